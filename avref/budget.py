"""The budget rule at work: how many drafts a step verifies, and what the rule keeps from step to step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from avref.cost_table import CostTable
from avref.pruning import StaleSurvival, SurvivalProfile, choose_budget, settled


class Budget:
    """B by one of the rules of `pruning`, with the memory that `lookahead` and `stale` need.

    Profiles are kept by the depth drafted: the best of 2 R slots are not those of 7 R.
    """

    def __init__(self, rule: str, num_positions: int) -> None:
        self.rule, self.num_positions = rule, num_positions
        self.profiles: defaultdict[int, SurvivalProfile] = defaultdict(SurvivalProfile)
        self.stale = StaleSurvival(num_positions)

    def choose(self, live: Tensor, capacities: Tensor, request_ids: Sequence[int], cost_table: CostTable) -> int:
        """B for this step's survivals `live` [R, depth drafted], float64 on the host.

        Everything but `live` was known before drafting: capacities [R] too. A slot that turned out empty while drafting
        has survival 0 in `live`; it must not shrink `capacities`, or the number of slots would tell on the drafts.
        """
        num_requests, depth = live.shape
        if self.rule == "stale":
            old = self.stale.gather(request_ids, capacities)[:, :depth]
            return choose_budget(old, cost_table, num_requests, rule="argmax", capacities=capacities)
        if self.rule == "retrospective":
            return choose_budget(live, cost_table, num_requests, rule="argmax", capacities=capacities)
        if self.rule == "early_stop":
            return choose_budget(live, cost_table, num_requests, rule="early_stop", capacities=capacities)
        profile = self.profiles[depth].predict(int(capacities.sum()))
        return choose_budget(live, cost_table, num_requests, rule="lookahead", profile=profile, capacities=capacities)

    def settled(
        self, live: Tensor, drafted: int, capacities: Tensor, request_ids: Sequence[int], cost_table: CostTable
    ) -> bool:
        """Whether drafting may end behind `drafted` positions: no later draft can be verified, or have a say in that.

        live [R, depth planned] is 0 behind them. Not for retrospective, which reads everything, nor for lookahead
        before its first step drafted in full: the profile would never learn what lies behind.
        """
        if self.rule == "retrospective" or (self.rule == "lookahead" and live.shape[1] not in self.profiles):
            return False
        budget = self.choose(live, capacities, request_ids, cost_table)
        return settled(live.numpy(), drafted, budget - (self.rule == "stale"), capacities)

    def record(
        self,
        live: Tensor,
        capacities: Tensor,
        drafted: Tensor,
        request_ids: Sequence[int],
        known: int | None = None,
    ) -> None:
        """Keep this step's survivals, after its budget was chosen; drafted [R] are the drafts each request got.

        known: where drafting ended early, how many of the best survivals are sure to be the best.
        """
        self.profiles[live.shape[1]].update(live, capacities, known)
        if self.rule == "stale":
            self.stale.record(request_ids, F.pad(live, (0, self.num_positions - live.shape[1])), drafted)
