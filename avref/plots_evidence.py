"""The bench's figures: throughput against speed per user, and fixed against adaptive verification by workload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from avref.plot_style import POLICY_COLORS, STYLE, new_figure


def _look(arm: str) -> dict[str, Any]:
    """Colour, line and marker of an arm: fixed lengths from light to dark blue, adaptive ones thick."""
    if arm.startswith("adaptive-"):
        broken = arm.endswith("full-draft")
        color = "#E69F00" if broken else POLICY_COLORS["adaptive-7"]
        return {"color": color, "linewidth": 2.4, "linestyle": "--" if broken else "-", "marker": "s", "zorder": 4}
    if arm.startswith("fixed-"):
        shade = 0.3 + 0.1 * min(7, int(arm.removeprefix("fixed-")))
        return {"color": POLICY_COLORS.get(arm) or mpl.colormaps["Blues"](shade), "marker": "o", "linewidth": 1.3}
    if arm == "none":
        return {"color": POLICY_COLORS["none"], "marker": "D", "linewidth": 1.8}
    return {"color": "#000000", "marker": "x", "linewidth": 1.1, "linestyle": ":"}


def _name(arm: str) -> str:
    kind, _, rest = arm.partition("-")
    if kind == "none":
        return "no speculation"
    if kind in ("fixed", "adaptive"):
        num, _, more = rest.partition("-")
        return f"{kind} K = {num}" + (", always drafts K" if more else "")
    return "drafts, verifies nothing"


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
    for arm in dict.fromkeys(r["arm"] for r in rows):
        own = sorted((r for r in rows if r["arm"] == arm), key=lambda r: r["concurrency"])
        x, y = [r["tokens_per_s_per_user"] for r in own], [r["tokens_per_s"] for r in own]
        axes.plot(x, y, markersize=4.5, label=_name(arm), **_look(arm))
        if arm.startswith("adaptive-") and not arm.endswith("full-draft"):
            for r in own:
                place = (r["tokens_per_s_per_user"], r["tokens_per_s"])
                axes.annotate(str(r["concurrency"]), place, (5, 4), textcoords="offset points", fontsize=8.5)
    axes.set(xscale="log", yscale="log", xlabel="tokens/s per user", ylabel="tokens/s, all requests")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_formatter(NullFormatter())
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
        axes.bar(x, y, 0.92 * width, color=_look(arm)["color"], label=_name(arm))
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
