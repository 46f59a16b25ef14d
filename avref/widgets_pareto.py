"""The Pareto explorer: throughput against speed per user, from replays made once, before anything is drawn."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import ipywidgets as widgets
from matplotlib.figure import Figure

from avref.cost_table import CostTable
from avref.evidence import fits, simulate, traces
from avref.evidence.replay import Policy
from avref.evidence.trace_file import Trace
from avref.plots_pareto import on_frontier, plot_frontier
from avref.widgets_explorer import LABEL, WIDE, Explorer

REQUESTS = (1, 4, 16, 64)
FLOORS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
Row = dict[str, Any]
Results = Mapping[str, Mapping[str, Sequence[Row]]]
"""Rows by drafter and by cost table."""


def arms(trace: Trace) -> dict[str, Policy]:
    """The arms that are compared: none, three fixed lengths (1, 3, K), and adaptive without and with adaptive drafting.

    Without a confidence of its own (an estimator's feature, an n-gram's record) a trace has no adaptive arm.
    """
    k, own = trace.num_positions, simulate.own_confidence(trace)
    made = {"none": Policy.none()} | {f"fixed-{i}": Policy.fixed(i) for i in sorted({1, min(3, k), k})}
    if own:
        made[f"adaptive-{k}-full-draft"] = Policy.adaptive(confidence=own, adaptive_drafting=False)
        made[f"adaptive-{k}"] = Policy.adaptive(confidence=own)
    return made


def sweep(
    trace: Trace, table: CostTable, requests: Sequence[int] = REQUESTS, *, steps: int = 240, workload: str | None = None
) -> list[Row]:
    """Every arm at every number of requests that the table covers, replayed on the held-out half of the answers.

    steps: decode steps at one request; R requests take steps / sqrt(R) of them, at least 40. An estimator starts from
    what it learned on the other half. workload: the held-out answers to its prompts only. Each row holds arm, requests,
    tokens_per_s, tokens_per_s_per_user, to_none (over no speculation), to_best_fixed (over the fastest arm without
    adaptive verification), and drafted, verified and emitted per request and step. Raises ValueError when the table
    covers none of `requests`.
    """
    first, second = fits.halves(trace)
    if workload is not None:
        second = second[trace.workload[second] == trace.header["workloads"].index(workload)]
    learned = _learned(trace)
    rows: list[Row] = []
    for n in (r for r in requests if r <= table.max_requests):
        own = []
        for arm, policy in arms(trace).items():
            start, num = simulate.warmed(policy, trace, learned), max(40, int(steps / n**0.5))
            run = simulate.measure(trace, table, start, n, second, warmup=first, num_steps=num).outcome
            own.append(_row(arm, n, run.tokens_per_s, run.stats))
        plain = own[0]["tokens_per_s"]
        fixed = max(r["tokens_per_s"] for r in own if not r["arm"].startswith("adaptive"))
        rows += [r | {"to_none": r["tokens_per_s"] / plain, "to_best_fixed": r["tokens_per_s"] / fixed} for r in own]
    if not rows:
        raise ValueError(f"none of {tuple(requests)} requests is covered: this table ends at {table.max_requests}")
    return rows


@lru_cache(maxsize=16)
def _learned(trace: Trace) -> Any:
    """The estimator after the first half of a trace's answers: the same for every table and load."""
    return simulate.learn(trace, fits.halves(trace)[0])


def _row(arm: str, requests: int, speed: float, stats: Any) -> Row:
    each = stats.num_request_steps
    return {
        "arm": arm,
        "requests": requests,
        "tokens_per_s": speed,
        "tokens_per_s_per_user": speed / requests,
        "drafted": float(stats.drafted_by_position.sum() / each),
        "verified": float(stats.verified_by_position.sum() / each),
        "emitted": stats.tokens_per_request_step,
    }


def choices(rows: Sequence[Row], floor: float) -> tuple[Row, float]:
    """(the row with the most tokens/s among those that give each user `floor` times plain decoding's speed at one
    request, that speed in tokens/s); the row with the most per user when none does."""
    alone = min((r for r in rows if r["arm"] == "none"), key=lambda r: r["requests"])
    least = floor * alone["tokens_per_s_per_user"]
    allowed = [r for r in rows if r["tokens_per_s_per_user"] >= least]
    if allowed:
        return max(allowed, key=lambda r: r["tokens_per_s"]), least
    return max(rows, key=lambda r: r["tokens_per_s_per_user"]), least


def pareto_figure(
    results: Results, *, drafter: str | None = None, table: str | None = None, floor: float = 0.0
) -> Figure:
    """The picture of `ParetoExplorer` at one setting; None: the first of `results`. ValueError for an unknown name."""
    rows = _rows(results, drafter, table)
    return plot_frontier(rows, floor=choices(rows, floor)[1])


class ParetoExplorer(Explorer):
    """Which arm, and how many requests at once, gives the most tokens per second while each user gets enough.

    results: by drafter and cost table, what `sweep` returns. Raises ValueError when there are none.
    """

    def __init__(self, results: Results) -> None:
        if not results or not all(results.values()):
            raise ValueError("results is empty; give rows by drafter and by cost table, as `sweep` makes them")
        self.results = results
        tables = list(next(iter(results.values())))
        self.drafter = widgets.Dropdown(options=list(results), description="drafter", style=LABEL)
        self.table = widgets.ToggleButtons(options=tables, description="cost table", style=LABEL)
        self.floor = widgets.SelectionSlider(
            options=FLOORS, value=0.0, description="per user, over plain", style=LABEL, layout=WIDE
        )
        super().__init__(self.drafter, self.table, self.floor)

    def draw(self) -> tuple[Figure, str]:
        rows = _rows(self.results, self.drafter.value, self.table.value)
        return plot_frontier(rows, floor=choices(rows, self.floor.value)[1]), _summary(rows, self.floor.value)


def _rows(results: Results, drafter: str | None, table: str | None) -> Sequence[Row]:
    by_table = _one(results, "drafter", drafter)
    return _one(by_table, "table", table)


def _one(mapping: Mapping[str, Any], kind: str, name: str | None) -> Any:
    wanted = next(iter(mapping)) if name is None else name
    if wanted not in mapping:
        raise ValueError(f"{kind} is {name!r}; these results hold {', '.join(map(repr, mapping))}")
    return mapping[wanted]


def _summary(rows: Sequence[Row], floor: float) -> str:
    best, least = choices(rows, floor)
    met = best["tokens_per_s_per_user"] >= least
    ours = sum(on_frontier(r, rows) for r in rows if r["arm"].startswith("adaptive"))
    together = f"{best['requests']} request{'s' * (best['requests'] > 1)} at once"
    return (
        f"{'most tokens/s' if met else 'none is fast enough; most per user'}: <b>{html.escape(best['arm'])}</b> with "
        f"{together}, <b>{best['tokens_per_s']:,.0f}</b> tokens/s, "
        f"{best['tokens_per_s_per_user']:,.1f} per user (wanted: {least:,.1f}); adaptive points on the frontier: {ours}"
    )


def shipped(*wanted: str) -> list[str]:
    """Those of the shipped traces that are wanted, in that order; the first shipped one when there are none."""
    found = [name for name in wanted if name in traces.shipped()]
    return found or traces.shipped()[:1]
