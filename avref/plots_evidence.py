"""The bench's figures: throughput against speed per user, and fixed against adaptive verification by workload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from avref.plot_arms import arm_look, arm_name, draw_per_user, number_loads
from avref.plot_style import STYLE, new_figure


def _setting(result: Mapping[str, Any]) -> str:
    m, s = result["machine"], result["settings"]
    return (
        f"{m['target']} + {s['method']}, {m['dtype']}, {m['device']}, {m['threads']} threads, temperature 1, top-p 0.95"
    )


@mpl.rc_context(STYLE)
def plot_pareto(result: Mapping[str, Any]) -> Figure:
    """Throughput against tokens per second per user, a line per arm, a point per concurrency; better is up and right.

    Both axes are logarithmic. `result` is what `avref.evidence.bench.bench` returns; medians over repeats.
    """
    rows = [r for r in result["rows"] if r["block"] == "concurrency"]
    figure, (axes,) = new_figure(size=(8.6, 5.4))
    draw_per_user(axes, rows, "concurrency")
    number_loads(axes, [r for r in rows if r["arm"].startswith("adaptive-") and "full" not in r["arm"]], "concurrency")
    axes.set_title("Throughput against speed per user (numbers: requests running at once)")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    figure.supxlabel(_setting(result), fontsize=8.5, color="#555555", x=0.01, ha="left")
    return figure


@mpl.rc_context(STYLE)
def plot_off_on(result: Mapping[str, Any]) -> Figure:
    """Tokens per second by workload: no speculation, a fixed K (off), and adaptive verification (on).

    A bar is the median of the repeats, its line goes from the lowest to the highest; above the last bar stands the
    median ratio of on to off. `result` is what `avref.evidence.bench.bench` returns.
    """
    rows = [r for r in result["rows"] if r["block"] == "workloads"]
    cases, names = list(dict.fromkeys(r["case"] for r in rows)), list(dict.fromkeys(r["arm"] for r in rows))
    figure, (axes,) = new_figure(size=(8.6, 4.2))
    width = 0.84 / len(names)
    top = max(r["tokens_per_s_range"][1] for r in rows)
    for i, arm in enumerate(names):
        own = {r["case"]: r for r in rows if r["arm"] == arm}
        x = np.array([cases.index(case) for case in own]) + (i - (len(names) - 1) / 2) * width
        y = np.array([r["tokens_per_s"] for r in own.values()])
        low, high = np.array([r["tokens_per_s_range"] for r in own.values()]).T
        axes.bar(x, y, 0.92 * width, color=arm_look(arm)["color"], label=arm_name(arm))
        axes.errorbar(x, y, [y - low, high - y], fmt="none", ecolor="#333333", elinewidth=0.9, capsize=2)
        for place, end, case in zip(x, high, own, strict=True):
            ratio = _on_over_off(result, case) if arm.startswith("adaptive-") else None
            if ratio:
                axes.text(place, end + 0.015 * top, f"x {ratio:.2f}", ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(cases)), [case.replace("_", " ") for case in cases])
    axes.grid(False, axis="x")
    axes.set(ylabel="tokens/s", ylim=(0, 1.12 * top))
    axes.set_title(f"Adaptive verification off and on, {rows[0]['concurrency']} requests (x: on over off)")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    figure.supxlabel(_setting(result), fontsize=8.5, color="#555555", x=0.01, ha="left")
    return figure


def _on_over_off(result: Mapping[str, Any], case: str) -> float | None:
    found = (
        r["ratio"]
        for r in result["ratios"]
        if r["block"] == "workloads" and r["case"] == case and r["against"].startswith("fixed-")
    )
    return next(found, None)
