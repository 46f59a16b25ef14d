"""Continuous batching and one decode step of (adaptive) speculative decoding.

`Engine.decode` is the whole method: depth, draft, feature, confidence, survival, budget, allocate, verify, accept or
reject, observe, refit. Running requests occupy the cache rows 0 .. R-1; when one finishes, the last row moves into its
place. A request's newest token is *pending*: it is not in the cache yet, and is the first token of its next chunk.

On a GPU the host waits for the device 4 times in a plain step (5 with top-p). Speculation adds at most 3 waits per
drafter forward, 11 plus 7 per position reached in acceptance, and 9 with adaptive verification, where a token-by-token
drafter waits once more for each position, to ask whether it was the last (tests/test_transfers).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from avref import sampling
from avref.budget import Budget
from avref.confidence import Confidence
from avref.config import SpeculativeConfig
from avref.cost_table import CostTable
from avref.decision import Decision
from avref.depth import DraftDepth
from avref.drafters.base import Drafter, DraftProposal
from avref.estimator import OnlineAcceptanceEstimator
from avref.layout import Layout, send
from avref.packed import PackedModel
from avref.pruning import SurvivalProfile
from avref.request import Request, fresh_uniforms, sampling_tensors
from avref.stats import Stats, Stopwatch

MAX_PREFILL_TOKENS = 4096  # of several prompts in one packed forward; a longer one has a forward of its own
MOST_OWED = 32
"""Steps without drafts after which the drafter is brought up to date at the latest; until then states are kept."""


class Engine:
    """Requests in, tokens out.

    Holds the target's cache, the drafter, and what adaptive verification learns: `estimator`, and the memories of the
    `budget` rule and of the drafting `depth`.
    """

    def __init__(
        self,
        target: PackedModel,
        drafter: Drafter | None,
        config: SpeculativeConfig | None,
        *,
        max_num_seqs: int,
        estimator: OnlineAcceptanceEstimator | None = None,
        cost_table: CostTable | None = None,
    ) -> None:
        self.target, self.drafter, self.config = target, drafter, config
        if drafter is not None and hasattr(drafter, "attach"):
            drafter.attach(target)  # layer_skip drafts on the target's own cache
        self.max_num_seqs, self.estimator, self.cost_table = max_num_seqs, estimator, cost_table
        self.num_positions = config.num_speculative_tokens if config else 0
        self.adaptive = bool(config and config.enable_adaptive_verification)
        self.confidence = Confidence(config, drafter, estimator) if config and self.adaptive else None
        self.has_budget = self.confidence is not None and not self.confidence.stops  # then it needs a cost table
        self.probe_interval = config.probe_interval if config and self.confidence and self.confidence.learns else 0
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.budget = Budget(config.budget_rule, self.num_positions) if config else None
        has_depth = config is not None and config.adaptive_drafting and self.has_budget
        self.depth = DraftDepth(self.num_positions, probe_interval=self.probe_interval) if has_depth else None
        # for profiling and controls: a request's capacity -> its admitted drafts; and the depth to draft
        self.override: Callable[[int], int] | None = None
        self.fixed_depth: int | None = None
        # called with (cache row, request) before a finished request leaves its row
        self.on_finish: Callable[[int, Request], None] | None = None
        self.watch = Stopwatch(target.device)
        self.stats = Stats.zeros(self.num_positions)
        self.step_count = 0
        self.num_calls = 0  # of `generate`, on which an adaptive engine's seeds depend (`LLM._moved`)

    @property
    def profile(self) -> SurvivalProfile | None:
        """Survivals by rank of past steps meant to draft all K positions; None before the first."""
        return self.budget.profiles.get(self.num_positions) if self.budget else None

    # ---- requests in and out ----
    def add(self, request: Request) -> None:
        self.waiting.append(request)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Let waiting requests enter, decode all running ones once, and return those that finished."""
        self.watch.start()
        while self.waiting and len(self.running) < self.max_num_seqs:
            self.prefill(self._entering())
        finished = self._remove_finished()
        if self.running:
            self.decode()
            finished += self._remove_finished()
        self.watch.lap("other")
        return finished

    def _entering(self) -> list[Request]:
        entering: list[Request] = []
        tokens = 0
        while self.waiting and len(self.running) + len(entering) < self.max_num_seqs:
            tokens += len(self.waiting[0].prompt_ids)
            if entering and tokens > MAX_PREFILL_TOKENS:
                break
            entering.append(self.waiting.popleft())
        return entering

    def _remove_finished(self) -> list[Request]:
        finished = [r for r in self.running if r.finish_reason]
        for row in reversed([i for i, r in enumerate(self.running) if r.finish_reason]):
            if self.on_finish:
                self.on_finish(row, self.running[row])
            last = len(self.running) - 1
            if row < last:
                self.target.cache.move(last, row)
                if self.drafter:
                    self.drafter.move(last, row)
                self.running[row] = self.running[last]
            self.running.pop()
        return finished

    def abort(self) -> None:
        """Forget all requests (after an error in the middle of a step)."""
        self.waiting.clear()
        self.running.clear()
        self.target.cache.clear()
        if self.drafter:
            self.drafter.clear()

    # ---- prefill ----
    def prefill(self, entering: list[Request]) -> None:
        """One packed forward over the prompts of entering requests, and their first token."""
        device, first_row = self.target.device, len(self.running)
        prompts = [r.prompt_ids for r in entering]
        layout = Layout([0] * len(prompts), [len(p) for p in prompts], device, first_row)
        ids = send(list(itertools.chain.from_iterable(prompts)), device)
        logits, hidden = self.target.forward(
            ids, layout, layout.last, self.drafter.hidden_layers if self.drafter else ()
        )
        uniforms = fresh_uniforms(entering, 1, device)[:, 0]
        tokens = sampling.sample(sampling.probs(logits, *sampling_tensors(entering, device)), uniforms).tolist()
        if self.drafter:
            self.drafter.enter(layout, prompts, hidden)
        for request, token in zip(entering, tokens, strict=True):
            request.emit([token])
        self.running += entering
        self.stats.num_requests += len(entering)
        self.stats.num_tokens += len(entering)
        self.watch.lap("prefill")

    # ---- one decode step ----
    def decode(self) -> None:
        """Draft, decide what to verify, verify in one packed forward, accept or reject, learn."""
        requests, device = self.running, self.target.device
        lengths = [r.num_cached for r in requests]
        capacity = [self._capacity(r) for r in requests]
        depth = self._depth(max(capacity))
        capacity = [min(c, depth) for c in capacity]
        temperature, top_k, top_p = sampling_tensors(requests, device)
        pending = send([r.output_ids[-1] for r in requests], device)  # [R]
        # [R, 2K + 2]: K to draft with, K to accept with, one for the residual or bonus token
        uniforms = fresh_uniforms(requests, 2 * self.num_positions + 2, device)
        if max(capacity) or max(len(r.owed) for r in requests) >= MOST_OWED:
            self.catch_up()
        self.watch.lap("other")

        decision = self._decision(capacity, temperature)
        proposal = self._draft(lengths, pending, max(capacity), temperature, uniforms, decision)
        self.watch.lap("draft")

        drafted = proposal.found(capacity) if proposal else [0] * len(requests)
        admitted = self._admit(proposal, decision, capacity, drafted)
        drafts = proposal.tokens.tolist() if proposal else [[]] * len(requests)
        chunks = [[r.output_ids[-1], *d[:n]] for r, d, n in zip(requests, drafts, admitted, strict=True)]
        layout = Layout(lengths, [len(c) for c in chunks], device)
        ids = send(list(itertools.chain.from_iterable(chunks)), device)  # [T]
        self.watch.lap("other")

        logits, hidden = self.target.forward(ids, layout, None, self.drafter.hidden_layers if self.drafter else ())
        self.watch.lap("verify")

        tokens, accepted = self._accept(logits, proposal, admitted, uniforms, temperature, top_k, top_p)
        self.watch.lap("sample")

        if proposal is None and self.depth is not None and hidden is not None:
            for request, (token,), state in zip(requests, chunks, hidden, strict=True):
                request.owed.append((token, state))
        elif self.drafter:
            self.drafter.extend(layout, chunks, hidden, [n + 1 for n in accepted])
        graded_accepted, graded_verified = [], []
        for request, row, n, m in zip(requests, tokens, accepted, admitted, strict=True):
            taken = request.emit(row[: n + 1])
            self.stats.num_tokens += taken
            graded_accepted.append(min(n, taken))  # nothing behind a stop token is graded
            graded_verified.append(min(m, taken) if taken <= n else m)
        if grade := getattr(self.drafter, "grade", None):  # n-grams keep a record of their own
            for r, verdict in enumerate(zip(graded_accepted, graded_verified, strict=True)):
                grade(r, *verdict)
        if self.estimator is not None and decision is not None and decision.features is not None:
            self.estimator.observe(
                decision.features,
                send(graded_accepted, device),
                send(graded_verified, device),
            )
        if self.estimator is not None:  # a step without drafts counts too
            self.stats.num_refits += bool(self.estimator.end_step())
        self._count(drafted, admitted, graded_accepted, graded_verified)
        self.step_count += 1

    @torch.inference_mode()
    def catch_up(self) -> None:
        """Show the drafter what steps without drafts have left: one call for many steps costs little more than for one.

        As long as not drafting is best, a drafter's upkeep in every step would be most of what speculation costs.
        """
        owed = [list(r.owed) for r in self.running]
        if self.drafter is None or not any(owed):
            return
        final = [len(own) for own in owed]
        starts = [r.num_cached - n for r, n in zip(self.running, final, strict=True)]
        nothing = 0, torch.zeros_like(next(state for own in owed for _, state in own))
        owed = [own or [nothing] for own in owed]  # a row that owes nothing is shown a token that it does not keep
        tokens = [[token for token, _ in own] for own in owed]
        states = torch.stack([state for own in owed for _, state in own])
        self.drafter.extend(Layout(starts, [len(own) for own in owed], self.target.device), tokens, states, final)
        for request in self.running:
            request.owed.clear()

    def _capacity(self, request: Request) -> int:
        """How many drafts are worth making for this request.

        The step emits at most this many tokens plus one, and no draft may pass what the drafter can address.
        """
        if self.drafter is None:
            return 0
        return max(0, min(self.num_positions, request.remaining - 1, self.drafter.max_length - 1 - request.num_cached))

    def _depth(self, deepest: int) -> int:
        """How many positions to draft, for all requests: settled before drafting, by past steps and the cost table."""
        if self.fixed_depth is not None:
            return min(self.fixed_depth, deepest)
        if self.depth is None or self.override:
            return deepest
        assert self.cost_table is not None
        chosen = self.depth.choose(self.step_count, len(self.running), deepest, self.cost_table)
        return deepest if chosen and self._probes() else chosen  # while idle, its own full steps are the probes

    def _probes(self) -> bool:
        """Whether one request is verified in full in this step, if it drafts: every position keeps its labels."""
        return self.probe_interval > 0 and self.step_count % self.probe_interval == self.probe_interval - 1

    def _decision(self, capacity: list[int], temperature: Tensor) -> Decision | None:
        """How this step will decide what to verify; None where everything drafted is verified."""
        if self.confidence is None:
            return None
        learning = self._probes() or self.fixed_depth is not None or self.depth is None or self.depth.in_full
        return Decision(
            self.confidence,
            self.budget if self.has_budget else None,
            self.depth,
            self.cost_table,
            torch.tensor(capacity, device="cpu"),
            [r.request_id for r in self.running],
            temperature,
            may_end=not (self.override or (self.has_budget and learning)),
        )

    def _draft(
        self,
        lengths: list[int],
        pending: Tensor,
        depth: int,
        temperature: Tensor,
        uniforms: Tensor,
        decision: Decision | None,
    ) -> DraftProposal | None:
        if self.drafter is None or self.config is None or depth == 0:
            return None
        ends = decision is not None and (self.depth is not None or not self.has_budget)
        enough = decision.enough if decision and ends else None
        greedy = self.config.draft_sample_method == "greedy"
        return self.drafter.propose(lengths, pending, depth, temperature, uniforms[:, :depth], greedy, enough=enough)

    def _admit(
        self, proposal: DraftProposal | None, decision: Decision | None, capacity: list[int], drafted: list[int]
    ) -> list[int]:
        """Decide what to verify: admitted drafts per request, of the `drafted` ones."""
        admitted = drafted
        if proposal is not None and decision is not None:
            if decision.num_read == 0:
                decision.read(proposal)
            admitted = decision.admit(drafted)
        if self._probes():
            probe = self.step_count // self.probe_interval % len(drafted)
            admitted[probe] = drafted[probe]
        if self.override:  # real drafts or not: profiling times a number of tokens
            width = proposal.tokens.shape[1] if proposal else 0
            admitted = [self.override(min(c, width)) for c in capacity]
        return admitted

    def _accept(
        self,
        logits: Tensor,
        proposal: DraftProposal | None,
        admitted: list[int],
        uniforms: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
    ) -> tuple[list[list[int]], list[int]]:
        """Standard rejection sampling -> (emitted tokens per request, accepted drafts per request)."""
        k = self.num_positions
        if proposal is None:
            tokens = sampling.sample(sampling.probs(logits, temperature, top_k, top_p), uniforms[:, 2 * k])
            return tokens[:, None].tolist(), [0] * len(admitted)
        depth = proposal.tokens.shape[1]
        verdict = sampling.verify(
            logits,
            send(admitted, logits.device),
            proposal.tokens,
            proposal.q,
            proposal.q_drawn,
            uniforms[:, k : k + depth],
            uniforms[:, 2 * k],
            temperature,
            top_k,
            top_p,
            vocab_ids=proposal.vocab_ids,
        )
        return verdict.tokens.tolist(), verdict.num_accepted.tolist()

    def _count(self, drafted: list[int], admitted: list[int], accepted: list[int], verified: list[int]) -> None:
        s, k = self.stats, np.arange(self.num_positions)
        column = lambda x: np.asarray(x)[:, None]  # noqa: E731
        s.num_steps += 1
        s.num_request_steps += len(drafted)
        s.drafted_by_position += (k < column(drafted)).sum(0)
        s.verified_by_position += (k < column(admitted)).sum(0)
        s.graded_by_position += ((k <= column(accepted)) & (k < column(verified))).sum(0)
        s.accepted_by_position += (k < column(accepted)).sum(0)
