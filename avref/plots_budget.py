"""Figures about the budget: what a decode step costs, and which drafts are worth verifying."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from avref.cost_table import CostTable
from avref.plot_style import POLICY_COLORS, STYLE, new_figure
from avref.pruning import MAX_SCALE, allocate, choose_budget

if TYPE_CHECKING:
    from avref.evidence.synthetic import Simulation

Floats = npt.NDArray[np.float64]

_BY_REQUESTS = ("#56B4E9", "#0072B2", "#009E73", "#E69F00", "#CC79A7", "#000000", "#7F7F7F")


@mpl.rc_context(STYLE)
def plot_cost_table(table: CostTable) -> Figure:
    """Milliseconds of a decode step against packed tokens, a line for each power of two of requests.

    A line runs from one token per request (nothing verified) to the most that the table was made for. Dots are the
    measured medians, where the table keeps them; the line is their running maximum, as the budget reads it.
    """
    figure, (axes,) = new_figure(size=(8.0, 4.0))
    deepest = table.max_tokens // table.max_requests
    measured = np.array(table.metadata.get("verify_points", []), dtype=float).reshape(-1, 3)  # (requests, tokens, ms)
    sizes = sorted({1 << i for i in range(table.max_requests.bit_length())} | {table.max_requests})
    for i, requests in enumerate(s for s in sizes if s <= table.max_requests):
        tokens = np.arange(requests, requests * deepest + 1)
        ms = table.step_ms(requests, tokens)
        color = _BY_REQUESTS[i % len(_BY_REQUESTS)]
        name = f"{requests} request{'s' if requests > 1 else ''}"
        axes.plot(tokens, ms, color=color, label=name)
        points = measured[measured[:, 0] == requests]
        axes.plot(points[:, 1], points[:, 2] + table.draft(requests), "o", color=color, markersize=4)
    axes.set(xlabel="tokens in the target's forward (requests + verified drafts)", ylabel="decode step (ms)")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


@mpl.rc_context(STYLE)
def plot_survival(survival: Tensor, admitted: Tensor, cost_table: CostTable) -> Figure:
    """One step's decision: survivals [R, K] with the admitted drafts [R] framed, and tokens per second against B.

    Right: (R + the B best survivals) / milliseconds of the step, times 1000; the dot is the number admitted.
    """
    figure, (table, rate) = new_figure(1, 2, size=(11.0, 0.5 * len(survival) + 1.6), width_ratios=[1.25, 1])
    _draw_survivals(table, survival, admitted)
    _draw_rate(rate, survival, int(admitted.sum()), cost_table)
    return figure


def _draw_survivals(axes: Axes, survival: Tensor, admitted: Tensor) -> None:
    num_requests, num_positions = survival.shape
    axes.imshow(survival.cpu().numpy(), cmap="Blues", vmin=0, vmax=1.3, aspect="auto")
    for r, k in np.ndindex(num_requests, num_positions):
        value = float(survival[r, k])
        chosen = k < int(admitted[r])
        style: Any = {"fontweight": "bold"} if chosen else {"alpha": 0.7}
        axes.text(k, r, f"{value:.2f}", ha="center", va="center", color="white" if value > 0.7 else "black", **style)
    frame: Any = {"fill": False, "edgecolor": POLICY_COLORS["adaptive-7"], "linewidth": 2.4, "clip_on": False}
    for r, n in enumerate(admitted.tolist()):
        if n:
            axes.add_patch(mpl.patches.Rectangle((-0.49, r - 0.45), n, 0.9, **frame))
    axes.set_xticks(range(num_positions), [str(k + 1) for k in range(num_positions)])
    axes.set_yticks(range(num_requests))
    axes.grid(False)
    axes.set(xlabel="draft position", ylabel="request", title="Survival; framed: verified")


def _draw_rate(axes: Axes, survival: Tensor, budget: int, cost_table: CostTable) -> None:
    num_requests, num_positions = survival.shape
    best = survival.flatten().double().sort(descending=True).values.cpu().numpy()
    expected = num_requests + np.append(0.0, best.cumsum())  # [R K + 1] by B
    b = np.arange(len(expected))
    per_second = 1e3 * expected / cost_table.step_ms(num_requests, num_requests + b, depth=num_positions)
    axes.plot(b, per_second, color="black")
    axes.plot(budget, per_second[budget], "o", color=POLICY_COLORS["adaptive-7"], markersize=9, label=f"B = {budget}")
    axes.set(xlabel="budget B: drafts verified, best first", ylabel="expected tokens/s", title="Tokens per second")
    axes.set_ylim(0, 1.12 * per_second.max())
    axes.legend(loc="lower right")


@mpl.rc_context(STYLE)
def plot_cost_tables(tables: Mapping[str, CostTable], requests: Sequence[int] = (1, 8, 32, 128)) -> Figure:
    """Milliseconds of verification against packed tokens, a panel per table, a line per number of requests.

    A line runs from one token per request to eight, as far as the table goes; both axes are logarithmic, so that flat
    and proportional look the same at every scale.
    """
    figure, panels = new_figure(1, len(tables), size=(2.6 * len(tables), 3.0), sharex=True)
    for axes, (name, table) in zip(panels, tables.items(), strict=True):
        for running, color in zip(requests, _BY_REQUESTS, strict=False):
            if running <= table.max_requests:
                tokens = np.arange(running, min(8 * running, table.token_limit(running)) + 1)
                axes.plot(tokens, table.verify(running, tokens), color=color, label=f"{running}")
        low = 0.7 * float(table.verify(1, 1))
        high = 25 * low  # as many decades in every panel, so that slopes compare
        axes.set(xscale="log", yscale="log", ylim=(low, high), xlabel="tokens in the forward", title=name)
        axes.minorticks_off()
        ticks = [ms for ms in (1, 2, 5, 10, 20, 50, 100, 200, 500) if low < ms < high]
        axes.set_yticks(ticks, [f"{ms}" for ms in ticks])
        axes.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    panels[0].set_ylabel("verification (ms)")
    panels[-1].legend(title="requests", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


@mpl.rc_context(STYLE)
def plot_allocations(survival: Tensor, budgets: Sequence[int]) -> Figure:
    """The same survivals [R, K] with several budgets: framed are the drafts that each of them admits."""
    figure, panels = new_figure(1, len(budgets), size=(3.5 * len(budgets), 0.42 * len(survival) + 1.2), sharey=True)
    for axes, budget in zip(panels, budgets, strict=True):
        _draw_survivals(axes, survival, allocate(survival, budget))
        axes.set_title(f"B = {budget}")
        axes.label_outer()
    return figure


@mpl.rc_context(STYLE)
def plot_rules(simulations: Mapping[str, Simulation]) -> Figure:
    """Tokens per second of each budget rule over the best fixed length in hindsight, a group of bars per setting."""
    figure, (axes,) = new_figure(size=(9.5, 3.6))
    names = list(next(iter(simulations.values())).rules)
    for i, rule in enumerate(names):
        at = np.arange(len(simulations)) + 0.2 * (i - (len(names) - 1) / 2)
        heights = [simulation.relative[rule] for simulation in simulations.values()]
        lossy = rule == "retrospective"
        style: Any = {"hatch": "///", "edgecolor": "white"} if lossy else {}
        axes.bar(at, heights, 0.17, color=POLICY_COLORS[rule], label=rule + " (lossy)" * lossy, **style)
    none = [simulation.no_speculation / simulation.fixed.max() for simulation in simulations.values()]
    axes.plot(none, "D", color=POLICY_COLORS["none"], markersize=7, label="no speculation")
    axes.axhline(1.0, color=POLICY_COLORS["fixed-7"], linewidth=1.2, label="best fixed length")
    axes.set_xticks(range(len(simulations)), list(simulations))
    axes.grid(False, axis="x")
    axes.set(xlabel="cost table, requests", ylabel="tokens/s over the\nbest fixed length")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


@mpl.rc_context(STYLE)
def plot_lookahead(survival: Tensor, profile: npt.ArrayLike, cost_table: CostTable, admitted: int) -> Figure:
    """What `lookahead` sees with `admitted` drafts admitted: read so far, the slot in question, the predicted tail.

    Left: survivals by rank. Right: tokens per second of what is admitted, and predicted for every further end.
    """
    num_requests, mean = len(survival), np.asarray(profile)
    best = survival.flatten().double().sort(descending=True).values.numpy()
    s, ranks = best[admitted], np.arange(1, len(best) + 1)
    tail = np.minimum(s, mean[admitted + 1 :] * min(s / mean[admitted], MAX_SCALE))
    tokens = num_requests + np.append(0.0, np.concatenate([best[: admitted + 1], tail]).cumsum())
    ms = cost_table.step_ms(num_requests, num_requests + np.append(0, ranks), survival.shape[1])
    rate = 1e3 * tokens / ms
    figure, (left, right) = new_figure(1, 2, size=(11.0, 3.6))
    if admitted:
        left.bar(ranks[:admitted], best[:admitted], color="black", label="admitted")
    left.bar(ranks[admitted], s, color=POLICY_COLORS["adaptive-7"], label="in question: read")
    left.bar(ranks[admitted + 1 :], tail, fill=False, edgecolor="#999999", label="behind it: predicted")
    left.plot(ranks, mean[: len(best)], color="#0072B2", linestyle="--", label="mean of past steps")
    left.set(xlabel="draft, in order of survival", ylabel="survival", ylim=(0, 1.02))
    right.plot(range(admitted + 1), rate[: admitted + 1], "o-", color="black", markersize=4, label="admitted")
    right.plot(ranks[admitted:], rate[admitted + 1 :], "o", color="#999999", mfc="none", label="predicted")
    right.axhline(rate[admitted], color="black", linestyle=":", linewidth=1.2, label="to be beaten")
    right.set(xlabel="drafts verified", ylabel="expected tokens/s")
    for axes in (left, right):
        axes.legend(fontsize=9, loc="best")
    return figure


def plot_belief(truth: Tensor, believed: Tensor, cost_table: CostTable, profile: npt.ArrayLike | None) -> Figure:
    """One step decided on believed survivals [R, K] and paid by the true ones: rates by budget, and the drafts chosen.

    Left: what the rules believe a budget would emit, what it does emit, and where two rules stop. Right: the true
    survivals, requests in order of drafts verified; left of the line is what `lookahead` admits.
    """
    num_requests, num_positions = truth.shape
    by_position = truth.T.flatten()[believed.T.flatten().argsort(descending=True, stable=True)]
    b = np.arange(truth.numel() + 1)
    cost = cost_table.step_ms(num_requests, num_requests + b, num_positions)
    gains = {"believed": believed.flatten().sort(descending=True).values, "true": by_position}
    rate = {n: 1e3 * (num_requests + np.append(0.0, g.double().cumsum(0).numpy())) / cost for n, g in gains.items()}
    margins = {"left": 0.09, "right": 0.97, "top": 0.9, "bottom": 0.15, "wspace": 0.2}
    with mpl.rc_context(STYLE):
        figure, (left, right) = new_figure(1, 2, size=(10.0, 3.8), margins=margins, width_ratios=[1.5, 1])
        left.plot(b, rate["believed"], color=POLICY_COLORS["none"], linestyle="--", label="believed")
        left.plot(b, rate["true"], color="#0072B2", label="true")
        budget = 0
        for rule in ("early_stop", "lookahead"):
            budget = choose_budget(believed, cost_table, num_requests, rule, profile)
            style: Any = {"color": POLICY_COLORS[rule], "markersize": 7 if rule == "lookahead" else 11}
            left.plot(budget, rate["true"][budget], "o", label=f"{rule}: B = {budget}", **style)
        left.set(xlabel="budget B: drafts verified, best first", ylabel="expected tokens/s")
        left.set_ylim(0, 1.15 * max(r.max() for r in rate.values()))
        left.set_title("Tokens per second", y=1.0)
        left.legend(loc="lower right", fontsize=9)
        admitted = allocate(believed, budget)
        order = admitted.argsort(descending=True, stable=True)
        right.imshow(truth[order].numpy(), cmap="Blues", vmin=0, vmax=1.3, aspect="auto", interpolation="nearest")
        edge: Any = {"color": POLICY_COLORS["adaptive-7"], "linewidth": 2.4, "clip_on": False}
        edges = np.arange(num_requests + 1) - 0.5
        right.stairs(admitted[order].numpy() - 0.5, edges, orientation="horizontal", baseline=-0.5, **edge)
        right.set_xticks(range(num_positions), [str(k + 1) for k in range(num_positions)])
        right.set_yticks([])
        right.grid(False)
        right.set(xlabel="draft position", ylabel="requests", xlim=(-0.55, num_positions - 0.5))
        right.set_title("True survival; left of the line: verified", y=1.0)
    return figure


@mpl.rc_context(STYLE)
def plot_speeds(
    x: Sequence[float], curves: Mapping[str, npt.ArrayLike], *, xlabel: str, ylabel: str, bottom: float = 0.0
) -> Figure:
    """Speed against one quantity, a line with dots for each of up to six curves; the axis starts at `bottom`."""
    figure, (axes,) = new_figure(size=(8.5, 3.6))
    for (name, values), color in zip(curves.items(), _BY_REQUESTS[1:], strict=False):
        axes.plot(x, np.asarray(values), "o-", markersize=4, color=POLICY_COLORS.get(name, color), label=name)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_ylim(bottom=bottom)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
