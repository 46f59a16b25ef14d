"""Figures about what a replay says: speed against load, and the frontier of throughput and speed per user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from avref.plot_arms import arm_look, arm_name, draw_per_user, number_loads
from avref.plot_style import STYLE, new_figure


@mpl.rc_context(STYLE)
def plot_load(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Speed over no speculation against requests running at once: a panel per cost table, a line per arm.

    results: by table, rows as `avref.evidence.simulate` makes them (arm, requests, to_none).
    """
    figure, panels = new_figure(1, len(results), size=(3.5 * len(results) + 1.5, 3.6), sharey=True)
    for axes, (name, rows) in zip(panels, results.items(), strict=True):
        for arm in dict.fromkeys(r["arm"] for r in rows):
            own = [r for r in rows if r["arm"] == arm]
            x, y = [r["requests"] for r in own], [r["to_none"] for r in own]
            axes.plot(x, y, markersize=4, label=arm_name(arm), **arm_look(arm))
        levels = sorted({r["requests"] for r in rows})
        axes.set(xscale="log", xlabel="requests at once", title=name)
        axes.set_xticks(levels, [str(n) for n in levels])
        axes.minorticks_off()
    panels[0].set_ylabel("tokens/s over no speculation")
    panels[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    return figure


def plot_frontier(rows: Sequence[Mapping[str, Any]], *, floor: float = 0.0) -> Figure:
    """Throughput against speed per user, a line per arm, a point per number of requests; up and right is better.

    rows: arm, requests, tokens_per_s, tokens_per_s_per_user. Ringed are the points that no other beats in both; what
    lies left of `floor` tokens/s per user is too slow and shaded.
    """
    margins = {"left": 0.09, "right": 0.7, "top": 0.95, "bottom": 0.14}
    with mpl.rc_context(STYLE):
        figure, (axes,) = new_figure(size=(9.0, 4.4), margins=margins)
        draw_per_user(axes, rows, "requests")
        best = [r for r in rows if on_frontier(r, rows)]
        x, y = [r["tokens_per_s_per_user"] for r in best], [r["tokens_per_s"] for r in best]
        axes.plot(x, y, "o", markersize=10, color="#444444", mfc="none", linewidth=0, label="on the frontier")
        number_loads(axes, best, "requests")
        low, high = axes.get_xlim()
        if floor > 0:
            axes.axvspan(low, min(max(floor, low), high), color="#EEEEEE", zorder=0)
        axes.set_xlim(low, high)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    return figure


def on_frontier(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no other row has both more tokens/s and more per user."""
    x, y = row["tokens_per_s_per_user"], row["tokens_per_s"]
    return not any(r["tokens_per_s_per_user"] > x and r["tokens_per_s"] > y for r in rows)
