"""The law of what `LLM` emits, against the target's own, worked out from its logits.

Thousands of requests with one prompt run to their end, half of them with top-p; the joint counts of their first three
tokens (the first comes from the prefill, the others from decode steps in which 20 to 80 % of the drafts are trimmed)
are compared with the exact law by a chi-square test. Seeds are fixed, so a test gives the same answer every time: a
lossless setting must reach p >= ALPHA (with new seeds it would miss it once in 1,000 times), a lossy control or a
mutant must fall below ALPHA / 1,000 at the same sample size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from numpy.typing import NDArray
from scipy.stats import chi2
from torch import Tensor

from avref import sampling
from avref.config import SamplingParams
from avref.cost_table import CostTable
from avref.features import FEATURES
from avref.llm import LLM
from avref.packed import plain_attention

ALPHA = 1e-3
SAMPLES = 1000  # requests behind every law
SAFE_RULES = ("lookahead", "stale", "early_stop")
DEPTH = 3  # tokens whose joint law is tested


# The oracle


def distribution(
    logits: NDArray[np.float64], top_p: float, temperature: float = 1.0, top_k: int = 0
) -> NDArray[np.float64]:
    """One row in float64: the softmax, the top_k best tokens, then the smallest set of these that reaches top_p."""
    p = np.exp((logits - logits.max()) / temperature)
    best = np.argsort(-p, kind="stable")
    p[best[top_k or len(p) :]] = 0
    p /= p.sum()
    size = int(np.searchsorted(np.cumsum(p[best]), top_p - 1e-9)) + 1
    p[best[size:]] = 0
    return p / p.sum()


@torch.inference_mode()
def exact_law(target: Any, prompt: Sequence[int], top_p: float, **more: Any) -> NDArray[np.float64]:
    """The joint law of the next three tokens [V, V, V]."""
    size = target.config.vocab_size
    law = np.ones((size,) * DEPTH)
    with plain_attention(target):
        for depth in range(DEPTH):
            prefixes = list(itertools.product(range(size), repeat=depth))
            ids = torch.tensor([[*prompt, *prefix] for prefix in prefixes])
            logits = target(input_ids=ids, use_cache=False).logits[:, -1].double().numpy()
            steps = np.array([distribution(row, top_p, **more) for row in logits]).reshape((size,) * (depth + 1))
            law *= steps.reshape((size,) * (depth + 1) + (1,) * (DEPTH - depth - 1))
    assert law.sum() == pytest.approx(1)
    return law


def chi_square(answers: Sequence[Sequence[int]], law: NDArray[np.float64]) -> tuple[float, int]:
    """(statistic, degrees of freedom); cells with fewer than 5 expected answers are taken together."""
    counts = np.zeros_like(law)
    for answer in answers:
        counts[tuple(answer[:DEPTH])] += 1
    if counts[law == 0].any():
        return np.inf, 1  # a token outside the nucleus
    expected = law * len(answers)
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 5:  # what is rare together is rare still: add it to the smallest common cell
        smallest = expected[:-1].argmin()
        observed[smallest] += observed[-1]
        expected[smallest] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    return float(((observed - expected) ** 2 / expected).sum()), len(observed) - 1


def p_value(*samples: tuple[Sequence[Sequence[int]], NDArray[np.float64]]) -> float:
    """Of independent samples together, each with its law."""
    statistics = [chi_square(*sample) for sample in samples]
    return float(chi2.sf(sum(s for s, _ in statistics), sum(df for _, df in statistics)))


# A random pair: attention matters, so does every token of the prefix


PROMPT = [3, 1, 4]
NUCLEUS = 0.75
STEEP = {"slope": 4.0, "intercept": 2.0, "refit_interval": 10**6}  # the score decides sharply who is verified


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.sharpen(tiny.llama(vocab_size=8, num_hidden_layers=1, pad_token_id=None, eos_token_id=None), 1.2)


@pytest.fixture(scope="module")
def drafters(target: Any) -> dict[str, Any]:
    """The dflash drafter knows six of the eight tokens."""
    return {"draft_model": tiny.near(target, 0.12), "dflash": tiny.dflash(target, 4, vocab_ids=[0, 1, 2, 4, 5, 7])}


@pytest.fixture(scope="module")
def laws(target: Any) -> dict[float, NDArray[np.float64]]:
    return {top_p: exact_law(target, PROMPT, top_p) for top_p in (1.0, NUCLEUS)}


WHOLE = SamplingParams(max_tokens=5)
BOTH = (WHOLE, replace(WHOLE, top_p=NUCLEUS))


def run(
    target: Any, method: str, drafter: Any, params: Sequence[SamplingParams] = BOTH, **settings: Any
) -> tuple[LLM, list[list[int]], list[list[int]]]:
    """SAMPLES requests with each of two settings, side by side in one batch -> the answers of each kind."""
    config = {
        "method": method,
        "model": drafter,
        "num_speculative_tokens": 3,
        "enable_adaptive_verification": True,
        "estimator": {"slope": 2.0, "intercept": 1.0, "refit_interval": 30},
        "probe_interval": 16,
        **settings,
    }
    costs = CostTable.from_curves(
        [(1, 0.1), (32, 0.2)],
        [(1, 1.0), (32, 6.0), (48, 6.6), (64, 7.4), (80, 9.0), (128, 16.0)],
        max_requests=32,
        max_tokens=128,
    )
    llm = LLM(target, config, max_num_seqs=32, max_model_len=16, cost_table=costs)
    outputs = llm.generate([PROMPT] * (2 * SAMPLES), list(params) * SAMPLES)
    answers = [o.outputs[0].token_ids for o in outputs]
    assert {len(a) for a in answers} == {5}
    return llm, answers[::2], answers[1::2]


def trimmed(llm: LLM) -> float:
    return 1 - llm.stats.verified_by_position.sum() / llm.stats.drafted_by_position.sum()


@pytest.fixture(scope="module")
def runs(target: Any, drafters: dict[str, Any]) -> dict[tuple[str, str], Any]:
    return {(m, rule): run(target, m, drafters[m], budget_rule=rule) for m in drafters for rule in SAFE_RULES}


@pytest.mark.parametrize("rule", SAFE_RULES)
@pytest.mark.parametrize("method", ["draft_model", "dflash"])
def test_emitted_law(method: str, rule: str, runs: Any, laws: Any) -> None:
    llm, whole, nucleus = runs[method, rule]
    stats = llm.stats
    assert 0.2 < trimmed(llm) < 0.8
    assert 0.1 < stats.accepted_by_position.sum() / stats.graded_by_position.sum() < 0.9
    assert stats.num_refits >= 4
    assert p_value((whole, laws[1.0])) >= ALPHA
    assert p_value((nucleus, laws[NUCLEUS])) >= ALPHA


@pytest.mark.parametrize("method", ["draft_model", "dflash"])
def test_emitted_law_with_greedy_drafts(method: str, target: Any, drafters: dict[str, Any], laws: Any) -> None:
    llm, whole, nucleus = run(target, method, drafters[method], draft_sample_method="greedy")
    assert 0.2 < trimmed(llm) < 0.8
    assert p_value((whole, laws[1.0])) >= ALPHA
    assert p_value((nucleus, laws[NUCLEUS])) >= ALPHA


@pytest.mark.parametrize("method", ["draft_model", "dflash"])
def test_emitted_law_at_other_temperatures_and_top_k(method: str, target: Any, drafters: dict[str, Any]) -> None:
    """C3: what the target is cut and scaled by holds for what is emitted, whatever the drafter knows of it."""
    kinds: tuple[dict[str, Any], ...] = (
        {"top_p": 0.9, "temperature": 0.6},
        {"top_p": 1.0, "temperature": 1.8, "top_k": 3},
    )
    llm, *answers = run(target, method, drafters[method], params=[replace(WHOLE, **kind) for kind in kinds])
    assert 0.1 < trimmed(llm) < 0.9
    laws = [exact_law(target, PROMPT, **kind) for kind in kinds]
    for kind, (own, other) in zip(answers, (laws, laws[::-1]), strict=True):
        assert p_value((kind, own)) >= ALPHA
        assert p_value((kind, other)) < ALPHA / 1000
    plain = exact_law(target, PROMPT, 1.0, top_k=3)
    assert p_value((answers[1], plain)) < ALPHA / 1000  # temperature 1.8 is told from 1


def test_laws_are_told_apart(drafters: dict[str, Any], runs: Any, laws: Any) -> None:
    """The check has teeth: the law without top-p is not that with it, nor is the drafter's the target's."""
    _, whole, nucleus = runs["draft_model", "lookahead"]
    assert p_value((whole, laws[NUCLEUS])) < ALPHA / 1000
    assert p_value((nucleus, laws[1.0])) < ALPHA / 1000
    assert p_value((whole, exact_law(drafters["draft_model"], PROMPT, 1.0))) < ALPHA / 1000


@pytest.mark.parametrize("method", ["draft_model", "dflash"])
def test_a_score_that_sees_the_drawn_token_is_rejected(
    method: str, target: Any, drafters: dict[str, Any], laws: Any
) -> None:
    """The article's footnote, as a setting that has to be allowed by name."""
    settings = {"feature": "logit_q_sampled", "allow_lossy": True, "estimator": STEEP}
    llm, whole, nucleus = run(target, method, drafters[method], **settings)
    assert 0.2 < trimmed(llm) < 0.8
    assert p_value((whole, laws[1.0]), (nucleus, laws[NUCLEUS])) < ALPHA / 1000


# Mutants of the engine: each must fail the test above


def test_mutant_resampling_from_p(target: Any, drafters: dict[str, Any], laws: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sampling, "residual", lambda p, q: p)
    _, whole, nucleus = run(target, "draft_model", drafters["draft_model"])
    assert p_value((whole, laws[1.0]), (nucleus, laws[NUCLEUS])) < ALPHA / 1000


def test_mutant_trimmed_drafts_count_as_rejected(
    target: Any, drafters: dict[str, Any], laws: Any, monkeypatch: Any
) -> None:
    """The token in place of a trimmed draft then comes from the residual instead of p."""
    verify = sampling.verify

    def mutant(logits: Tensor, admitted: Tensor, drafts: Tensor, q: Tensor, *rest: Any, **kw: Any) -> sampling.Verdict:
        verdict = verify(logits, admitted, drafts, q, *rest, **kw)
        u_final, temperature, top_k, top_p = rest[2:6]
        rows = ((verdict.num_accepted == admitted) & (admitted < drafts.shape[1])).nonzero().squeeze(1)
        if len(rows):
            last = (admitted + 1).cumsum(0)[rows] - 1
            p = sampling.probs(logits[last], temperature[rows], top_k[rows], top_p[rows])
            law = sampling.residual(p, q[rows, admitted[rows]])
            verdict.tokens[rows, admitted[rows]] = sampling.sample(law, u_final[rows])
        return verdict

    monkeypatch.setattr(sampling, "verify", mutant)
    _, whole, nucleus = run(target, "draft_model", drafters["draft_model"])
    assert p_value((whole, laws[1.0]), (nucleus, laws[NUCLEUS])) < ALPHA / 1000


def test_mutant_score_from_the_drawn_token(target: Any, drafters: dict[str, Any], laws: Any, monkeypatch: Any) -> None:
    """Under a lossless feature's name, so that no check of settings can notice."""
    monkeypatch.setitem(
        FEATURES, "logit_q_max", replace(FEATURES["logit_q_sampled"], name="logit_q_max", lossless=True)
    )
    _, whole, nucleus = run(target, "dflash", drafters["dflash"], budget_rule="early_stop", estimator=STEEP)
    assert p_value((whole, laws[1.0]), (nucleus, laws[NUCLEUS])) < ALPHA / 1000


# A pair made to leak: what follows the first draft says which token it was (DSpark paper, appendix A)


STAIRCASE = {
    "method": "draft_model",
    "num_speculative_tokens": 2,
    "enable_adaptive_verification": True,
    "estimator": {"slope": 1.0, "intercept": [0.9, -1.0], "refit_interval": 10**6},
    "probe_interval": 0,
    "adaptive_drafting": False,  # it would leave the second drafts out: then there is nothing to look at
}


def staircase_pair() -> tuple[Any, Any]:
    """Bigram models over 4 tokens. From 0 or 3 both go to 1 or 2, one as likely as the other; after 1 the drafter is
    sure
    (and right) that 3 follows, after 2 it is unsure."""
    table = torch.full((4, 4), -6.0)
    table[[0, 3], 1:3] = 1.0
    table[1, 3] = 2.0
    table[2] = torch.tensor([0.5, -0.5, 0.0, 1.0])
    draft = table.clone()
    draft[2] = 0.0
    return tiny.bigram(table), tiny.bigram(draft)


def run_staircase(rule: str, **settings: Any) -> tuple[float, list[list[int]], NDArray[np.float64]]:
    """Waves of three requests. Their first drafts (c = .71) are not worth their price, unless two second ones come with
    them: those cost next to nothing and are all but certain (.99) behind a sure token. Looking at them says what x_1
    was.
    """
    target, drafter = staircase_pair()
    config = {**STAIRCASE, "model": drafter, "budget_rule": rule, **settings}
    verify_ms = np.array([1.0, 1.0, 2.0, 3.0, 3.85, 4.6, 5.35, 5.95, 6.0, 6.1])  # by tokens, 3 to 9 with three requests
    llm = LLM(target, config, max_num_seqs=3, max_model_len=8, cost_table=CostTable(np.zeros(4), verify_ms))
    answers, verified, drafted = [], 0, 0
    for _ in range(-(-SAMPLES // 3)):
        outputs = llm.generate([[1]] * 3, SamplingParams(max_tokens=4, ignore_eos=True))
        answers += [o.outputs[0].token_ids for o in outputs]
        verified += llm.stats.verified_by_position.sum()
        drafted += llm.stats.drafted_by_position.sum()
    return 1 - verified / drafted, answers, exact_law(target, [1], 1.0)


def test_lookahead_on_the_staircase() -> None:
    share_trimmed, answers, law = run_staircase("lookahead")
    assert 0.1 < share_trimmed < 0.8
    assert p_value((answers, law)) >= ALPHA


def test_retrospective_budget_is_rejected() -> None:
    share_trimmed, answers, law = run_staircase("retrospective", allow_lossy=True)
    assert 0.2 < share_trimmed < 0.8
    assert p_value((answers, law)) < ALPHA / 1000


def second_calls(forget: bool, number: int = 400) -> list[list[int]]:
    """The same call twice on an LLM that has learned nothing -> the second answer, for many seeds.

    In the first call nothing is known of past steps, and no draft is verified; what its first step saw is what the
    second call's first step then looks ahead with.
    """
    target, drafter = staircase_pair()
    config = {**STAIRCASE, "model": drafter}
    costs = CostTable(np.zeros(2), np.array([1.0, 1.0, 2.0, 2.2]))
    answers = []
    for seed in range(number):
        llm = LLM(target, config, max_num_seqs=1, max_model_len=8, cost_table=costs)
        params = SamplingParams(max_tokens=4, ignore_eos=True, seed=seed)
        llm.generate([[1]], params)
        if forget:
            llm.engine.num_calls = 0
        answers.append(llm.generate([[1]], params)[0].outputs[0].token_ids)
    return answers


def restored(number: int = 400) -> list[list[int]]:
    """Two LLMs with one seed, each asked once; the second starts with what the first has learned.

    The estimator is refitted in every step without damping, so that it knows the draw: a rejection sends the intercept
    below the threshold of the cost table.
    """
    target = tiny.bigram(torch.tensor([0.5, 0.5]).log().expand(2, 2).clone())
    estimator = {"refit_interval": 1, "damping": 0.0, "intercept": 0.3, "slope": 0.0}
    config = {
        "method": "draft_model",
        "model": tiny.bigram(torch.tensor([0.2, 0.8]).log().expand(2, 2).clone()),
        "num_speculative_tokens": 1,
        "enable_adaptive_verification": True,
        "adaptive_drafting": False,
        "probe_interval": 0,
        "estimator": estimator,
    }
    table, params = CostTable([0.0, 0.0], [1.0, 1.0, 1.55]), SamplingParams(max_tokens=3, ignore_eos=True)
    answers = []
    for seed in range(number):
        first, second = (
            LLM(target, config, max_num_seqs=1, max_model_len=8, cost_table=table, seed=seed) for _ in "ab"
        )
        assert first.estimator is not None and second.estimator is not None
        first.generate([[1]], params)
        second.estimator.load_state_dict(first.estimator.state_dict())
        answers.append(second.generate([[1]], params)[0].outputs[0].token_ids)
    return answers


def test_a_seed_that_comes_back_with_what_was_learned_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new LLM that takes over an estimator's state would draw again what that state was fitted to."""
    law = exact_law(tiny.bigram(torch.tensor([0.5, 0.5]).log().expand(2, 2).clone()), [1], 1.0)
    assert p_value((restored(), law)) >= ALPHA
    monkeypatch.setattr("avref.estimator.OnlineAcceptanceEstimator.taught", lambda self: "")
    assert p_value((restored(), law)) < ALPHA / 1000


def test_a_seed_that_comes_back_in_a_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was learned from a request's draws would know them, if a later request drew the same."""
    law = exact_law(staircase_pair()[0], [1], 1.0)
    assert p_value((second_calls(forget=False), law)) >= ALPHA
    monkeypatch.setattr("avref.estimator.OnlineAcceptanceEstimator.taught", lambda self: "")
    assert p_value((second_calls(forget=True), law)) < ALPHA / 1000
