"""Checkers for the exercises of notebook 01, in the way of `avref.exercises`: each prints what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from avref import metrics
from avref.exercises import _say

KEEPS_RANKING = {
    "a": (True, "the square rises with max q, which is never negative"),
    "b": (False, "it falls: the AUC becomes 1 - AUC"),
    "c": (True, "the logarithm rises"),
    "d": (False, "it falls below one half and rises above"),
    "e": (True, "within one position, an intercept is the same for all drafts"),
    "f": (False, "it ties drafts that were apart, and a tie counts one half"),
    "g": (False, "it reads the token, so it is not a function of max q"),
}
"""01_the_feature, exercise 4: what is made of max q -> whether the AUC within a position stays, and why."""


def check_log_odds(log_odds: Callable[..., Any]) -> bool:
    """01_the_feature, exercise 1: `log_odds(logits, temperature)` -> [...] in float32, right where q_max is near 1."""
    cases = [
        ([2.0, 1.0, 0.5, -1.0], 1.0, "an ordinary row"),
        ([2.0, 1.0, 0.5, -1.0], 0.5, "temperature 0.5"),
        ([3.0, 3.0, 0.0], 1.0, "tied maxima"),
        ([20.0, 0.0, -1.0], 1.0, "a drafter that is nearly certain"),
        ([300.0, 270.0, 0.0], 1.0, "large logits, a gap of 30"),
    ]
    for logits, temperature, what in cases:
        answer = log_odds(torch.tensor(logits), temperature)
        if answer is None:
            return _say("not written yet: return the log-odds of the top token")
        z = np.sort(np.array(logits, dtype=np.longdouble) / temperature)[::-1]
        right = float(-np.log(np.exp(z[1:] - z[0]).sum()))
        if not abs(float(answer) - right) < 1e-3:  # NaN and infinity fail too
            return _say(f"{what}, logits {logits}, T = {temperature:g}: you say {float(answer):.4f}, it is {right:.4f}")
    return _say("right, near certainty too: the mass of the others is summed, not taken as 1 - q", True)


def check_auc(auc: Callable[..., Any]) -> bool:
    """01_the_feature, exercise 2: `auc(labels, scores)` by comparing pairs, ties one half."""
    cases = [([1, 0, 1, 0], [0.9, 0.1, 0.8, 0.2]), ([1, 1, 0, 0, 0], [0.5, 0.2, 0.5, 0.2, 0.1])]
    rng = np.random.default_rng(0)
    cases += [([int(y) for y in rng.random(40) < 0.6], rng.integers(0, 9, 40).tolist()) for _ in range(3)]
    for labels, scores in cases:
        answer = auc(np.array(labels), np.array(scores, dtype=float))
        if answer is None:
            return _say("not written yet: return a number")
        right = metrics.auc(labels, scores)
        if not abs(float(answer) - right) < 1e-9:
            return _say(f"labels {labels}, scores {scores}: you say {float(answer):.4f}, it is {right:.4f}")
    return _say("right: the share of (accepted, rejected) pairs in the right order, a tie counting one half", True)


def check_ece(ece: Callable[..., Any]) -> bool:
    """01_the_feature, exercise 3: `ece(labels, probabilities, num_bins)`, bins of equal width, 1 in the last one."""
    rng = np.random.default_rng(0)
    p = rng.random(200) ** 0.3  # most of them high: bins of unequal size
    cases = [
        ((rng.random(200) < p).astype(int), p, 10),
        ((rng.random(200) < p**2).astype(int), p, 15),
        (np.array([1, 0, 1]), np.array([1.0, 1.0, 0.95]), 5),
    ]
    for labels, probabilities, num_bins in cases:
        answer = ece(labels, probabilities, num_bins)
        if answer is None:
            return _say("not written yet: return a number")
        right = metrics.ece(labels, probabilities, num_bins)
        if not abs(float(answer) - right) < 1e-9:
            return _say(f"{len(labels)} drafts, {num_bins} bins: you say {float(answer):.4f}, it is {right:.4f}")
    return _say("right: gaps weighted by how many drafts a bin holds", True)


def check_keeps_ranking(kept: Any) -> bool:
    """01_the_feature, exercise 4: the letters of `KEEPS_RANKING` that leave the AUC within a position as it is."""
    return check_letters(kept, KEEPS_RANKING, ("keeps the AUC", "does not keep the AUC"), "what rises with max q")


def check_letters(given: Any, answers: dict[str, tuple[bool, str]], words: tuple[str, str], praise: str) -> bool:
    """The letters that are true, given as one string; `words` say what a letter is if true and if not."""
    if given is None or given is ...:
        return _say("not written yet: give the letters as a string")
    unknown = set(given) - set(answers)
    if unknown:
        return _say(f"unknown letters {''.join(sorted(unknown))}: choose from {''.join(answers)}")
    for letter, (true, why) in answers.items():
        if (letter in given) != true:
            return _say(f"{letter} {words[0] if true else words[1]}: {why}")
    return _say(f"right: {praise}", True)
