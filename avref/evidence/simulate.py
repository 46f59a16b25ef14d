"""What every arm emits per second under any cost table, from one request to thousands: traces replayed, no model run.

An arm is measured on the held-out half of the trace's answers; what it learns from, it learned on the other half (the
estimator's coefficients, fitted there, and the running means of budget and depth). Its answers are taken over and over
in random order with R requests running all the time, so a speed is that of a full batch, prefill left out.

The tables are those of `tables`: what drafting costs there is made to fit the trace's own family of drafter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from avref.config import real, whole
from avref.cost_table import CostTable
from avref.evidence import fits, traces
from avref.evidence.observed import Measured, measure
from avref.evidence.policy import Policy
from avref.evidence.resampling import summary
from avref.evidence.trace_file import Array, Trace
from avref.files import write_text

REQUESTS = (1, 4, 16, 64, 256)
REQUEST_STEPS, FEWEST, MOST = 12_000, 200, 1500  # steps: so many request steps, but not fewer and not more


# ---- arms ----
def own_confidence(trace: Trace) -> str | None:
    """What an adaptive arm reads on this trace: the estimator's feature, or the record an n-gram drafter keeps."""
    if trace.logit_q_max is not None:
        return "estimator"
    return "head" if trace.head is not None else None


def arms(trace: Trace) -> dict[str, Policy]:
    """Every arm that the trace can judge, by the bench's names: none, fixed-1 ... fixed-K, always-trim, adaptive-K.

    Beside them those that a bench has no names for: head and q_max as confidences, and the oracle.
    """
    k, own = trace.num_positions, own_confidence(trace)
    made = {"none": Policy.none(), **{f"fixed-{i}": Policy.fixed(i) for i in range(1, k + 1)}}
    made["always-trim"] = Policy.control()
    if own:
        made[f"adaptive-{k}"] = Policy.adaptive(confidence=own)
        made[f"adaptive-{k}-full-draft"] = Policy.adaptive(confidence=own, adaptive_drafting=False)
    if own == "estimator" and trace.head is not None:
        made["head"] = Policy.adaptive(confidence="head")
    if own == "estimator":
        made["q_max"] = Policy.adaptive(confidence="q_max")
    made["oracle"] = Policy.adaptive(confidence="oracle")
    return made


def warmed(policy: Policy, trace: Trace, learned: fits.OnlineAcceptanceEstimator | None) -> Policy:
    """The policy with its estimator starting at coefficients learned elsewhere."""
    if learned is None or not policy.learns or "slope" in policy.estimator:
        return policy
    start = {"slope": float(learned.slope), "intercept": learned.intercepts.tolist()}
    return replace(policy, estimator={**policy.estimator, **start})


def learn(trace: Trace, answers: Array) -> fits.OnlineAcceptanceEstimator | None:
    """The estimator, run over some answers until it stands still; None for a drafter without logits."""
    if trace.logit_q_max is None:
        return None
    return fits.fit(traces.features(trace), fits.draw(trace, seed=1).of(answers))


# ---- measuring ----
def simulate(
    trace: Trace, table: CostTable, requests: Sequence[int] = REQUESTS, *, seed: int = 0, effort: float = 1.0
) -> dict[str, Any]:
    """Every arm at every number of requests that the table covers: a row each, and what was left out and why.

    effort scales the number of decode steps. Raises ValueError when the table covers none of the numbers asked for.
    """
    real("effort", effort, 0.0, 1e6, open_low=True)
    for r in requests:
        whole("a number of requests", r, 0)
    first, second = fits.halves(trace)
    learned, rows, left = learn(trace, first), [], []
    for r in requests:
        if not 1 <= r <= table.max_requests:
            left.append(f"{r} requests: this table covers 1 to {table.max_requests}")
            continue
        found: dict[str, Measured] = {}
        for name, policy in arms(trace).items():
            needed = r * (1 + (trace.num_positions if policy.verify is None else policy.verify))
            if needed > table.token_limit(r):
                left.append(f"{name} at {r} requests: {needed} tokens, this table covers {table.token_limit(r)}")
                continue
            steps = max(1, int(effort * np.clip(REQUEST_STEPS // r, FEWEST, MOST)))
            start = warmed(policy, trace, learned)
            found[name] = measure(trace, table, start, r, second, num_steps=steps, warmup=first, seed=seed)
        rows += [_row(name, found) for name in found if "none" in found]  # else `left` says why
    if not rows:
        raise ValueError(f"nothing to simulate: {'; '.join(left)}")
    return {"trace": dict(trace.header), "table": _described(table), "rows": rows, "left_out": left}


def _row(name: str, found: Mapping[str, Measured]) -> dict[str, Any]:
    own = found[name]
    stats, speed = own.outcome.stats, own.tokens_per_s
    best = max((n for n in found if n == "none" or n.startswith("fixed-")), key=lambda n: found[n].tokens_per_s)
    counts = {kind: getattr(stats, f"{kind}_by_position") for kind in ("drafted", "verified", "accepted")}
    return {
        "arm": name,
        "requests": own.num_requests,
        "tokens_per_s": speed,
        "tokens_per_s_per_user": speed / own.num_requests,
        "to_none": speed / found["none"].tokens_per_s,
        "to_best_fixed": speed / found[best].tokens_per_s,
        "best_fixed": best,
        **{kind: float(count.sum() / stats.num_request_steps) for kind, count in counts.items()},
        **{f"{kind}_by_position": count.tolist() for kind, count in counts.items()},
        "steps": stats.num_steps,
        "draft_ms": stats.draft_ms,
        "verify_ms": stats.verify_ms,
        "refits": stats.num_refits,
    }


def _described(table: CostTable) -> dict[str, Any]:
    return {name: value for name, value in table.metadata.items() if not name.endswith("_points")}


# ---- the command's output ----
def markdown(result: Mapping[str, Any]) -> str:
    """The rows as a table, with the setting above and what was left out below."""
    h, about = result["trace"], result["table"]
    header = ["requests", "arm", "tokens/s", "per user", "x none", "x best fixed", "drafted", "verified", "accepted"]
    lines = [
        [r["requests"], r["arm"], *(f"{r[n]:.1f}" for n in ("tokens_per_s", "tokens_per_s_per_user"))]
        + [f"{r[n]:.2f}" for n in ("to_none", "to_best_fixed", "drafted", "verified", "accepted")]
        for r in result["rows"]
    ]
    table = tabulate(lines, header, tablefmt="pipe", disable_numparse=True, colalign=("right", "left", *["right"] * 7))
    setting = (
        f"{h['target']} with {h['method']} ({h['draft_sample_method']} drafting), replayed under the cost table of "
    )
    setting += f"{about.get('machine', 'a machine not named')}. Drafted, verified, accepted: per request and step."
    left = ["", "Left out:", "", *(f"- {what}" for what in result["left_out"])] if result["left_out"] else []
    return "\n".join([setting, "", table, *left]) + "\n"


def save(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write `simulate.json`, `simulate.md` and `pareto.png`; return their paths."""
    from avref import plots

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in ("simulate.json", "simulate.md", "pareto.png")]
    write_text(paths[0], json.dumps(summary(dict(result)), indent=1, allow_nan=False) + "\n")
    write_text(paths[1], markdown(result))
    plots.plot_simulation(result).savefig(paths[2], dpi=150)
    return paths
