"""Whole budget rules on synthetic drafts with known acceptance probabilities: what each emits per second.

The law of the drafts: log-odds of acceptance = centre + 2 z_request + 2.3 z_position, z standard normal and fresh in
every step, centre set so that the mean acceptance is as asked. It is made up, its two spreads picked by hand. It is
unkind to `stale`: nothing carries over, so the step before says no more than the average does. With `persistence` a
request's difficulty carries over from step to step.

Counted are expected tokens (the true survivals of the drafts verified, and one token per request) over the
milliseconds of the cost table, so that no verdict has to be drawn. `retrospective` is counted like the others, though
what it emits does not follow the target's law.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from avref.cost_table import CostTable
from avref.pruning import SurvivalProfile, choose_budget

Floats = npt.NDArray[np.float64]

RULES = ("stale", "early_stop", "lookahead", "retrospective")
REQUEST_SPREAD, POSITION_SPREAD = 2.0, 2.3


@dataclass(frozen=True)
class Simulation:
    """Expected tokens per second of every arm, and the budgets that the rules chose."""

    rules: dict[str, float]
    fixed: Floats  # [K+1] by drafts verified per request; 0: drafted, none verified ("always trim")
    no_speculation: float  # nothing drafted either
    budgets: dict[str, npt.NDArray[np.int64]]  # [steps]

    @property
    def relative(self) -> dict[str, float]:
        """Each rule over the best fixed number of drafts, chosen in hindsight."""
        return {name: float(value / self.fixed.max()) for name, value in self.rules.items()}


@lru_cache(maxsize=32)
def acceptance_log_odds(
    num_requests: int,
    mean_acceptance: float,
    *,
    num_steps: int = 500,
    num_positions: int = 7,
    persistence: float = 0.0,
    seed: int = 0,
) -> Floats:
    """True log-odds of acceptance, [steps, R, K]; persistence is the correlation of z_request from step to step.

    Raises ValueError for a mean acceptance outside (0, 1) and a persistence outside [0, 1).
    """
    if not 0 < mean_acceptance < 1:
        raise ValueError(f"mean_acceptance must lie between 0 and 1, got {mean_acceptance}")
    if not 0 <= persistence < 1:
        raise ValueError(f"persistence must be at least 0 and below 1, got {persistence}")
    rng = np.random.default_rng(seed)
    centre = _centre(mean_acceptance)
    by_request = rng.standard_normal((num_steps, num_requests, 1))
    by_position = rng.standard_normal((num_steps, num_requests, num_positions))
    for now in range(1, num_steps if persistence else 0):
        by_request[now] = persistence * by_request[now - 1] + np.sqrt(1 - persistence**2) * by_request[now]
    log_odds = centre + REQUEST_SPREAD * by_request + POSITION_SPREAD * by_position
    log_odds.setflags(write=False)  # it is kept and given out again
    return log_odds


@lru_cache(maxsize=32)
def _centre(mean_acceptance: float) -> float:
    """The log-odds around which the mean acceptance is as asked: by bisection, the mean as a Gauss-Hermite sum."""
    z, weight = np.polynomial.hermite_e.hermegauss(99)
    spread, low, high = np.hypot(REQUEST_SPREAD, POSITION_SPREAD), -40.0, 40.0
    for _ in range(60):
        centre = (low + high) / 2
        below = sigmoid(centre + spread * z) @ weight < mean_acceptance * weight.sum()
        low, high = (centre, high) if below else (low, centre)
    return centre


def simulate_rules(
    cost_table: CostTable,
    log_odds: Floats,
    *,
    calibration_error: float = 0.0,
    depth: int | None = None,
    rules: Sequence[str] = RULES,
) -> Simulation:
    """Run budget rules and fixed lengths over the drafts of `acceptance_log_odds`, [steps, R, K].

    The rules see confidences whose log-odds are off by calibration_error (above 0: overconfident); the tokens counted
    follow the truth. Only the first `depth` positions are drafted (default K), and paid for where the table knows
    draft milliseconds by depth. Raises ValueError for an unknown rule and for batch shapes outside the cost table.
    """
    unknown = set(rules) - set(RULES)
    if unknown:
        raise ValueError(f"unknown rules {sorted(unknown)}: choose among {', '.join(RULES)}")
    drafted = log_odds[:, :, :depth]
    truth = _survival(drafted)  # [steps, R, depth]
    believed = truth if calibration_error == 0 else _survival(drafted + calibration_error)
    budgets = _budgets(cost_table, believed, rules)
    num_requests = log_odds.shape[1]
    gains = _gains(truth, believed)  # [steps, R depth + 1] tokens from the drafts verified, by B
    speed = {}
    for name, chosen in budgets.items():
        tokens = num_requests + gains[np.arange(len(chosen)), chosen]
        ms = cost_table.step_ms(num_requests, num_requests + chosen, truth.shape[2])
        speed[name] = float(1e3 * tokens.sum() / ms.sum())
    none = 1e3 * num_requests / float(cost_table.verify(num_requests, num_requests))
    return Simulation(speed, _fixed(cost_table, _survival(log_odds)), none, budgets)


def _budgets(cost_table: CostTable, believed: Floats, rules: Sequence[str]) -> dict[str, npt.NDArray[np.int64]]:
    num_requests = believed.shape[1]
    chosen: dict[str, list[int]] = {name: [] for name in rules}
    profile, old = SurvivalProfile(), np.ones(believed.shape[1:])  # a new request's old survivals are 1
    for live in believed:
        tail = profile.predict(live.size)
        for name in rules:
            rule: Any = "argmax" if name in ("stale", "retrospective") else name
            chosen[name].append(choose_budget(old if name == "stale" else live, cost_table, num_requests, rule, tail))
        profile.update(live)
        old = live
    return {name: np.array(values, dtype=np.int64) for name, values in chosen.items()}


def _gains(truth: Floats, believed: Floats) -> Floats:
    """[steps, N+1]: sum of the true survivals of the B slots that are best by the believed ones, always prefixes."""
    by_position = [values.transpose(0, 2, 1).reshape(len(values), -1) for values in (believed, truth)]  # [steps, K R]
    order = np.argsort(-by_position[0], axis=1, kind="stable")  # ties go by position, then by request
    gains = np.take_along_axis(by_position[1], order, axis=1).cumsum(axis=1)
    return np.concatenate([np.zeros((len(gains), 1)), gains], axis=1)


def _fixed(cost_table: CostTable, truth: Floats) -> Floats:
    """Tokens per second of drafting and verifying k tokens per request, k = 0..K; at 0 all K are drafted in vain."""
    num_requests, num_positions = truth.shape[1:]
    tokens = num_requests + np.append(0.0, truth.sum(axis=1).mean(axis=0).cumsum())  # [K+1]
    shapes = [(num_requests * (1 + k), k or num_positions) for k in range(num_positions + 1)]
    ms = [float(cost_table.step_ms(num_requests, size, depth)) for size, depth in shapes]
    return np.asarray(1e3 * tokens / np.array(ms))


def sigmoid(log_odds: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-log_odds)))


def _survival(log_odds: Floats) -> Floats:
    return np.asarray(sigmoid(log_odds).cumprod(axis=-1), dtype=np.float64)
