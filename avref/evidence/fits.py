"""Fits on a trace: labelled drafts, the online estimator run over them, and predictions on answers it has not seen.

The estimator is `avref.estimator.OnlineAcceptanceEstimator` itself. Its round sums take one row per graded draft, NaN
at the other positions, which it leaves out: so a label may be that of the drawn draft x, which goes with features of x
too (`traces.verdicts`), and the same labels serve every feature.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch

from avref.estimator import OnlineAcceptanceEstimator
from avref.evidence import traces
from avref.evidence.resampling import Floats, ScoreSums
from avref.evidence.trace_file import Array, Trace

MOVES = 1e-4  # a fit stands still when no coefficient moves more in a round


@dataclass(frozen=True, eq=False)
class Drafts:
    """Graded drafts, one entry each: the trace's row, position (from 0), answer, and whether it was accepted."""

    row: Array
    position: Array
    answer: Array
    label: Array
    num_positions: int
    num_answers: int

    def __len__(self) -> int:
        return len(self.row)

    def where(self, mask: Array) -> Drafts:
        """Those at which `mask` [M] holds (or those at some indices, which may repeat)."""
        columns: dict[str, Any] = {n: getattr(self, n)[mask] for n in ("row", "position", "answer", "label")}
        return replace(self, **columns)

    def of(self, answers: Array) -> Drafts:
        """Those of some answers."""
        return self.where(np.isin(self.answer, answers))

    def drawn(self, weights: Floats) -> Drafts:
        """Those of a resample: each draft as often as its answer was drawn, weights [A]."""
        return self.where(np.repeat(np.arange(len(self)), weights[self.answer].astype(np.int64)))

    def scores(self, probabilities: Array) -> ScoreSums:
        return ScoreSums(self.label, probabilities, self.answer, self.num_answers)

    @cached_property
    def counts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(num_accepted, num_verified) [M], as `observe` wants them."""
        return torch.from_numpy(self.position + self.label), torch.from_numpy(self.position + 1)


def draw(trace: Trace, seed: int = 0) -> Drafts:
    """One draw of the verdicts on every block of a trace, verified in full."""
    accepted, graded = traces.verdicts(trace, seed)
    row, position = graded.nonzero()
    label = accepted[graded].astype(np.int64)
    return Drafts(row, position, trace.answer[row], label, trace.num_positions, len(trace.num_tokens))


def halves(trace: Trace) -> tuple[Array, Array]:
    """Answers to fit on, and the held-out ones: the first and the second half of each workload's prompts.

    All answers to a prompt are on one side; a workload with one prompt is cut between its answers. Raises ValueError
    when a side would be empty.
    """
    first: list[int] = []
    for workload in np.unique(trace.workload):
        own = np.flatnonzero(trace.workload == workload)
        prompts = np.unique(trace.prompt[own])
        early = trace.prompt[own] < prompts[len(prompts) // 2] if len(prompts) > 1 else np.arange(len(own)) % 2 == 0
        first += own[early].tolist()
    second = np.setdiff1d(np.arange(len(trace.num_tokens)), first)
    if not len(first) or not len(second):
        raise ValueError(f"this trace has {len(trace.num_tokens)} answer(s), too few to fit on one half and judge on")
    return np.array(sorted(first)), second


def matrix(values: Array, drafts: Drafts) -> torch.Tensor:
    """Features [M, K] for the estimator: each draft's own at its position, NaN elsewhere. values [N, K] or [M]."""
    own = values if values.ndim == 1 else values[drafts.row, drafts.position]
    out = np.full((len(drafts), drafts.num_positions), np.nan)
    out[np.arange(len(drafts)), drafts.position] = own
    return torch.from_numpy(out)


def fit(
    values: Array, drafts: Drafts, *, start: OnlineAcceptanceEstimator | None = None, rounds: int = 60, **settings: Any
) -> OnlineAcceptanceEstimator:
    """The online estimator, shown all of `drafts` as one round, over and over until it stands still.

    That is where serving would take it if the traffic stayed as it is. values: a feature [N, K]. start: go on from a
    fit's coefficients instead of the cold start.
    """
    if start is not None:
        settings |= {"slope": start.slope, "intercept": start.intercepts, "shared_slope": start.shared_slope}
    estimator = OnlineAcceptanceEstimator(drafts.num_positions, **settings)
    f = matrix(values, drafts)
    for _ in range(rounds):
        before = torch.cat((estimator.slope.reshape(-1), estimator.intercepts))
        estimator.observe(f, *drafts.counts)
        estimator.refit()
        if float((torch.cat((estimator.slope.reshape(-1), estimator.intercepts)) - before).abs().max()) < MOVES:
            break
    return estimator


def predict(estimator: OnlineAcceptanceEstimator, values: Array, drafts: Drafts) -> Floats:
    """Confidence of each draft, [M]."""
    c = estimator.predict(matrix(values, drafts)).double().numpy()
    return cast(Floats, c[np.arange(len(drafts)), drafts.position])


@dataclass(frozen=True, eq=False)
class Online:
    """A run of the estimator along a trace: what it predicted before each verdict, and its coefficients by round."""

    predictions: Floats  # [M], in the order of the drafts
    slopes: Floats  # [rounds + 1]
    intercepts: Floats  # [rounds + 1, K]


def online(
    values: Array, drafts: Drafts, turn: Array, blocks_per_round: int, estimator: OnlineAcceptanceEstimator
) -> Online:
    """Serve the drafts in the order of `turn` [M] (whose blocks are numbered from 0), refitting after every round.

    The sums of a round do not depend on how it is cut into steps: one call stands for all of its steps.
    """
    predictions = np.empty(len(drafts))
    history = [(estimator.slope, estimator.intercepts)]
    for first in range(0, int(turn.max(initial=0)) + 1, blocks_per_round):
        own = np.flatnonzero((turn >= first) & (turn < first + blocks_per_round))
        part = drafts.where(own)
        predictions[own] = predict(estimator, values, part)
        estimator.observe(matrix(values, part), *part.counts)
        estimator.refit()
        history.append((estimator.slope, estimator.intercepts))
    slopes, intercepts = (torch.stack(column).numpy() for column in zip(*history, strict=True))
    return Online(predictions, slopes, intercepts)


def serving_order(trace: Trace, drafts: Drafts) -> Array:
    """Number of each draft's block, [M], when all answers are decoded side by side: by offset, then by answer."""
    rows = np.unique(drafts.row)
    ranked = rows[np.lexsort((trace.answer[rows], trace.offset[rows]))]
    number = np.zeros(len(trace), dtype=np.int64)
    number[ranked] = np.arange(len(rows))
    return np.asarray(number[drafts.row])
