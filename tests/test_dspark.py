"""dspark: training computes what the drafter proposes, the tail reads only what is known, and output is lossless."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import test_lossless_end_to_end
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_lossless_end_to_end import ALPHA, NUCLEUS, PROMPT, exact_law, p_value, run, trimmed
from torch import Tensor, nn

from avref import LLM, SamplingParams
from avref.drafters import weights
from avref.drafters.base import DraftProposal
from avref.drafters.dflash import DFlashDrafter, DFlashModel
from avref.drafters.dspark import DSparkConfig, DSparkDrafter, DSparkModel
from avref.drafters.layers import DrafterConfig
from avref.layout import Layout
from avref.packed import PackedModel
from avref.train import dflash as train_dflash
from avref.train import dspark as train_dspark
from avref.train.blocks import Batch, loss_and_overlap
from avref.train.loop import _take_over

DEPTH = 4
LAYERS = (1, 2)
VOCAB_IDS = torch.arange(5, 45)


@dataclass
class Settings:
    """What `start` reads."""

    depth: int = DEPTH
    target_layers: tuple[int, ...] = LAYERS
    num_layers: int = 1
    intermediate_size: int = 32


def untrained(target: Any, vocab_ids: Tensor = VOCAB_IDS, **settings: Any) -> DSparkModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return train_dspark.start(target, Settings(**settings), vocab_ids).eval()


def trained(target: Any, vocab_ids: Tensor = VOCAB_IDS, strength: float = 0.3, **settings: Any) -> DSparkModel:
    """A drafter whose tail and heads matter, and whose norms have gains of their own."""
    model = untrained(target, vocab_ids, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        nn.init.normal_(model.markov_out.weight, std=strength)
        nn.init.normal_(model.confidence_head.down.weight, std=1.0)
        for name, weight in model.named_parameters():
            if "norm" in name:
                nn.init.uniform_(weight, 0.7, 1.4)
    return model


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.llama(eos_token_id=None).requires_grad_(False)


def texts(count: int, length: int) -> Tensor:
    return torch.randint(3, tiny.VOCAB, (count, length), generator=torch.Generator().manual_seed(0))


class Side:
    """A drafter that follows given texts [R, n] behind the target, as the engine drives it."""

    def __init__(self, target: Any, drafter: Any, ids: Tensor, lengths: list[int]) -> None:
        self.packed, self.drafter, self.ids, self.lengths = PackedModel(target, len(ids), 64), drafter, ids, lengths
        prompts = [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)]
        drafter.enter(*self._read([0] * len(prompts), prompts))

    def extend(self, kept: list[int], rejected: list[int]) -> None:
        """The target processes kept[r] tokens of the text and rejected[r] wrong ones behind them."""
        rows = zip(self.ids, self.lengths, kept, rejected, strict=True)
        chunks = [[*row[n : n + k].tolist(), *[7] * wrong] for row, n, k, wrong in rows]
        self.drafter.extend(*self._read(self.lengths, chunks), kept)
        self.lengths = [n + k for n, k in zip(self.lengths, kept, strict=True)]

    def _read(self, starts: list[int], chunks: list[list[int]]) -> tuple[Layout, list[list[int]], Any]:
        layout = Layout(starts, [len(c) for c in chunks])
        ids = torch.tensor([token for chunk in chunks for token in chunk])
        return layout, chunks, self.packed.forward(ids, layout, None, LAYERS)[1]

    def text(self) -> Tensor:
        """The pending tokens and those that really follow [R, DEPTH + 1]."""
        return self.ids.gather(1, torch.tensor(self.lengths)[:, None] + torch.arange(DEPTH + 1))

    def propose(
        self,
        forced: Tensor | None = None,
        uniforms: Tensor | None = None,
        greedy: bool = False,
        temperature: float = 0.8,
        enough: Any = None,
    ) -> Any:
        rows = len(self.lengths)
        return self.drafter.propose(
            self.lengths,
            self.text()[:, 0],
            DEPTH,
            torch.full((rows,), temperature),
            torch.full((rows, DEPTH), 0.5) if uniforms is None else uniforms,
            greedy,
            forced=forced,
            enough=enough,
        )


@torch.inference_mode()
def test_training_equals_proposing(target: Any) -> None:
    """`forward` on whole texts gives, at every anchor, the logits and heads of the drafter on the forced text."""
    model, ids = trained(target), texts(3, 40)
    drafter = DSparkDrafter(model, target, 3, 64)
    whole = PackedModel(target, 3, 64)
    _, hidden = whole.forward(ids[:, :-1].flatten(), Layout([0] * 3, [39] * 3), None, LAYERS)
    side = Side(target, drafter, ids, [9, 5, 1])
    anchors, proposals = [], []
    for kept, rejected in (
        ([1, 1, 1], [0, 3, 2]),
        ([4, 1, 2], [1, 4, 0]),
        ([5, 3, 1], [0, 0, 2]),
        ([2, 2, 5], [2, 1, 0]),
    ):
        anchors.append(torch.tensor(side.lengths))
        proposals.append(side.propose(forced=side.text()[:, 1:]))
        side.extend(kept, rejected)
    batch = Batch(hidden.view(3, 39, -1), ids, torch.stack(anchors, dim=1), *(torch.empty(0),) * 3)
    drafts = train_dspark.forward(model, target.get_input_embeddings(), drafter.head, batch, DEPTH)
    assert drafts.confidence is not None and drafts.stop is not None
    for m, proposal in enumerate(proposals):
        torch.testing.assert_close(drafts.logits[:, m], proposal.logits, atol=1e-4, rtol=0)
        torch.testing.assert_close(drafts.stop[:, m], proposal.stop, atol=1e-4, rtol=0)
        torch.testing.assert_close(drafts.confidence[:, m].sigmoid(), proposal.confidence, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_logits_and_confidence_from_the_formula(target: Any) -> None:
    """The module's formula in float64, with the embedding row looked up by hand."""
    model, ids = trained(target), texts(2, 20)
    drafter = DSparkDrafter(model, target, 2, 64)
    side = Side(target, drafter, ids, [6, 9])
    proposal = side.propose()
    pending = ids[[0, 1], side.lengths]
    states = drafter.states(side.lengths, pending, DEPTH).double().view(2, DEPTH, -1)
    before = torch.cat([pending[:, None], proposal.tokens[:, :-1]], dim=1)
    e = target.model.embed_tokens.weight[before].double()
    e = e * (e.square().mean(-1, keepdim=True) + model.config.eps).rsqrt() * model.embedding_norm.weight.double()
    markov = e @ model.markov_in.weight.double().T
    logits = states @ drafter.head.double().T + markov @ model.markov_out.weight.double().T
    torch.testing.assert_close(proposal.logits.double(), logits, atol=1e-4, rtol=0)
    head = model.confidence_head
    inner = torch.cat([states, markov], -1) @ head.up.weight.double().T + head.up.bias.double()
    odds = (inner * inner.sigmoid()) @ head.down.weight[0].double() + head.down.bias.double()
    torch.testing.assert_close(proposal.confidence.double(), odds.sigmoid(), atol=1e-5, rtol=0)
    q = torch.softmax(logits / 0.8, -1)
    torch.testing.assert_close(proposal.q.double(), q, atol=1e-5, rtol=0)
    drawn = (q.cumsum(-1) > 0.5).int().argmax(-1)  # every uniform is .5
    assert proposal.draft_ids.tolist() == drawn.tolist()
    assert proposal.tokens.tolist() == VOCAB_IDS[drawn].tolist()
    torch.testing.assert_close(proposal.q_drawn, proposal.q.gather(-1, proposal.draft_ids[..., None])[..., 0])


@torch.inference_mode()
def test_an_untrained_tail_changes_nothing(target: Any, tmp_path: Path) -> None:
    """Started from a trained dflash drafter, dspark drafts what that one drafts."""
    dflash = train_dflash.start(target, Settings(), VOCAB_IDS)
    weights.save(dflash, tmp_path / "d", "dflash", "tiny")
    dflash = weights.read(tmp_path / "d", "dflash", DrafterConfig, DFlashModel)
    dspark = untrained(target)
    _take_over(dspark, tmp_path / "d", VOCAB_IDS)
    ids = texts(2, 20)
    plain = Side(target, DFlashDrafter(dflash, target, 2, 64), ids, [6, 9]).propose()
    ours = Side(target, DSparkDrafter(dspark, target, 2, 64), ids, [6, 9]).propose()
    assert torch.equal(plain.logits, ours.logits)
    assert torch.equal(plain.tokens, ours.tokens)
    assert torch.equal(plain.stop, ours.stop)


@pytest.mark.parametrize("position", range(DEPTH))
@torch.inference_mode()
def test_nothing_reads_the_token_it_judges(position: int, target: Any) -> None:
    """Another x_k leaves q, confidence and stop up to k as they are; q and confidence behind it change."""
    side = Side(target, DSparkDrafter(trained(target, strength=1.0), target, 2, 64), texts(2, 20), [6, 9])
    uniforms = [torch.full((2, DEPTH), 0.5) for _ in range(2)]
    uniforms[0][:, position], uniforms[1][:, position] = 0.02, 0.98
    one, other = (side.propose(uniforms=u, temperature=5.0) for u in uniforms)
    assert (one.tokens[:, position] != other.tokens[:, position]).all()
    for a, b in ((one.confidence, other.confidence), (one.logits, other.logits), (one.q, other.q)):
        assert torch.equal(a[:, : position + 1], b[:, : position + 1])
        if position + 1 < DEPTH:
            assert not torch.isclose(a[:, position + 1], b[:, position + 1]).all()
    assert torch.equal(one.stop, other.stop)


@torch.inference_mode()
def test_forced_tokens_take_the_place_of_the_drawn_ones(target: Any) -> None:
    side = Side(target, DSparkDrafter(trained(target), target, 2, 64), texts(2, 20), [6, 9])
    free: DraftProposal = side.propose()
    same = side.propose(forced=free.tokens)
    assert torch.equal(free.tokens, same.tokens)
    assert torch.equal(free.logits, same.logits)  # type: ignore[arg-type]
    other = free.tokens.clone()
    other[:, 1] = 47  # no draft id, but a token of the target
    forced = side.propose(forced=other)
    assert torch.equal(forced.tokens[:, :2], free.tokens[:, :2])
    assert torch.equal(forced.logits[:, :2], free.logits[:, :2])  # type: ignore[index]
    assert not torch.allclose(forced.logits[:, 2], free.logits[:, 2])  # type: ignore[index]


@torch.inference_mode()
def test_greedy_proposals_are_one_hot(target: Any) -> None:
    side = Side(target, DSparkDrafter(trained(target), target, 2, 64), texts(2, 20), [6, 9])
    proposal = side.propose(greedy=True)
    assert proposal.q is None
    assert torch.equal(proposal.draft_ids, proposal.logits.argmax(-1))
    assert (proposal.q_drawn == 1).all()


# What reaches what in training


def random_batch(depth: int = DEPTH) -> Batch:
    generator = torch.Generator().manual_seed(0)
    anchors = torch.randint(2, 12, (2, 5), generator=generator)
    top_ids = torch.rand(2, 5, depth, len(VOCAB_IDS), generator=generator).argsort(-1)[..., :8]
    logs = torch.randn(2, 5, depth, 8, generator=generator).sort(-1, descending=True).values.log_softmax(-1)
    return Batch(torch.randn(2, 16, 64), texts(2, 17), anchors, torch.ones(2, 5, depth).bool(), top_ids, logs)


def test_the_heads_do_not_shape_the_drafts(target: Any) -> None:
    """The confidence and stop losses reach their own heads only, the drafts' loss everything else."""
    model, batch = trained(target).train(), random_batch()
    head = target.get_output_embeddings().weight[VOCAB_IDS]
    drafts = train_dspark.forward(model, target.get_input_embeddings(), head, batch, DEPTH)
    assert drafts.confidence is not None and drafts.stop is not None
    (drafts.confidence.sum() + drafts.stop.sum()).backward(retain_graph=True)
    names, heads = {name for name, _ in model.named_parameters()}, ("confidence_head", "stop_head")
    reached = {name for name, p in model.named_parameters() if p.grad is not None}
    assert reached == {name for name in names if name.startswith(heads)}
    model.zero_grad()
    loss_and_overlap(drafts._replace(stop=None, confidence=None), batch, 1.0)[0].backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert reached == {name for name in names if not name.startswith(heads)}


def test_the_confidence_learns_the_overlap(target: Any) -> None:
    """A few hundred steps on one batch: the bias lowers the loss of the drafts, the head's answer nears its label."""
    model, batch = untrained(target).train(), random_batch()
    head = target.get_output_embeddings().weight[VOCAB_IDS]
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses, overlap = [], torch.empty(0)
    for _ in range(100):
        drafts = train_dspark.forward(model, target.get_input_embeddings(), head, batch, DEPTH)
        loss, overlap = loss_and_overlap(drafts, batch, 1.0)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    assert model.markov_out.weight.abs().sum() > 0
    assert drafts.confidence is not None
    torch.testing.assert_close(drafts.confidence.sigmoid().mean((0, 1)), overlap, atol=0.1, rtol=0)


# Through the engine


def make(target: Any, model: Any, **settings: Any) -> LLM:
    config = {"method": "dspark", "model": model, "num_speculative_tokens": DEPTH, **settings}
    return LLM(target, config, max_num_seqs=3, max_model_len=64)


@pytest.mark.parametrize("drafting", ["probabilistic", "greedy"])
def test_greedy_output_is_plain_greedy(drafting: str, target: Any) -> None:
    prompts = [[3, 4], [5, 6, 7, 8, 9], [11], [12, 13, 14], [20, 21]]
    llm = make(target, trained(target), draft_sample_method=drafting)
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    assert [o.outputs[0].token_ids for o in outputs] == [tiny.greedy(target, p, 20) for p in prompts]
    assert llm.stats.accepted_by_position.sum() > 0


@pytest.fixture(scope="module")
def small() -> Any:
    return tiny.sharpen(tiny.llama(vocab_size=8, num_hidden_layers=1, pad_token_id=None, eos_token_id=None), 1.2)


@pytest.mark.parametrize("drafting", ["probabilistic", "greedy"])
def test_emitted_law(drafting: str, small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six of the eight tokens, adaptive verification, with and without top-p: the target's law."""
    model = trained(small, torch.tensor([0, 1, 2, 4, 5, 7]), target_layers=(0, 1), intermediate_size=16)
    monkeypatch.setattr(test_lossless_end_to_end, "SAMPLES", 500)
    llm, whole, nucleus = run(small, "dspark", model, draft_sample_method=drafting)
    assert 0.2 < trimmed(llm) < 0.8
    assert 0.1 < llm.stats.accepted_by_position.sum() / llm.stats.graded_by_position.sum() < 0.9
    assert p_value((whole, exact_law(small, PROMPT, 1.0))) >= ALPHA
    assert p_value((nucleus, exact_law(small, PROMPT, NUCLEUS))) >= ALPHA


# On disk


@pytest.fixture
def saved(target: Any, tmp_path: Path) -> Path:
    weights.save(trained(target), tmp_path / "drafter", "dspark", "tiny")
    return tmp_path / "drafter"


def test_round_trip(saved: Path, target: Any) -> None:
    drafter = make(target, str(saved)).engine.drafter
    assert isinstance(drafter, DSparkDrafter)
    assert drafter.model.config == trained(target).config
    for name, tensor in trained(target).state_dict().items():
        assert torch.equal(drafter.model.state_dict()[name], tensor.bfloat16().to(tensor.dtype))


@pytest.mark.parametrize("name", ["confidence_head.down.weight", "markov_out.weight", "stop_head.up.bias"])
def test_a_missing_tensor_is_refused_by_name(name: str, saved: Path, target: Any) -> None:
    tensors = load_file(saved / "model.safetensors")
    del tensors[name]
    save_file(tensors, saved / "model.safetensors")
    with pytest.raises(RuntimeError, match=rf"damaged or of another version.*{name}.*again"):
        make(target, str(saved))


def test_a_folder_of_another_method_is_refused(saved: Path, target: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="was not made for method 'dflash' but for 'dspark'"):
        make(target, str(saved), method="dflash")
    weights.save(train_dflash.start(target, Settings(), VOCAB_IDS), tmp_path / "dflash", "dflash", "tiny")
    with pytest.raises(ValueError, match="was not made for method 'dspark' but for 'dflash'"):
        make(target, str(tmp_path / "dflash"))


def test_the_shipped_shape_fits(tmp_path: Path) -> None:
    """The default target's width and draft vocabulary, in bfloat16: at most 12 MB."""
    config = DSparkConfig(576, 9, 3, 64, 1152, 1, 7, (0, 8, 16, 24, 29, 30), 8192)
    weights.save(DSparkModel(config), tmp_path, "dspark", "smollm2")
    assert (tmp_path / "model.safetensors").stat().st_size <= 12_000_000
