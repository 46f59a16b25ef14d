"""Where confidence comes from: each source reads what it says, the stopping rules stop where a loop by hand stops.

Oracles: plain Hugging Face for greedy tokens, a softmax and a Python loop for prefix lengths.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from avref import drafters, profiling
from avref.confidence import Confidence, resolve
from avref.config import SamplingParams, SpeculativeConfig
from avref.decision import Decision
from avref.drafters.base import DraftProposal
from avref.drafters.draft_model import DraftModel
from avref.estimator import OnlineAcceptanceEstimator
from avref.llm import LLM

PROMPTS = [[3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 3], [11, 12], [3, 4, 3, 4, 3]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, max_tokens=20, ignore_eos=True)


class Talkative(DraftModel):
    """A draft model with a confidence and a stop head of its own: functions of the logits, so that they are lossless.

    `most` drafts at most per proposal; `found` per request.
    """

    has_confidence = has_stop_head = True
    most, found = 64, 64

    def propose(self, lengths: Any, pending: Tensor, depth: int, *rest: Any, enough: Any = None) -> DraftProposal:
        heard = None if enough is None else lambda position: enough(self.judged(position))
        proposal = self.judged(super().propose(lengths, pending, min(depth, self.most), *rest, enough=heard))
        if self.found < 64:
            proposal.num_drafted = [min(depth, (n + self.found) % 4) for n in lengths]
        return proposal

    @staticmethod
    def judged(proposal: DraftProposal) -> DraftProposal:
        assert proposal.logits is not None
        q_max = proposal.logits.softmax(-1).amax(-1)
        return replace(proposal, confidence=q_max.sqrt(), stop=4.0 * q_max - 1.0)


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.sharpen(tiny.llama(), 1.5)


@pytest.fixture(scope="module")
def models(target: Any) -> dict[str, Any]:
    return {"draft_model": tiny.near(target, 0.1), "dflash": tiny.dflash(target, vocab_ids=range(45)), "ngram": None}


@pytest.fixture(scope="module")
def plain_greedy(target: Any) -> list[list[int]]:
    return [tiny.greedy(target, p, 20) for p in PROMPTS]


def make(target: Any, method: str, model: Any, confidence: str, **settings: Any) -> LLM:
    config = {"method": method, "model": model, "num_speculative_tokens": 5, "enable_adaptive_verification": True}
    config |= {"confidence": confidence, **settings}
    return LLM(target, config, max_num_seqs=3, max_model_len=64, cost_table=tiny.flat_costs())


@pytest.fixture
def talkative(monkeypatch: pytest.MonkeyPatch) -> None:
    """Method draft_model loads a `Talkative`."""
    monkeypatch.setitem(drafters.CLASSES, "draft_model", "test_confidence:Talkative")


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]


def record(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[DraftProposal, list[int], Tensor, list[int]]]:
    """(proposal, capacities, temperatures, admitted) of every step that drafts."""
    steps = []
    admit = llm.engine._admit

    def watch(proposal: Any, decision: Any, capacity: list[int], drafted: list[int]) -> Any:
        answer = admit(proposal, decision, capacity, drafted)
        if proposal is not None:
            steps.append((proposal, capacity, decision.temperature, list(answer)))
        return answer

    monkeypatch.setattr(llm.engine, "_admit", watch)
    return steps


# Which source


@pytest.mark.parametrize(
    ("confidence", "drafter", "expected"),
    [
        ("auto", {}, "estimator"),
        ("auto", {"has_confidence": True}, "estimator"),
        ("auto", {"has_logits": False, "has_confidence": True}, "head"),
        ("estimator", {}, "estimator"),
        ("q_max", {}, "q_max"),
        ("threshold", {}, "threshold"),
        ("head", {"has_confidence": True}, "head"),
        ("head", {"has_logits": False, "has_confidence": True}, "head"),
        ("stop_head", {"has_stop_head": True}, "stop_head"),
        ("head", {}, "a confidence of the drafter's own.*'estimator', 'q_max', 'threshold'$"),
        ("stop_head", {"has_confidence": True}, "a stop head.*'estimator', 'head', 'q_max', 'threshold'$"),
        ("estimator", {"has_logits": False, "has_confidence": True}, "draft logits.*one of 'head'$"),
        ("q_max", {"has_logits": False, "has_confidence": True}, "draft logits"),
        ("threshold", {"has_logits": False, "has_confidence": True}, "draft logits"),
    ],
)
def test_resolve(confidence: str, drafter: dict[str, bool], expected: str) -> None:
    config = SpeculativeConfig("dflash", confidence=confidence, enable_adaptive_verification=True)
    if " " in expected:
        with pytest.raises(ValueError, match=expected):
            resolve(config, SimpleNamespace(**drafter))  # type: ignore[arg-type]
    else:
        assert resolve(config, SimpleNamespace(**drafter)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"confidence": "oracle"}, "'oracle'.*'auto', 'estimator', 'head', 'q_max', 'threshold', 'stop_head'"),
        ({"confidence": "q_max", "enable_adaptive_verification": False}, "'q_max'.*enable_adaptive_verification=True"),
        ({"threshold": 0.5}, "threshold=0.5 is not read by confidence='auto'"),
        ({"confidence": "head", "threshold": 0.5}, "threshold=0.5 is not read by confidence='head'"),
        ({"confidence": "threshold", "threshold": 1.5}, r"threshold is 1.5.*\[0, 1\]"),
        ({"confidence": "threshold", "threshold": float("nan")}, "threshold is nan"),
        ({"confidence": "threshold", "budget_rule": "stale"}, "budget_rule='stale' is not read by .*no budget"),
        ({"confidence": "q_max", "estimator": {"slope": 1.0}}, "estimator=.*is not read by confidence='q_max'"),
        ({"confidence": "head", "feature": "margin"}, "feature='margin' is not read by confidence='head'"),
        ({"adaptive_drafting": 2}, "adaptive_drafting is 2"),
    ],
)
def test_settings_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.from_dict({"method": "dflash", "enable_adaptive_verification": True, **changes})


def test_probes_that_teach_nothing_are_refused() -> None:
    logits, own = SimpleNamespace(has_confidence=True), SimpleNamespace(has_confidence=True, has_logits=False)

    def resolved(confidence: str, drafter: Any, interval: int) -> str:
        config = SpeculativeConfig(
            "dflash", confidence=confidence, probe_interval=interval, enable_adaptive_verification=True
        )
        return resolve(config, drafter)

    for source in ("q_max", "threshold", "head"):
        with pytest.raises(ValueError, match=f"probe_interval=16 is not read by confidence='{source}', which learns"):
            resolved(source, logits, 16)
        assert resolved(source, logits, 0) == resolved(source, logits, 64) == source
    assert resolved("estimator", logits, 16) == "estimator" and resolved("auto", own, 16) == "head"


def test_an_estimator_for_ngrams_is_refused_at_load(target: Any) -> None:
    with pytest.raises(ValueError, match=r"estimator=.*'head' for method 'ngram'"):
        make(target, "ngram", None, "auto", estimator={"slope": 1.0})
    with pytest.raises(ValueError, match=r"reads draft logits, and method 'ngram' has none.*'head'"):
        make(target, "ngram", None, "estimator")


# What is read


def test_each_source_reads_what_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 2, 7, generator=generator)
    ids, own = torch.zeros(3, 2, dtype=torch.long), torch.rand(3, 2, generator=generator)
    proposal = DraftProposal(ids, ids, logits, None, torch.ones(3, 2), confidence=own, stop=logits[..., 0])
    temperature = torch.tensor([1.0, 0.5, 0.0])
    q = (logits / torch.tensor([1.0, 0.5, 1.0])[:, None, None]).double().softmax(-1).amax(-1)
    expected = {"head": own, "q_max": q, "threshold": q, "stop_head": logits[..., 0].sigmoid()}
    expected["estimator"] = torch.sigmoid(2.0 * torch.log(q / (1 - q)) + 0.3)
    drafter: Any = SimpleNamespace(has_confidence=True, has_stop_head=True)
    for source, values in expected.items():
        config = SpeculativeConfig(
            "dflash", num_speculative_tokens=4, confidence=source, enable_adaptive_verification=True
        )
        estimator = OnlineAcceptanceEstimator(4, slope=2.0, intercept=0.3)
        features, confidence = Confidence(config, drafter, estimator).read(proposal, temperature)
        assert confidence.shape == (3, 4) and (confidence[:, 2:] == 0).all()
        torch.testing.assert_close(confidence[:, :2].double(), values.double(), rtol=1e-5, atol=1e-6)
        assert (features is not None) == (source == "estimator")


def test_stopping_by_hand() -> None:
    """C111: a stop head's threshold is on the product, so .9 .9 .9 .9 at .7 keeps three; q_max is taken one by one."""
    c = torch.tensor([[0.9, 0.9, 0.9, 0.9], [0.9, 0.3, 0.9, 0.9], [0.2, 0.9, 0.9, 0.9], [1.0, 1.0, 1.0, 1.0]])
    settings = {"enable_adaptive_verification": True, "num_speculative_tokens": 4}
    drafter: Any = SimpleNamespace(has_stop_head=True)
    default = {name: Confidence(SpeculativeConfig("dflash", confidence=name, **settings), drafter) for name in STOPPING}
    assert default["threshold"].stop(c).tolist() == [4, 1, 0, 4]
    assert default["stop_head"].stop(c).tolist() == [3, 1, 0, 4]
    sharp = Confidence(SpeculativeConfig("dflash", confidence="threshold", threshold=0.95, **settings), drafter)
    assert sharp.stop(c).tolist() == [0, 0, 0, 4]


# End to end

STOPPING = ("threshold", "stop_head")
RUNS = [
    ("draft_model", "auto"),
    ("draft_model", "estimator"),
    ("draft_model", "q_max"),
    ("draft_model", "threshold"),
    ("dflash", "q_max"),
    ("dflash", "threshold"),
    ("dflash", "stop_head"),
    ("ngram", "auto"),
    ("ngram", "head"),
]


@pytest.mark.parametrize(("method", "confidence"), RUNS)
def test_greedy_tokens_are_the_targets(
    method: str, confidence: str, target: Any, models: dict[str, Any], plain_greedy: list[list[int]]
) -> None:
    settings = {"threshold": 0.1} if confidence == "stop_head" else {}  # it is not trained: about .5 everywhere
    llm = make(target, method, models[method], confidence, **settings)
    assert tokens(llm) == plain_greedy
    stats = llm.stats
    assert 0 < stats.verified_by_position.sum() <= stats.drafted_by_position.sum()
    assert (stats.verified_by_position <= stats.drafted_by_position).all()
    assert (llm.estimator is not None) == (confidence in ("auto", "estimator") and method != "ngram")


@pytest.mark.parametrize("confidence", ["head", "stop_head"])
def test_heads_on_a_token_by_token_drafter(
    confidence: str, talkative: None, target: Any, models: dict[str, Any], plain_greedy: list[list[int]]
) -> None:
    llm = make(target, "draft_model", models["draft_model"], confidence)
    assert tokens(llm) == plain_greedy
    assert 0 < llm.stats.verified_by_position.sum() < llm.stats.drafted_by_position.sum()
    assert llm.estimator is None and llm.stats.num_refits == 0


@pytest.mark.parametrize("threshold", [None, 0.2, 0.8])
@pytest.mark.parametrize("confidence", STOPPING)
@pytest.mark.parametrize("method", ["draft_model", "dflash"])
def test_prefix_lengths_by_hand(
    method: str,
    confidence: str,
    threshold: float | None,
    talkative: None,
    target: Any,
    models: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Position by position from the proposal itself; the end of a block early must not have cut a request short."""
    llm = make(target, method, models[method], confidence, threshold=threshold)
    steps = record(llm, monkeypatch)
    llm.generate(PROMPTS, [SAMPLED, GREEDY, SAMPLED, SAMPLED, GREEDY])
    value = threshold if threshold is not None else {"threshold": 0.4, "stop_head": 0.7}[confidence]
    lengths = []
    for proposal, capacity, temperature, admitted in steps:
        assert proposal.logits is not None and proposal.stop is not None
        for r, most in enumerate(capacity):
            n, product, stopped = 0, 1.0, False
            for k in range(min(most, proposal.tokens.shape[1])):
                t = float(temperature[r]) or 1.0
                c = float((proposal.logits[r, k] / t).double().softmax(-1).max())
                if confidence == "stop_head":
                    c = product = product * float(proposal.stop[r, k].double().sigmoid())
                if c < value:
                    stopped = True
                    break
                n += 1
            assert admitted[r] == n
            assert stopped or n == most
            lengths.append(n)
    assert len(set(lengths)) > 1 or (method, confidence) == ("dflash", "stop_head")  # that head is not trained


@pytest.mark.parametrize("confidence", STOPPING)
def test_ending_a_block_early_changes_nothing_but_the_drafting(
    confidence: str, talkative: None, target: Any, models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(target, "draft_model", models["draft_model"], confidence, threshold=0.6)
    early, drafted, verified = tokens(llm, SAMPLED), llm.stats.drafted_by_position, llm.stats.verified_by_position
    monkeypatch.setattr(Decision, "enough", None)
    llm = make(target, "draft_model", models["draft_model"], confidence, threshold=0.6)
    assert tokens(llm, SAMPLED) == early
    assert llm.stats.verified_by_position.tolist() == verified.tolist()
    assert drafted[0] == llm.stats.drafted_by_position[0]
    assert drafted[1:].sum() < 0.9 * llm.stats.drafted_by_position[1:].sum()


def test_stopping_rules_need_no_cost_table(
    target: Any, models: dict[str, Any], plain_greedy: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "load_or_profile", lambda llm: pytest.fail("profiled"))
    llm = make(target, "dflash", models["dflash"], "threshold")
    llm.engine.cost_table = None
    assert tokens(llm) == plain_greedy


def test_probes_where_verdicts_teach_something(target: Any, models: dict[str, Any]) -> None:
    for method, confidence, learns in (("dflash", "auto", True), ("ngram", "auto", True), ("dflash", "q_max", False)):
        engine = make(target, method, models[method], confidence, **({"probe_interval": 3} if learns else {})).engine
        assert engine.probe_interval == (3 if learns else 0)
        assert [engine._probes()] + [engine._probes() for engine.step_count in (1, 2, 3, 5)] == [
            False,
            False,
            learns,
            False,
            learns,
        ]


# Drafts that the drafter did not find


@pytest.mark.parametrize(
    ("confidence", "rule"),
    [("estimator", "lookahead"), ("head", "lookahead"), ("head", "stale"), ("head", "early_stop"), ("threshold", None)],
)
@pytest.mark.parametrize("limit", ["most", "found"])
def test_fewer_drafts_than_asked_for(
    limit: str,
    confidence: str,
    rule: str | None,
    talkative: None,
    target: Any,
    models: dict[str, Any],
    plain_greedy: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All requests get 2 at most, or each a number of its own: what is not there is neither counted nor verified."""
    monkeypatch.setattr(Talkative, limit, 2)
    settings = {} if rule is None else {"budget_rule": rule}
    llm = make(target, "draft_model", models["draft_model"], confidence, adaptive_drafting=False, **settings)
    steps = record(llm, monkeypatch)
    assert tokens(llm) == plain_greedy
    drafted = llm.stats.drafted_by_position
    assert drafted[0] > drafted[2] and (limit == "found") == (drafted[2] > 0)
    for proposal, capacity, _, admitted in steps:
        found = proposal.num_drafted or [2] * len(capacity)
        assert all(n <= min(c, f) for n, c, f in zip(admitted, capacity, found, strict=True))
    assert sum(sum(admitted) for *_, admitted in steps) == llm.stats.verified_by_position.sum() > 0


def test_empty_slots_are_zeros_among_the_slots_known_before(
    talkative: None, target: Any, models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of slots that a budget is chosen from must not depend on what was found while drafting."""
    monkeypatch.setattr(Talkative, "found", 2)
    llm = make(target, "draft_model", models["draft_model"], "head", adaptive_drafting=False)
    assert llm.engine.budget is not None
    seen = []
    choose = llm.engine.budget.choose
    monkeypatch.setattr(llm.engine.budget, "choose", lambda *a: seen.append((a[0], a[1])) or choose(*a))
    steps = record(llm, monkeypatch)
    tokens(llm)
    for (live, capacities), (proposal, capacity, _, _) in zip(seen, steps, strict=True):
        assert capacities.tolist() == capacity
        assert proposal.num_drafted is not None
        for row, found, most in zip(live, proposal.num_drafted, capacity, strict=True):
            assert (row[found:] == 0).all() and (row[: min(found, most)] > 0).all()
