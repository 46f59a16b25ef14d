"""Checkers for the exercises of 05_budget: each runs the reader's function and prints what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from avref.exercises import _say
from avref.pruning import MAX_SCALE


def check_turning_point(turning_point: Callable[[float, float, float], Any]) -> bool:
    """Exercise 1: `turning_point(flops, bandwidth, bytes_per_parameter)` -> the tokens at which the flat part ends.

    Without caches, P b / bandwidth = 2 P T / flops, hence T = b flops / (2 bandwidth), whatever the model.
    """
    for flops, bandwidth, size, right in (
        (989e12, 3.35e12, 2.0, 295.2239),
        (65e12, 320e9, 2.0, 203.125),
        (1e12, 1e11, 1.0, 5.0),
    ):
        answer = turning_point(flops, bandwidth, size)
        if answer is None:
            return _say("not written yet: return a number of tokens")
        if not abs(float(answer) - right) <= 1e-4 * right:
            return _say(
                f"{flops / 1e12:g} TFLOP/s, {bandwidth / 1e9:g} GB/s, {size:g} bytes per parameter: you say "
                f"{float(answer):.4g} tokens, but with {right:.4g} reading and arithmetic take equally long"
            )
    return _say("right: the model's size cancels, rate and bandwidth remain", True)


def check_predicted_tail(predict: Callable[..., Any]) -> bool:
    """Exercise 2: `predict(profile, admitted, s)` -> survivals behind the next one, as lookahead predicts them.

    t_j = min(s, m_j min(s / m_{B+1}, 4)) for j > B + 1, B = admitted, s the next live survival, m the profile.
    """
    profile = np.array([0.95, 0.8, 0.6, 0.15, 0.1])
    for admitted, s, what in (
        (0, 0.95, "a step like the past ones"),
        (1, 0.4, "less certain than usual: all behind it shrinks too"),
        (2, 0.7, "more certain than usual"),
        (3, 0.7, "far more certain than usual: at most four times the mean"),
    ):
        answer = predict(profile.copy(), admitted, s)
        if answer is None:
            return _say("not written yet: return the predicted survivals")
        found = np.asarray(answer, dtype=float)
        right = np.minimum(s, profile[admitted + 1 :] * min(s / profile[admitted], MAX_SCALE))
        if found.shape != right.shape or not np.abs(found - right).max() <= 1e-9:
            return _say(
                f"{admitted} admitted, next survival {s:g} ({what}): you say {found.round(3).tolist()}, expected are "
                f"{right.round(3).tolist()}"
            )
    return _say("right: it reads one live survival, the rest is the past, scaled to it", True)


def check_draft_depth(depth_for: Callable[..., Any]) -> bool:
    """Exercise 3: `depth_for(survival, step_ms)` -> how many positions to draft, 0 included, before drafting.

    One request: survival [K] is the mean of past steps by position, step_ms [K+1] goes by depth. Right is the depth
    with the most tokens per millisecond, the smallest of equals.
    """
    cases: tuple[tuple[list[float], list[float]], ...] = (
        ([0.8, 0.6, 0.4], [10.0, 12.0, 14.0, 16.0]),
        ([0.1, 0.05, 0.01], [10.0, 12.0, 14.0, 16.0]),  # not worth drafting at all
        ([0.5, 0.45, 0.4], [10.0, 16.0, 17.0, 18.0]),  # the first pass is dear, the next ones cheap
        ([0.9, 0.9, 0.9], [10.0, 10.0, 10.0, 60.0]),
        ([0.5, 0.5], [2.0, 3.0, 4.0]),  # all equal
    )
    for survival, step_ms in cases:
        answer = depth_for(list(survival), list(step_ms))
        if answer is None:
            return _say("not written yet: return a number of positions")
        rate = (1 + np.append(0.0, np.cumsum(survival))) / step_ms
        right = int(np.flatnonzero(rate >= rate.max() * (1 - 1e-9))[0])
        if answer != right:
            return _say(
                f"mean survivals {survival}, step ms by depth {step_ms}: you say {answer}; tokens per millisecond by "
                f"depth are {rate.round(3).tolist()}, so draft {right}"
            )
    return _say(
        "right: past means only, so this step's drafts cannot sway it, and searching all depths is allowed", True
    )


def check_what_may_decide(answers: dict[str, Any]) -> bool:
    """Exercise 4: True where the decision to verify x_k may look at it, and False where it may not."""
    right = {
        "largest probability of q_k": True,
        "probability of x_k under q_k": False,
        "survival of x_(k+1), same request": False,
        "survival of another request's last draft": True,
        "verdicts of past steps": True,
        "the number of slots whose live survival is above 0.5": False,
    }
    missing = [name for name in right if answers.get(name) in (None, ...)]
    if missing:
        return _say(f"not written yet: give True or False for {missing[0]!r}")
    wrong = [name for name, may in right.items() if bool(answers[name]) != may]
    if wrong:
        why = "it may be used: it is known before x_k" if right[wrong[0]] else "it depends on x_k or on what follows it"
        return _say(f"{len(wrong)} of {len(right)} are wrong, the first: {wrong[0]!r}: {why}")
    return _say("right: anything before x_k in its own request, anything of the others, nothing else", True)
