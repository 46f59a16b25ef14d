"""Distillation: training computes what the engine computes, resumes exactly, and lowers the loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from avref import LLM, SamplingParams
from avref.drafters import weights
from avref.drafters.dflash import DFlashConfig, DFlashDrafter, DFlashModel
from avref.packed import Layout, PackedModel, plain_attention
from avref.train.data import Recorder, Sequences, label, record
from avref.train.dflash import block_states, from_target, loss_and_overlap, make_batch, nucleus
from avref.train.evaluate import overlap_by_position
from avref.train.loop import Settings, learning_rate, train
from tests import tiny

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


@pytest.fixture(scope="module")
def target():
    return tiny.llama().requires_grad_(False)


@pytest.fixture(scope="module")
def data(target) -> Sequences:
    llm = LLM(target, max_num_seqs=4, max_model_len=64)
    prompts = [[3 + i % 40, 5, 7 + i % 11] for i in range(24)]
    llm.prompt_ids = lambda texts: texts  # token ids: the tiny target has no tokenizer
    params = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=24, ignore_eos=True)
    return Sequences([record(llm, Recorder(LAYERS), prompts, params)])


def test_recorded_states_are_the_plain_models(target, data):
    """Hidden states and labels of a sequence that shared its batch equal a plain forward over it alone."""
    for i in (0, 7, 23):
        with plain_attention(target), torch.inference_mode():
            out = target(input_ids=data.ids[i][None], use_cache=False, output_hidden_states=True)
        expected = torch.cat([out.hidden_states[j][0, :-1] for j in LAYERS], dim=-1)
        assert torch.allclose(data.hidden[i].float(), expected, atol=0.02 * float(expected.abs().max()))
        best = out.logits[0, :-1].argmax(-1)
        agree = (data.top_ids[i][:, 0] == best).float().mean()  # labels come from states rounded to bfloat16
        assert agree > 0.9


def test_label_gives_log_probabilities_in_order(target):
    states = torch.randn(5, 32)
    top_ids, logs = label(target, states, count=10)
    expected = torch.log_softmax(target.lm_head(states), -1)
    assert torch.allclose(logs.float(), expected.gather(-1, top_ids.long()), atol=2e-2)
    assert (logs[:, :-1] >= logs[:, 1:]).all()


def test_training_blocks_equal_the_drafters_proposals(target):
    """`block_states` on a whole sequence gives, at every anchor, the logits that the engine's drafter proposes from."""
    model = from_target(target, LAYERS, 2, 32, 4, torch.arange(40)).eval()
    ids = torch.randint(3, 50, (20,), generator=torch.Generator().manual_seed(0))
    packed = PackedModel(target, 1, 64)
    drafter = DFlashDrafter(model, target, 1, 64)
    _, hidden = packed.forward(ids[:10], Layout([0], [10]), None, LAYERS)
    with torch.inference_mode():
        drafter.enter(Layout([0], [10]), [ids[:10].tolist()], hidden)
        states = [hidden]
        for position in range(10, 15):
            proposal = drafter.propose(
                [position], ids[position : position + 1], 4, torch.ones(1), torch.full((1, 4), 0.5), False
            )
            anchors = torch.tensor([[position]])
            blocks = block_states(
                model, target.get_input_embeddings(), torch.cat(states)[None], ids[anchors], anchors, 4
            )
            assert torch.allclose(blocks[0, 0] @ drafter.head.T, proposal.logits[0], atol=1e-4)
            layout = Layout([position], [1])  # the pending token is processed; what the block wrote is overwritten
            _, one = packed.forward(ids[position : position + 1], layout, None, LAYERS)
            drafter.extend(layout, [[int(ids[position])]], one, [1])
            states.append(one)


def test_first_drafts_do_not_depend_on_the_depth(target):
    model = from_target(target, LAYERS, 1, 32, 4, torch.arange(40)).eval()
    hidden, anchors = torch.randn(1, 9, 64), torch.tensor([[5]])
    with torch.inference_mode():
        deep, shallow = (
            block_states(model, target.get_input_embeddings(), hidden, torch.tensor([[7]]), anchors, d) for d in (4, 2)
        )
    assert torch.allclose(deep[:, :, :2], shallow, atol=1e-5)


def test_nucleus_keeps_what_reaches_top_p():
    p = nucleus(torch.tensor([0.5, 0.3, 0.1, 0.1]).log(), 0.75)
    assert torch.allclose(p, torch.tensor([0.625, 0.375, 0.0, 0.0]))


def test_overlap_counts_tokens_the_drafter_lacks_as_lost(target, data):
    """With a draft vocabulary of everything, the loss's overlap is sum(min(p, q)); without a token its mass is lost."""
    to_draft = torch.arange(50)
    model = from_target(target, LAYERS, 1, 32, 4, torch.arange(50)).eval()
    batch = make_batch(data, [0, 1], 6, 4, to_draft, torch.Generator().manual_seed(0))
    _, whole = loss_and_overlap(model, target.get_input_embeddings(), target.lm_head.weight, batch, 4, 1.0)
    batch.top_ids[:] = -1
    _, none = loss_and_overlap(model, target.get_input_embeddings(), target.lm_head.weight, batch, 4, 1.0)
    assert (whole > 0).all()
    assert (none == 0).all()


def test_training_lowers_the_loss_and_resumes_exactly(target, data, tmp_path: Path):
    whole = train(target, data, tmp_path / "whole", SMALL, validation=4)
    first = {**vars(SMALL), "steps": 8}
    schedule = learning_rate
    train(target, data, tmp_path / "parts", Settings(**first), validation=4)
    assert schedule is learning_rate
    resumed = train(target, data, tmp_path / "parts", SMALL, validation=4)
    again = train(target, data, tmp_path / "parts", SMALL, validation=4)  # nothing left to do
    for a, b in zip(resumed.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert (tmp_path / "whole" / "curve.json").is_file()
    assert [p.shape for p in whole.parameters()] == [p.shape for p in resumed.parameters()]


def test_resuming_in_the_middle_equals_an_uninterrupted_run(target, data, tmp_path: Path, monkeypatch):
    """Killed between two checkpoints, a run continues from the last one and ends with the same weights."""
    from avref.train import loop

    whole = train(target, data, tmp_path / "whole", SMALL, validation=4)
    real, calls = loop.loss_and_overlap, []

    def dies(*arguments):
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(loop, "loss_and_overlap", dies)
    with pytest.raises(KeyboardInterrupt):
        train(target, data, tmp_path / "parts", SMALL, validation=4)
    monkeypatch.setattr(loop, "loss_and_overlap", real)
    parts = train(target, data, tmp_path / "parts", SMALL, validation=4)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.slow
def test_a_short_training_raises_the_overlap(target, data, tmp_path: Path):
    settings = Settings(**{**vars(SMALL), "steps": 250, "learning_rate": 3e-3, "checkpoint_every": 250, "warmup": 10})
    before = from_target(target, LAYERS, 1, 32, 4, torch.arange(40))
    after = train(target, data, tmp_path, settings, validation=4)
    start, end = (overlap_by_position(m.eval(), target, data, 0.95)[0] for m in (before, after))
    assert end[0] > start[0] + 0.05


def test_overlap_of_a_perfect_drafter_is_one(target, data, monkeypatch):
    """Where q equals p everywhere the overlap is 1 at every position, whatever was sampled."""
    from avref.train import evaluate

    model = from_target(target, LAYERS, 1, 32, 4, torch.arange(50))
    width = 32

    def perfect(model, embedding, hidden, pending, anchors, depth):
        place = anchors[0][:, None] + torch.arange(depth)
        return hidden[0, place, -width:][None]  # the target's own final states

    monkeypatch.setattr(evaluate, "block_states", perfect)
    overlap, weight = overlap_by_position(model, target, data, 1.0)
    assert torch.allclose(overlap, torch.ones(4, dtype=torch.float64), atol=1e-5)
    assert (weight == weight[0]).all()


def test_saved_weights_load_and_damaged_ones_are_refused(target, tmp_path: Path):
    model = from_target(target, LAYERS, 1, 32, 4, torch.arange(40))
    weights.save(model, tmp_path / "d", "dflash", "tiny")
    config = {"method": "dflash", "model": str(tmp_path / "d"), "num_speculative_tokens": 4}
    llm = LLM(target, config, max_num_seqs=2, max_model_len=64)
    loaded = llm.engine.drafter.model.state_dict()
    for name, value in model.state_dict().items():
        assert torch.allclose(loaded[name].float(), value.float(), rtol=1e-2, atol=1e-2)
    path = tmp_path / "d" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(RuntimeError, match="damaged"):
        weights.load(llm.config, llm, DFlashConfig, DFlashModel)
