"""The law of what `LLM` emits, against the target's own, worked out from its logits.

Thousands of requests with one prompt run to their end; the joint counts of their first three tokens (the first comes from
the prefill, the others from decode steps in which 20 to 80 % of the drafts are trimmed) are compared with the exact law by
a chi-square test. Seeds are fixed, so a test gives the same answer every time: a lossless setting must reach p >= ALPHA
(it would miss it by chance once in 1,000 new seeds), a lossy control or a mutant must fall below ALPHA / 1,000.
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
from scipy.stats import chisquare
from torch import Tensor

from avref import sampling
from avref.config import SamplingParams
from avref.cost_table import CostTable
from avref.features import FEATURES
from avref.llm import LLM
from avref.packed import plain_attention

ALPHA = 1e-3
SAMPLES = 1500  # requests behind every law
SAFE_RULES = ("lookahead", "stale", "early_stop")
DEPTH = 3  # tokens whose joint law is tested


# The oracle


def distribution(logits: NDArray[np.float64], top_p: float) -> NDArray[np.float64]:
    """One row in float64: the softmax, then the smallest set of best tokens that reaches top_p."""
    p = np.exp(logits - logits.max())
    p /= p.sum()
    best = np.argsort(-p, kind="stable")
    size = int(np.searchsorted(np.cumsum(p[best]), top_p - 1e-9)) + 1
    p[best[size:]] = 0
    return p / p.sum()


@torch.inference_mode()
def exact_law(target: Any, prompt: Sequence[int], top_p: float) -> NDArray[np.float64]:
    """The joint law of the next three tokens [V, V, V]."""
    size = target.config.vocab_size
    law = np.ones((size,) * DEPTH)
    with plain_attention(target):
        for depth in range(DEPTH):
            prefixes = list(itertools.product(range(size), repeat=depth))
            ids = torch.tensor([[*prompt, *prefix] for prefix in prefixes])
            logits = target(input_ids=ids, use_cache=False).logits[:, -1].double().numpy()
            steps = np.array([distribution(row, top_p) for row in logits]).reshape((size,) * (depth + 1))
            law *= steps.reshape((size,) * (depth + 1) + (1,) * (DEPTH - depth - 1))
    assert law.sum() == pytest.approx(1)
    return law


def p_value(answers: Sequence[Sequence[int]], law: NDArray[np.float64]) -> float:
    """Chi-square of the first tokens of every answer; cells with fewer than 5 expected are taken together."""
    counts = np.zeros_like(law)
    for answer in answers:
        counts[tuple(answer[:DEPTH])] += 1
    if counts[law == 0].any():
        return 0.0  # a token outside the nucleus
    expected = law * len(answers)
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 5:  # what is rare together is rare still: add it to the smallest common cell
        smallest = expected[:-1].argmin()
        observed[smallest] += observed[-1]
        expected[smallest] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    return float(chisquare(observed, expected * observed.sum() / expected.sum()).pvalue)


# A random pair: attention matters, so does every token of the prefix


PROMPT = [3, 1, 4]
NUCLEUS = 0.75


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.sharpen(tiny.llama(vocab_size=8, num_hidden_layers=1, pad_token_id=None, eos_token_id=None), 0.8)


@pytest.fixture(scope="module")
def drafters(target: Any) -> dict[str, Any]:
    """The dflash drafter knows six of the eight tokens."""
    return {"draft_model": tiny.near(target, 0.3), "dflash": tiny.dflash(target, 4, vocab_ids=[0, 1, 2, 4, 5, 7])}


@pytest.fixture(scope="module")
def laws(target: Any) -> dict[float, NDArray[np.float64]]:
    return {top_p: exact_law(target, PROMPT, top_p) for top_p in (1.0, NUCLEUS)}


def run(target: Any, method: str, drafter: Any, **settings: Any) -> tuple[LLM, list[list[int]], list[list[int]]]:
    """SAMPLES requests without top-p and as many with it, side by side in one batch -> the answers of each kind."""
    config = {
        "method": method,
        "model": drafter,
        "num_speculative_tokens": 3,
        "enable_adaptive_verification": True,
        "estimator": {"slope": 1.0, "intercept": 0.3, "refit_interval": 40},
        "probe_interval": 16,
        **settings,
    }
    costs = CostTable.from_curves(
        [(1, 0.1), (32, 0.2)], [(1, 1.0), (32, 6.0), (48, 7.0), (64, 10.5), (128, 24.0)], max_requests=32, max_tokens=128
    )
    llm = LLM(target, config, max_num_seqs=32, max_model_len=16, cost_table=costs)
    whole = SamplingParams(max_tokens=5)
    outputs = llm.generate([PROMPT] * (2 * SAMPLES), [whole, replace(whole, top_p=NUCLEUS)] * SAMPLES)
    answers = [o.outputs[0].token_ids for o in outputs]
    assert {len(a) for a in answers} == {5}
    return llm, answers[::2], answers[1::2]


def trimmed(llm: LLM) -> float:
    return 1 - llm.stats.verified_by_position.sum() / llm.stats.drafted_by_position.sum()


@pytest.mark.parametrize("rule", SAFE_RULES)
@pytest.mark.parametrize("method", ["draft_model", "dflash"])
def test_emitted_law(method: str, rule: str, target: Any, drafters: dict[str, Any], laws: Any) -> None:
    llm, whole, nucleus = run(target, method, drafters[method], budget_rule=rule)
    assert 0.2 < trimmed(llm) < 0.8
    assert 0.1 < llm.stats.accepted_by_position.sum() / llm.stats.graded_by_position.sum() < 0.9
    assert llm.stats.num_refits >= 5
    assert p_value(whole, laws[1.0]) >= ALPHA
    assert p_value(nucleus, laws[NUCLEUS]) >= ALPHA


@pytest.mark.parametrize("method", ["draft_model", "dflash"])
def test_emitted_law_with_greedy_drafts(method: str, target: Any, drafters: dict[str, Any], laws: Any) -> None:
    llm, whole, nucleus = run(target, method, drafters[method], draft_sample_method="greedy")
    assert 0.2 < trimmed(llm) < 0.8
    assert p_value(whole, laws[1.0]) >= ALPHA
    assert p_value(nucleus, laws[NUCLEUS]) >= ALPHA


def test_the_two_laws_are_told_apart(target: Any, drafters: dict[str, Any], laws: Any) -> None:
    """The check has teeth: the law without top-p is not that with it, nor is the drafter's the target's."""
    assert not np.allclose(laws[1.0], laws[NUCLEUS])
    _, whole, nucleus = run(target, "draft_model", drafters["draft_model"])
    assert p_value(whole, laws[NUCLEUS]) < ALPHA / 1000
    assert p_value(nucleus, laws[1.0]) < ALPHA / 1000
    assert p_value(whole, exact_law(drafters["draft_model"], PROMPT, 1.0)) < ALPHA / 1000


@pytest.mark.parametrize("method", ["draft_model", "dflash"])
def test_a_score_that_sees_the_drawn_token_is_rejected(
    method: str, target: Any, drafters: dict[str, Any], laws: Any
) -> None:
    """Control of the article's footnote, as a setting that has to be allowed by name."""
    settings = {"feature": "logit_q_sampled", "allow_lossy": True}
    llm, whole, _ = run(target, method, drafters[method], **settings)
    assert 0.1 < trimmed(llm) < 0.9
    assert p_value(whole, laws[1.0]) < ALPHA / 1000


# Mutants of the engine: each must fail the test above


def test_mutant_resampling_from_p(target: Any, drafters: dict[str, Any], laws: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sampling, "residual", lambda p, q: p)
    _, whole, nucleus = run(target, "draft_model", drafters["draft_model"])
    assert p_value(whole, laws[1.0]) < ALPHA / 1000
    assert p_value(nucleus, laws[NUCLEUS]) < ALPHA / 1000


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
    _, whole, _ = run(target, "draft_model", drafters["draft_model"])
    assert p_value(whole, laws[1.0]) < ALPHA / 1000


def test_mutant_score_from_the_drawn_token(target: Any, drafters: dict[str, Any], laws: Any, monkeypatch: Any) -> None:
    """Under a lossless feature's name, so that no check of settings can notice."""
    monkeypatch.setitem(FEATURES, "logit_q_max", replace(FEATURES["logit_q_sampled"], name="logit_q_max", lossless=True))
    _, whole, _ = run(target, "dflash", drafters["dflash"])
    assert p_value(whole, laws[1.0]) < ALPHA / 1000


# A pair made to leak: what follows the first draft says which token it was (DSpark paper, appendix A)


SURE, UNSURE = (1, 2), (3, 4)


def staircase_pair() -> tuple[Any, Any]:
    """Bigram models over 6 tokens. From 0 or 5 both go to 1, 2, 3 or 4 alike; after 1 and 2 the drafter is sure (and
    right) that 5 follows, after 3 and 4 it is unsure."""
    table = torch.full((6, 6), -6.0)
    table[[0, 5], 1:5] = 1.0
    table[list(SURE), 5] = 2.0
    table[list(UNSURE)] = torch.tensor([0.5, 0.0, -0.5, 0.0, -0.5, 1.0])
    draft = table.clone()
    draft[list(UNSURE)] = 0.0
    return tiny.bigram(table), tiny.bigram(draft)


def run_staircase(rule: str, **settings: Any) -> tuple[LLM, list[list[int]], NDArray[np.float64]]:
    """Three requests at once; one draft each costs as much as two plain steps, the second is nearly free."""
    target, drafter = staircase_pair()
    config = {
        "method": "draft_model",
        "model": drafter,
        "num_speculative_tokens": 2,
        "enable_adaptive_verification": True,
        "budget_rule": rule,
        "estimator": {"slope": 1.0, "intercept": [2.0, -1.0], "refit_interval": 10**6},
        "probe_interval": 0,
        **settings,
    }
    by_requests = np.full((4, 10), np.nan)
    for r in (1, 2, 3):
        by_requests[r, : 3 * r + 1] = 1e-3 + r * np.array([1.0] * (r + 1) + [2.0] * r + [2.2] * r)
    by_requests[0] = 1.0
    llm = LLM(target, config, max_num_seqs=3, max_model_len=8, cost_table=CostTable(np.zeros(4), by_requests))
    outputs = llm.generate([[0]] * SAMPLES, SamplingParams(max_tokens=4, ignore_eos=True))
    return llm, [o.outputs[0].token_ids for o in outputs], exact_law(target, [0], 1.0)


@pytest.mark.parametrize("rule", SAFE_RULES)
def test_safe_rules_on_the_staircase(rule: str) -> None:
    llm, answers, law = run_staircase(rule)
    assert 0.2 < trimmed(llm) < 0.8
    assert p_value(answers, law) >= ALPHA


def test_retrospective_budget_is_rejected() -> None:
    llm, answers, law = run_staircase("retrospective", allow_lossy=True)
    assert 0.2 < trimmed(llm) < 0.8
    assert p_value(answers, law) < ALPHA / 1000
