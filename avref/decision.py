"""One step's decision: from the drafts, as they come, to how many of each request are verified.

Confidence, survival, budget, allocation; a stopping rule ends at confidence. A drafter that works token by token asks
after every position whether it is `enough`: then no later draft can be verified, and the block ends, for all requests.
A parallel drafter's block is read at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from avref.budget import Budget
from avref.confidence import Confidence
from avref.cost_table import CostTable
from avref.depth import DraftDepth
from avref.drafters.base import DraftProposal
from avref.pruning import allocate, survival


@dataclass
class Decision:
    """Made before drafting, fed while drafting, asked for its verdict by `admit`.

    `may_end` says whether the block may end early. `features` [R, K] are for the estimator to observe.
    """

    source: Confidence
    budget: Budget | None  # None for a stopping rule
    depth: DraftDepth | None
    cost_table: CostTable | None
    capacities: Tensor  # [R] known before drafting, on the host
    request_ids: Sequence[int]
    temperature: Tensor  # [R]
    may_end: bool
    features: Tensor | None = None  # [R, K]
    confidence: Tensor | None = None  # [R, K], 0 where nothing is drafted
    num_read: int = 0  # positions
    settled_at: int | None = None  # the first of these after which no later draft mattered

    def read(self, proposal: DraftProposal) -> None:
        """Features and confidence of a block, or of its next position."""
        features, confidence = self.source.read(proposal, self.temperature, self.num_read)
        self.features = features if self.features is None or features is None else self.features + features
        self.confidence = confidence if self.confidence is None else self.confidence + confidence
        self.num_read += proposal.tokens.shape[1]

    def enough(self, position: DraftProposal) -> bool:
        """Take in the position just drafted; whether the block ends here."""
        self.read(position)
        if self.settled_at is None and self._settled():
            self.settled_at = self.num_read
        return self.may_end and self.settled_at is not None

    def admit(self, found: Sequence[int]) -> list[int]:
        """Drafts to verify [R], of the `found` [R]; what is kept for later steps is updated."""
        if self.budget is None:
            return [min(n, d) for n, d in zip(self._sure().tolist(), found, strict=True)]
        assert self.cost_table is not None
        drafted = torch.tensor(found, device="cpu")
        live = self._live(drafted)
        budget = self.budget.choose(live, self.capacities, self.request_ids, self.cost_table)
        admitted = allocate(live, budget, drafted).tolist()
        ended = self.may_end and self.settled_at is not None and self.settled_at < live.shape[1]
        self.budget.record(live, self.capacities, drafted, self.request_ids, budget + 1 if ended else None)
        if self.depth is not None:
            ended_at = self.settled_at or self.num_read
            self.depth.learn(live.numpy(), self.capacities.numpy(), self.cost_table, ended_at)
        return admitted

    def _settled(self) -> bool:
        open_rows = self.capacities > self.num_read
        if self.budget is None:
            return not bool((open_rows & (self._sure().cpu() >= self.num_read)).any())
        assert self.cost_table is not None
        live = self._live(self.capacities.clamp(max=self.num_read))
        return self.budget.settled(live, self.num_read, self.capacities, self.request_ids, self.cost_table)

    def _sure(self) -> Tensor:
        """Drafts [R] in front of the first that the stopping rule refuses."""
        assert self.confidence is not None
        return self.source.stop(self.confidence)

    def _live(self, drafted: Tensor) -> Tensor:
        """This step's survivals [R, depth planned], float64 on the host; an empty slot is never accepted."""
        assert self.confidence is not None
        live = survival(self.confidence)[:, : int(self.capacities.max())].double().cpu()
        return live.masked_fill(torch.arange(live.shape[1], device="cpu") >= drafted[:, None], 0.0)
