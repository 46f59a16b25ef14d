"""Checkers for the exercises of 07_end_to_end: each runs the reader's function and prints what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from avref.exercises import _say


def check_break_even(break_even: Callable[[float, float, float], Any]) -> bool:
    """Exercise 1: `break_even(draft_ms, verify_ms, plain_ms)` -> tokens per request and step at which it pays.

    A speculative step takes draft_ms + verify_ms and emits a tokens per request, a plain one takes plain_ms and emits
    one: a = (draft_ms + verify_ms) / plain_ms.
    """
    for draft, verify, plain in ((2.0, 40.0, 40.0), (10.0, 30.0, 20.0), (0.0, 25.0, 20.0)):
        answer = break_even(draft, verify, plain)
        if answer is None:
            return _say("not written yet: return a number of tokens")
        right = (draft + verify) / plain
        if not abs(float(answer) - right) <= 1e-9:
            return _say(
                f"drafting {draft:g} ms, verifying {verify:g} ms, a plain step {plain:g} ms: you say "
                f"{float(answer):.4g} tokens, but the step is {right:.4g} times as long as a plain one"
            )
    return _say("right: the token that a plain step emits is among them, so at 1 nothing was won yet", True)


def check_frontier(frontier: Callable[[list[tuple[float, float]]], Any]) -> bool:
    """Exercise 2: `frontier(points)` -> indices of the points that no other beats in both coordinates, in order."""
    cases = (
        [(1.0, 1.0)],
        [(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)],
        [(1.0, 3.0), (2.0, 2.0), (1.5, 1.5), (3.0, 1.0)],
        [(2.0, 2.0), (2.0, 2.0), (1.0, 1.0)],  # equal points do not beat each other
        [(3.0, 1.0), (3.0, 2.0), (1.0, 4.0)],  # as good in one, better in the other: it does not beat in both
    )
    for points in cases:
        answer = frontier(list(points))
        if answer is None:
            return _say("not written yet: return a list of indices")
        right = [i for i, (x, y) in enumerate(points) if not any(a > x and b > y for a, b in points)]
        if sorted(answer) != right:
            return _say(f"{points}: you say {sorted(answer)}, but {right} are beaten by nobody in both")
    return _say("right: a point leaves the frontier only when one single other point is better in both", True)


def check_verdict(verdict: Callable[[float, float, float], Any]) -> bool:
    """Exercise 3: `verdict(low, high, above)` -> what an interval says about the claim "more than `above`".

    "confirmed" when all of it lies above, "clearly not" when none of it does, else "within the noise".
    """
    for low, high, above, right in (
        (1.02, 1.10, 1.0, "confirmed"),
        (0.99, 1.10, 1.0, "within the noise"),
        (0.90, 1.0, 1.0, "clearly not"),
        (0.90, 1.01, 1.0, "within the noise"),
        (1.0, 1.2, 1.0, "within the noise"),
        (0.98, 0.99, 0.97, "confirmed"),
    ):
        answer = verdict(low, high, above)
        if answer is None:
            return _say("not written yet: return one of the three texts")
        if answer != right:
            return _say(f"{low:g} to {high:g}, claimed above {above:g}: you say {answer!r}, right is {right!r}")
    return _say("right: the middle of an interval decides nothing", True)


def check_what_follows(answers: Mapping[str, Any]) -> bool:
    """Exercise 4: True for statements that hold for every drafter and load, False for those that can fail."""
    right = {
        "a longer acceptance length means more tokens per second": False,
        "in a given step, trimming lowers the number of accepted drafts, or leaves it": True,
        "trimming saves drafting time": False,
        "the emitted text follows the target's law at any load": True,
        "choosing the depth, 0 included, costs nothing: exploring is free": False,
        "what pays at one request pays at sixty-four": False,
    }
    missing = [name for name in right if answers.get(name) in (None, ...)]
    if missing:
        return _say(f"not written yet: give True or False for {missing[0]!r}")
    wrong = [name for name, holds in right.items() if bool(answers[name]) != holds]
    if wrong:
        why = "it holds" if right[wrong[0]] else "there is a table above in which it fails"
        return _say(f"{len(wrong)} of {len(right)} are wrong, the first: {wrong[0]!r}: {why}")
    return _say("right", True)
