"""Checkers for the exercises in the notebooks: each runs the reader's function and prints what is wrong.

An exercise that is not written yet is told apart from one that is wrong; neither stops the notebook.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


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
        if abs(float(slope_step) - right[0]) > 1e-8:
            return _say(
                f"K = {num_positions}: the slope step is {float(slope_step):.6f}, a dense solve gives {right[0]:.6f}"
            )
        if intercept_steps.shape != (num_positions,):
            return _say(f"K = {num_positions}: the intercept steps have shape {list(intercept_steps.shape)}")
        worst = np.abs(intercept_steps.numpy() - right[1:]).max()
        if worst > 1e-8:
            return _say(f"K = {num_positions}: the slope step is right, an intercept step is off by {worst:.2g}")
    return _say("right: the closed form equals the dense solve", True)


def check_graded(graded: Callable[..., Any]) -> bool:
    """03_irls, exercise 2: `graded(num_accepted, num_verified, num_positions)` -> bool [R, K], every case of K = 3."""
    for verified in range(4):
        for accepted in range(verified + 1):
            mask = graded(torch.tensor([accepted]), torch.tensor([verified]), 3)
            if mask is None:
                return _say("not written yet: return a mask of shape [R, K]")
            found = torch.as_tensor(mask).bool().tolist()
            right = [[k < verified and k <= accepted for k in range(3)]]
            if found != right:
                return _say(f"{accepted} accepted of {verified} verified: you say {found}, graded are {right}")
    return _say("right: accepted drafts and the first rejection, nothing else", True)


def check_evidence(drafts_for: Callable[[float, float], Any]) -> bool:
    """03_irls, exercise 3: `drafts_for(share, damping)` -> the fewest drafts that let `share` of a step through."""
    for share, damping, right in ((0.5, 50, 50), (0.9, 50, 450), (0.75, 8, 24), (0.95, 200, 3800)):
        answer = drafts_for(share, damping)
        if answer is None:
            return _say("not written yet: return a number of drafts")
        if abs(float(answer) - right) > 1e-6 * right:
            return _say(
                f"share {share}, constant {damping}: you say {float(answer):g}, but n / (n + C) reaches it at {right}"
            )
    return _say("right: a tenth of the step is still held back at n = 9 C", True)


def _say(text: str, right: bool = False) -> bool:
    print(("✓ " if right else "✗ ") + text)
    return right
