"""Checkers for the exercises of 06_drafters: each runs the reader's function and prints what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from avref.exercises import _say


def check_passes(passes: Callable[[str, int, int], Any]) -> bool:
    """Exercise 1: `passes(method, num_requests, depth)` -> (forward passes of the drafter, tokens in each of them).

    One pass over R K tokens for the parallel families, K passes over R tokens for those that go token by token, no pass
    at all for prompt lookup.
    """
    for method, kind in (
        ("dflash", "parallel"),
        ("eagle", "token by token"),
        ("dspark", "parallel"),
        ("draft_model", "token by token"),
        ("mtp", "token by token"),
        ("layer_skip", "token by token"),
        ("ngram", "no model"),
    ):
        for num_requests, depth in ((1, 7), (16, 4)):
            answer = passes(method, num_requests, depth)
            if answer is None:
                return _say("not written yet: return two numbers")
            one = {"parallel": (1, num_requests * depth), "token by token": (depth, num_requests)}
            right = one.get(kind, (0, 0))
            if tuple(answer) != right:
                return _say(
                    f"{method} ({kind}), {num_requests} requests, {depth} drafts each: you say {tuple(answer)}, "
                    f"right is {right}"
                )
    return _say(
        "right: what a block costs depends on the passes, hardly on the tokens in them while batches are small", True
    )


def check_pooled(pooled: Callable[..., Any]) -> bool:
    """Exercise 2: `pooled(rates, depth)` -> acceptance by position, [depth], given an accepted prefix.

    Request i accepts every draft with probability rates[i], at every position; position k of the pool then has
    sum(rates ** k) / sum(rates ** (k - 1)), which never falls.
    """
    for rates in ([0.5], [0.9, 0.1], [0.2, 0.4, 0.8], [1.0, 0.0]):
        a = np.array(rates)
        answer = pooled(a.copy(), 4)
        if answer is None:
            return _say("not written yet: return an acceptance rate for every position")
        found, right = (
            np.asarray(answer, dtype=float),
            [float((a**k).sum() / (a ** (k - 1)).sum()) for k in (1, 2, 3, 4)],
        )
        if found.shape != (4,) or not np.abs(found - right).max() <= 1e-9:
            return _say(
                f"requests that accept {rates}: you say {found.round(3).tolist()}, but the blocks that get to position "
                f"k are a different mixture each time: {np.round(right, 3).tolist()}"
            )
    return _say("right: the deeper, the more of the easy requests; the curve rises though no draft gets better", True)


def check_second_overlap(second_overlap: Callable[..., Any]) -> bool:
    """Exercise 3: `second_overlap(joint)` -> acceptance at position 2 of the drafter that says each token's own law.

    joint [V, V]: the target's law of two tokens. The drafter's q_1 is the law of the first, q_2 the marginal of the
    second: sum over x, y of min(joint[x, y], p(x) m(y)).
    """
    cases = {
        "independent tokens": np.outer([0.5, 0.5], [0.2, 0.8]),
        "New York or San Diego": np.diag([0.5, 0.5]),
        "one of the two is rare": np.diag([0.9, 0.1]),
        "three tokens": np.array([[0.3, 0.1, 0.0], [0.0, 0.2, 0.1], [0.05, 0.05, 0.2]]),
    }
    for name, joint in cases.items():
        answer = second_overlap(joint.copy())
        if answer is None:
            return _say("not written yet: return a probability")
        right = float(np.minimum(joint, np.outer(joint.sum(1), joint.sum(0))).sum())
        if not abs(float(answer) - right) <= 1e-9:
            return _say(
                f"{name}: you say {float(answer):.4g}, but accepted drafts have mass {right:.4g}: sum the overlap of "
                "p(y | x) with the marginal of y over the first tokens x, each with its own probability"
            )
    return _say("right: 1 only if the second token does not depend on the first", True)


def check_what_a_head_may_read(answers: Mapping[str, Any]) -> bool:
    """Exercise 4: True where a confidence for draft x_k may read it without biasing the output, False where not."""
    right = {
        "dspark: the state of slot k": True,
        "dspark: the embedding of x_(k-1)": True,
        "dspark: the embedding of x_k": False,
        "dspark: the logits at slot k+1, bias included": False,
        "dflash: the logits at slot k+1": True,
        "eagle: the state after it has read x_k": False,
        "ngram: how often matches of this length were right": True,
    }
    missing = [name for name in right if answers.get(name) in (None, ...)]
    if missing:
        return _say(f"not written yet: give True or False for {missing[0]!r}")
    wrong = [name for name, may in right.items() if bool(answers[name]) != may]
    if wrong:
        why = "it is the same whatever x_k is" if right[wrong[0]] else "it changes with the x_k that was drawn"
        return _say(f"{len(wrong)} of {len(right)} are wrong, the first: {wrong[0]!r}: {why}")
    return _say("right: in a parallel block even later slots know nothing of x_k", True)
