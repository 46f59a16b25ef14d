"""Checkers for the exercises in the notebooks: each runs the reader's function and prints what is wrong.

An exercise that is not written yet is told apart from one that is wrong; neither stops the notebook.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def check_break_even(least_survival: Callable[[float, float, float], Any]) -> bool:
    """00_quickstart, exercise 1: `least_survival(tokens, ms, extra_ms)` -> the survival at which a draft pays off."""
    for tokens, ms, extra_ms, right in ((1.0, 20.0, 1.0, 0.05), (8.0, 40.0, 1.0, 0.2), (12.5, 50.0, 2.0, 0.5)):
        answer = least_survival(tokens, ms, extra_ms)
        if answer is None:
            return _say("not written yet: return a probability")
        if not abs(float(answer) - right) <= 1e-9:
            before, after = tokens / ms, (tokens + float(answer)) / (ms + extra_ms)
            return _say(
                f"{tokens:g} tokens in {ms:g} ms, one more draft for {extra_ms:g} ms: with a survival of "
                f"{float(answer):.4g} the rate goes from {before:.4f} to {after:.4f} tokens/ms; it should stay the same"
            )
    return _say("right: a draft has to bring what the present rate emits in its milliseconds", True)


def check_expected_tokens(expected_tokens: Callable[..., Any]) -> bool:
    """00_quickstart, exercise 2: `expected_tokens(confidence, admitted)`, by listing every pattern of verdicts."""
    generator = torch.Generator().manual_seed(0)
    for admitted in ([3], [0], [2, 0, 3], [1, 3, 2, 0]):
        confidence = torch.rand(len(admitted), 3, generator=generator, dtype=torch.float64)
        answer = expected_tokens(confidence, torch.tensor(admitted))
        if answer is None:
            return _say("not written yet: return a number of tokens")
        right = sum(_mean_emitted(row, n) for row, n in zip(confidence.tolist(), admitted, strict=True))
        if not abs(float(answer) - right) <= 1e-6:
            return _say(f"admitted {admitted}: you say {float(answer):.4f}, listing all verdicts gives {right:.4f}")
    return _say("right: one token per request, and the survivals of the drafts that are verified", True)


def _mean_emitted(confidence: list[float], admitted: int) -> float:
    """Tokens that one request emits on average: accepted drafts up to the first rejection, and one token more."""
    mean = 0.0
    for verdicts in itertools.product((True, False), repeat=admitted):
        chance = math.prod(c if yes else 1 - c for c, yes in zip(confidence, verdicts, strict=False))
        mean += chance * (1 + len(list(itertools.takewhile(bool, verdicts))))
    return mean


def check_growth(grow: Callable[..., Any]) -> bool:
    """00_quickstart, exercise 3: `grow(survivals, num_requests, step_ms)` -> budget, slot by slot without peeking."""
    rng = np.random.default_rng(0)
    cases = [
        ([0.9, 0.1], 1, [1.0, 1.1, 2.0]),
        ([0.1, 0.1], 2, [1.0, 1.5, 2.0]),
        ([0.9, 0.9, 0.9], 1, [1.0, 1.1, 1.2, 1.3]),
        ([0.5, 0.5], 1, [2.0, 3.0, 3.0]),  # a tie is no improvement
        ([0.5, 0.45, 0.42], 1, [1.0, 1.55, 1.6, 1.6]),  # a staircase: the best is 3, behind a step that does not pay
    ]
    cases += [(rng.random(6).tolist(), 2, (1 + rng.random(7).cumsum()).tolist()) for _ in range(5)]
    for survivals, num_requests, step_ms in cases:
        survivals = sorted(survivals, reverse=True)
        answer = grow(list(survivals), num_requests, list(step_ms))
        if answer is None:
            return _say("not written yet: return the number of drafts to verify")
        rate = (num_requests + np.append(0.0, np.cumsum(survivals))) / step_ms
        right = next((b for b in range(len(survivals)) if rate[b + 1] <= rate[b]), len(survivals))
        if answer != right:
            peeked = ", which is the best of all budgets, but found by looking at every survival"
            return _say(
                f"R = {num_requests}, survivals {np.round(survivals, 2).tolist()}, step ms "
                f"{np.round(step_ms, 2).tolist()}: you say {answer}{peeked if answer == rate.argmax() else ''}; the "
                f"rates are {np.round(rate, 3).tolist()}, and the first not to improve ends the growth at {right}"
            )
    return _say("right: it reads one survival at a time, and none behind the one it refuses", True)


def check_arrowhead(solve: Callable[..., Any]) -> bool:
    """03_irls, exercise 1: `solve(a, b, h, g0, g1, ridge)` -> (slope step, intercept steps [K]), by a dense solve."""
    rng = np.random.default_rng(0)
    for num_positions in (1, 4, 7):
        f, w, r = (
            rng.normal(2, 3, (50, num_positions)),
            rng.uniform(0, 0.25, (50, num_positions)),
            rng.normal(0, 1, (50, num_positions)),
        )
        sums = [torch.as_tensor(x.sum(axis=0)) for x in (w * f * f, w * f, w, r * f, r)]
        answer = solve(*sums, 1e-3)
        if answer is None:
            return _say("not written yet: return the slope step and the K intercept steps")
        slope_step, intercept_steps = answer[0], torch.as_tensor(answer[1])
        a, b, h, g0, g1 = (x.numpy() for x in sums)
        hessian = np.diag(np.concatenate(([a.sum()], h))) + 1e-3 * np.eye(num_positions + 1)
        hessian[0, 1:] = hessian[1:, 0] = b
        right = np.linalg.solve(hessian, np.concatenate(([g0.sum()], g1)))
        if not abs(float(slope_step) - right[0]) <= 1e-8:
            return _say(
                f"K = {num_positions}: the slope step is {float(slope_step):.6f}, a dense solve gives {right[0]:.6f}"
            )
        if intercept_steps.shape != (num_positions,):
            return _say(f"K = {num_positions}: the intercept steps have shape {list(intercept_steps.shape)}")
        worst = np.abs(intercept_steps.numpy() - right[1:]).max()
        if not worst <= 1e-8:
            return _say(f"K = {num_positions}: the slope step is right, an intercept step is off by {worst:.2g}")
    return _say("right: the closed form equals the dense solve", True)


def check_graded(graded: Callable[..., Any]) -> bool:
    """03_irls, exercise 2: `graded(num_accepted, num_verified, num_positions)` -> bool [R, K], every case of K = 3."""
    cases = [([accepted], [verified], 3) for verified in range(4) for accepted in range(verified + 1)]
    for accepted, verified, width in (*cases, ([0, 2, 1, 3, 0], [0, 2, 4, 3, 1], 4)):
        mask = graded(torch.tensor(accepted), torch.tensor(verified), width)
        if mask is None:
            return _say("not written yet: return a mask of shape [R, K]")
        found = torch.as_tensor(mask).bool().tolist()
        right = [[k < v and k <= a for k in range(width)] for a, v in zip(accepted, verified, strict=True)]
        if found != right:
            return _say(f"{accepted} accepted of {verified} verified: you say {found}, graded are {right}")
    return _say("right: accepted drafts and the first rejection, nothing else", True)


def check_evidence(drafts_for: Callable[[float, float], Any]) -> bool:
    """03_irls, exercise 3: `drafts_for(share, damping)` -> the fewest drafts that let `share` of a step through."""
    for share, damping, right in ((0.5, 50, 50), (0.9, 50, 450), (0.75, 8, 24), (0.95, 200, 3800)):
        answer = drafts_for(share, damping)
        if answer is None:
            return _say("not written yet: return a number of drafts")
        if not abs(float(answer) - right) <= 1e-6 * right:
            return _say(
                f"share {share}, constant {damping}: you say {float(answer):g}, but n / (n + C) reaches it at {right}"
            )
    return _say("right: a tenth of the step is still held back at n = 9 C", True)


def _say(text: str, right: bool = False) -> bool:
    print(("✓ " if right else "✗ ") + text)
    return right
