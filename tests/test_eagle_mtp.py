"""The token-by-token trained drafters, eagle and mtp: training computes what they propose, and they are lossless."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import tiny
import torch
from test_lossless_end_to_end import ALPHA, exact_law, p_value
from torch import Tensor, nn

from avref import LLM, CostTable, SamplingParams, drafters
from avref.drafters.base import DraftProposal
from avref.drafters.eagle import EagleDrafter, EagleModel
from avref.drafters.layers import DrafterConfig
from avref.drafters.mtp import MTPModel
from avref.layout import Layout
from avref.packed import PackedModel
from avref.train import family
from avref.train.blocks import Batch

DEPTH = 4
LAYERS = (1, 2)
METHODS = ("eagle", "mtp")


@dataclass
class Settings:
    """What `start` reads."""

    depth: int = DEPTH
    target_layers: tuple[int, ...] = LAYERS
    num_layers: int = 1
    intermediate_size: int = 32


def model_of(method: str, target: Any, vocab_ids: Tensor, disturbed: bool = True) -> Any:
    """As training starts it; disturbed, so that no norm is taken twice, and no module for another, unnoticed."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = family(method).start(target, Settings(), vocab_ids).eval()
        for name, weight in model.named_parameters() if disturbed else ():
            if "norm" in name:
                nn.init.uniform_(weight, 0.5, 1.5)
            else:
                weight.data += 0.3 * weight.std(correction=0) * torch.randn(weight.shape)
    return model


def drafter_of(model: Any, method: str, target: Any, rows: int = 4) -> Any:
    module, name = drafters.CLASSES[method].split(":")
    return getattr(importlib.import_module(module), name)(model, target, rows, 64)


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.llama(num_hidden_layers=2).requires_grad_(False)


def texts(count: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 50, (count, length), generator=torch.Generator().manual_seed(seed))


def batch_of(hidden: Tensor, ids: Tensor, anchors: Tensor) -> Batch:
    return Batch(hidden, ids, anchors, *(torch.empty(0),) * 3)


def packed(chunks: list[list[int]]) -> Tensor:
    return torch.tensor(list(itertools.chain.from_iterable(chunks)))


class Side:
    """A target and a drafter that follow given texts [R, n], as the engine drives them."""

    def __init__(self, target: Any, drafter: Any, ids: Tensor) -> None:
        self.packed, self.drafter, self.ids = PackedModel(target, len(ids), 64), drafter, ids

    def enter(self, lengths: list[int]) -> None:
        prompts = [row[:n].tolist() for row, n in zip(self.ids, lengths, strict=True)]
        layout = Layout([0] * len(prompts), lengths)
        _, hidden = self.packed.forward(packed(prompts), layout, None, self.drafter.hidden_layers)
        self.drafter.enter(layout, prompts, hidden)
        self.lengths = list(lengths)

    def extend(self, kept: list[int], rejected: list[int]) -> None:
        """Process kept[r] >= 1 tokens of the text and rejected[r] wrong ones."""
        chunks = [
            [*row[n : n + k].tolist(), *[7] * wrong]
            for row, n, k, wrong in zip(self.ids, self.lengths, kept, rejected, strict=True)
        ]
        layout = Layout(self.lengths, [len(c) for c in chunks])
        _, hidden = self.packed.forward(packed(chunks), layout, None, self.drafter.hidden_layers)
        self.drafter.extend(layout, chunks, hidden, kept)
        self.lengths = [n + k for n, k in zip(self.lengths, kept, strict=True)]

    def propose(self, depth: int = DEPTH, forced: bool = True, **settings: Any) -> Any:
        rows = torch.arange(len(self.ids))
        place = torch.tensor(self.lengths)[:, None] + torch.arange(depth + 1)  # [R, depth + 1]
        following = self.ids.gather(1, place)
        return self.drafter.propose(
            self.lengths,
            following[:, 0],
            depth,
            torch.ones(len(rows)),
            torch.full((len(rows), depth), 0.5),
            False,
            forced=following[:, 1:] if forced else None,
            **settings,
        )


@pytest.mark.parametrize("method", METHODS)
@torch.inference_mode()
def test_training_equals_proposing(method: str, target: Any) -> None:
    """The unrolled blocks of a whole batch are the engine's proposals, also after rejected drafts were written."""
    model = model_of(method, target, torch.arange(5, 45))
    drafter, ids = drafter_of(model, method, target), texts(3, 40)
    side = Side(target, drafter, ids)
    reader = PackedModel(target, 3, 64)
    _, hidden = reader.forward(ids[:, :-1].flatten(), Layout([0] * 3, [39] * 3), None, drafter.hidden_layers)
    seen, proposals = [], []
    side.enter([9, 5, 1])
    for kept, rejected in (
        ([1, 1, 1], [0, 3, 2]),
        ([4, 1, 2], [1, 4, 0]),
        ([5, 3, 1], [0, 0, 2]),
        ([2, 2, 5], [2, 1, 0]),
    ):
        seen.append(torch.tensor(side.lengths))
        proposals.append(side.propose())
        side.extend(kept, rejected)
    batch = batch_of(hidden.view(3, 39, -1), ids, torch.stack(seen, dim=1))
    drafts = family(method).forward(model, target.get_input_embeddings(), drafter.head, batch, DEPTH)
    for m, proposal in enumerate(proposals):
        assert torch.allclose(drafts.logits[:, m], proposal.logits, atol=1e-4)
        assert torch.allclose(drafts.stop[:, m], proposal.stop, atol=1e-4)
    assert drafts.logits.std() > 0.1


@pytest.fixture
def float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("method", METHODS)
def test_gradients_flow_through_the_chain(method: str) -> None:
    """The last slot's slope along a random direction of all weights, against a difference quotient."""
    torch.manual_seed(0)
    target = tiny.llama().double().requires_grad_(False)
    model = model_of(method, target, torch.arange(40))
    batch = batch_of(torch.randn(2, 12, 64), texts(2, 13), torch.tensor([[3, 7], [5, 8]]))
    head = target.get_output_embeddings().weight[:40]
    weigh = torch.randn(2, 2, 40)

    def value() -> Tensor:
        logits = family(method).forward(model, target.get_input_embeddings(), head, batch, DEPTH).logits
        return (logits[:, :, -1].log_softmax(-1) * weigh).sum()

    weights = [p for name, p in model.named_parameters() if "stop_head" not in name]
    direction = [p.std(correction=0) * torch.randn(p.shape) for p in weights]
    gradients = torch.autograd.grad(value(), weights)
    slope = torch.stack([(g * d).sum() for g, d in zip(gradients, direction, strict=True)]).sum()
    ends = []
    with torch.no_grad():
        for step in (1e-6, -2e-6):
            for p, d in zip(weights, direction, strict=True):
                p += step * d
            ends.append(value())
    assert slope.item() == pytest.approx((ends[0] - ends[1]).item() / 2e-6, rel=1e-4)


@pytest.mark.parametrize("method", METHODS)
@torch.inference_mode()
def test_cache_after_any_verdict_equals_a_fresh_one(method: str, target: Any) -> None:
    """Full, partial and no acceptance, and steps without drafts: nothing that was drafted or rejected stays visible."""
    model, ids = model_of(method, target, torch.arange(50)), texts(3, 48)
    side = Side(target, drafter_of(model, method, target), ids)
    side.enter([6, 9, 2])
    for kept in ([5, 3, 1], [1, 5, 2], [2, 1, 5]):
        side.propose()
        side.extend(kept, [DEPTH + 1 - k for k in kept])
        side.extend([1, 1, 1], [0, 0, 0])
    fresh = Side(target, drafter_of(model, method, target), ids)
    fresh.enter(side.lengths)
    for i, buffers in fresh.drafter.cache.layers.items():
        for ours, expected in zip(side.drafter.cache.layers[i], buffers, strict=True):
            for r, n in enumerate(side.lengths):
                assert torch.allclose(ours[r, :n], expected[r, :n], atol=1e-5)
    assert len(fresh.drafter.cache.layers) == (1 if method == "eagle" else DEPTH)
    assert torch.allclose(side.drafter.newest[:3], fresh.drafter.newest[:3], atol=1e-5)
    assert torch.allclose(side.propose().logits, fresh.propose().logits, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
@torch.inference_mode()
def test_rows_move_and_rows_are_taken_again(method: str, target: Any) -> None:
    """The last request moves into a free row, and a new one enters the row that it left."""
    model, ids = model_of(method, target, torch.arange(50)), texts(4, 30)
    side = Side(target, drafter_of(model, method, target), ids[:3])
    side.enter([4, 7, 11])
    side.extend([2, 1, 3], [1, 0, 1])
    expected = side.propose().logits
    side.drafter.move(2, 0)
    side.packed.cache.move(2, 0)
    prompt = ids[3, :5]
    layout = Layout([0], [5], first_row=2)
    _, hidden = side.packed.forward(prompt, layout, None, side.drafter.hidden_layers)
    side.drafter.enter(layout, [prompt.tolist()], hidden)
    side.ids, side.lengths = ids[[2, 1, 3]], [side.lengths[2], side.lengths[1], 5]
    logits = side.propose().logits
    assert torch.allclose(logits[:2], expected[[2, 1]], atol=1e-5)
    alone = Side(target, drafter_of(model, method, target), ids[3:])
    alone.enter([5])
    assert torch.allclose(logits[2:], alone.propose().logits, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
@torch.inference_mode()
def test_what_propose_returns(method: str, target: Any) -> None:
    vocab_ids = torch.arange(4, 48, 2)
    drafter, ids = drafter_of(model_of(method, target, vocab_ids), method, target), texts(3, 40)
    side = Side(target, drafter, ids)
    side.enter([9, 5, 1])
    free = side.propose(forced=False)
    assert torch.equal(free.tokens, vocab_ids[free.draft_ids])
    assert torch.allclose(free.q, free.logits.softmax(-1), atol=1e-6)
    assert torch.equal(free.q_drawn, free.q.gather(-1, free.draft_ids[..., None])[..., 0])
    side.ids = ids.scatter(1, torch.tensor(side.lengths)[:, None] + 1 + torch.arange(DEPTH), free.tokens)
    assert torch.equal(side.propose().q, free.q)  # forced on its own drafts, it says the same
    side.ids = ids
    forced = side.propose()
    assert torch.equal(forced.q[:, 0], free.q[:, 0])
    assert not torch.allclose(forced.q[:, 1:], free.q[:, 1:], atol=1e-3)
    asked: list[Any] = []
    short = side.propose(forced=False, enough=lambda position: asked.append(position) or len(asked) == 2)
    for name in ("tokens", "draft_ids", "logits", "q", "q_drawn", "stop"):
        expected = getattr(free, name)[:, :2]
        assert torch.equal(getattr(short, name), expected)
        assert torch.equal(torch.cat([getattr(position, name) for position in asked], dim=1), expected)


@pytest.mark.parametrize("drafts", ["probabilistic", "greedy"])
@pytest.mark.parametrize("method", METHODS)
def test_greedy_output_is_the_targets(method: str, drafts: str, target: Any) -> None:
    """Five requests in two rows: they finish, move, and enter while others run."""
    config = {
        "method": method,
        "model": model_of(method, target, torch.arange(3, 50), disturbed=False),
        "num_speculative_tokens": 3,
        "draft_sample_method": drafts,
        "enable_adaptive_verification": False,
    }
    llm = LLM(target, config, max_num_seqs=2, max_model_len=40)
    prompts = [[3, 9, 4], [11], [7, 8, 9, 10, 11, 12], [40, 3], [5] * 4]
    lengths = [24, 14, 20, 9, 18]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    answers = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
    assert answers == [tiny.greedy(target, p, n) for p, n in zip(prompts, lengths, strict=True)]
    assert llm.stats.accepted_by_position[0] > 0


# On a bigram target, with weights that pass the token's embedding on, a drafter is its target


TOKENS = 5


@pytest.fixture(scope="module")
def bigram() -> Any:
    return tiny.bigram(torch.randn(TOKENS, TOKENS, generator=torch.Generator().manual_seed(0)) * 1.5)


def copying(method: str, target: Any, noise: float, vocab_ids: Sequence[int] = range(TOKENS)) -> Any:
    """A drafter that says what the target says, up to what noise in its attention and its states adds."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = family(method).start(target, Settings(target_layers=(0, 1)), torch.tensor(vocab_ids))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.startswith("join") or name.endswith(("o_proj.weight", "down.weight")):
                weight.normal_(std=noise, generator=generator)
            if name.startswith("join"):
                weight += torch.eye(*weight.shape)
            elif name.endswith("norm.weight"):
                weight.fill_(noise if name == "fuse_norm.weight" else 1.0)
    return model


@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_that_says_what_the_target_says_is_always_accepted(method: str, bigram: Any) -> None:
    config = {"method": method, "model": copying(method, bigram, 0.0), "enable_adaptive_verification": False}
    for depth in (1, 4):
        llm = LLM(bigram, {**config, "num_speculative_tokens": depth}, max_num_seqs=3, max_model_len=64)
        llm.generate([[3], [1, 2], [4, 4]], SamplingParams(max_tokens=40))
        assert (llm.stats.accepted_by_position == llm.stats.verified_by_position).all()
        assert llm.stats.accepted_by_position[-1] > 10


def emitted(method: str, target: Any, drafts: str = "probabilistic") -> tuple[LLM, float]:
    """1,200 requests with a drafter that lacks a token -> the LLM and the p-value of their first three tokens' law."""
    config = {
        "method": method,
        "model": copying(method, target, 0.3, [0, 1, 3, 4]),
        "num_speculative_tokens": 3,
        "draft_sample_method": drafts,
        "enable_adaptive_verification": True,
        "estimator": {"refit_interval": 5},
    }
    # with 100 requests a draft pays from a survival of 1/6 on
    costs = CostTable.from_curves(
        [(1, 0.1), (100, 0.2)], [(1, 2.0), (100, 3.0), (400, 4.5)], max_requests=100, max_tokens=400
    )
    llm = LLM(target, config, max_num_seqs=100, max_model_len=16, cost_table=costs)
    outputs = llm.generate([[2, 1, 3]] * 1200, SamplingParams(max_tokens=5, ignore_eos=True))
    return llm, p_value(([o.outputs[0].token_ids for o in outputs], exact_law(target, [2, 1, 3], 1.0)))


@pytest.mark.parametrize("drafts", ["probabilistic", "greedy"])
@pytest.mark.parametrize("method", METHODS)
def test_emitted_law(method: str, drafts: str, bigram: Any) -> None:
    llm, p = emitted(method, bigram, drafts)
    accepted, graded = llm.stats.accepted_by_position, llm.stats.graded_by_position
    assert 20 < llm.stats.verified_by_position[2] < 0.95 * llm.stats.drafted_by_position[2]  # some are trimmed
    assert 0.1 < accepted.sum() / graded.sum() < 0.9
    assert accepted[1] > 100
    assert p >= ALPHA


def test_mutant_q_of_another_position(bigram: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above has teeth: later drafts are judged by the q of the first."""
    real = EagleDrafter.propose

    def mutant(*arguments: Any, **kw: Any) -> DraftProposal:
        proposal = real(*arguments, **kw)
        proposal.q[:] = proposal.q[:, :1].clone()
        proposal.q_drawn = proposal.q.gather(-1, proposal.draft_ids[..., None])[..., 0]
        return proposal

    monkeypatch.setattr(EagleDrafter, "propose", mutant)
    assert emitted("eagle", bigram)[1] < ALPHA / 1000


# What is refused


@pytest.mark.parametrize("method", METHODS)
def test_a_depth_above_the_trained_one_is_refused(method: str, target: Any) -> None:
    config = {"method": method, "model": model_of(method, target, torch.arange(50)), "num_speculative_tokens": 5}
    with pytest.raises(ValueError, match=r"num_speculative_tokens=5.*trained to draft 4 tokens"):
        LLM(target, config, max_num_seqs=2, max_model_len=40)


def test_a_wrong_number_of_layers_is_refused() -> None:
    shape = (32, 4, 2, 8, 32)
    with pytest.raises(ValueError, match=r"num_layers=2.*one layer"):
        EagleModel(DrafterConfig(*shape, num_layers=2, depth=4, target_layers=LAYERS, vocab_size=8))
    with pytest.raises(ValueError, match=r"num_layers=1 and depth=4.*one module per depth"):
        MTPModel(DrafterConfig(*shape, num_layers=1, depth=4, target_layers=LAYERS, vocab_size=8))


def test_mtp_reads_the_last_two_layers_of_what_was_recorded(target: Any) -> None:
    settings = Settings(target_layers=(0, *LAYERS))
    model = family("mtp").start(target, settings, torch.arange(50))
    assert model.config.target_layers == LAYERS
    hidden, ids, anchors = torch.randn(1, 9, 3 * 32), texts(1, 10), torch.tensor([[5]])
    table, head = target.get_input_embeddings(), target.get_output_embeddings().weight
    with torch.inference_mode():
        every, last = (
            family("mtp").forward(model, table, head, batch_of(h, ids, anchors), DEPTH).logits
            for h in (hidden, hidden[..., 32:])
        )
    assert torch.equal(every, last)
