"""Replay: a policy's decode steps on a trace, without a model, under any cost table.

R requests walk through recorded answers. At its offset a request gets the recorded block; draft k is accepted with
probability min(1, q(y_k) / p(y_k)) given that those before it were (`traces` derives it), so the first rejection is
drawn once and cuts whatever the policy admits: accepted = min(admitted, first rejection). The request then moves on by
accepted + 1 tokens, the last one being the bonus, the residual's token or the target's own: the recorded y is right in
every case. What decides is the engine's own code (`estimator`, `pruning`, `budget`, `depth`), called in its order.

Exact for parallel drafters: their block does not depend on which drafts were drawn. In a token-by-token drafter's block
what lies behind the first rejection was drafted on another prefix than the recorded one. Those scores (all of them, so
that they belong together) are taken from a row drawn from the whole trace; so are overlaps past an answer's end, where
no token was recorded. An oracle knows the overlaps of the recorded prefix, which behind a rejection is not the drafted
one. Not replayed: prefill, the growth of contexts, what a trained drafter is shown after steps without drafts, and an
n-gram drafter's learning: its confidence is the one recorded, from verdicts on every draft.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from avref.budget import Budget
from avref.config import whole
from avref.cost_table import CostTable
from avref.depth import DraftDepth
from avref.estimator import OnlineAcceptanceEstimator
from avref.evidence import traces
from avref.evidence.policy import Policy, scores
from avref.evidence.trace_file import Array, Trace
from avref.pruning import allocate, survival
from avref.stats import Stats

__all__ = ["Outcome", "Policy", "Replay"]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a run counted, in the engine's own `Stats`."""

    stats: Stats

    @property
    def total_ms(self) -> float:
        return self.stats.draft_ms + self.stats.verify_ms

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens of all requests per second, by the cost table; an answer's first comes from its prefill."""
        return (self.stats.num_tokens - self.stats.num_requests) / self.total_ms * 1e3


@dataclass
class _Run:
    """The requests of one run: which answer each walks through, and how far it is."""

    stats: Stats
    queue: Iterator[int]
    ids: Array = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # [R]
    answer: Array = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # [R]
    offset: Array = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # [R]
    clock_ms: float = 0.0

    def fill(self, num_requests: int, next_id: int) -> int:
        """Let requests enter while there is room; returns how many did."""
        new = list(itertools.islice(self.queue, num_requests - len(self.answer)))
        self.ids = np.append(self.ids, next_id + np.arange(len(new)))
        self.answer = np.append(self.answer, np.array(new, dtype=np.int64))
        self.offset = np.append(self.offset, np.zeros(len(new), dtype=np.int64))
        self.stats.num_requests += len(new)
        self.stats.num_tokens += len(new)
        return len(new)

    def keep(self, stays: Array) -> None:
        """The others leave."""
        self.ids, self.answer, self.offset = (x[stays] for x in (self.ids, self.answer, self.offset))


class Replay:
    """One policy at work on a trace. What it learns (estimator, budget, depth) stays from run to run, as in `LLM`.

    num_requests: R, requests running at once. believed: the table that decisions read, where it is not the one that
    counts the time (None: the same). Raises ValueError when the trace lacks what the policy reads, or has shorter
    blocks than it drafts, and for an R outside the cost table.
    """

    def __init__(
        self,
        trace: Trace,
        cost_table: CostTable,
        policy: Policy,
        *,
        num_requests: int,
        seed: int = 0,
        believed: CostTable | None = None,
    ) -> None:
        k = trace.num_positions
        whole("num_requests", num_requests, 1)
        if num_requests > cost_table.max_requests:
            raise ValueError(f"num_requests is {num_requests}; this cost table covers 1 to {cost_table.max_requests}")
        for name, value in (("depth", policy.depth), ("verify", policy.verify)):
            if value is not None and not 0 <= value <= k:
                raise ValueError(f"the policy's {name} is {value}; this trace has blocks of {k} drafts")
        self.trace, self.cost_table, self.policy, self.max_num_seqs = trace, cost_table, policy, num_requests
        self.believed = believed or cost_table
        self.num_positions, self.generator = k, np.random.default_rng(seed)
        self.accept = np.nan_to_num(traces.accept_probability(trace))  # [N, K], 0 past the end of an answer
        self.scores = scores(trace, policy) if policy.decides else None  # [N, K]
        self.estimator = OnlineAcceptanceEstimator(k, **policy.estimator) if policy.learns else None
        has_budget = policy.decides and policy.stops_below is None
        self.budget = Budget(policy.budget_rule, k) if has_budget else None
        probes = policy.learns or (policy.decides and trace.logit_q_max is None)  # an n-gram's record learns too
        self.probe_interval = policy.probe_interval if probes else 0
        has_depth = has_budget and policy.adaptive_drafting
        self.depth = DraftDepth(k, probe_interval=self.probe_interval) if has_depth else None
        self.step_count = self.num_requests = 0

    def run(self, num_steps: int | None = None, *, answers: npt.ArrayLike | None = None) -> Outcome:
        """Decode and count.

        num_steps None: every answer once, in the order given (`answers` indexes the trace's; None: all), until the last
        has ended. Otherwise so many steps with R requests running, the answers taken over and over in random order.
        """
        if num_steps is not None:
            whole("num_steps", num_steps, 1)
        chosen = np.arange(len(self.trace.num_tokens)) if answers is None else self.trace.indices(answers)
        queue = iter(chosen.tolist()) if num_steps is None else self._endless(chosen)
        run = _Run(Stats.zeros(self.num_positions), queue)
        while num_steps is None or run.stats.num_steps < num_steps:
            self.num_requests += run.fill(self.max_num_seqs, self.num_requests)
            if not len(run.answer):
                break
            self._step(run)
        run.stats.wall_s = run.clock_ms / 1e3
        return Outcome(run.stats)

    def _endless(self, answers: Array) -> Iterator[int]:
        while True:
            yield from self.generator.permutation(answers).tolist()

    def _step(self, run: _Run) -> None:
        """One decode step: depth, draft, confidence, budget, allocate, verify, accept or reject, observe, refit."""
        trace, table = self.trace, self.cost_table
        rows = trace.first_row[run.answer] + run.offset  # [R]
        left = trace.tokens_left[rows].astype(np.int64)  # [R] tokens until the recorded end
        limit = np.where(trace.stopped[run.answer], trace.header["max_tokens"] - 1 - run.offset, left)
        capacity = np.clip(limit - 1, 0, self.num_positions)  # as the engine's: it does not know where an answer stops
        depth = self._depth(int(capacity.max()), len(rows))
        capacity = np.minimum(capacity, depth)
        drafted = np.minimum(capacity, trace.num_drafted[rows])
        first_rejection = self._first_rejection(rows)  # [R]

        made = int(capacity.max())  # positions that the drafter really drafts
        features, admitted = None, np.minimum(drafted, self.policy.verify or 0)
        if self.scores is not None and made:
            read = self._read(rows, first_rejection, left)  # [R, K]
            threshold = self.policy.stops_below
            if threshold is None:
                features, admitted, made = self._allocate(read, capacity, drafted, run.ids)
                drafted = np.minimum(drafted, made)
            else:
                wanted = _stop(read, threshold, self.policy.confidence)
                if not trace.header["parallel"]:  # a token-by-token block ends when no request wants another draft
                    made = int(np.minimum(wanted + 1, capacity).max())
                    drafted = np.minimum(drafted, made)
                admitted = np.minimum(wanted, drafted)
            if self._probes():
                probe = self.step_count // self.probe_interval % len(rows)
                admitted[probe] = drafted[probe]

        accepted = np.minimum(admitted, first_rejection)
        taken = np.minimum(accepted + 1, left)
        verified = np.where(taken <= accepted, np.minimum(admitted, taken), admitted)  # nothing behind a stop is graded
        accepted = np.minimum(accepted, taken)
        if self.estimator is not None:
            if features is not None:
                self.estimator.observe(features, torch.from_numpy(accepted), torch.from_numpy(verified))
            run.stats.num_refits += bool(self.estimator.end_step())
        self._count(run, drafted, admitted, accepted, verified)
        draft_ms = table.draft(len(rows), made) if made else 0.0
        verify_ms = float(table.verify(len(rows), len(rows) + int(admitted.sum())))
        run.stats.draft_ms += draft_ms
        run.stats.verify_ms += verify_ms
        run.stats.num_tokens += int(taken.sum())
        run.clock_ms += draft_ms + verify_ms
        run.offset = run.offset + taken
        run.keep(taken < left)
        self.step_count += 1

    def _depth(self, deepest: int, num_requests: int) -> int:
        if self.depth is not None:
            chosen = self.depth.choose(self.step_count, num_requests, deepest, self.believed)
            deepest = deepest if chosen and self._probes() else chosen
        return deepest if self.policy.depth is None else min(self.policy.depth, deepest)

    def _probes(self) -> bool:
        interval = self.probe_interval
        return interval > 0 and self.step_count % interval == interval - 1

    def _first_rejection(self, rows: Array) -> Array:
        """Drafts accepted if all are verified, [R]; at most those before the end of the answer."""
        kept = self.generator.random((len(rows), self.num_positions)) < self.accept[rows]
        return np.cumprod(kept, axis=1).sum(axis=1)

    def _read(self, rows: Array, first_rejection: Array, left: Array) -> Array:
        """The policy's scores [R, K], those of another row where the recorded prefix was not the drafted one."""
        assert self.scores is not None
        position = np.arange(self.num_positions)
        foreign = np.zeros((len(rows), self.num_positions), dtype=bool)
        if not self.trace.header["parallel"]:
            foreign |= position > first_rejection[:, None]
        if self.policy.confidence == "oracle":
            foreign |= position >= left[:, None]
        if not foreign.any():
            return np.asarray(self.scores[rows])
        others = self.generator.integers(len(self.trace), size=len(rows))
        return np.where(foreign, self.scores[others], self.scores[rows])

    def _allocate(
        self, read: Array, capacity: Array, drafted: Array, ids: Array
    ) -> tuple[torch.Tensor | None, Array, int]:
        """(features that the estimator will observe, admitted [R], positions drafted): as `decision.Decision` does."""
        assert self.budget is not None
        features, confidence, deepest = None, torch.from_numpy(read), int(capacity.max())
        if self.estimator is not None:
            features = torch.from_numpy(np.where(np.arange(self.num_positions) < deepest, read, 0.0))
            confidence = self.estimator.predict(features)
        whole_block = survival(confidence[:, :deepest]).double()  # [R, depth planned]
        capacities, request_ids = torch.from_numpy(capacity), ids.tolist()
        settled_at = self._settled(whole_block, capacities, request_ids)
        in_full = self._probes() or self.policy.depth is not None or self.depth is None or self.depth.in_full
        made = deepest if in_full else settled_at
        found = torch.from_numpy(np.minimum(drafted, made))
        live = whole_block.masked_fill(torch.arange(deepest) >= found[:, None], 0.0)
        budget = self.budget.choose(live, capacities, request_ids, self.believed)
        admitted = allocate(live, budget, found).numpy()
        self.budget.record(live, capacities, found, request_ids, budget + 1 if made < deepest else None)
        if self.depth is not None:
            self.depth.learn(live.numpy(), capacity, self.believed, settled_at)
        return features, admitted, made

    def _settled(self, whole_block: torch.Tensor, capacities: torch.Tensor, request_ids: list[int]) -> int:
        """Positions behind which a token-by-token block could end, were it not to be made in full."""
        assert self.budget is not None
        planned = whole_block.shape[1]
        if self.trace.header["parallel"] or self.depth is None:
            return planned
        for n in range(1, planned):
            behind = torch.arange(planned) >= capacities.clamp(max=n)[:, None]
            live = whole_block.masked_fill(behind, 0.0)
            if self.budget.settled(live, n, capacities, request_ids, self.believed):
                return n
        return planned

    def _count(self, run: _Run, drafted: Array, admitted: Array, accepted: Array, verified: Array) -> None:
        s, k = run.stats, np.arange(self.num_positions)
        s.num_steps += 1
        s.num_request_steps += len(drafted)
        s.drafted_by_position += (k < drafted[:, None]).sum(0)
        s.verified_by_position += (k < admitted[:, None]).sum(0)
        s.graded_by_position += ((k <= accepted[:, None]) & (k < verified[:, None])).sum(0)
        s.accepted_by_position += (k < accepted[:, None]).sum(0)


def _stop(read: Array, threshold: float, confidence: str) -> Array:
    """Drafts before the first at which the stopping rule stops, [R]."""
    score = np.cumprod(read, axis=1) if confidence == "stop_head" else read
    return np.asarray(np.cumprod(score >= threshold, axis=1).sum(axis=1))
