"""Prompt lookup: what followed the last tokens when they occurred before (Saxena 2023, prompt lookup decoding).

The longest suffix of the request's text (prompt and answer, pending token included) that occurred earlier, of length 3
down to 1, is taken at its most recent occurrence; the tokens behind it are the drafts. They end where the text ends,
and a request without a match gets none. There is no model: drafts cost no forward, and q is one-hot.

So no feature can be read from q. The confidence is the record of past drafts instead: by match length n and position k,

    c[n, k] = (accepted[n, k] + 1) / (graded[n, k] + 2),

the posterior mean of an acceptance probability that was uniform on [0, 1] before any verdict (Laplace's rule). Only
graded drafts count, as everywhere: the accepted ones and the first rejected one, never a trimmed one. Text and verdicts
are all from before this step's drafts, and the drafts are a function of the text, so a decision by c keeps the law.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from avref.config import SpeculativeConfig
from avref.drafters.base import DraftProposal, Enough
from avref.layout import Layout

if TYPE_CHECKING:
    from avref.llm import LLM

LONGEST, SHORTEST = 3, 1  # lengths n of the suffixes looked up, in tokens
PRIOR_ACCEPTED, PRIOR_GRADED = 1.0, 2.0


@dataclass
class History:
    """One request's final tokens, and where each n-gram of them ended last: O(1) per token and per look-up."""

    tokens: list[int] = field(default_factory=list)
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)

    def append(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            for n in range(SHORTEST, min(LONGEST, len(self.tokens)) + 1):
                self.ends[tuple(self.tokens[-n:])] = len(self.tokens) - 1

    def copy(self) -> History:
        return History(list(self.tokens), dict(self.ends))

    def lookup(self, pending: int, depth: int) -> tuple[int, list[int]]:
        """(match length, up to `depth` tokens that followed the match) for the text with `pending` at its end.

        `pending` is not indexed yet, so every n-gram found ended before it, and at least one token followed.
        (0, []) without a match.
        """
        suffix = (*self.tokens[-(LONGEST - 1) :], pending)
        for n in range(len(suffix), SHORTEST - 1, -1):
            end = self.ends.get(suffix[-n:])
            if end is not None:
                return n, [*self.tokens[end + 1 : end + 1 + depth], pending][:depth]
        return 0, []


class NGram:
    """Drafts from each request's own text."""

    hidden_layers: tuple[int, ...] = ()
    max_depth = 64
    has_confidence, has_logits = True, False

    def __init__(self, max_rows: int, max_length: int) -> None:
        self.max_length = max_length
        self.history = [History() for _ in range(max_rows)]
        # [rows] (match length, drafts) of the proposal that waits for its verdict
        self.proposed: list[tuple[int, int]] = [(0, 0)] * max_rows
        self.graded = np.zeros((LONGEST + 1, self.max_depth), dtype=np.int64)  # [n, K], row 0 stays empty
        self.accepted = np.zeros_like(self.graded)

    @classmethod
    def load(cls, config: SpeculativeConfig, llm: LLM, max_rows: int) -> NGram:
        return cls(max_rows, llm.max_model_len)

    def enter(self, layout: Layout, tokens: Sequence[Sequence[int]], hidden: Tensor | None) -> None:
        for row, prompt in enumerate(tokens, start=layout.first_row):
            self.history[row], self.proposed[row] = History(), (0, 0)
            self.history[row].append(prompt)

    def extend(
        self, layout: Layout, tokens: Sequence[Sequence[int]], hidden: Tensor | None, kept: Sequence[int]
    ) -> None:
        for row, (chunk, n) in enumerate(zip(tokens, kept, strict=True), start=layout.first_row):
            self.history[row].append(chunk[:n])

    def grade(self, row: int, num_accepted: int, num_verified: int) -> None:
        """Count the verdict on the row's newest proposal, once: k is graded when k <= accepted and k < verified.

        The engine gives what it gives an estimator: nothing behind a stop token counts.
        """
        (n, num_drafted), self.proposed[row] = self.proposed[row], (0, 0)
        self.graded[n, : min(num_accepted + 1, num_verified, num_drafted)] += 1
        self.accepted[n, : min(num_accepted, num_drafted)] += 1

    def propose(
        self,
        lengths: Sequence[int],
        pending: Tensor,
        depth: int,
        temperature: Tensor,
        uniforms: Tensor,
        greedy: bool,
        forced: Tensor | None = None,
        enough: Enough | None = None,
    ) -> DraftProposal:
        """Copy up to `depth` tokens for each request; nothing is drawn.

        Like a parallel drafter's, a block is made at once from the text before it: `forced` and `enough` change
        nothing. Beyond a request's drafts (`num_drafted`) tokens and confidence are 0.
        """
        tokens = np.zeros((len(lengths), depth), dtype=np.int64)  # [R, K]
        confidence = np.zeros((len(lengths), depth), dtype=np.float32)
        rate = (self.accepted + PRIOR_ACCEPTED) / (self.graded + PRIOR_GRADED)  # [n, K]
        num_drafted = []
        for row, newest in enumerate(pending.tolist()):
            assert len(self.history[row].tokens) == lengths[row]
            n, drafts = self.history[row].lookup(newest, depth)
            tokens[row, : len(drafts)] = drafts
            confidence[row, : len(drafts)] = rate[n, : len(drafts)]
            num_drafted.append(len(drafts))
            self.proposed[row] = n, len(drafts)
        ids = torch.from_numpy(tokens).to(pending.device, non_blocking=True)
        return DraftProposal(
            ids,
            ids,
            logits=None,
            q=None,
            q_drawn=torch.ones(ids.shape, device=ids.device),
            confidence=torch.from_numpy(confidence).to(ids.device, non_blocking=True),
            num_drafted=num_drafted,
        )

    def clear(self) -> None:
        """Forget all requests; what was learned about match lengths stays."""
        self.history = [History() for _ in self.history]
        self.proposed = [(0, 0)] * len(self.history)

    def move(self, source: int, target: int) -> None:
        self.history[target], self.proposed[target] = self.history[source].copy(), self.proposed[source]
