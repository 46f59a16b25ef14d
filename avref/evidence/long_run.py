"""The long-run objective: expected tokens minus a rate times the cost, against the ratio that the engine maximises.

Tokens per second over a long run is a ratio of means, so the budget of a step might be chosen by

    B = argmax over B of    sum of the B best survivals - rate * step_ms(R + B)    rate: tokens per ms in the long run

instead of by the step's own ratio. It is optimal where the state of a step (how hard its drafts are) does not depend
on what earlier steps did: then the long run is a renewal process, whose rate that B maximises (Dinkelbach 1967).
Where difficulty belongs to the tokens it is not. A stretch of text of n tokens has to be got through whatever happens,
at n / (tokens per ms there), so each stretch wants its own ratio. A rate from the whole run then verifies too much in
easy text, and too little in hard text, where it may give up drafts that pay.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from avref.budget import Budget
from avref.cost_table import CostTable
from avref.evidence.resampling import Floats


def growth(best: Floats, cost: Floats, tail: Floats, rate: float) -> int:
    """B slot by slot, looking ahead as `pruning.choose_budget` does, for tokens - rate * ms.

    best [N] live survivals, descending; cost [N+1] ms by B; tail [N] predicted survivals by rank. With B slots
    admitted, the slots behind the next are predicted as t_j = m_j * min(s / m_{B+1}, 4); the next one is admitted when
    some end e has s + t_{B+2} + ... + t_e above rate * (cost_e - cost_B). Like there, only s is read of the live ones.
    """
    running = np.concatenate([[0.0], tail.cumsum()])
    for b in range(len(best)):
        scale = min(best[b] / tail[b], 4.0) if tail[b] > 0 else 0.0
        tokens = best[b] + scale * (running[b + 1 :] - running[b + 1])
        if (tokens - rate * (cost[b + 1 :] - cost[b])).max() <= 1e-12:
            return b
    return len(best)


class LongRunBudget(Budget):
    """A budget for tokens - rate * ms, the rate a running mean of what past steps were expected to emit per ms.

    Before the first step there is no rate, and it is the look-ahead rule. For replays: the engine keeps the ratio.
    """

    def __init__(self, num_positions: int) -> None:
        super().__init__("lookahead", num_positions)
        self.steps = 0
        self.tokens = self.ms = 0.0  # running means of a step

    def choose(self, live: Tensor, capacities: Tensor, request_ids: Sequence[int], cost_table: CostTable) -> int:
        num_requests, depth = live.shape
        exists = np.arange(depth) < capacities.numpy()[:, None]
        best = np.sort(live.numpy()[exists])[::-1][: cost_table.token_limit(num_requests) - num_requests]
        cost = cost_table.step_ms(num_requests, num_requests + np.arange(len(best) + 1), depth)
        tail = self.profiles[depth].predict(int(capacities.sum()))
        if self.ms and tail is not None:
            budget = growth(best, cost, tail[: len(best)], self.tokens / self.ms)
        else:
            budget = super().choose(live, capacities, request_ids, cost_table)
        self.steps += 1
        weight = max(0.02, 1 / self.steps)
        self.tokens += weight * (num_requests + best[:budget].sum() - self.tokens)
        self.ms += weight * (cost[budget] - self.ms)
        return budget


# ---- worked out exactly ----
def example() -> dict[str, Any]:
    """R = 1, K = 7, a step of B drafts costs 1 + .312 B; a block's drafts are all easy (c = .985) or all hard (.5).

    "steps": 59 % of the steps are easy, whatever was done before. "tokens": 59 % of the tokens are, in stretches much
    longer than a block. Both with the budgets (easy, hard) and the long-run rate of the ratio, of tokens - rate * cost
    at the rate that the ratio reaches, and of the best pair of budgets there is.
    """
    b, share = np.arange(8), np.array([0.59, 0.41])
    tokens = np.stack([(1 - c ** (b + 1)) / (1 - c) for c in (0.985, 0.5)])  # [2, K+1]: 1 + c + ... + c^B
    cost = 1 + 0.312 * b

    def rate(case: str, budgets: Sequence[int]) -> float:
        emitted, ms = tokens[[0, 1], list(budgets)], cost[list(budgets)]
        return float(share @ emitted / (share @ ms) if case == "steps" else 1 / (share @ (ms / emitted)))

    found: dict[str, Any] = {}
    for case in ("steps", "tokens"):
        ratio = tuple(int(x) for x in (tokens / cost).argmax(axis=1))
        reached = rate(case, ratio)
        linear = tuple(int(x) for x in (tokens - reached * cost).argmax(axis=1))
        best = max(itertools.product(b.tolist(), repeat=2), key=lambda pair: rate(case, pair))
        found[case] = {
            name: {"budgets": budgets, "rate": rate(case, budgets), "to_ratio": rate(case, budgets) / reached}
            for name, budgets in (("ratio", ratio), ("long run", linear), ("best", best))
        }
    return found
