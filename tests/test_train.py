"""Distillation: training computes what the engine computes, resumes exactly, and lowers the loss."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import GraniteConfig

from avref import LLM, SamplingParams
from avref.drafters import weights
from avref.drafters.dflash import DFlashDrafter, DFlashModel
from avref.drafters.layers import DrafterConfig
from avref.evidence import traces
from avref.files import load_tensors
from avref.layout import Layout
from avref.packed import PackedModel, plain_attention
from avref.train import FAMILIES, command, evaluate, family
from avref.train import data as data_module
from avref.train.blocks import Batch, Drafts, loss_and_overlap, make_batch, nucleus
from avref.train.data import Recorder, Sequences, label, record
from avref.train.dflash import block_states, forward, start
from avref.train.loop import Settings, train

LAYERS = (1, 2)
SMALL = Settings(
    depth=4,
    target_layers=LAYERS,
    vocab_size=40,
    intermediate_size=32,
    sequences=2,
    blocks=8,
    steps=12,
    checkpoint_every=4,
)
DFLASH = family("dflash")
PROMPTS = [[3 + i % 40, 5, 7 + i % 11] for i in range(24)]
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.llama().requires_grad_(False)


@pytest.fixture(scope="module")
def data(target: Any) -> Sequences:
    llm = LLM(target, max_num_seqs=4, max_model_len=64)
    llm.prompt_ids = lambda texts: texts  # token ids: the tiny target has no tokenizer
    return Sequences([record(llm, Recorder(LAYERS), PROMPTS, SAMPLED)])


def untrained(target: Any, size: int = 40, **changes: Any) -> DFlashModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return start(target, replace(SMALL, **changes), torch.arange(size)).eval()


def batch_of(hidden: torch.Tensor, ids: torch.Tensor, anchors: torch.Tensor, depth: int) -> Batch:
    """A batch for forwards only: no labels."""
    shape = (*anchors.shape, depth)
    return Batch(hidden, ids, anchors, torch.ones(shape, dtype=torch.bool), torch.zeros(*shape, 1), torch.zeros(1))


def test_recorded_states_are_the_plain_models(target: Any, data: Sequences) -> None:
    """Hidden states and labels of a sequence that shared its batch equal a plain forward over it alone."""
    for i in (0, 7, 23):
        with plain_attention(target), torch.inference_mode():
            out = target(input_ids=data.ids[i][None], use_cache=False, output_hidden_states=True)
        expected = torch.cat([out.hidden_states[j][0, :-1] for j in LAYERS], dim=-1)
        assert torch.allclose(data.hidden[i].float(), expected, atol=0.02 * float(expected.abs().max()))
        best = out.logits[0, :-1].argmax(-1)
        agree = (data.top_ids[i][:, 0] == best).float().mean()  # labels come from states rounded to bfloat16
        assert agree > 0.9


def test_label_gives_log_probabilities_in_order(target: Any) -> None:
    states = torch.randn(5, 32)
    top_ids, logs = label(target, states, count=10)
    expected = torch.log_softmax(target.lm_head(states), -1)
    assert torch.allclose(logs.float(), expected.gather(-1, top_ids.long()), atol=2e-2)
    assert (logs[:, :-1] >= logs[:, 1:]).all()


def test_training_blocks_equal_the_drafters_proposals(target: Any) -> None:
    """`block_states` on a whole sequence gives, at every anchor, the logits that the engine's drafter proposes from."""
    model = untrained(target, num_layers=2)
    ids = torch.randint(3, 50, (20,), generator=torch.Generator().manual_seed(0))
    packed = PackedModel(target, 1, 64)
    drafter = DFlashDrafter(model, target, 1, 64)
    with torch.inference_mode():
        _, hidden = packed.forward(ids[:10], Layout([0], [10]), None, LAYERS)
        drafter.enter(Layout([0], [10]), [ids[:10].tolist()], hidden)
        states = [hidden]
        for position in range(10, 15):
            pending = ids[position : position + 1]
            proposal = drafter.propose([position], pending, 4, torch.ones(1), torch.full((1, 4), 0.5), False)
            batch = batch_of(torch.cat(states)[None], ids[None], torch.tensor([[position]]), 4)
            blocks = block_states(model, target.get_input_embeddings(), batch, 4)
            assert torch.allclose(blocks[0, 0] @ drafter.head.T, proposal.logits[0], atol=1e-4)
            layout = Layout([position], [1])  # the pending token is processed; what the block wrote is overwritten
            _, one = packed.forward(pending, layout, None, LAYERS)
            drafter.extend(layout, [pending.tolist()], one, [1])
            states.append(one)


def test_first_drafts_do_not_depend_on_the_depth(target: Any) -> None:
    batch = batch_of(torch.randn(1, 9, 64), torch.full((1, 10), 7), torch.tensor([[5]]), 4)
    with torch.inference_mode():
        deep, shallow = (block_states(untrained(target), target.get_input_embeddings(), batch, d) for d in (4, 2))
    assert torch.allclose(deep[:, :, :2], shallow, atol=1e-5)


def test_nucleus_keeps_what_reaches_top_p() -> None:
    p = nucleus(torch.tensor([0.5, 0.3, 0.1, 0.1]).log(), 0.75)
    assert torch.allclose(p, torch.tensor([0.625, 0.375, 0.0, 0.0]))


def test_a_nucleus_beyond_what_was_recorded_is_not_blown_up() -> None:
    """1,000 equal tokens of which 128 are recorded: at top-p .95 each has 1 / 950, as where all are recorded."""
    logs = torch.full((1, 128), math.log(1 / 1000))
    assert nucleus(logs, 0.95).sum().item() == pytest.approx(128 / 950)
    assert nucleus(logs, 1.0).sum().item() == pytest.approx(0.128)


def test_too_few_sequences_are_one_clear_error(target: Any, data: Sequences, tmp_path: Path) -> None:
    few = copy.copy(data)
    for name in ("ids", "hidden", "top_ids", "top_logs", "prompt_lengths"):
        setattr(few, name, getattr(data, name)[:1])
    with pytest.raises(ValueError, match=r"1 sequence\(s\) are recorded, and none of those to train on"):
        train(family("dflash"), target, few, tmp_path, Settings(steps=1, target_layers=(1, 2)))


def test_overlap_of_known_laws() -> None:
    """One slot, p = (.5, .3, .2), q = (.2, .6, .2): overlap .2 + .3 + .2; a token that the drafter lacks is lost."""
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.6, 0.2])
    drafts = Drafts(q.log().view(1, 1, 1, 3), torch.zeros(1, 1, 1))
    batch = Batch(
        torch.zeros(1, 1, 1),
        torch.zeros(1, 2, dtype=torch.long),
        torch.zeros(1, 1, dtype=torch.long),
        torch.ones(1, 1, 1, dtype=torch.bool),
        torch.arange(3).view(1, 1, 1, 3),
        p.log().view(1, 1, 1, 3),
    )
    loss, overlap = loss_and_overlap(drafts, batch, 1.0)
    assert overlap.tolist() == pytest.approx([0.7])
    stop = torch.log(torch.tensor(2.0))  # cross-entropy of a stop head at even odds, whatever the label
    assert float(loss) == pytest.approx(float(0.5 * -(p * q.log()).sum() + 0.3 + stop))
    batch.top_ids[..., 1] = -1
    assert loss_and_overlap(drafts, batch, 1.0)[1].tolist() == pytest.approx([0.4])
    cut = loss_and_overlap(drafts, batch, 0.45)[1]  # top-p .45 keeps the first token alone: min(1, .2)
    assert cut.tolist() == pytest.approx([0.2])


def test_batches_hold_the_recorded_tokens(data: Sequences) -> None:
    """Slot k of a block at anchor a is labelled by what the target said after token a + k, where the answer goes on."""
    batch = make_batch(data, [3, 5], 6, 4, torch.arange(50), torch.Generator().manual_seed(1))
    for b, i in enumerate((3, 5)):
        length = len(data.hidden[i])
        for m, anchor in enumerate(batch.anchors[b].tolist()):
            assert data.prompt_lengths[i] <= anchor < length
            assert batch.tokens(2)[b, m].tolist()[: length - anchor] == data.ids[i][anchor : anchor + 2].tolist()
            for k in range(4):
                assert bool(batch.valid[b, m, k]) == (anchor + k < length)
                if anchor + k < length:
                    assert torch.equal(batch.top_ids[b, m, k], data.top_ids[i][anchor + k].long())


def test_training_lowers_the_loss_and_resumes_exactly(target: Any, data: Sequences, tmp_path: Path) -> None:
    train(DFLASH, target, data, tmp_path, replace(SMALL, steps=8), validation=4)
    resumed = train(DFLASH, target, data, tmp_path, SMALL, validation=4)
    again = train(DFLASH, target, data, tmp_path, SMALL, validation=4)  # nothing left to do
    for a, b in zip(resumed.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    batch = make_batch(data, range(8), 8, 4, torch.arange(50), torch.Generator().manual_seed(0))
    whole = replace(SMALL, vocab_size=50, learning_rate=3e-3, warmup=2, steps=40)
    trained = train(DFLASH, target, data, tmp_path / "all", whole, validation=4)
    losses = []
    for model in (untrained(target, 50), trained):
        with torch.inference_mode():
            drafts = forward(model, target.get_input_embeddings(), target.lm_head.weight, batch, 4)
        losses.append(float(loss_and_overlap(drafts, batch, 0.95)[0]))
    assert losses[1] < losses[0] - 0.05


def test_resuming_in_the_middle_equals_an_uninterrupted_run(
    target: Any, data: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between two checkpoints, a run continues from the last one and ends with the same weights."""
    from avref.train import loop

    whole = train(DFLASH, target, data, tmp_path / "whole", SMALL, validation=4)
    real, calls = loop.loss_and_overlap, []

    def dies(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(loop, "loss_and_overlap", dies)
    with pytest.raises(KeyboardInterrupt):
        train(DFLASH, target, data, tmp_path / "parts", SMALL, validation=4)
    monkeypatch.setattr(loop, "loss_and_overlap", real)
    parts = train(DFLASH, target, data, tmp_path / "parts", SMALL, validation=4)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.slow
def test_a_short_training_raises_the_overlap(target: Any, data: Sequences, tmp_path: Path) -> None:
    settings = replace(SMALL, steps=120, learning_rate=3e-3, checkpoint_every=120, warmup=10)
    after = train(DFLASH, target, data, tmp_path, settings, validation=4).eval()
    overlaps = []
    for model in (untrained(target), after):
        llm = LLM(
            target,
            {"method": "dflash", "model": model, "num_speculative_tokens": 4},
            max_num_seqs=8,
            max_model_len=64,
        )
        fresh = {"fresh": [[4 + i, 6, 2] for i in range(24)]}
        overlaps.append(traces.overlap_by_position(traces.record(llm, fresh, SAMPLED))[0])
    assert overlaps[1][0] > overlaps[0][0] + 0.05


def test_saved_weights_load_and_damaged_ones_are_refused(target: Any, tmp_path: Path) -> None:
    model = untrained(target)
    weights.save(model, tmp_path / "d", "dflash", "tiny")
    config = {"method": "dflash", "model": str(tmp_path / "d"), "num_speculative_tokens": 4}
    llm = LLM(target, config, max_num_seqs=2, max_model_len=64)
    loaded = llm.engine.drafter.model.state_dict()
    for name, value in model.state_dict().items():
        assert torch.allclose(loaded[name].float(), value.float(), rtol=1e-2, atol=1e-2)
    path = tmp_path / "d" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(RuntimeError, match="damaged"):
        weights.load(llm.config, llm, DrafterConfig, DFlashModel)


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target as the command line takes it, of three layers instead of thirty."""
    path = tmp_path_factory.mktemp("target")
    tiny.llama(num_hidden_layers=3).save_pretrained(path)
    tiny.tokenizer([f"w{i}" for i in range(tiny.VOCAB)]).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(("method", "layers"), [("dflash", (0, 1, 2, 3)), ("mtp", (2, 3)), ("draft_model", ())])
def test_the_command_from_a_name_to_a_drafter_that_loads(
    method: str, layers: tuple[int, ...], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything `python -m avref train` does, twice: the second time nothing is recorded or trained again."""
    monkeypatch.setattr(command, "SAMPLING", replace(command.SAMPLING, max_tokens=12))
    monkeypatch.setattr(command, "HELD_OUT", {"per_workload": 1, "max_tokens": 6})
    small = {"num_layers": min(2, command.SETTINGS[method].num_layers), "vocab_size": 40, "checkpoint_every": 2}
    if method == "mtp":
        small["depth"] = 2
    monkeypatch.setitem(command.SETTINGS, method, replace(command.SETTINGS[method], **small))
    monkeypatch.setattr(data_module, "tqdm", lambda items, **_: items)
    folder = command.run(method, named, tmp_path, num_prompts=10, num_texts=3, steps=4)
    shards = {p: p.stat().st_mtime_ns for p in (tmp_path / "shards").glob("shard-*")}
    assert len(shards) == 2 and json.loads((folder / "config.json").read_text()).get("target_layers", []) == list(
        layers
    )
    card = (folder / "card.md").read_text()
    assert "10 answers sampled from the target itself" in card and "3 pieces of text" in card
    config = {"method": method, "model": str(folder), "num_speculative_tokens": 2}
    out = LLM(named, config, max_num_seqs=2, max_model_len=64).generate([[3, 4, 5]], SamplingParams(max_tokens=6))
    assert out[0].outputs[0].token_ids
    before, _ = load_tensors(folder / "model.safetensors", "")
    assert command.run(method, named, tmp_path, num_prompts=10, num_texts=3, steps=4) == folder
    after, _ = load_tensors(folder / "model.safetensors", "")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert shards == {p: p.stat().st_mtime_ns for p in (tmp_path / "shards").glob("shard-*")}


@pytest.mark.parametrize(
    ("last", "expected"), [(30, (0, 8, 16, 24, 29, 30)), (32, (0, 9, 17, 26, 31, 32)), (2, (0, 1, 2))]
)
def test_layers_of_another_target(last: int, expected: tuple[int, ...]) -> None:
    assert command.layers_of(last, command.SETTINGS["dflash"].target_layers) == expected
    assert command.layers_of(last, (29, 30)) == (last - 1, last) and command.layers_of(last, ()) == ()


@pytest.mark.parametrize("scale", [{}, {"logits_scaling": 8.0}])
def test_targets_that_scale_their_logits_are_refused(scale: dict[str, float]) -> None:
    """The labels are the head on the last state: of a target that divides them, training would teach another law."""
    target = tiny.build(GraniteConfig(**tiny.SHAPE, **scale)) if scale else tiny.llama()
    llm = LLM(target, max_num_seqs=1, max_model_len=32)
    if scale:
        with pytest.raises(ValueError, match="scales or caps the logits of its head, and training is not written"):
            command.first_state_is_the_embedding(llm)
    else:
        assert command.first_state_is_the_embedding(llm)


def test_answers_are_recorded_alike_in_one_go_and_in_parts(target: Any, tmp_path: Path) -> None:
    """A run that was stopped, a longer one, and a shard that was deleted give the answers of a run in one go."""

    def build(folder: str, count: int) -> list[list[int]]:
        llm = LLM(target, max_num_seqs=4, max_model_len=64)
        llm.prompt_ids = lambda texts: texts
        paths = data_module.build_shards(
            llm, Recorder(LAYERS), [[3, 4 + i] for i in range(count)], SAMPLED, tmp_path / folder, per_shard=4
        )
        return [ids.tolist() for ids in Sequences.load(*paths).ids]

    whole = build("whole", 11)
    assert sorted(build("parts", 6)) == sorted(ids for ids in whole if ids[1] < 10)
    assert build("parts", 11) == whole  # the short shard is made again
    (tmp_path / "parts" / "shard-001.safetensors").unlink()
    assert build("parts", 11) == whole
    assert build("parts", 4) == whole[:4]  # what was not asked for is not read


def test_unknown_families_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'ngram'.*dflash"):
        family("ngram")
    assert "dflash" in FAMILIES


def test_held_out_overlap_has_a_row_per_workload(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target drafting for itself overlaps fully, on every workload and at every position."""
    monkeypatch.setattr(evaluate.workloads, "load", lambda name, num: [[5 + len(name), 9, 4 + i] for i in range(num)])
    llm = LLM(target, max_num_seqs=8, max_model_len=64)
    rows = evaluate.held_out_overlap(
        llm, "draft_model", target, num_speculative_tokens=3, per_workload=4, max_tokens=12, top_p=1.0
    )
    assert set(rows) == {"all", *evaluate.workloads.NAMES}
    for row in rows.values():
        assert row == pytest.approx([1.0, 1.0, 1.0], abs=2e-3)
