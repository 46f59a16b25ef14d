"""Pruning: from confidences to how many drafts are verified, and which.

    survival   S_k = c_1 * ... * c_k, the probability that draft k is reached and accepted
    budget     B: grow while (R + sum of the B best survivals) / (draft_ms[R, K] + verify_ms[R + B]) can be improved
    allocate   the B best slots (request, position), always a prefix of each request

Three rules choose B. What each may look at decides whether the emitted law stays the target's (design: a global argmax
over this step's survivals leaks, since deeper survivals depend on the token whose fate they decide):

    argmax      the best B over the survivals given. Lossless on the previous step's (`StaleSurvival`, vLLM's rule);
                lossy on this step's, for teaching only.
    early_stop  slot by slot in order of survival, stopping at the first that does not improve the ratio (DSpark,
                arXiv 2607.05147, algorithm 1). Lossless on live survivals; stops short on cost staircases.
    lookahead   the same growth, but what lies behind the next slot is predicted from past steps (`SurvivalProfile`), so
                that a step of the staircase can be crossed. Lossless on live survivals, and the default.

Everything here is a few hundred numbers and runs on the host in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from avref.cost_table import CostTable

Floats = npt.NDArray[np.float64]
Capacities = Tensor | npt.NDArray[np.int64] | Sequence[int] | None
Rule = Literal["argmax", "early_stop", "lookahead"]

TIE = 1e-9
"""Ratios closer than this (relative) count as equal, and of equal ratios the smallest budget wins."""
MAX_SCALE = 4.0
"""How far above its past mean a whole tail may be predicted after a confident slot."""
_BLOCK_ROWS = 64


def survival(confidence: Tensor) -> Tensor:
    """Probability that each draft is reached and accepted: ``S_k = c_1 * ... * c_k`` along the last axis.

    confidence [..., K] in [0, 1] -> [..., K] of the same dtype, never rising along k: a product taken in parallel may
    rise by a rounding, hence the running minimum. Nothing is checked here (it would cost a device synchronisation);
    NaN spreads to the end of its row and `choose_budget` refuses it. Source: article, section on the budget.
    """
    return confidence.cumprod(-1).cummin(-1).values  # [..., K]


def choose_budget(
    survival: Tensor | Floats,
    cost_table: CostTable,
    num_requests: int,
    rule: Rule = "lookahead",
    profile: npt.ArrayLike | None = None,
    capacities: Capacities = None,
) -> int:
    """How many drafts to verify in this step: the B that the rule finds for tokens per millisecond,

        ratio(B) = (R + s_1 + ... + s_B) / (draft_ms[R, K] + verify_ms[R + B]),    s the survivals in descending order.

    survival [R, K], one row per running request; slots at or beyond capacities [R] (default: K) do not exist. B is at
    most the number of slots, and R + B at most the tokens the cost table knows. profile, for ``lookahead``: predicted
    survivals by rank, descending, one for every slot at least; without one (None: no step seen yet) nothing is known
    about the tail and the rule is early_stop. With no requests B is 0. Raises ValueError for NaN or values outside
    [0, 1], a row that rises, a wrong shape, an unknown rule, and batch shapes outside the cost table.

    ``lookahead``, with B slots admitted, A = R + s_1 + ... + s_B, and the next survival s = s_{B+1}: the slots behind
    it are predicted as t_j = min(s, m_j * min(s / m_{B+1}, 4)), m the profile; the next slot is admitted when some end
    e > B has (A + s + t_{B+2} + ... + t_e) / step_ms(R + e) above ratio(B). It reads no live survival beyond s, which
    depends on admitted tokens only.
    """
    choose = _RULES.get(rule)
    if choose is None:
        raise ValueError(f"unknown budget rule {rule!r}: choose one of {', '.join(_RULES)}")
    values, live = _checked(survival, capacities)
    if len(values) != num_requests:
        raise ValueError(f"survival has {len(values)} rows for {num_requests} requests: give one row for each")
    if num_requests == 0:
        return 0
    best = np.sort(values[live])[::-1]  # [N], descending
    best = best[: max(0, cost_table.token_limit(num_requests) - num_requests)]
    tokens = np.arange(num_requests, num_requests + len(best) + 1)
    cost = cost_table.step_ms(num_requests, tokens, depth=values.shape[1])  # [N+1] by B
    expected = num_requests + np.concatenate([[0.0], best.cumsum()])  # [N+1] tokens emitted, by B
    tail = None if profile is None else _checked_profile(profile, len(best))
    return choose(best, expected, cost, tail)


def allocate(survival: Tensor | Floats, budget: int, capacities: Capacities = None) -> Tensor:
    """Number of drafts to verify for every request: the ``budget`` best slots, a prefix of each request.

    survival [R, K] -> admitted [R] int64 on the survival's device, admitted[r] <= capacities[r] and their sum
    min(budget, number of slots). Ties go to the smaller position, then to the smaller request, never by token: with
    c = 1 in float32 a tie decided by anything else could depend on the drafts. Raises as `choose_budget` does, and for
    a negative budget.
    """
    if budget < 0:
        raise ValueError(f"budget must be 0 or more, got {budget}")
    values, live = _checked(survival, capacities)
    keys = np.where(live, values, -1.0).T.reshape(-1)  # [K*R], position by position
    winners = np.argsort(-keys, kind="stable")[: min(budget, int(live.sum()))]
    admitted = np.bincount(winners % max(1, len(values)), minlength=len(values))  # [R]
    device = survival.device if isinstance(survival, Tensor) else None
    return torch.as_tensor(admitted, dtype=torch.int64, device=device)


def settled(survival: Floats, drafted: int, last_read: int, capacities: Capacities = None) -> bool:
    """Whether drafting may end behind the first `drafted` positions without any effect on what is verified.

    survival [R, K], whatever stands in it behind `drafted`. An undrafted slot's survival is at most the last drafted
    one of its request, and of equal slots the deeper comes later. So the best `last_read` + 1 slots stay the best ones,
    in the same order, if the last of them is not below any of these bounds: then a rule that reads no further must
    decide as if all had been drafted. With a budget B the growth rules read the slot that they refuse too, rank B
    (from 0); a budget known before drafting only needs its own slots, the last of rank B - 1. Source: design, section
    4.
    """
    exists = _live(survival.shape, capacities)
    undrafted = exists[:, drafted:].any(axis=1)  # [R]
    bound = survival[undrafted, drafted - 1].max(initial=0.0)
    best = np.sort(survival[:, :drafted][exists[:, :drafted]])[::-1]
    return not undrafted.any() or last_read < 0 or (last_read < len(best) and bool(best[last_read] >= bound))


def _argmax(best: Floats, expected: Floats, cost: Floats, tail: Floats | None) -> int:
    ratio = expected / cost
    return int(np.argmax(ratio >= ratio.max() * (1 - TIE)))


def _early_stop(best: Floats, expected: Floats, cost: Floats, tail: Floats | None) -> int:
    ratio = expected / cost
    return _first(ratio[1:] <= ratio[:-1] * (1 + TIE))


def _lookahead(best: Floats, expected: Floats, cost: Floats, tail: Floats | None) -> int:
    """A table of gains, one row per B and one column per end e; B is the first row without a positive entry.

    The profile falls, so t_j = m_j * min(s / m_{B+1}, 4) already is at most s, and with M the profile's running sum

        gain(B, e) = A + s + min(s / m_{B+1}, 4) * (M_e - M_{B+1}) - ratio(B) * step_ms(R + e)

    counts the tokens won over what the present ratio emits in that time. Rows are made in blocks: most steps stop soon.
    """
    if tail is None:
        return _early_stop(best, expected, cost, tail)
    num_slots = len(best)
    present = expected[:-1] / cost[:-1] * (1 + TIE)  # [N] by B
    running = np.concatenate([[0.0], tail.cumsum()])  # [N+1] M
    scale = np.minimum(best, MAX_SCALE * tail) / np.where(tail > 0, tail, 1.0)  # [N] by B; a profile of 0 predicts 0
    by_row = np.stack([expected[1:] - scale * running[1:], scale, -present], axis=1)  # [N, 3]
    by_end = np.stack([np.ones(num_slots), running[1:], cost[1:]])  # [3, N]
    for start in range(0, num_slots, _BLOCK_ROWS):
        gain = by_row[start : start + _BLOCK_ROWS] @ by_end[:, start:]  # [n, N-start]
        gain[:, : len(gain)][np.tri(len(gain), k=-1, dtype=bool)] = -np.inf  # ends at or before B do not exist
        stops = gain.max(axis=1) <= 0
        if stops.any():
            return start + _first(stops)
    return num_slots


_RULES: dict[str, Callable[[Floats, Floats, Floats, Floats | None], int]] = {
    "argmax": _argmax,
    "early_stop": _early_stop,
    "lookahead": _lookahead,
}


def _first(flags: npt.NDArray[np.bool_]) -> int:
    """Index of the first True, or the length when there is none."""
    return int(flags.argmax()) if flags.any() else len(flags)


def _checked(survival: Tensor | Floats, capacities: Capacities) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Survivals in float64 [R, K] on the host, and which slots exist [R, K]."""
    if isinstance(survival, Tensor):
        survival = survival.detach().to("cpu", torch.float64).numpy()
    values = np.asarray(survival, dtype=np.float64)
    if values.ndim != 2:
        raise ValueError(f"survival must have shape [R, K], got {values.shape}")
    live = _live(values.shape, capacities)
    known = np.where(live, values, 0.0)
    if not ((known >= 0) & (known <= 1)).all():
        wrong = known[~((known >= 0) & (known <= 1))][0]
        raise ValueError(f"survival must lie in [0, 1], got {wrong}: look for NaN in the draft logits")
    if (known[:, 1:] > known[:, :-1]).any():
        raise ValueError("survival rises along a request: pass avref.survival(confidence), not the confidence itself")
    return values, live


def _live(shape: tuple[int, ...], capacities: Capacities) -> npt.NDArray[np.bool_]:
    num_requests, num_positions = shape
    if capacities is None:
        return np.ones(shape, dtype=bool)
    limits = np.asarray(capacities.cpu() if isinstance(capacities, Tensor) else capacities)
    if limits.shape != (num_requests,) or (limits.size and (limits.min() < 0 or limits.max() > num_positions)):
        raise ValueError(f"capacities must be {num_requests} numbers from 0 to {num_positions}, got {limits.tolist()}")
    return np.arange(num_positions) < limits[:, None]


def _checked_profile(profile: npt.ArrayLike, num_slots: int) -> Floats:
    tail = np.asarray(profile, dtype=np.float64)
    if tail.ndim != 1 or len(tail) < num_slots:
        raise ValueError(f"profile needs one predicted survival for each of {num_slots} slots, got shape {tail.shape}")
    tail = tail[:num_slots]
    if not ((tail >= 0) & (tail <= 1)).all() or (np.diff(tail) > 0).any():
        raise ValueError("profile must hold survivals in [0, 1], descending, as SurvivalProfile.predict gives them")
    return tail


class SurvivalProfile:
    """Running mean of the j-th best survival of past steps, kept over relative ranks j / (number of slots).

    Over relative ranks, so that it carries over when requests come and go: ``m <- m + rate * (this step - m)``.
    """

    _grid = (np.arange(512) + 0.5) / 512

    def __init__(self, *, rate: float = 0.05) -> None:
        if not 0 < rate <= 1:
            raise ValueError(f"rate must be above 0 and at most 1, got {rate}")
        self.rate = rate
        self._mean: Floats | None = None  # [512], descending

    def update(self, survival: Tensor | Floats, capacities: Capacities = None, known: int | None = None) -> None:
        """Take in one step's survivals [R, K], after its budget was chosen; a step without slots teaches nothing.

        known: only so many of the best are (drafting ended); the others are taken as lookahead predicts them.
        """
        values, live = _checked(survival, capacities)
        best = np.sort(values[live])[::-1]
        if len(best) == 0:
            return
        tail = self.predict(len(best))
        if known is not None and tail is not None:
            scale = min(best[known - 1] / tail[known - 1], MAX_SCALE) if tail[known - 1] > 0 else 0.0
            best = np.append(best[:known], np.minimum(scale * tail[known:], best[known - 1]))
        seen = np.interp(self._grid, _ranks(len(best)), best)
        self._mean = seen if self._mean is None else self._mean + self.rate * (seen - self._mean)

    def predict(self, num_slots: int) -> Floats | None:
        """Predicted survivals of so many slots, descending [num_slots]; None before the first update."""
        if self._mean is None:
            return None
        predicted = np.interp(_ranks(num_slots), self._grid, self._mean)
        return np.minimum.accumulate(np.clip(predicted, 0.0, 1.0))


def _ranks(num_slots: int) -> Floats:
    return (np.arange(num_slots) + 0.5) / max(1, num_slots)


class StaleSurvival:
    """The previous step's survivals, request by request, for choosing a budget that this step's drafts cannot sway.

    A request's old survivals travel with it, whatever its row. What is missing is a constant known before drafting:
    1 for a request that is new, the running mean of that position where the request did not draft it last time; never
    the live value. Source: vllm/v1/worker/gpu/spec_decode/adaptive_verification.py, row by row as in the design.
    """

    def __init__(self, num_positions: int, *, rate: float = 0.05) -> None:
        if num_positions < 1:
            raise ValueError(f"num_positions must be 1 or more, got {num_positions}")
        self.num_positions = num_positions
        self.rate = rate
        self._old: dict[object, Floats] = {}  # request id -> [K], NaN where nothing was drafted
        self._mean = np.full(num_positions, np.nan)  # [K], NaN before the first draft at that position

    def gather(self, request_ids: Sequence[object], capacities: Capacities = None) -> Tensor:
        """Old survivals of these requests, float64 [R, K] on the host; 0 past capacities, known before drafting."""
        fallback = np.where(np.isnan(self._mean), 1.0, self._mean)  # [K]
        rows = [self._old.get(request_id, np.ones(self.num_positions)) for request_id in request_ids]
        values = np.array(rows).reshape(-1, self.num_positions)  # [R, K]
        values = np.minimum.accumulate(np.where(np.isnan(values), fallback, values), axis=1)
        return torch.from_numpy(np.where(_live(values.shape, capacities), values, 0.0))

    def record(self, request_ids: Sequence[object], survival: Tensor | Floats, drafted: Capacities = None) -> None:
        """Keep this step's survivals [R, K] of the positions drafted [R]; requests not named here have left."""
        values, live = _checked(survival, drafted)
        if values.shape != (len(request_ids), self.num_positions):
            raise ValueError(f"survival must have shape {(len(request_ids), self.num_positions)}, got {values.shape}")
        values = np.where(live, values, np.nan)
        self._old = dict(zip(request_ids, values, strict=True))
        counts = live.sum(axis=0)  # [K]
        now = np.where(live, values, 0.0).sum(axis=0) / np.maximum(1, counts)
        moved = np.where(np.isnan(self._mean), now, self._mean + self.rate * (now - self._mean))
        self._mean = np.where(counts > 0, moved, self._mean)
