"""Checkers for the exercises of notebook 04, in the way of `avref.exercises`: each prints what is wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from avref.exercises import _say
from avref.exercises_feature import check_letters
from avref.plots_feature import ARTICLE_WORKLOADS

STATEMENTS = {
    "a": (False, "half are accepted where max q = .5; at other features it is another share"),
    "b": (True, "the drafter's odds go from 1 to 4, and 4 to the power .5 is 2"),
    "c": (True, "sigmoid(logit(max q)) is max q"),
    "d": (False, "the slope halves and every prediction stays"),
    "e": (True, "parallel lines in log-odds never cross"),
    "f": (False, "any positive slope ranks the drafts of one position in the same way"),
    "g": (False, "all of its drafts are accepted, whatever max q is: nothing is left for a slope to explain"),
}
"""04_slope_and_intercepts, exercise 3: statements -> true or not, and why."""


def check_crossing(crossing: Callable[[float, float], Any]) -> bool:
    """04_slope_and_intercepts, exercise 1: `crossing(slope, intercept)` -> the feature at which c equals max q."""
    for slope, intercept in ((0.5, -0.2), (0.5, 1.0), (0.65, -0.55), (1.5, 0.3)):
        answer = crossing(slope, intercept)
        if answer is None:
            return _say("not written yet: return a feature, a log-odds")
        f = float(answer)
        if not abs(slope * f + intercept - f) < 1e-9:
            c, q = (1 / (1 + np.exp(-z)) for z in (slope * f + intercept, f))
            return _say(f"slope {slope}, intercept {intercept}: at your feature {f:.3f} max q is {q:.3f} and c {c:.3f}")
    return _say("right: with a slope below 1 the estimator says more than max q below it, and less above it", True)


def check_intercept(intercept: Callable[..., Any]) -> bool:
    """04_slope_and_intercepts, exercise 2: `intercept(slope, f, labels)`: mean confidence equal to the mean label."""
    rng = np.random.default_rng(0)
    for slope, level in ((0.5, 0.4), (0.5, -1.5), (0.9, -0.3)):
        f = rng.normal(2.0, 2.0, 400)
        labels = (rng.random(400) < 1 / (1 + np.exp(-(slope * f + level)))).astype(float)
        answer = intercept(slope, f.copy(), labels.copy())
        if answer is None:
            return _say("not written yet: return an intercept")
        mean = float((1 / (1 + np.exp(-(slope * f + float(answer))))).mean())
        if not abs(mean - labels.mean()) < 1e-4:
            return _say(
                f"slope {slope}: mean confidence {mean:.4f}, but {labels.mean():.4f} of the drafts were accepted"
            )
    return _say("right: that is where the gradient in the intercept, the sum of label - c, is zero", True)


def check_statements(true: Any) -> bool:
    """04_slope_and_intercepts, exercise 3: the letters of `STATEMENTS` that are true, as one string."""
    return check_letters(true, STATEMENTS, ("is true", "is not true"), "slope scales the log-odds, intercepts shift")


def check_chance(chance: Callable[..., Any]) -> bool:
    """04_slope_and_intercepts, exercise 4: `chance(a, b)` -> share of all orders of b with |r| at least as large."""
    entropy, slope, first = np.array(list(ARTICLE_WORKLOADS.values())).T
    for a, b in ((first, entropy), (slope, entropy), (entropy, entropy)):
        answer = chance(a.copy(), b.copy())
        if answer is None:
            return _say("not written yet: return a share between 0 and 1")
        right = _share(a, b)
        if not abs(float(answer) - right) < 1e-6:
            r = float(np.corrcoef(a, b)[0, 1])
            return _say(f"r = {r:.2f}: you say {float(answer):.4f}, of the 120 orders {round(120 * right)} reach it")
    return _say(
        f"right: by chance |r| reaches .89 in {_share(first, entropy):.1%} of the orders of five workloads", True
    )


def _share(a: np.ndarray, b: np.ndarray) -> float:
    found = [abs(np.corrcoef(a, order)[0, 1]) for order in itertools.permutations(b)]
    return float(np.mean(np.array(found) >= abs(np.corrcoef(a, b)[0, 1]) - 1e-9))
