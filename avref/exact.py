"""The emitted law by exact enumeration: is a rule for what to verify lossless, or does it only look so?

On a toy vocabulary every draft, every verdict and every replacement token can be listed with its probability, in
float64. Summed up they are the joint law of what all requests emit, to be compared with the target's own:

    lossless:   total_variation(joint_law(experiment), target_law(experiment)) = 0

One step, as in the engine: draft K tokens per request, turn each into a confidence, multiply along the request to
survivals, let the policy say how many drafts of each request are verified, verify, emit. Then the next step, with
fresh drafts. Whatever is missing from a request's first K + 1 tokens at the end is drawn from the target.

Whether position k is verified may depend on what precedes x_k in its own request and on anything in the others, never
on x_k or what follows it. Four ways to break this are built in: `footnote`, `dspark_appendix`, `staircase_lookahead`,
`aggregate_early_stop`. Work grows like V^(R K) in every step, so V and K are 2 or 3 and R is 1 or 2.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from avref.features import FEATURES
from avref.policies import (
    Floats as Floats,
)
from avref.policies import (
    Policy as Policy,
)
from avref.policies import (
    Seen as Seen,
)
from avref.policies import (
    Table as Table,
)
from avref.policies import (
    bucket_jump as bucket_jump,
)
from avref.policies import (
    budget_policy as budget_policy,
)
from avref.policies import (
    costs as costs,
)
from avref.policies import (
    depth_worth as depth_worth,
)
from avref.policies import (
    drafting_to as drafting_to,
)
from avref.policies import (
    drafting_until as drafting_until,
)
from avref.policies import (
    fixed_budget as fixed_budget,
)
from avref.policies import (
    safe_drafting as safe_drafting,
)
from avref.policies import (
    stop_policy as stop_policy,
)
from avref.policies import (
    threshold_policy as threshold_policy,
)
from avref.pruning import SurvivalProfile, survival

Tokens = tuple[int, ...]
Law = dict[tuple[Tokens, ...], float]  # what every request emits -> probability
Distribution = Callable[[Tokens], Sequence[float]]  # the tokens so far -> probabilities [V]
Confidence = Callable[[int, Tokens, Sequence[float], int], float]  # k, the tokens before x_k, q_k, x_k -> c_k
MASK = -1  # what a parallel drafter reads in place of its own drafts


@dataclass(frozen=True)
class Request:
    """The target's p and the drafter's q after any tokens, and the confidence in each draft.

    A parallel drafter (dflash) makes its block at once: its q knows the tokens before the block and the position, no
    draft. `ends` says after which tokens nothing more is drafted, as when an n-gram's text ends.
    """

    target: Distribution
    drafter: Distribution
    confidence: Confidence
    parallel: bool = False
    ends: Callable[[Tokens], bool] = lambda tokens: False


@dataclass(frozen=True)
class Experiment:
    """Everything that determines an emitted law; `dataclasses.replace(e, policy=...)` tries another policy on it."""

    requests: Sequence[Request]
    num_drafts: int
    policy: Policy
    num_steps: int = 1
    profile_rate: float = 0.05


def joint_law(experiment: Experiment) -> Law:
    """Probability of every combination of the requests' first K + 1 tokens, under the experiment's policy.

    Raises ValueError for distributions that do not sum to 1 and for admitted counts outside 0..K.
    """
    num_requests = len(experiment.requests)
    drafts_of = cache(lambda r, before: _drafts(experiment.requests[r], before, experiment.num_drafts))
    block_of = cache(lambda r, before, draft, n: _verified(experiment.requests[r], before, draft[:n]))
    admit = cache(lambda confidence, drafted, past: _admitted(experiment, confidence, drafted, past))

    start: tuple[tuple[Tokens, ...], tuple[Table, ...]] = ((),) * num_requests, ()
    states = {start: 1.0}  # (emitted by every request, survivals of the past steps) -> probability
    for steps_left in reversed(range(experiment.num_steps)):
        following: defaultdict[tuple[tuple[Tokens, ...], tuple[Table, ...]], float] = defaultdict(float)
        for (emitted, past), weight in states.items():
            for choice in itertools.product(*(drafts_of(r, emitted[r]) for r in range(num_requests))):
                drafts, chances, confidences = zip(*choice, strict=True)
                admitted, live = admit(confidences, tuple(map(len, drafts)), past)
                remembered = (*past, live) if steps_left else ()
                blocks = [block_of(r, emitted[r], drafts[r], admitted[r]) for r in range(num_requests)]
                for block, chance in _independent(blocks):
                    now = tuple(before + new for before, new in zip(emitted, block, strict=True))
                    following[now, remembered] += weight * math.prod(chances) * chance
        states = following

    rest_of = cache(lambda r, before: _continued(experiment.requests[r].target, before, experiment.num_drafts + 1))
    law: Law = defaultdict(float)
    for (emitted, _past), weight in states.items():
        for outcome, chance in _independent([rest_of(r, emitted[r]) for r in range(num_requests)]):
            law[outcome] += weight * chance
    return dict(law)


def target_law(experiment: Experiment) -> Law:
    """The same for the target alone: what a lossless policy has to reproduce."""
    length = experiment.num_drafts + 1
    return dict(_independent([_continued(request.target, (), length) for request in experiment.requests]))


def total_variation(a: Law, b: Law) -> float:
    """Half the sum of absolute differences: the largest difference in the probability of any event, 0 to 1."""
    return 0.5 * sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys())


def leak(experiment: Experiment) -> float:
    """Total variation between what the policy emits and the target's law; 0 up to rounding when lossless."""
    return total_variation(joint_law(experiment), target_law(experiment))


def first_token(law: Law, request: int = 0) -> list[float]:
    """Probabilities of the first token that one request emits, by token id."""
    out: defaultdict[int, float] = defaultdict(float)
    for emitted, chance in law.items():
        out[emitted[request][0]] += chance
    return [out[token] for token in range(max(out) + 1)]


# One step


def _drafts(request: Request, before: Tokens, num_drafts: int) -> list[tuple[Tokens, float, tuple[float, ...]]]:
    """Every draft of up to K tokens after `before`: the tokens, their probability under q, K confidences."""
    drafts: list[tuple[Tokens, float, tuple[float, ...]]] = [((), 1.0, ())]
    for k in range(num_drafts):
        longer = []
        for tokens, chance, confidences in drafts:
            if len(tokens) < k or request.ends(before + tokens):
                longer.append((tokens, chance, (*confidences, 0.0)))
                continue
            q = _q(request, before, tokens)
            for x, q_x in enumerate(q):
                if q_x > 0:
                    c = request.confidence(k, before + tokens, q, x)
                    longer.append(((*tokens, x), chance * q_x, (*confidences, c)))
        drafts = longer
    return drafts


def _q(request: Request, before: Tokens, drafted: Tokens) -> list[float]:
    """q of the next draft, after the tokens before the block and the drafts so far."""
    return _distribution(request.drafter, before + ((MASK,) * len(drafted) if request.parallel else drafted))


def _admitted(
    experiment: Experiment, confidence: Table, drafted: tuple[int, ...], past: tuple[Table, ...]
) -> tuple[list[int], Table]:
    """The policy's decision, and this step's survivals."""
    live = survival(torch.tensor(confidence, dtype=torch.float64)).numpy()  # [R, K]
    profile = SurvivalProfile(rate=experiment.profile_rate)
    for table in past:
        profile.update(np.array(table))
    previous = np.array(past[-1]) if past else np.ones_like(live)
    seen = Seen(np.array(confidence), live, previous, profile.predict(live.size), drafted, past)
    admitted = [int(n) for n in experiment.policy(seen)]
    if len(admitted) != len(live) or not all(0 <= n <= most for n, most in zip(admitted, drafted, strict=True)):
        raise ValueError(
            f"a policy must give {len(live)} counts from 0 to {experiment.num_drafts}, got {admitted} where {drafted} "
            "were drafted"
        )
    return admitted, tuple(map(tuple, live.tolist()))


def _verified(request: Request, before: Tokens, draft: Tokens) -> list[tuple[Tokens, float]]:
    """Standard rejection sampling over the admitted drafts: every block that may be emitted, with its probability."""
    blocks = []
    reached = 1.0  # probability that everything up to here was accepted
    for k, x in enumerate(draft):
        p, q = np.array(_distribution(request.target, before + draft[:k])), np.array(_q(request, before, draft[:k]))
        accepted = min(1.0, p[x] / q[x])
        excess = np.maximum(p - q, 0.0)  # the residual, not yet normalised
        if accepted < 1 and excess.any():
            rejected = reached * (1 - accepted) * excess / excess.sum()
            blocks += [((*draft[:k], y), float(chance)) for y, chance in enumerate(rejected) if chance > 0]
        reached *= float(accepted)
    bonus = _distribution(request.target, before + draft)  # also where drafts were trimmed: that is no rejection
    return blocks + [((*draft, y), reached * chance) for y, chance in enumerate(bonus) if reached * chance > 0]


def _continued(target: Distribution, tokens: Tokens, length: int) -> list[tuple[Tokens, float]]:
    """The first `length` tokens, what is missing being drawn from the target."""
    if len(tokens) >= length:
        return [(tokens[:length], 1.0)]
    options = [(x, chance) for x, chance in enumerate(_distribution(target, tokens)) if chance > 0]
    return [(e, c * chance) for x, chance in options for e, c in _continued(target, (*tokens, x), length)]


def _independent(laws: Sequence[Sequence[tuple[Tokens, float]]]) -> Iterator[tuple[tuple[Tokens, ...], float]]:
    for choice in itertools.product(*laws):
        yield tuple(tokens for tokens, _ in choice), math.prod(chance for _, chance in choice)


def _distribution(of: Distribution, tokens: Tokens) -> list[float]:
    values = [float(value) for value in of(tokens)]
    if not (min(values) >= 0 and abs(sum(values) - 1) < 1e-9):
        raise ValueError(f"probabilities after {tokens} must be at least 0 and sum to 1, got {values}")
    return values


# Confidences


def feature_confidence(name: str, *, slope: float = 0.5, intercepts: Sequence[float] = (-0.2,)) -> Confidence:
    """c = sigmoid(slope * feature + intercept_k), with one of `features.FEATURES` (the last intercept is repeated)."""
    feature = FEATURES[name]

    def confidence(k: int, before: Tokens, q: Sequence[float], x: int) -> float:
        f = float(feature.fn(torch.tensor(q, dtype=torch.float64).log(), torch.tensor(x), 1.0))
        return 1 / (1 + math.exp(-(slope * f + intercepts[min(k, len(intercepts) - 1)])))

    return confidence


# Four ways to leak


def _always(*probabilities: float) -> Distribution:
    return lambda tokens: probabilities


def footnote() -> Experiment:
    """Trim a draft when its own q(x) is below .5: emits (.4, .6) for a target of (.5, .5) (article, footnote 1)."""
    request = Request(_always(0.5, 0.5), _always(0.2, 0.8), lambda k, before, q, x: q[x])
    return Experiment([request], 1, threshold_policy(0.5))


def _after_a(then: float, otherwise: float) -> Request:
    """Target (.7, .3), draft (.5, .5), confidence .8 in the first token; in the second it depends on the first."""
    c = lambda k, before, q, x: (0.8, then if before[-1:] == (0,) else otherwise, 0.9)[k]  # noqa: E731
    return Request(_always(0.7, 0.3), _always(0.5, 0.5), c)


def dspark_appendix() -> Experiment:
    """The best budget over live survivals: emits (.85, .15) for (.7, .3) (DSpark, arXiv 2607.05147, appendix A)."""
    return Experiment([_after_a(0.9, 0.0)], 2, budget_policy(costs(1 / 1, 1 / 0.5, 1 / 0.45), "retrospective"))


def staircase_lookahead() -> Experiment:
    """Looking ahead to the end of a cost step with live survivals: emits (.85, .15) for (.7, .3)."""
    return Experiment([_after_a(0.9, 0.0)], 2, bucket_jump(costs(1.0, 2.0, 2.0)))


def aggregate_early_stop() -> Experiment:
    """A third position drafted only if the second survivals sum to 1.2: request 1 emits (.55, .45) for (.7, .3)."""
    steady = Request(_always(0.5, 0.5), _always(0.5, 0.5), lambda k, before, q, x: (0.95, 0.92 / 0.95, 0.9 / 0.92)[k])
    stop = lambda part, depth: depth == 2 and part.survival[:, 1].sum() < 1.2  # noqa: E731
    return Experiment([steady, _after_a(0.9, 0.05)], 3, drafting_until(stop, fixed_budget(3)))
