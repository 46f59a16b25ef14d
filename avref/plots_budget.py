"""Figures about the budget: what a decode step costs, and which drafts are worth verifying."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from avref.cost_table import CostTable
from avref.plot_style import POLICY_COLORS, STYLE, new_figure

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
    axes.imshow(survival.cpu(), cmap="Blues", vmin=0, vmax=1.3, aspect="auto")
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
