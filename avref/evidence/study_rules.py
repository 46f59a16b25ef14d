"""Studies beside the ledger: tracking, budget rules, wrong cost tables, and the long-run objective."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from avref import exact, traffic
from avref.cost_table import CostTable
from avref.estimator import STEP_RULES, OnlineAcceptanceEstimator
from avref.evidence import hardware, simulate, synthetic, tables
from avref.evidence.long_run import LongRunBudget, example
from avref.evidence.observed import Measured, Observed
from avref.evidence.pair import Pair
from avref.evidence.policy import Policy
from avref.evidence.resampling import estimate

DAMPING, INTERVALS = (0.0, 10.0, 50.0, 200.0, 1000.0), (25, 100, 400)
RULES_AT = {"measured": (1, 16, 32), "b300": (4, 16, 64)}
TRACES_AT = {"measured": 16, "b300": 16}
LONG_RUN_AT = {"measured": (1, 32), "b300": (64,)}
WRONG_AT = {"measured": 16, "b300": 64}


# ---- tracking ----
def tracking(num_steps: int = 2400) -> list[dict[str, Any]]:
    """Excess log-loss over the truth of every damping, refit interval and step rule on three kinds of traffic.

    A row each, and per kind two references: the best constants in hindsight ("constant"), and each round of 100 steps
    judged by the fit to its own verdicts ("each round in hindsight"). The truth itself has 0.
    """
    rows: list[dict[str, Any]] = []
    for kind in traffic.KINDS:
        for step, interval, damping in itertools.product(STEP_RULES, INTERVALS, DAMPING):
            own: dict[str, Any] = {"traffic": kind, "step": step, "damping": damping}
            run = traffic.simulate_damping(**own, refit_interval=interval, num_steps=num_steps)
            graded = run.num_graded.sum(dim=1)
            excess = float((run.excess_log_loss * graded).sum() / graded.sum())
            rows.append({"traffic": kind, "step": step, "interval": interval, "damping": damping, "excess": excess})
        for name, rounds in (("constant", 1), ("each round in hindsight", num_steps // 100)):
            rows.append({"traffic": kind, "step": name, "excess": _in_hindsight(kind, num_steps, rounds)})
    return rows


def _in_hindsight(kind: str, num_steps: int, rounds: int) -> float:
    """Excess log-loss of constants fitted to the very verdicts of each of so many rounds."""
    data, loss, total = traffic.make_traffic(kind, num_steps=num_steps), 0.0, 0.0
    for steps in torch.arange(num_steps).chunk(rounds):
        f, accepted = data.features[steps].flatten(0, 1), data.num_accepted[steps].flatten()
        estimator = OnlineAcceptanceEstimator(f.shape[1], damping=0.0)
        for _ in range(30):
            estimator.observe(f, accepted, torch.full_like(accepted, f.shape[1]))
            estimator.refit()
        log_odds = (estimator.slope * f + estimator.intercepts)[None]
        truth = data.log_odds[steps].flatten(0, 1)[None]
        graded = float((torch.arange(f.shape[1]) <= accepted[:, None]).sum())
        loss += graded * float(traffic.excess_log_loss(log_odds, truth, accepted[None])[0])
        total += graded
    return loss / total


# ---- budget rules ----
def budget_rules(pair: Pair | None, effort: float = 1.0) -> dict[str, Any]:
    """Tokens/s of every rule over the best fixed K: with known probabilities, on a trace, and what each rule leaks."""
    known, num_steps = [], max(20, int(120 * effort))
    for name, table in (("measured", hardware.measured()), ("b300", hardware.published_b300())):
        for r, mean in itertools.product(RULES_AT[name], (0.45, 0.7)):
            drafts = synthetic.acceptance_log_odds(r, mean, num_steps=num_steps, persistence=0.5)
            relative = synthetic.simulate_rules(table, drafts).relative
            known.append({"table": name, "requests": r, "acceptance": mean, **relative})
    return {"known": known, "leak": leaks(), "trace": _on_trace(pair, effort) if pair else []}


def leaks() -> dict[str, float]:
    """Total variation between what each rule emits and the target's law, in DSpark's example, over two steps."""
    given, table = exact.dspark_appendix(), exact.costs(1 / 1, 1 / 0.5, 1 / 0.45)
    policies = {rule: exact.budget_policy(table, rule) for rule in synthetic.RULES}  # type: ignore[arg-type]
    return {rule: exact.leak(replace(given, policy=p, num_steps=2)) for rule, p in policies.items()}


def _on_trace(pair: Pair, effort: float) -> list[dict[str, Any]]:
    """The rules on a trace, with the estimator's confidences and everything drafted."""
    rows = []
    for name, r in TRACES_AT.items():
        table = tables.named(name, pair.trace, r)
        base = _run(pair, table, Policy.adaptive(adaptive_drafting=False), r, effort)
        for rule in synthetic.RULES:
            policy = Policy.adaptive(adaptive_drafting=False, budget_rule=rule)
            speed = _run(pair, table, policy, r, effort) if rule != "lookahead" else base
            over = estimate(speed.over(base, pair.weights))
            rows.append({"table": name, "requests": r, "rule": rule, "over_lookahead": over})
    return rows


def _run(pair: Pair, table: CostTable, policy: Policy, requests: int, effort: float, **options: Any) -> Measured:
    steps = max(24, int(effort * max(60, min(400, 3200 // requests))))
    return pair.measure(table, policy, requests, steps, **options)


# ---- wrong cost tables ----
def distorted(table: CostTable) -> dict[str, CostTable]:
    """Tables that are wrong in one way each: in scale, in slope, in tilt, and about what drafting costs."""
    draft, verify = table.draft_ms, table.verify_ms
    tokens = np.arange(verify.shape[-1]) / (verify.shape[-1] - 1)  # 0 to 1
    middle = np.nanmedian(verify[..., 1:])

    def made(draft_ms: Any = draft, verify_ms: Any = verify) -> CostTable:
        return CostTable(draft_ms, verify_ms)

    return {
        "everything x 2": made(2 * draft, 2 * verify),
        "verification x 2": made(verify_ms=2 * verify),
        "verification x 0.5": made(verify_ms=0.5 * verify),
        "flattened by half": made(verify_ms=middle + 0.5 * (verify - middle)),
        "flat": made(verify_ms=np.where(np.isnan(verify), np.nan, middle)),
        "tilted up by half": made(verify_ms=verify * (0.75 + 0.5 * tokens)),
        "tilted down by half": made(verify_ms=verify * (1.25 - 0.5 * tokens)),
        "drafts for free": made(draft_ms=0 * draft),
    }


def wrong_tables(pair: Pair, effort: float = 1.0) -> list[dict[str, Any]]:
    """Tokens/s, by the right table, of decisions made by a wrong one, over those made by the right one."""
    rows = []
    for name, r in WRONG_AT.items():
        table = tables.named(name, pair.trace, r)
        for drafting in (False, True):
            policy = Policy.adaptive(confidence=simulate.own_confidence(pair.trace), adaptive_drafting=drafting)
            right = _run(pair, table, policy, r, effort)
            for kind, wrong in distorted(table).items():
                if drafting and kind not in ("flat", "drafts for free", "verification x 0.5"):
                    continue  # where the depth is chosen too, what drafting costs matters most
                speed = _run(pair, table, policy, r, effort, believed=wrong)
                over = estimate(speed.over(right, pair.weights))
                rows.append({"table": name, "requests": r, "wrong": kind, "adaptive_drafting": drafting, "over": over})
    return rows


# ---- the long-run objective ----
class LongRunReplay(Observed):
    """A replay whose budget maximises tokens - rate * ms."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.budget = LongRunBudget(self.num_positions)


def long_run(pair: Pair, effort: float = 1.0) -> list[dict[str, Any]]:
    """Tokens/s of the long-run objective over that of the ratio, on a trace: difficulty belongs to the tokens there."""
    rows = []
    for name, levels in LONG_RUN_AT.items():
        for r in levels:
            table = tables.named(name, pair.trace, r)
            policy = Policy.adaptive(confidence=simulate.own_confidence(pair.trace), adaptive_drafting=False)
            ratio = _run(pair, table, policy, r, effort)
            linear = _run(pair, table, policy, r, effort, replay=LongRunReplay)
            both = (m.outcome.stats for m in (ratio, linear))
            verified = [float(stats.verified_by_position.sum() / stats.num_request_steps) for stats in both]
            over = estimate(linear.over(ratio, pair.weights))
            rows.append({"pair": pair.name, "table": name, "requests": r, "over_ratio": over, "verified": verified})
    return rows


def once(pair: Pair | None, effort: float = 1.0) -> dict[str, Any]:
    """The studies that are made once, those on a trace on one pair."""
    wrong = wrong_tables(pair, effort) if pair else []
    followed = tracking(max(max(INTERVALS), int(2400 * effort)))
    return {"tracking": followed, "rules": budget_rules(pair, effort), "example": example(), "wrong_tables": wrong}
