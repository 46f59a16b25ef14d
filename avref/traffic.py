"""Synthetic accept/reject traffic with known coefficients, and the estimator run over it.

A decode step drafts K tokens for each of R requests. Draft k of a request has feature f ~ normal(2, 2.5) and is
accepted, given that those before it were, with probability sigmoid(slope f + intercept_k(t)). Three kinds of traffic:

    steady    intercepts stay where they are
    drifting  they rise and fall by 1.5 over 1,600 steps
    flipping  they jump every 800 steps between a workload where nearly every draft is accepted (a copying task)
              and one where most are rejected

Because the truth is known, an estimate c is judged without label noise: its excess log-loss over the round's graded
drafts is the mean of KL(c* || c), c* the true probability, in nats per draft.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from avref.cost_table import CostTable
from avref.estimator import OnlineAcceptanceEstimator
from avref.pruning import allocate, choose_budget, survival

KINDS = ("steady", "drifting", "flipping")
TRUE_SLOPE = 0.5
COPYING, WRITING = 12.0, -2.5  # how far flipping traffic shifts the intercepts


@dataclass(frozen=True)
class Traffic:
    """Draft features, verdicts with everything verified, and the intercepts that produced them."""

    features: Tensor  # [steps, R, K]
    num_accepted: Tensor  # [steps, R]
    log_odds: Tensor  # [steps, R, K], the true ones
    intercepts: Tensor  # [steps, K]


@dataclass(frozen=True)
class DampingHistory:
    """A run: the estimate in force during each round, the truth at each step, and what the gap between them costs."""

    edges: Tensor  # [rounds + 1], the decode steps between which the rounds lie
    slope: Tensor  # [rounds], or [rounds, K] when not shared
    intercepts: Tensor  # [rounds, K]
    true_slope: float
    true_intercepts: Tensor  # [steps, K]
    excess_log_loss: Tensor  # [rounds], nats per graded draft
    num_graded: Tensor  # [rounds, K]
    traffic: str
    step: str
    label: str

    @property
    def mean_excess(self) -> float:
        """Excess log-loss over all graded drafts after the first round, which the cold start alone decides."""
        graded = self.num_graded.sum(dim=1)[1:]
        return float((self.excess_log_loss[1:] * graded).sum() / graded.sum())


@lru_cache(maxsize=8)
def make_traffic(
    kind: str, *, num_steps: int = 2400, num_requests: int = 8, num_positions: int = 7, seed: int = 0
) -> Traffic:
    """Draw traffic of one kind: [steps, R, K] features with their verdicts; raises ValueError for an unknown kind."""
    if kind not in KINDS:
        raise ValueError(f"traffic is {kind!r}; expected one of {', '.join(KINDS)}")
    generator = torch.Generator().manual_seed(seed)
    shape = (num_steps, num_requests, num_positions)
    time = torch.arange(num_steps, dtype=torch.float64)
    shift = {
        "steady": torch.zeros_like(time),
        "drifting": 1.5 * torch.sin(2 * math.pi * time / 1600),
        "flipping": torch.where(time // 800 % 2 == 0, COPYING, WRITING).double(),
    }[kind]
    by_depth = torch.linspace(0.4, -0.8, num_positions, dtype=torch.float64)
    intercepts = shift[:, None] + by_depth  # [steps, K]
    features = 2 + 2.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
    log_odds = TRUE_SLOPE * features + intercepts[:, None]  # [steps, R, K]
    accept = torch.rand(shape, generator=generator, dtype=torch.float64) < log_odds.sigmoid()
    return Traffic(features, accept.long().cumprod(dim=-1).sum(dim=-1), log_odds, intercepts)


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch works on one thread: on arrays this small two only wait for each other, long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def simulate_damping(
    *,
    damping: float = 50.0,
    refit_interval: int = 100,
    step: str = "self_concordant",
    shared_slope: bool = True,
    traffic: str = "steady",
    num_steps: int = 2400,
    num_requests: int = 8,
    num_positions: int = 7,
    seed: int = 0,
) -> DampingHistory:
    """Run the real estimator over synthetic traffic and record every round.

    Raises ValueError for settings that `OnlineAcceptanceEstimator` or `make_traffic` refuses, or when no round fits.
    """
    estimator = OnlineAcceptanceEstimator(
        num_positions, damping=damping, refit_interval=refit_interval, step=step, shared_slope=shared_slope
    )
    num_rounds = num_steps // refit_interval
    if num_rounds < 1:
        raise ValueError(f"refit_interval is {refit_interval}; expected at most num_steps={num_steps}")
    data = make_traffic(traffic, num_steps=num_steps, num_requests=num_requests, num_positions=num_positions, seed=seed)
    used = num_rounds * refit_interval  # an unfinished last round is left out
    features = data.features[:used].view(num_rounds, -1, num_positions)  # [rounds, N R, K]
    accepted = data.num_accepted[:used].view(num_rounds, -1)  # [rounds, N R]
    verified = torch.full_like(accepted[0], num_positions)  # [N R]
    rows = []
    for f, count in zip(features, accepted, strict=True):
        # The sums of a round do not depend on how it is cut into steps: one call stands for refit_interval of them.
        estimator.observe(f, count, verified)
        rows.append((estimator.slope, estimator.intercepts, estimator.sums[-1]))
        estimator.refit()
    slope, intercepts, graded = (torch.stack(column) for column in zip(*rows, strict=True))
    estimate = slope.view(num_rounds, 1, -1) * features + intercepts[:, None]  # [rounds, N R, K] log-odds
    truth = data.log_odds[:used].view_as(features)
    return DampingHistory(
        edges=torch.arange(num_rounds + 1) * refit_interval,
        slope=slope,
        intercepts=intercepts,
        true_slope=TRUE_SLOPE,
        true_intercepts=data.intercepts[:used],
        excess_log_loss=excess_log_loss(estimate, truth, accepted),
        num_graded=graded,
        traffic=traffic,
        step=step,
        label=f"{traffic}, C = {damping:g}, refit every {refit_interval} steps",
    )


def excess_log_loss(estimate: Tensor, truth: Tensor, accepted: Tensor) -> Tensor:
    """Mean KL divergence of the estimate from the truth over graded drafts: [rounds] from log-odds [rounds, N R, K]."""
    divergence = truth.sigmoid() * (truth - estimate) - softplus(truth) + softplus(estimate)
    graded = torch.arange(truth.shape[-1]) <= accepted[..., None]  # everything is verified
    return (divergence * graded).sum(dim=(1, 2)) / graded.sum(dim=(1, 2))


@dataclass(frozen=True)
class StarvationHistory:
    """Drafts verified at each step, probes left out, and the acceptance rate that the traffic had."""

    budgets: Tensor  # [steps]
    acceptance: Tensor  # [steps]
    num_requests: int
    num_positions: int
    probe_interval: int


def simulate_starvation(probe_interval: int, *, num_steps: int = 2800, seed: int = 0) -> StarvationHistory:
    """Adaptive verification through an outage: 95 % of drafts accepted, 2 % from step 300 to 1,300, 95 % again.

    R = 4 requests, K = 3 positions, a step of n tokens costs 1 + 0.08 n. The budget stops at the first draft that does
    not pay (rule `early_stop`). Every `probe_interval` steps (0: never) one request is verified at full depth.
    """
    num_requests, num_positions, generator = 4, 3, torch.Generator().manual_seed(seed)
    costs = CostTable(np.zeros(num_requests + 1), 1 + 0.08 * np.arange(num_requests * (num_positions + 1) + 1))
    estimator = OnlineAcceptanceEstimator(num_positions)
    step = torch.arange(num_steps)
    acceptance = torch.where((step < 300) | (step >= 1300), 0.95, 0.02)
    features = torch.randn(num_steps, num_requests, num_positions, generator=generator)
    accept = torch.rand(features.shape, generator=generator) < acceptance[:, None, None]
    runs = accept.long().cumprod(dim=-1).sum(dim=-1)  # [steps, R], drafts accepted when all are verified
    budgets = []
    for now, f in enumerate(features):
        survivals = survival(estimator.predict(f))  # [R, K]
        budgets.append(choose_budget(survivals, costs, num_requests, rule="early_stop"))
        verified = allocate(survivals, budgets[-1])  # [R]
        if probe_interval and now % probe_interval == 0:
            verified[now // probe_interval % num_requests] = num_positions
        estimator.observe(f, torch.minimum(runs[now], verified), verified)
        estimator.end_step()
    return StarvationHistory(torch.tensor(budgets), acceptance, num_requests, num_positions, probe_interval)
