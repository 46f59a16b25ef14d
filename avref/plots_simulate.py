"""Figures of replayed arms: throughput against speed per user, and against the number of requests running."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from avref.plot_arms import arm_look, arm_name, draw_per_user, number_loads
from avref.plot_style import STYLE, new_figure

TABLES = {"measured": "2 cores (measured)", "b300": "four B300 (published)"}
OUTSIDE: Any = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "fontsize": 9}


@mpl.rc_context(STYLE)
def plot_simulation(result: Mapping[str, Any]) -> Figure:
    """Tokens/s against tokens/s per user of every simulated arm, a point per number of requests running.

    `result` is what `avref.evidence.simulate.simulate` returns. Both axes are logarithmic.
    """
    figure, (axes,) = new_figure(size=(8.8, 5.4))
    rows = result["rows"]
    draw_per_user(axes, rows, "requests")
    number_loads(axes, [r for r in rows if r["arm"].startswith("adaptive") and "full" not in r["arm"]], "requests")
    axes.set_title("Throughput against speed per user, replayed (numbers: requests running at once)")
    axes.legend(**OUTSIDE)
    about = f"{result['trace']['target']} + {result['trace']['method']}, cost table: "
    figure.supxlabel(
        about + f"{result['table'].get('machine', 'not named')}", fontsize=8.5, color="#555555", x=0.01, ha="left"
    )
    return figure


@mpl.rc_context(STYLE)
def plot_throughput(studies: Mapping[str, Any]) -> Figure:
    """Tokens/s over no speculation against requests running: a panel per table and pair."""
    speeds = studies["speeds"]
    tables, pairs = (list(dict.fromkeys(s[n] for s in speeds)) for n in ("table", "pair"))
    columns = min(4, len(pairs))
    rows = -(-len(pairs) // columns)
    figure, panels = new_figure(len(tables) * rows, columns, size=(3.0 * columns + 2.2, 2.7 * rows * len(tables)))
    for i, axes in enumerate(panels):
        table, place = tables[i // (rows * columns)], i % (rows * columns)
        if place >= len(pairs):
            axes.set_axis_off()
            continue
        own = next(s["over_none"] for s in speeds if s["table"] == table and s["pair"] == pairs[place])
        for arm, by_requests in own.items():
            levels = [r for r in by_requests if by_requests[r]["value"]]
            y = [by_requests[r]["value"] for r in levels]
            axes.plot([int(r) for r in levels], y, markersize=4, label=arm_name(arm), **arm_look(arm))
        axes.set(xscale="log", title=f"{pairs[place]}, {table}", xlabel="requests running")
        axes.set_xticks(ticks := [int(r) for r in own["none"]], [str(r) for r in ticks])
        axes.xaxis.set_minor_formatter(NullFormatter())
        if place % columns == 0:
            axes.set_ylabel("tokens/s over none")
    handles = {name: h for axes in panels for h, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    panels[columns - 1].legend(handles.values(), handles.keys(), **OUTSIDE)
    about = "; ".join(f"{t}: {TABLES.get(t, t)}" for t in tables)
    figure.supxlabel(about, fontsize=8.5, color="#555555", x=0.01, ha="left")
    return figure
