"""Measuring an arm by replay: tokens and milliseconds by answer, so that speeds can be resampled over answers.

A busy server's requests stand anywhere in their answers. So the first requests of a run start at random offsets; the
later ones at the beginning, as they enter where others end. With few requests, a run of some hundred steps would see a
few answers only; there a request leaves after `WINDOW` tokens, and every request starts at a random offset.

Arms are compared on the same luck: with one seed, the i-th request of a run goes through the same answer from the same
offset, and the drafts there meet the same fate, whatever the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from avref.cost_table import CostTable
from avref.evidence.replay import Outcome, Policy, Replay
from avref.evidence.resampling import Floats, ratio
from avref.evidence.trace_file import Array, Trace

WARMUP_STEPS = 32
WINDOW, FEW = 48, 4  # tokens; requests up to which windows are used
FATES = 8  # draws of what becomes of every draft; requests take them in turn


@dataclass(frozen=True, eq=False)
class Measured:
    """One arm at one number of requests: what was counted, and the sums by answer."""

    outcome: Outcome
    num_requests: int
    tokens: Floats  # [A] decoded
    ms: Floats  # [A] of the steps in which the answer ran
    trimmed: Floats  # [A, K] times that a request's first trimmed draft was at this position

    @property
    def tokens_per_s(self) -> float:
        return self.outcome.tokens_per_s

    def resampled(self, weights: Floats, beside: Measured | None = None) -> Floats:
        """Tokens per second on every resample of the answers, [num + 1] from weights [num + 1, A].

        Each of R requests emits its tokens in the steps that it runs in: R sum(tokens) / sum(ms). How an answer's speed
        depends on the company it has is not resampled. beside: count only answers that another measurement saw too.
        """
        seen = (self.ms > 0) & (True if beside is None else beside.ms > 0)
        return 1e3 * self.num_requests * ratio(self.tokens * seen, self.ms * seen, weights)

    def over(self, other: Measured, weights: Floats) -> Floats:
        """Tokens per second over those of another arm, on the answers that both saw, [num + 1]."""
        return self.resampled(weights, other) / other.resampled(weights, self)


class Observed(Replay):
    """A replay that keeps count by answer, and starts its requests as the module says."""

    def __init__(self, *arguments: Any, seed: int = 0, **options: Any) -> None:
        super().__init__(*arguments, seed=seed, **options)
        self.seed, self.windows = seed, self.max_num_seqs <= FEW
        draws = np.random.default_rng(seed).random((FATES, *self.accept.shape), dtype=np.float32)
        self.kept_drafts = np.cumprod(draws < self.accept, axis=2, dtype=np.uint8).sum(axis=2)  # [FATES, N]
        self.begin: dict[int, int] = {}  # request -> offset that it began at
        self.clear()

    def clear(self) -> None:
        """Start counting anew."""
        num_answers = len(self.trace.num_tokens)
        self.tokens, self.ms = np.zeros(num_answers), np.zeros(num_answers)
        self.trimmed = np.zeros((num_answers, self.num_positions))
        self.first_request = self.num_requests
        self.luck = np.random.default_rng(self.seed + 1)

    def _endless(self, answers: Array) -> Iterator[int]:
        order = np.random.default_rng(self.seed + 2)
        while True:
            yield from order.permutation(answers).tolist()

    def _first_rejection(self, rows: Array) -> Array:
        return self.kept_drafts[self.fate, rows].astype(np.int64)

    def _step(self, run: Any) -> None:
        new = np.array([i not in self.begin for i in run.ids.tolist()])
        if self.windows or run.stats.num_steps == 0:
            anywhere = self.luck.random(int(new.sum())) * (self.trace.num_tokens[run.answer[new]] - 1)
            run.offset[new] = anywhere.astype(np.int64)
        self.begin.update(zip(run.ids[new].tolist(), run.offset[new].tolist(), strict=True))
        self.fate = (run.ids - self.first_request) % FATES
        ids, answer, before, clock_ms = run.ids, run.answer, run.offset, run.clock_ms
        super()._step(run)
        left = self.trace.num_tokens[answer] - 1 - before
        stays = np.searchsorted(ids, run.ids)  # request ids rise along the batch
        left[stays] = run.offset - before[stays]
        np.add.at(self.tokens, answer, left)
        np.add.at(self.ms, answer, run.clock_ms - clock_ms)
        if self.windows:
            self._close_windows(run)

    def _close_windows(self, run: Any) -> None:
        begun = np.array([self.begin[i] for i in run.ids.tolist()], dtype=np.int64)
        run.keep(run.offset - begun < WINDOW)

    def _count(self, run: Any, drafted: Array, admitted: Array, accepted: Array, verified: Array) -> None:
        cut = admitted < drafted
        np.add.at(self.trimmed, (run.answer[cut], admitted[cut]), 1.0)
        super()._count(run, drafted, admitted, accepted, verified)


def measure(
    trace: Trace,
    table: CostTable,
    policy: Policy,
    num_requests: int,
    answers: Array,
    *,
    num_steps: int,
    warmup: Array | None = None,
    seed: int = 0,
    replay: Callable[..., Observed] = Observed,
    **options: Any,
) -> Measured:
    """Run one arm on some answers for so many steps, after a few on the `warmup` answers. options go to `replay`."""
    run = replay(trace, table, policy, num_requests=num_requests, seed=seed, **options)
    if warmup is not None and policy.decides:
        run.run(WARMUP_STEPS, answers=warmup)
    run.clear()
    outcome = run.run(num_steps, answers=answers)
    return Measured(outcome, num_requests, run.tokens, run.ms, run.trimmed)
