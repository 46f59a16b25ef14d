"""The trained draft model: training computes what it proposes, its cache never lags, and only its layers are stored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_lossless_end_to_end
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_lossless_end_to_end import ALPHA, NUCLEUS, PROMPT, exact_law, p_value, run, trimmed
from torch import Tensor, nn

from avref import LLM, SamplingParams
from avref.drafters import weights
from avref.drafters.base import draw
from avref.drafters.draft_model import DraftModel, TinyLlama, TinyLlamaConfig
from avref.layout import Layout
from avref.packed import plain_attention
from avref.train import dflash as train_dflash
from avref.train import draft_model as train
from avref.train.blocks import Batch, loss_and_overlap

DEPTH = 4
VOCAB_IDS = torch.arange(5, 45)


@dataclass
class Settings:
    """What `start` reads."""

    depth: int = DEPTH
    target_layers: tuple[int, ...] = (1, 2)
    num_layers: int = 1
    intermediate_size: int = 32


def started(target: Any, **settings: Any) -> TinyLlama:
    return train.start(target, Settings(**settings), VOCAB_IDS).eval()


def trained(target: Any, **settings: Any) -> TinyLlama:
    """A draft model whose norms have gains of their own."""
    model = started(target, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for name, weight in model.named_parameters():
            if "norm" in name:
                nn.init.uniform_(weight, 0.7, 1.4)
    return model


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.llama(eos_token_id=None).requires_grad_(False)


def texts(count: int, length: int) -> Tensor:
    return torch.randint(3, tiny.VOCAB, (count, length), generator=torch.Generator().manual_seed(0))


def drafter_of(model: TinyLlama, target: Any, rows: int = 1) -> DraftModel:
    return DraftModel(model.on(target), rows, 64, tiny.VOCAB)


def enter(drafter: DraftModel, rows: list[list[int]]) -> None:
    drafter.enter(Layout([0] * len(rows), [len(r) for r in rows]), rows, None)


def propose(drafter: DraftModel, lengths: list[int], text: Tensor, depth: int = DEPTH) -> Any:
    """Drafts behind each text's token at lengths[r], forced to go on as the text does."""
    place = torch.tensor(lengths)[:, None] + torch.arange(depth + 1)
    following, rows = text.gather(1, place), len(lengths)
    return drafter.propose(
        lengths,
        following[:, 0],
        depth,
        torch.ones(rows),
        torch.full((rows, depth), 0.5),
        False,
        forced=following[:, 1:],
    )


# Training


@torch.inference_mode()
def test_training_equals_proposing(target: Any) -> None:
    """`forward` on padded texts of two lengths gives, at every anchor, the drafter's logits on the forced text."""
    model, ids = trained(target, num_layers=2), texts(2, 40)
    anchors = torch.tensor([[1, 20, 20, 34], [5, 9, 10, 21]])
    padded = ids.clone()
    padded[1, 26:] = 0
    head = target.get_output_embeddings().weight[VOCAB_IDS]
    batch = Batch(torch.empty(0), padded, anchors, *(torch.empty(0),) * 3)
    drafts = train.forward(model, target.get_input_embeddings(), head, batch, DEPTH)
    assert drafts.stop is None and drafts.confidence is None
    for m in range(anchors.shape[1]):
        lengths = anchors[:, m].tolist()
        drafter = drafter_of(model, target, 2)
        enter(drafter, [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)])
        logits = propose(drafter, lengths, ids).logits
        torch.testing.assert_close(drafts.logits[:, m], logits, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_all_of_the_targets_layers_make_the_target(target: Any) -> None:
    """Started with as many layers and neurons as the target has, the draft model is the target."""
    model, ids = started(target, num_layers=2, intermediate_size=48), texts(3, 12)
    with plain_attention(target):
        expected = target(input_ids=ids, use_cache=False).logits
    logits = model(target.get_input_embeddings()(ids)) @ target.get_output_embeddings().weight.T
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@torch.no_grad()
def test_layers_come_from_both_ends_and_neurons_by_strength() -> None:
    deep = tiny.llama(num_hidden_layers=5)
    model = started(deep, num_layers=3, intermediate_size=8)
    for ours, theirs in zip(model.model.layers, [deep.model.layers[i] for i in (0, 1, 4)], strict=True):
        assert torch.equal(ours.self_attn.k_proj.weight, theirs.self_attn.k_proj.weight)
        strength = torch.tensor(
            [
                theirs.mlp.down_proj.weight[:, i].norm()
                * theirs.mlp.up_proj.weight[i].norm()
                * theirs.mlp.gate_proj.weight[i].norm()
                for i in range(48)
            ]
        )
        best = sorted(range(48), key=lambda i: -float(strength[i]))[:8]
        assert torch.equal(ours.mlp.down_proj.weight, theirs.mlp.down_proj.weight[:, best])
        assert torch.equal(ours.mlp.gate_proj.weight, theirs.mlp.gate_proj.weight[best])
        assert torch.equal(ours.mlp.up_proj.weight, theirs.mlp.up_proj.weight[best])


def test_a_target_of_another_architecture_starts_at_random() -> None:
    other = tiny.gpt2()
    model = train.start(other, Settings(), VOCAB_IDS)
    assert model.config.hidden_size == 32
    assert model(other.get_input_embeddings()(torch.tensor([[3, 4]]))).shape == (1, 2, 32)


def test_training_lowers_the_loss_and_leaves_the_target_alone(target: Any) -> None:
    model, generator = started(target), torch.Generator().manual_seed(0)
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings().weight[VOCAB_IDS]
    before = embedding.weight.clone()
    top_ids = torch.rand(2, 5, DEPTH, len(VOCAB_IDS), generator=generator).argsort(-1)[..., :8]
    logs = torch.randn(2, 5, DEPTH, 8, generator=generator).sort(-1, descending=True).values.log_softmax(-1)
    anchors = torch.randint(2, 12, (2, 5), generator=generator)
    batch = Batch(torch.empty(0), texts(2, 17), anchors, torch.ones(2, 5, DEPTH).bool(), top_ids, logs)
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(60):
        loss, _ = loss_and_overlap(train.forward(model, embedding, head, batch, DEPTH), batch, 1.0)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert all(p.grad is not None for p in model.parameters())
    assert losses[-1] < 0.8 * losses[0]
    assert torch.equal(embedding.weight, before)


# The cache: what it holds after a step is what a fresh drafter holds that has read the same text


@pytest.mark.parametrize(
    "steps",
    [
        [(4, 0)] * 3,  # C53: none accepted
        [(4, 1), (4, 3), (4, 2)],  # C53: some
        [(4, 4)] * 3,  # C54: all, the last draft was never fed
        [(1, 1), (1, 0), (1, 1)],
        [(3, 3), (0, 0), (0, 0), (3, 2)],  # C62: steps that draft nothing
        [(4, 4), (0, 0), (2, 0), (4, 4)],
        [(4, (4, 1)), (4, (0, 4)), (2, (2, 0))],  # two requests with fates of their own
    ],
)
@torch.inference_mode()
def test_cache_equals_a_fresh_one(steps: list[tuple[int, Any]], target: Any) -> None:
    """Each step drafts so many tokens, of which so many are accepted; wrong ones lie behind them."""
    model, ids = trained(target), texts(2, 40)
    drafter, lengths = drafter_of(model, target, 2), [4, 7]
    enter(drafter, [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)])
    for depth, fate in steps:
        accepted = fate if isinstance(fate, tuple) else (fate, fate)
        wrong = ids.clone()
        for row, (n, a) in enumerate(zip(lengths, accepted, strict=True)):
            wrong[row, n + 1 + a :] = 7  # what was drafted in place of the text
        if depth:
            propose(drafter, lengths, wrong, depth)
        chunks = [wrong[row, n : n + depth + 1].tolist() for row, n in enumerate(lengths)]
        kept = [a + 1 for a in accepted]
        drafter.extend(Layout(lengths, [len(c) for c in chunks]), chunks, None, kept)
        lengths = [n + k for n, k in zip(lengths, kept, strict=True)]
        fresh = drafter_of(model, target, 2)
        enter(fresh, [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)])
        assert [c + len(b) for c, b in zip(drafter.cached, drafter.backlog, strict=True)] == lengths
        snapshot = (list(drafter.cached), [list(b) for b in drafter.backlog])
        torch.testing.assert_close(
            propose(drafter, lengths, ids).logits, propose(fresh, lengths, ids).logits, atol=1e-4, rtol=0
        )
        drafter.cached, drafter.backlog = snapshot  # looking must not count as a step
        drafter.fed = [0, 0]


@pytest.mark.parametrize("k", [1, 3, 8])
def test_the_target_as_its_own_draft_model_is_always_right(k: int, target: Any) -> None:
    """C54: any hole in the cache would show as a rejection."""
    whole = train.start(target, Settings(num_layers=2, intermediate_size=48), torch.arange(tiny.VOCAB)).eval()
    llm = make(target, whole, num_speculative_tokens=k)
    llm.generate([[3, 4], [5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    assert llm.stats.graded_by_position.sum() > 0
    assert (llm.stats.accepted_by_position == llm.stats.graded_by_position).all()


# Through the engine


def make(target: Any, model: Any, **settings: Any) -> LLM:
    config = {"method": "draft_model", "model": model, "num_speculative_tokens": DEPTH, **settings}
    return LLM(target, config, max_num_seqs=3, max_model_len=64)


@pytest.mark.parametrize("drafting", ["probabilistic", "greedy"])
def test_greedy_output_is_plain_greedy(drafting: str, target: Any) -> None:
    prompts = [[3, 4], [5, 6, 7, 8, 9], [11], [12, 13, 14], [20, 21]]
    llm = make(target, trained(target), draft_sample_method=drafting)
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    assert [o.outputs[0].token_ids for o in outputs] == [tiny.greedy(target, p, 20) for p in prompts]
    assert llm.stats.accepted_by_position.sum() > 0


@pytest.mark.parametrize("drafting", ["probabilistic", "greedy"])
def test_emitted_law(drafting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adaptive verification, with and without top-p: the target's law."""
    small = tiny.sharpen(tiny.llama(vocab_size=8, num_hidden_layers=1, pad_token_id=None, eos_token_id=None), 1.2)
    model = train.start(small, Settings(intermediate_size=16), torch.arange(7)).eval()  # lacks one of the 8 ids
    monkeypatch.setattr(test_lossless_end_to_end, "SAMPLES", 500)
    llm, whole, nucleus = run(small, "draft_model", model, draft_sample_method=drafting)
    assert 0.2 < trimmed(llm) < 0.8
    assert 0.1 < llm.stats.accepted_by_position.sum() / llm.stats.graded_by_position.sum() < 0.9
    assert p_value((whole, exact_law(small, PROMPT, 1.0))) >= ALPHA
    assert p_value((nucleus, exact_law(small, PROMPT, NUCLEUS))) >= ALPHA


# On disk


@pytest.fixture
def saved(target: Any, tmp_path: Path) -> Path:
    weights.save(trained(target), tmp_path / "drafter", "draft_model", "tiny")
    return tmp_path / "drafter"


def test_only_layers_and_norm_are_stored(saved: Path, target: Any) -> None:
    names = load_file(saved / "model.safetensors").keys()
    of_a_llama = {n for n, _ in tiny.llama(num_hidden_layers=1).named_parameters()}
    assert names == of_a_llama - {"model.embed_tokens.weight", "lm_head.weight"} | {"vocab_ids"}


@torch.inference_mode()
def test_round_trip_shares_the_targets_embedding(saved: Path, target: Any) -> None:
    drafter = make(target, str(saved)).engine.drafter
    assert isinstance(drafter, DraftModel)
    llama = drafter.model.model
    assert llama.get_input_embeddings().weight is target.get_input_embeddings().weight
    head = target.get_output_embeddings().weight[VOCAB_IDS]
    assert torch.equal(llama.get_output_embeddings().weight, head)
    model, ids = trained(target), texts(2, 12)
    rounded = TinyLlama(model.config)
    rounded.load_state_dict({k: v.bfloat16().float() for k, v in model.state_dict().items()})
    expected = rounded(target.get_input_embeddings()(ids)) @ head.T
    with plain_attention(llama):
        torch.testing.assert_close(llama(input_ids=ids, use_cache=False).logits, expected, atol=1e-4, rtol=0)


def test_half_precision_keeps_the_rotary_frequencies(target: Any) -> None:
    model = trained(target)
    llama = model.on(tiny.llama().bfloat16())
    assert llama.dtype == torch.bfloat16
    assert torch.equal(llama.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


def test_a_missing_tensor_is_refused_by_name(saved: Path, target: Any) -> None:
    tensors = load_file(saved / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, saved / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"damaged or of another version.*layers\.0\.mlp\.up_proj\.weight.*again"):
        make(target, str(saved))


def test_a_folder_of_another_method_is_refused(saved: Path, target: Any, tmp_path: Path) -> None:
    weights.save(train_dflash.start(target, Settings(), VOCAB_IDS), tmp_path / "dflash", "dflash", "tiny")
    with pytest.raises(ValueError, match="was not made for method 'draft_model' but for 'dflash'"):
        make(target, tmp_path / "dflash")
    with pytest.raises(ValueError, match="was not made for method 'dflash' but for 'draft_model'"):
        make(target, saved, method="dflash")


@pytest.mark.parametrize("change", [{"hidden_size": 64}, {"vocab_size": 48}])
def test_a_draft_model_of_another_target_is_refused(change: dict[str, int], saved: Path) -> None:
    with pytest.raises(ValueError, match=r"width 32 with 50 token ids.* train one for it"):
        make(tiny.llama(**change), saved)


def test_a_hugging_face_folder_still_works(target: Any, tmp_path: Path) -> None:
    target.save_pretrained(tmp_path)
    drafter = make(target, str(tmp_path)).engine.drafter
    assert isinstance(drafter, DraftModel)
    assert drafter.model.model is not target


def test_the_default_target_takes_the_shipped_one(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none is shipped, and for any other target, a model has to be named."""
    ours = tiny.llama(eos_token_id=None)
    monkeypatch.setattr(weights, "SHIPPED", tmp_path)
    with pytest.raises(ValueError, match=r"needs speculative_config\['model'\]"):
        make(ours, None)
    ours._avref_name = "smollm2"
    with pytest.raises(ValueError, match=r"needs speculative_config\['model'\]"):
        make(ours, None)
    saved.rename(tmp_path / "draft_model-smollm2")
    drafter = make(ours, None).engine.drafter
    assert isinstance(drafter, DraftModel)
    assert drafter.model.model.config.num_hidden_layers == 1


def test_the_shipped_shape_fits(tmp_path: Path) -> None:
    """Two layers of the default target's width in bfloat16: at most 12 MB."""
    config = TinyLlamaConfig(576, 1152, 2, 9, 3, 64, 49152, 8192, 8192, 100000.0, 1e-5)
    weights.save(TinyLlama(config), tmp_path, "draft_model", "smollm2")
    assert (tmp_path / "model.safetensors").stat().st_size <= 12_000_000


def test_draws_are_made_in_float32() -> None:
    """Logits .03 apart: in bfloat16 both ids would have q = .5, and the draw at .504 would be the other one."""
    one, logits = torch.ones(1), torch.tensor([[10.03, 10.0]])
    ids, q, drawn = draw(logits, one, torch.tensor([0.504]), greedy=False)
    assert ids.tolist() == [0] and q is not None and q.dtype == torch.float32
    assert float(drawn) == pytest.approx(1 / (1 + np.exp(-0.03)), abs=1e-6)
