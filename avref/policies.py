"""What to verify: rules that `exact` tries, each a function of what it is shown. Not all of them are lossless."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from avref.cost_table import CostTable
from avref.depth import DraftDepth
from avref.pruning import allocate, choose_budget, settled

Floats = npt.NDArray[np.float64]
Table = tuple[tuple[float, ...], ...]  # [R, K]
BudgetRule = Literal["lookahead", "early_stop", "stale", "retrospective"]


@dataclass(frozen=True)
class Seen:
    """All that a policy is shown in one step. Whether it may use all of it is the question."""

    confidence: Floats  # [R, K] of this step's drafts
    survival: Floats  # [R, K] of this step's drafts ("live")
    previous: Floats  # [R, K] of the step before; 1 at the first step, as for every new request
    profile: Floats | None  # [R K] predicted survivals by rank, from past steps; None before the first
    drafted: tuple[int, ...] | None = None  # [R] drafts found, confidence and survival are 0 behind them; None: all K
    past: tuple[Table, ...] = ()  # survivals of all steps before, `previous` the last


Policy = Callable[[Seen], Sequence[int]]  # -> admitted [R]


def costs(*step_ms: float) -> CostTable:
    """A cost table for up to as many requests as tokens, from the milliseconds of 1, 2, 3, ... packed tokens."""
    return CostTable(np.zeros(len(step_ms) + 1), [step_ms[0], *step_ms])


def _budget(seen: Seen, cost_table: CostTable, rule: BudgetRule) -> int:
    num_requests = len(seen.survival)
    if rule == "stale":
        return choose_budget(seen.previous, cost_table, num_requests, rule="argmax")
    if rule == "retrospective":
        return choose_budget(seen.survival, cost_table, num_requests, rule="argmax")
    return choose_budget(seen.survival, cost_table, num_requests, rule=rule, profile=seen.profile)


def budget_policy(cost_table: CostTable, rule: BudgetRule = "lookahead") -> Policy:
    """A budget by lookahead, early_stop, stale or retrospective (lossy), given to the best live slots."""
    return lambda seen: allocate(seen.survival, _budget(seen, cost_table, rule), seen.drafted).tolist()


def fixed_budget(budget: int) -> Policy:
    return lambda seen: allocate(seen.survival, budget, seen.drafted).tolist()


def threshold_policy(at_least: float, *, stop_after: bool = False) -> Policy:
    """Verify each request up to its first confidence below a threshold (Draft & Verify).

    With stop_after that draft is verified too: what a rule has to do that has seen the token.
    """

    def policy(seen: Seen) -> Sequence[int]:
        sure = (seen.confidence >= at_least).cumprod(axis=1).sum(axis=1)  # [R]
        most = seen.confidence.shape[1] if seen.drafted is None else np.array(seen.drafted)
        return np.minimum(sure + stop_after, most).tolist()

    return policy


def stop_policy(at_least: float) -> Policy:
    """Verify each request while the product of its confidences stays at or above a value (SpecDec++)."""
    return lambda seen: threshold_policy(at_least)(replace(seen, confidence=seen.survival))


def bucket_jump(cost_table: CostTable) -> Policy:
    """Growth by whole steps of a cost staircase, each judged by the live survivals up to its end. Lossy."""

    def policy(seen: Seen) -> Sequence[int]:
        num_requests = len(seen.survival)
        expected = num_requests + np.append(0.0, np.sort(seen.survival, axis=None)[::-1].cumsum())
        ms = cost_table.step_ms(num_requests, num_requests + np.arange(len(expected)))
        budget = 0
        while budget < len(expected) - 1:
            end = int(np.flatnonzero(ms == ms[budget + 1])[-1])
            if expected[end] / ms[end] <= expected[budget] / ms[budget]:
                break
            budget = end
        return allocate(seen.survival, budget).tolist()

    return policy


def drafting_to(depth: Callable[[Seen], int], policy: Policy) -> Policy:
    """Drafts every request to a depth that is settled before drafting; lossless if `depth` reads the past only.

    Deeper drafts are not shown to the policy, and a draft that nobody looks at is as good as none.
    """

    def to_depth(seen: Seen) -> Sequence[int]:
        d = depth(seen)
        if d == 0:
            return [0] * len(seen.survival)
        drafted = None if seen.drafted is None else tuple(min(n, d) for n in seen.drafted)
        tables = {name: getattr(seen, name)[:, :d] for name in ("confidence", "survival", "previous")}
        return policy(replace(seen, drafted=drafted, **tables))

    return to_depth


def depth_worth(cost_table: CostTable, survival: Floats) -> int:
    """The depth that `DraftDepth` recommends after one step with these survivals [R, K]."""
    num_requests, num_drafts = survival.shape
    worth = DraftDepth(num_drafts, warmup=1)
    worth.learn(survival, np.full(num_requests, num_drafts), cost_table)
    return worth.choose(0, num_requests, num_drafts, cost_table)


def drafting_until(stop: Callable[[Seen, int], bool], policy: Policy) -> Policy:
    """Drafts position by position and stops once `stop(what was drafted, depth)`; the policy decides on the rest.

    A draft that nobody looks at is as good as none: undrafted survivals are shown as 0, and never admitted.
    """

    def drafted(seen: Seen) -> Sequence[int]:
        num_drafts = seen.survival.shape[1]
        for depth in range(1, num_drafts + 1):
            known = np.arange(num_drafts) < depth
            part = replace(seen, survival=seen.survival * known, confidence=seen.confidence * known)
            if depth == num_drafts or stop(part, depth):
                break
        return [min(n, depth) for n in policy(part)]

    return drafted


def safe_drafting(cost_table: CostTable, rule: BudgetRule = "lookahead") -> Policy:
    """`budget_policy` that stops to draft only when nothing undrafted could change the allocation. Lossless.

    When that is, `pruning.settled` says, to the engine too.
    """

    def stop(part: Seen, depth: int) -> bool:
        return settled(part.survival, depth, _budget(part, cost_table, rule) - (rule == "stale"))

    return drafting_until(stop, budget_policy(cost_table, rule))
