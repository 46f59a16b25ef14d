"""Leaks in small: how trimming bends the emitted law.

The experiments are `exact.Experiment`s, so every law is enumerated: the article's footnote at any p, q and threshold,
one leak by a tie, random pairs to try features on. `emitted` draws from the same rule with the code that the engine
runs (`sampling.sample`, `sampling.verify`); `chi_square` says what such draws can and cannot show.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from avref import exact, sampling
from avref.exact import Experiment, Floats, Policy, Request, Seen

SCORES = ("q_sampled", "q_max")
"""What a draft can be trimmed by: the probability of the drawn token, or that of the drafter's most likely one."""


# The footnote, by hand


def two(a: float) -> tuple[float, float]:
    """The law (a, 1 - a) of two tokens, rounded so that 1 - .8 is not below .2; ValueError for a outside [0, 1]."""
    if not 0 <= a <= 1:
        raise ValueError(f"a probability must lie in [0, 1], got {a}")
    return round(a, 9), round(1 - a, 9)


def footnote(
    p: Sequence[float] = (0.5, 0.5), q: Sequence[float] = (0.2, 0.8), threshold: float = 0.5, score: str = "q_sampled"
) -> Experiment:
    """One draft from q [V] for a target p [V], trimmed when its score is below a threshold (article, footnote 1).

    Raises ValueError for a score outside `SCORES` and for p and q of different sizes.
    """
    if score not in SCORES:
        raise ValueError(f"unknown score {score!r}: choose one of {', '.join(SCORES)}")
    if len(p) != len(q):
        raise ValueError(f"p has {len(p)} tokens and q {len(q)}: give both the same vocabulary")
    p, q = tuple(p), tuple(q)
    confidence = (lambda k, before, q, x: q[x]) if score == "q_sampled" else (lambda k, before, q, x: max(q))
    request = Request(lambda tokens: p, lambda tokens: q, confidence)
    return Experiment([request], 1, exact.threshold_policy(threshold))


def paths(experiment: Experiment) -> dict[str, Floats]:
    """The first token's law [V] by what became of the draft; the parts sum to `exact.first_token(joint_law(...))`.

    "accepted": verified and kept. "replaced": verified and rejected, so drawn from the residual. "trimmed": not
    verified, so drawn from p. For one request and one draft; ValueError otherwise.
    """
    p, q = _pair(experiment)
    residual = sampling.residual(torch.tensor(p)[None], torch.tensor(q)[None])[0].numpy()
    parts = {name: np.zeros(len(p)) for name in ("accepted", "replaced", "trimmed")}
    for x in np.flatnonzero(q):
        if not _verifies(experiment, int(x)):
            parts["trimmed"] += q[x] * p
            continue
        accepted = min(1.0, p[x] / q[x])
        parts["accepted"][x] += q[x] * accepted
        parts["replaced"] += q[x] * (1 - accepted) * residual
    return parts


def leak_by_threshold(
    p: Sequence[float], q: Sequence[float], score: str, thresholds: npt.ArrayLike
) -> npt.NDArray[np.float64]:
    """Total variation between the footnote's emitted law and the target's, one entry per threshold."""
    return np.array([exact.leak(footnote(p, q, float(t), score)) for t in np.asarray(thresholds)])


def emitted(experiment: Experiment, n: int, *, seed: int = 0) -> npt.NDArray[np.int64]:
    """First tokens of n requests as counts [V], drawn by the code that the engine runs, for one draft per request."""
    p, q = (torch.tensor(values, dtype=torch.float32) for values in _pair(experiment))
    verifies = torch.tensor([int(_verifies(experiment, x)) for x in range(len(q))])  # [V]
    generator = torch.Generator().manual_seed(seed)
    u_draft, u_accept, u_final = torch.rand(3, n, generator=generator)
    tokens = sampling.sample(q.expand(n, -1), u_draft)  # [n]
    num_verified = verifies[tokens]  # [n]
    logits = p.log().expand(n + int(num_verified.sum()), -1)  # [T, V]
    plain = (torch.ones(n), torch.zeros(n, dtype=torch.int64), torch.ones(n))  # temperature 1, no top-k, no top-p
    verdict = sampling.verify(
        logits,
        num_verified,
        tokens[:, None],
        q.expand(n, 1, -1),
        q[tokens][:, None],
        u_accept[:, None],
        u_final,
        *plain,
    )
    return np.bincount(verdict.tokens[:, 0].numpy(), minlength=len(p))


def _pair(experiment: Experiment) -> tuple[Floats, Floats]:
    """p and q of the first token."""
    if len(experiment.requests) != 1 or experiment.num_drafts != 1:
        sizes = f"{len(experiment.requests)} requests and {experiment.num_drafts} drafts"
        raise ValueError(f"this looks at one request with one draft, got {sizes}: use exact.joint_law")
    (request,) = experiment.requests
    return np.array(request.target(()), dtype=float), np.array(request.drafter(()), dtype=float)


def _verifies(experiment: Experiment, x: int) -> bool:
    live = live_survival(experiment, [(x,)])  # [1, 1], the confidence too
    return bool(experiment.policy(Seen(live, live, np.ones_like(live), None))[0])


# What a policy sees and does


def live_survival(experiment: Experiment, drafts: Sequence[Sequence[int]]) -> Floats:
    """Survivals [R, K] of the first step when the requests draft these tokens [R][K]."""
    table = np.ones((len(drafts), experiment.num_drafts))
    for row, request, draft in zip(table, experiment.requests, drafts, strict=True):
        for k, x in enumerate(draft):
            before = tuple(draft[:k])
            row[k:] *= request.confidence(k, before, request.drafter(before), x)
    return table


def decisions(experiment: Experiment) -> list[tuple[int, ...]]:
    """Every allocation (admitted drafts per request) that the policy ever makes: one that never varies cannot leak."""
    seen: set[tuple[int, ...]] = set()

    def policy(step: Seen) -> Sequence[int]:
        admitted = tuple(int(n) for n in experiment.policy(step))
        seen.add(admitted)
        return admitted

    exact.joint_law(replace(experiment, policy=policy))
    return sorted(seen)


def ties_to_the_last(budget: int) -> Policy:
    """The best slots by ``argsort(...)[::-1]``: of equal survivals the deepest comes first. Lossy."""

    def policy(seen: Seen) -> Sequence[int]:
        num_requests = len(seen.survival)
        by_position = seen.survival.T.reshape(-1)  # [K R]
        best = np.argsort(by_position, kind="stable")[::-1][:budget]
        return np.bincount(best % num_requests, minlength=num_requests).tolist()

    return policy


def tie() -> Experiment:
    """A second draft that is certain (c = 1) after A ties with the first: request 0 emits (.85, .15) for (.7, .3)."""

    def request(sure: float, unsure: float) -> Request:
        confidence = lambda k, before, q, x: (0.8, sure if before[-1:] == (0,) else unsure)[k]  # noqa: E731
        return Request(lambda tokens: (0.7, 0.3), lambda tokens: (0.5, 0.5), confidence)

    return Experiment([request(1.0, 0.5), request(0.3, 0.3)], 2, ties_to_the_last(1))


# Features on random pairs


def random_pair(seed: int, confidence: exact.Confidence, *, vocab_size: int = 3) -> Request:
    """A target and a distorted copy as its drafter, both depending on all tokens before."""

    @cache
    def p(tokens: exact.Tokens) -> Sequence[float]:
        return np.random.default_rng((seed, 1, *tokens)).dirichlet(2 * np.ones(vocab_size)).tolist()

    @cache
    def q(tokens: exact.Tokens) -> Sequence[float]:
        distortion = np.random.default_rng((seed, 2, *tokens)).uniform(0.2, 1, size=vocab_size)
        mixed = (np.array(p(tokens)) + 0.05) * distortion
        return (mixed / mixed.sum()).tolist()

    return Request(p, q, confidence)


def worst_leak(feature: str, *, num_pairs: int = 4, num_drafts: int = 2) -> float:
    """The largest leak of trimming by one of `features.FEATURES`, over random pairs and three thresholds each."""
    confidence = exact.feature_confidence(feature)
    worst = 0.0
    for seed in range(num_pairs):
        request = random_pair(seed, confidence)
        vocabulary = range(len(request.target(())))
        prefixes = [t for k in range(num_drafts) for t in itertools.product(vocabulary, repeat=k)]
        scores = [confidence(len(t), t, request.drafter(t), x) for t in prefixes for x in vocabulary]
        for threshold in np.quantile(scores, (0.25, 0.5, 0.75)):
            experiment = Experiment([request], num_drafts, exact.threshold_policy(float(threshold)))
            worst = max(worst, exact.leak(experiment))
    return worst
