"""The pictures of the quick start: tokens per second of every arm, and what became of the drafts."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from avref.arms import deepest
from avref.plot_arms import arm_look, arm_name
from avref.plot_style import STYLE, new_figure
from avref.stats import Stats

_ABOVE: Any = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0), "fontsize": 9, "columnspacing": 1.2}
_TITLE_PAD = 44  # points: leaves room for two rows of legend between title and axes


@mpl.rc_context(STYLE)
def plot_quickstart(result: dict[str, Any]) -> Figure:
    """Speed against plain decoding by concurrency, and what became of the drafts at the largest concurrency.

    Left: a bar is the median of the repeats, its line goes from the lowest to the highest. Right: share of the drafts
    at each position that were verified, and that were accepted. `result` is what `avref.quickstart.quickstart` returns.
    """
    figure, (speed, drafts) = new_figure(1, 2, size=(11.0, 4.8), width_ratios=[1.55, 1])
    _draw_speed(speed, result["rows"])
    _draw_shares(drafts, result["rows"])
    m = result["machine"]
    setting = f"{m['target']} + {m['method']}, {m['dtype']}, {m['device']}, temperature 1, top-p 0.95"
    figure.text(0.006, 0.008, setting, fontsize=8.5, color="#555555")
    figure.set_layout_engine("constrained", rect=(0, 0.04, 1, 0.96), wspace=0.05)  # room for the line below the axes
    return figure


def _draw_speed(axes: Axes, rows: list[dict[str, Any]]) -> None:
    concurrencies = sorted({r["concurrency"] for r in rows})
    arms = list(dict.fromkeys(r["arm"] for r in rows))
    top = max(r["speedup_range"][1] for r in rows)
    width = 0.86 / len(arms)
    for i, arm in enumerate(arms):
        own = [next(r for r in rows if r["arm"] == arm and r["concurrency"] == c) for c in concurrencies]
        x = np.arange(len(concurrencies)) + (i - (len(arms) - 1) / 2) * width
        y = np.array([r["speedup"] for r in own])
        low, high = np.array([r["speedup_range"] for r in own]).T
        axes.bar(x, y, width * 0.92, color=arm_look(arm)["color"], label=arm_name(arm))
        if (high > low).any():
            axes.errorbar(x, y, [y - low, high - y], fmt="none", ecolor="#333333", elinewidth=0.9, capsize=2)
        for place, value, end in zip(x, y, high, strict=True):
            axes.text(place, end + 0.015 * top, f"{value:.2f}", ha="center", va="bottom", fontsize=9)
    axes.axhline(1.0, color="#444444", linewidth=0.8)
    axes.grid(False, axis="x")
    axes.set_xticks(range(len(concurrencies)), [str(c) for c in concurrencies])
    axes.set(xlabel="requests running at once", ylabel="tokens/s, as a multiple of no speculation")
    axes.set_ylim(0, 1.1 * top)
    axes.set_title("Speed of decoding", pad=_TITLE_PAD)
    axes.legend(**_ABOVE, ncols=3)


def _draw_shares(axes: Axes, rows: list[dict[str, Any]]) -> None:
    largest = max(r["concurrency"] for r in rows)
    for r in rows:
        if r["concurrency"] != largest or r["arm"] not in deepest(rows):
            continue
        drafted = np.maximum(1, r["drafted_by_position"])
        k, color = np.arange(1, len(drafted) + 1), arm_look(r["arm"])["color"]
        for count, marker, line in (("verified", "o", "-"), ("accepted", "s", ":")):
            share = np.array(r[f"{count}_by_position"]) / drafted
            axes.plot(k, share, color=color, marker=marker, linestyle=line, label=f"{count}, {arm_name(r['arm'])}")
    axes.set(xlabel="draft position", ylabel="share of the drafts made", ylim=(-0.02, 1.05))
    axes.set_title(f"What was verified, {largest} request{'s' if largest > 1 else ''}", pad=_TITLE_PAD)
    axes.legend(**_ABOVE, ncols=2)


@mpl.rc_context(STYLE)
def plot_drafts(stats: Stats) -> Figure:
    """What became of the drafts at each position: accepted, rejected, never reached, not verified; shares of all made.

    Never reached are drafts that were verified behind a rejection, or behind the end of the text: work for nothing.
    """
    drafted, verified, graded, accepted = (
        np.asarray(getattr(stats, f"{name}_by_position")) for name in ("drafted", "verified", "graded", "accepted")
    )
    parts = {
        "accepted": (accepted, "#0072B2"),
        "rejected": (graded - accepted, "#D55E00"),
        "verified, never reached": (verified - graded, "#CCCCCC"),
        "not verified": (drafted - verified, "#FFFFFF"),
    }
    figure, (axes,) = new_figure(size=(8.0, 3.6))
    k, bottom = np.arange(1, len(drafted) + 1), np.zeros(len(drafted))
    for name, (count, color) in parts.items():
        share = count / np.maximum(1, drafted)
        if count.any():
            axes.bar(k, share, 0.8, bottom=bottom, color=color, edgecolor="#999999", linewidth=0.6, label=name)
        bottom += share
    shares = (accepted / np.maximum(1, drafted)).tolist()
    axes.set(xlabel="draft position, and the share accepted there", ylabel="share of the drafts made", ylim=(0, 1.02))
    axes.set_xticks(k, [f"{position}\n{share:.0%}" for position, share in zip(k.tolist(), shares, strict=True)])
    axes.grid(False, axis="x")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
