"""How deep to draft, 0 included: fixed before drafting, from past steps only.

Adaptive verification still pays for drafts that it then trims. So before a step of R requests drafts, it asks which
depth d promises the most tokens per millisecond,

    R a_d / (draft_ms[R, e_d] + verify_ms[R + R b_d]),        d = 0, 1, ..., K        (a_0 = 1, b_0 = 0: no drafting)

with a_d the tokens that a step drafted to depth d emits per request, b_d the drafts it verifies per request, and e_d
the positions it really drafts: a token-by-token drafter ends the block once nothing deeper can be verified
(`pruning.settled`); for others e_d = d. All are running means over past steps. A step drafted to depth D tells about
every d <= D: cut its survivals S at d, then

    B_d = argmax over B of (R + sum of the B best) / (draft_ms[R, d] + verify_ms[R + B])
    A_d = R + sum of the B_d best

and a_d, b_d, e_d move towards A_d / R, B_d / R and where the block could end. This argmax looks back at survivals of
drafts whose fate is settled. Nothing about the present step's drafts is read, so the choice cannot bias them, and the
emitted law stays the target's (a depth that depends on the drafts themselves does bias it:
`exact.aggregate_early_stop`).

What a draft is worth depends on the load: with more requests each is worth verifying less often. So the means are kept
by powers of two of R, and a change of R does not have to be learned anew.

A step drafted to depth d says nothing about deeper ones. So the first steps at a load are drafted in full, later every
16th, every 64th while not drafting is best, and more seldom where drafting is dear: drafting for it costs at most 2 %
of the time (verifying what such a step admits is not counted). While not drafting is best, those steps are the probes
too: a probe of its own would draft in full for a drafter that is not worth it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from avref.cost_table import CostTable

Floats = npt.NDArray[np.float64]

EXPLORE_EVERY, EXPLORE_IDLE = 16, 64
"""Every so many steps (idle: while not drafting is best), or a multiple of it, one is drafted in full: it keeps a_d and
b_d of deeper d up to date."""
EXACT = 0.02
"""Rates that differ by less count as equal, and the smaller depth wins: no cost table is more exact."""
EXPLORE_SHARE = 0.02
"""Most of the time that this may cost, by the cost table."""


class Worth:
    """Running means at one load, by depth 0 .. K: what `DraftDepth` knows."""

    def __init__(self, num_positions: int) -> None:
        self.tokens = np.ones(num_positions + 1)  # a_d
        self.verified = np.zeros(num_positions + 1)  # b_d
        self.drafted = np.arange(num_positions + 1.0)  # e_d
        self.seen = np.zeros(num_positions + 1, dtype=np.int64)  # steps behind them


class DraftDepth:
    """What each depth is worth at each load, and the depth that this recommends.

    `rate` is that of the means (the first few steps are averaged evenly); `warmup` full steps come before the first
    choice; `probe_interval` takes the place of EXPLORE_IDLE unless it is 0, so that idle looks fall on probes.
    """

    def __init__(self, num_positions: int, *, rate: float = 0.1, warmup: int = 8, probe_interval: int = 0) -> None:
        self.rate, self.warmup, self.idle = rate, warmup, probe_interval or EXPLORE_IDLE
        self._worth: defaultdict[int, Worth] = defaultdict(partial(Worth, num_positions))
        self.in_full = True  # whether the depth chosen last is for learning, and the block must not end early

    def worth(self, num_requests: int) -> Worth:
        """What was learned from steps of so many requests, or others up to the same power of two."""
        return self._worth[(num_requests - 1).bit_length()]

    def choose(self, step: int, num_requests: int, deepest: int, cost_table: CostTable) -> int:
        """Depth for a step that may draft up to `deepest` positions; `step` counts decode steps from 0."""
        self.in_full, now = True, self.worth(num_requests)
        if deepest == 0 or now.seen[deepest] < self.warmup:
            return deepest
        full_ms = draft_ms(cost_table, num_requests, deepest)
        depths = slice(0, deepest + 1)
        packed = num_requests * (1.0 + now.verified[depths])  # [deepest+1] tokens, seldom a whole number
        packed = np.minimum(packed, cost_table.token_limit(num_requests))
        below, above = np.floor(packed).astype(int), np.ceil(packed).astype(int)
        low, high = cost_table.verify(num_requests, below), cost_table.verify(num_requests, above)
        verify_ms = low + (packed - below) * (high - low)
        drafting_ms = np.interp(now.drafted[depths], np.arange(deepest + 1), full_ms)
        rates = num_requests * now.tokens[depths] / (drafting_ms + verify_ms)
        best = int(np.argmax(rates >= (1 - EXACT) * rates.max()))  # of those as good, the smallest depth
        seldom = EXPLORE_EVERY if best else self.idle
        every = seldom * max(1, math.ceil(full_ms[-1] / low[0] / (EXPLORE_SHARE * seldom)))
        self.in_full = step % every == every - 1
        return deepest if self.in_full else best

    def learn(
        self, survival: Floats, capacities: npt.NDArray[np.int64], cost_table: CostTable, ended_at: int | None = None
    ) -> None:
        """Take in the survivals [R, D] of a step of depth D; slots at or past capacities [R] did not exist.

        ended_at: the position behind which drafting could end (default D); survivals behind it may be unknown, and 0.
        """
        num_requests, deepest = survival.shape
        if deepest == 0:
            return
        exists = np.arange(deepest) < capacities[:, None]  # [R, D]
        values, position = survival[exists], exists.nonzero()[1]  # [N]
        order = np.argsort(-values)
        kept = position[order] < np.arange(1, deepest + 1)[:, None]  # [D, N] whether slot n lies within depth d
        budgets = _from_zero(kept)  # [D, N+1]
        expected = num_requests + _from_zero(kept * values[order])  # [D, N+1] tokens emitted, by slots gone through
        limit = cost_table.token_limit(num_requests) - num_requests
        verify_ms = cost_table.verify(num_requests, num_requests + np.arange(min(limit, len(values)) + 1))
        step_ms = draft_ms(cost_table, num_requests, deepest)[1:, None] + verify_ms[np.minimum(budgets, limit)]
        best = np.where(budgets <= limit, expected / step_ms, 0.0).argmax(axis=1)[:, None]  # [D, 1]
        emitted = np.take_along_axis(expected, best, axis=1)[:, 0]  # [D] A_d
        verified = np.take_along_axis(budgets, best, axis=1)[:, 0]  # [D] B_d
        now, depths = self.worth(num_requests), slice(1, deepest + 1)
        now.seen[depths] += 1
        rate = np.maximum(self.rate, 1.0 / now.seen[depths])
        now.tokens[depths] += rate * (emitted / num_requests - now.tokens[depths])
        now.verified[depths] += rate * (verified / num_requests - now.verified[depths])
        now.drafted[depths] += rate * (np.minimum(np.arange(1, deepest + 1), ended_at or deepest) - now.drafted[depths])


def draft_ms(cost_table: CostTable, num_requests: int, deepest: int) -> Floats:
    """Milliseconds to draft 0, 1, ..., `deepest` tokens for every request; nothing for 0, whatever the table holds."""
    return np.array([0.0, *(cost_table.draft(num_requests, depth) for depth in range(1, deepest + 1))])


def _from_zero(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Running sums along the last axis, with the empty sum in front: [D, N] -> [D, N+1]."""
    return np.pad(values.cumsum(axis=-1), ((0, 0), (1, 0)))
