"""The target's first layers as its drafter, on the target's own cache.

Oracles: a model built from scratch with fewer layers and the target's weights, run by plain Hugging Face; plain greedy
decoding; the exact law of what is emitted.
"""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from test_lossless_end_to_end import ALPHA, NUCLEUS, PROMPT, SAMPLES, exact_law, p_value, run, trimmed
from torch import Tensor
from transformers import AutoModelForCausalLM, GPTNeoXConfig, OPTConfig

from avref.config import SamplingParams
from avref.drafters.base import DraftProposal
from avref.drafters.layer_skip import LayerSkip, truncated
from avref.layout import Layout
from avref.llm import LLM
from avref.packed import PackedModel, plain_attention

LAYERS = 3
FAMILIES = {
    "llama": lambda: tiny.llama(num_hidden_layers=LAYERS),
    "gpt2": lambda: tiny.gpt2(n_layer=LAYERS),
    "mistral": lambda: tiny.mistral(num_hidden_layers=LAYERS),
    "gemma3": lambda: tiny.gemma3(
        num_hidden_layers=LAYERS, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
}
PROMPTS = [[3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 3], [11, 12], [0, 0], list(range(20, 40)), [13, 41, 2, 6]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def target() -> Any:
    """The last layer says little, so that half of what the others draft is right."""
    model = tiny.sharpen(tiny.llama(num_hidden_layers=LAYERS), 1.5)
    with torch.no_grad():
        for layer in model.model.layers[2:]:
            layer.self_attn.o_proj.weight.mul_(0.2)
            layer.mlp.down_proj.weight.mul_(0.2)
    return model


def from_scratch(model: Any, num_layers: int) -> Any:
    """Plain Hugging Face: another configuration, and those of the model's weights that it asks for."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    config._attn_implementation = "eager"
    short = AutoModelForCausalLM.from_config(config).float().eval()
    missing, unexpected = short.load_state_dict(model.state_dict(), strict=False)
    assert not missing and unexpected
    return short


def make(target: Any, num_layers: int | None = 2, k: int = 5, **settings: Any) -> LLM:
    sizes = {name: settings.pop(name) for name in ("max_num_seqs", "max_model_len") if name in settings}
    config = {"method": "layer_skip", "model": num_layers, "num_speculative_tokens": k, **settings}
    return LLM(target, config, **{"max_num_seqs": 3, "max_model_len": 128, "cost_table": tiny.flat_costs(), **sizes})


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params)]


# The truncated model


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_truncated_model(family: str) -> None:
    model = FAMILIES[family]()
    ids = torch.tensor([[5, 3, 9, 9, 1, 30, 7, 2, 8, 8, 4, 6]])
    with plain_attention(model):
        before = model(input_ids=ids, use_cache=False).logits
        for n in (1, 2):
            expected = from_scratch(model, n)(input_ids=ids, use_cache=False).logits
            short = truncated(model, n)
            assert torch.allclose(short(input_ids=ids, use_cache=False).logits, expected, atol=1e-5)
            assert (expected - before).abs().max() > 0.1
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)  # the model is what it was
    assert {id(p) for p in short.parameters()} < {id(p) for p in model.parameters()}


def test_default_is_four_fifths() -> None:
    for total, expected in ((1, 1), (2, 2), (5, 4), (10, 8)):
        model = tiny.llama(num_hidden_layers=total)
        assert len(truncated(model).model.layers) == expected


def test_wrong_numbers_of_layers_are_refused(target: Any) -> None:
    for wrong in (0, -1, LAYERS + 1, 1.5, True, "some/model"):
        with pytest.raises(ValueError, match=r"number of layers to draft with, 1 to the target's 3 \(None: 2\)"):
            make(target, wrong)  # type: ignore[arg-type]


def test_structures() -> None:
    neox = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    assert len(truncated(tiny.build(GPTNeoXConfig(**neox, num_attention_heads=4)), 1).gpt_neox.layers) == 1
    opt = {"vocab_size": 50, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "word_embed_proj_dim": 32}
    with pytest.raises(ValueError, match=r"'layers' or 'h'; OPTForCausalLM.model has neither"):
        truncated(tiny.build(OPTConfig(**opt, num_attention_heads=4, max_position_embeddings=64)), 1)
    wrapped = tiny.llama()
    wrapped.model.forward = wrapped.model.forward
    with pytest.raises(ValueError, match="its forward is replaced"):
        truncated(wrapped, 1)


# Drafting on the target's cache


def packed(chunks: list[list[int]]) -> Tensor:
    return torch.tensor(list(itertools.chain.from_iterable(chunks)))


class Side:
    """A target and its own layers as drafter, driven by hand as the engine drives them."""

    def __init__(self, model: Any, num_layers: int, rows: int, max_length: int = 64) -> None:
        self.packed = PackedModel(model, rows, max_length)
        self.drafter = LayerSkip(model, num_layers, max_length)
        self.drafter.attach(self.packed)
        self.text: list[list[int]] = []  # what is final and cached

    def enter(self, prompts: list[list[int]]) -> None:
        layout = Layout([0] * len(prompts), [len(p) for p in prompts])
        self.packed.forward(packed(prompts), layout)
        self.drafter.enter(layout, prompts, None)
        self.text = [list(p) for p in prompts]

    def propose(self, pending: list[int], depth: int, **more: Any) -> DraftProposal:
        rows = len(pending)
        lengths = [len(t) for t in self.text]
        u = torch.rand(rows, depth, generator=torch.Generator().manual_seed(len(self.text[0])))
        return self.drafter.propose(lengths, torch.tensor(pending), depth, torch.ones(rows), u, False, **more)

    def verify(self, pending: list[int], drafts: Tensor, admitted: list[int], accepted: list[int]) -> None:
        chunks = [[p, *d[:n]] for p, d, n in zip(pending, drafts.tolist(), admitted, strict=True)]
        layout = Layout([len(t) for t in self.text], [len(c) for c in chunks])
        self.packed.forward(packed(chunks), layout)
        self.drafter.extend(layout, chunks, None, [n + 1 for n in accepted])
        for text, chunk, n in zip(self.text, chunks, accepted, strict=True):
            text += chunk[: n + 1]


@torch.inference_mode()
def plain_logits(model: Any, text: list[int], last: int) -> Tensor:
    """Of a model in plain Hugging Face, at the last so many tokens of a text."""
    return model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -last:]


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_after_full_partial_and_no_acceptance(family: str) -> None:
    """At every step the draft logits are those of the truncated model on the text and the drafts before (C53, C54)."""
    model = FAMILIES[family]()
    short = from_scratch(model, 2)
    side = Side(model, 2, 3)
    side.enter([[3, 4, 5, 6, 7], [9], list(range(10, 22))])
    steps = [([3, 3, 3], [3, 1, 0]), ([3, 2, 0], [0, 2, 0]), ([0, 0, 0], [0, 0, 0]), ([1, 3, 3], [1, 3, 2])]
    for i, (admitted, accepted) in enumerate(steps):
        pending = [20 + i, 30 + i, 40 + i]
        proposal = side.propose(pending, 3)
        assert proposal.logits is not None and proposal.q is not None
        for r, text in enumerate(side.text):
            seen = [*text, pending[r], *proposal.tokens[r, :2].tolist()]
            assert torch.allclose(proposal.logits[r], plain_logits(short, seen, 3), atol=1e-4)
        assert torch.allclose(proposal.q, proposal.logits.softmax(-1), atol=1e-6)
        assert torch.equal(proposal.q_drawn, proposal.q.gather(-1, proposal.tokens[..., None])[..., 0])
        side.verify(pending, proposal.tokens, admitted, accepted)


def test_drafting_leaves_the_target_as_it_was(target: Any) -> None:
    """What it writes is what the target writes there: verification reads its own keys and values only."""
    with_drafts, without = Side(target, 2, 2), Side(target, 2, 2)
    for side in (with_drafts, without):
        side.enter([[3, 4, 5], [9]])
    for pending in ([7, 8], [11, 12]):
        drafts = with_drafts.propose(pending, 4).tokens
        for side in (with_drafts, without):
            side.verify(pending, drafts, [2, 1], [1, 0])
    ids, layout = torch.tensor([5, 6]), Layout([len(t) for t in with_drafts.text], [1, 1])
    assert torch.equal(with_drafts.packed.forward(ids, layout)[0], without.packed.forward(ids, layout)[0])


def test_given_text(target: Any) -> None:
    """With `forced`, q at every depth is the truncated model's on the text, whatever it draws itself."""
    short = from_scratch(target, 2)
    side = Side(target, 2, 2)
    side.enter([[3, 4, 5], [9]])
    forced = torch.tensor([[8, 1, 13, 2], [2, 2, 40, 41]])
    proposal = side.propose([6, 7], 4, forced=forced)
    assert proposal.logits is not None
    for r, pending in enumerate((6, 7)):
        seen = [*side.text[r], pending, *forced[r, :3].tolist()]
        assert torch.allclose(proposal.logits[r], plain_logits(short, seen, 4), atol=1e-4)


def test_stopping_early(target: Any) -> None:
    side = Side(target, 2, 2)
    side.enter([[3, 4, 5], [9]])
    whole = side.propose([6, 7], 4)
    asked: list[Any] = []
    proposal = side.propose([6, 7], 4, enough=lambda position: asked.append(position) or len(asked) == 2)
    assert torch.equal(proposal.tokens, whole.tokens[:, :2])
    assert proposal.logits is not None and proposal.logits.shape[1] == 2
    assert torch.equal(torch.cat([position.logits for position in asked], dim=1), proposal.logits)


def test_greedy_drafts(target: Any) -> None:
    side = Side(target, 2, 1)
    side.enter([[3, 4, 5]])
    proposal = side.drafter.propose([3], torch.tensor([6]), 3, torch.ones(1), torch.rand(1, 3), True)
    assert proposal.logits is not None and proposal.q is None
    assert torch.equal(proposal.tokens, proposal.logits.argmax(-1))
    assert (proposal.q_drawn == 1).all()


def test_cache_grows_while_drafting(target: Any) -> None:
    """Past 256 tokens the first layers' buffers grow in the drafter, the others' in the target."""
    side = Side(target, 2, 2, max_length=400)
    text = torch.randint(0, tiny.VOCAB, (255,), generator=torch.Generator().manual_seed(0)).tolist()
    side.enter([text[:160], [9]])
    side.verify([text[160], 1], torch.tensor([text[161:]] * 2), [94, 1], [94, 0])
    drafts = side.propose([6, 7], 4)
    assert {i: keys.shape[1] for i, (keys, _) in side.packed.cache.layers.items()} == {0: 400, 1: 400, 2: 256}
    assert drafts.logits is not None
    seen = [*text, 6, *drafts.tokens[0, :3].tolist()]
    assert torch.allclose(drafts.logits[0], plain_logits(from_scratch(target, 2), seen, 4), atol=1e-4)
    side.verify([6, 7], drafts.tokens, [4, 4], [2, 0])
    logits, _ = side.packed.forward(torch.tensor([5, 5]), Layout([len(t) for t in side.text], [1, 1]))
    with plain_attention(target):
        for r in range(2):
            assert torch.allclose(logits[r], plain_logits(target, [*side.text[r], 5], 1)[0], atol=1e-4)


# Through the engine


@pytest.fixture(scope="module")
def plain_greedy(target: Any) -> list[list[int]]:
    return [tiny.greedy(target, p, 20) for p in PROMPTS]


@pytest.mark.parametrize("settings", [{}, {"enable_adaptive_verification": True}, {"draft_sample_method": "greedy"}])
@pytest.mark.parametrize("k", [1, 4])
def test_greedy_equals_plain_decoding(k: int, settings: Any, target: Any, plain_greedy: list[list[int]]) -> None:
    llm = make(target, 2, k, **settings)
    assert answers(llm, PROMPTS, GREEDY) == plain_greedy
    stats = llm.stats
    assert 0 < stats.accepted_by_position.sum() < stats.graded_by_position.sum()


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=30, ignore_eos=True, seed=3)])
@pytest.mark.parametrize("k", [1, 7])
def test_all_layers_accept_everything(k: int, params: SamplingParams, target: Any) -> None:
    llm = make(target, LAYERS, k)
    assert [len(a) for a in answers(llm, PROMPTS, params)] == [params.max_tokens] * len(PROMPTS)
    stats = llm.stats
    # in sampling a rounding of p / q below 1 may reject one draft in millions
    assert (stats.accepted_by_position == stats.verified_by_position).all() and stats.verified_by_position.sum() > 0


def test_full_acceptance_goes_on_after_steps_without_drafts(target: Any) -> None:
    llm = make(target, LAYERS, 3)
    schedule = iter([3, 0, 0, 3, 1, 0, 2] * 40)
    llm.engine.override = lambda capacity: min(capacity, next(schedule))
    assert answers(llm, PROMPTS, GREEDY) == [tiny.greedy(target, p, 20) for p in PROMPTS]
    assert (llm.stats.accepted_by_position == llm.stats.verified_by_position).all()


def test_requests_that_end_at_the_context(target: Any) -> None:
    """A long request at its last positions beside a short one: its drafts may not reach past the cache."""
    prompts = [list(range(3, 25)), [5, 6], list(range(3, 30))]
    llm = make(target, 2, 6, max_model_len=32)
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    assert answers(llm, prompts, params) == [tiny.greedy(target, p, 32 - len(p)) for p in prompts]


def test_an_error_leaves_nothing_behind(target: Any, plain_greedy: list[list[int]]) -> None:
    llm = make(target, 2, 4)
    llm.engine.override = lambda capacity: 1 // 0
    with pytest.raises(ZeroDivisionError):
        llm.generate(PROMPTS, GREEDY)
    llm.engine.override = None
    assert not llm.engine.target.cache.layers
    assert answers(llm, PROMPTS, GREEDY) == plain_greedy


def test_emitted_law() -> None:
    model = tiny.llama(vocab_size=8, num_hidden_layers=2, pad_token_id=None, eos_token_id=None)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.mul_(0.4)
        model.model.layers[1].mlp.down_proj.weight.mul_(0.4)
    llm, whole, nucleus = run(model, "layer_skip", 1)
    stats = llm.stats
    assert stats.graded_by_position.sum() > 2 * SAMPLES
    assert 0.1 < trimmed(llm) < 0.9
    assert 0.1 < stats.accepted_by_position.sum() / stats.graded_by_position.sum() < 0.95
    assert p_value((whole, exact_law(model, PROMPT, 1.0))) >= ALPHA
    assert p_value((nucleus, exact_law(model, PROMPT, NUCLEUS))) >= ALPHA
    assert p_value((whole, exact_law(from_scratch(model, 1), PROMPT, 1.0))) < ALPHA / 1000  # not the drafter's law


def test_load_reads_the_configuration(target: Any) -> None:
    llm = SimpleNamespace(model=target, max_model_len=16)
    drafter = LayerSkip.load(SimpleNamespace(model=None), llm, 2)  # type: ignore[arg-type]
    assert len(drafter.truncated.model.layers) == 2 and drafter.max_length == 16
