"""Checkers for the exercises of notebook 02, in the way of `avref.exercises`: each prints what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from avref import exact, leaks
from avref.exercises import _say

MAY_DECIDE = {
    "a": (True, "the largest entry of q_k is fixed before x_k is drawn"),
    "b": (True, "the entropy of q_k is fixed before x_k is drawn"),
    "c": (False, "q_k(x_k) is a function of x_k: the footnote"),
    "d": (True, "the drafts of other requests are drawn independently of x_k"),
    "e": (False, "token by token, q_{k+1} is computed from x_k: DSpark's appendix"),
    "f": (True, "survivals of past steps were known before this step's drafts"),
    "g": (False, "whether x_k is a space is a function of x_k"),
    "h": (False, "the sum holds the own second survival, which depends on x_1: the third leak"),
}
"""02_lossless, exercise 3: what the decision to verify draft k may depend on -> allowed, and why."""


def check_emitted(emitted: Callable[..., Any]) -> bool:
    """02_lossless, exercise 1: `emitted(p, q, verified)` -> the first token's law [V], by enumeration."""
    rng = np.random.default_rng(0)
    for verified in ([1, 1, 1], [0, 0, 0], [1, 0, 1], [0, 0, 1], [0, 1, 1]):
        p, q = rng.dirichlet(np.ones(3)), rng.dirichlet(np.ones(3))
        answer = emitted(p.copy(), q.copy(), np.array(verified, dtype=bool))
        if answer is None:
            return _say("not written yet: return one probability per token")
        right = _enumerated(p, q, verified)
        found = np.asarray(answer, dtype=float)
        if found.shape != (3,):
            return _say(f"the law of three tokens has three entries, you return shape {list(found.shape)}")
        if not np.abs(found - right).max() <= 1e-9:
            setting = f"p {_short(p)}, q {_short(q)}, verified {verified}"
            return _say(f"{setting}: you say {_short(found)}, listing every outcome gives {_short(right)}")
    return _say("right: accepted drafts, replacements of the rejected ones, and draws from p for the trimmed", True)


def _enumerated(p: exact.Floats, q: exact.Floats, verified: list[int]) -> exact.Floats:
    request = exact.Request(lambda tokens: p.tolist(), lambda tokens: q.tolist(), lambda k, before, q, x: verified[x])
    return np.array(exact.first_token(exact.joint_law(exact.Experiment([request], 1, exact.threshold_policy(0.5)))))


def _short(values: exact.Floats) -> list[float]:
    return np.round(values, 3).tolist()


def check_worst_drafter(q: Any) -> bool:
    """02_lossless, exercise 2: a drafter (q_A, q_B) that leaks more than .24 under the footnote's rule."""
    if q is None or q is ...:
        return _say("not written yet: set q to two probabilities")
    values = np.asarray(q, dtype=float)
    if values.shape != (2,) or not ((values >= 0).all() and abs(values.sum() - 1) < 1e-9):
        return _say(f"q must be two probabilities that sum to 1, got {values.tolist()}")
    leak = exact.leak(leaks.footnote(q=values.tolist()))
    if leak <= 0.24:
        return _say(f"q = {_short(values)} leaks {leak:.3f}; some drafter leaks more than 0.24")
    return _say(f"right: leak {leak:.4f}, from a drafter that is nearly the target itself; at (.5, .5) it is 0", True)


def check_may_decide(allowed: Any) -> bool:
    """02_lossless, exercise 3: the letters of `MAY_DECIDE` that keep the law, as one string."""
    if allowed is None or allowed is ...:
        return _say("not written yet: give the allowed letters as a string")
    unknown = set(allowed) - set(MAY_DECIDE)
    if unknown:
        return _say(f"unknown letters {''.join(sorted(unknown))}: choose from {''.join(MAY_DECIDE)}")
    for letter, (fine, why) in MAY_DECIDE.items():
        if (letter in allowed) != fine:
            return _say(f"{letter} is {'allowed' if fine else 'not allowed'}: {why}")
    return _say("right: what is fixed before x_k is drawn, and what other requests do", True)


def check_scaling(samples: Callable[[float, float, float], Any]) -> bool:
    """02_lossless, exercise 4: `samples(n, leak, smaller)` -> samples for the smaller leak, if n show the other."""
    for n, leak, smaller, right in ((2000, 0.05, 0.025, 8000), (500, 0.1, 0.01, 50000), (2091, 0.05, 0.002, 1306875)):
        answer = samples(n, leak, smaller)
        if answer is None:
            return _say("not written yet: return a number of samples")
        if not abs(float(answer) - right) <= 1e-6 * right:
            return _say(f"{n} samples show {leak}: for {smaller} you say {float(answer):,.0f}, it takes {right:,}")
    return _say("right: samples grow with the square, so a leak of a hundredth takes ten thousand times as many", True)
