"""The picture of the quick start: tokens per second of every arm, and where the drafts went."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from avref.plot_style import POLICY_COLORS, new_figure


def plot_quickstart(result: dict[str, Any]) -> Figure:
    """Speed against plain decoding by concurrency, and what became of the drafts at the largest concurrency.

    Left: a bar is the median of the repeats, its line goes from the lowest to the highest. Right: drafts verified and
    accepted per request and step, by position.
    """
    rows = result["rows"]
    concurrencies = sorted({r["concurrency"] for r in rows})
    arms = list(dict.fromkeys(r["arm"] for r in rows))
    figure, (speed, drafts) = new_figure(1, 2, size=(10.5, 4.0), width_ratios=[1.7, 1])
    width = 0.8 / len(arms)
    for i, arm in enumerate(arms):
        own = [next(r for r in rows if r["arm"] == arm and r["concurrency"] == c) for c in concurrencies]
        x = np.arange(len(concurrencies)) + (i - (len(arms) - 1) / 2) * width
        y = np.array([r["speedup"] for r in own])
        low, high = np.array([r["speedup_range"] for r in own]).T
        speed.bar(
            x,
            y,
            width * 0.92,
            color=POLICY_COLORS[arm],
            label=arm.replace("-", " K = ").replace("none", "no speculation"),
        )
        if arm != "none":
            speed.errorbar(x, y, [y - low, high - y], fmt="none", ecolor="#333333", elinewidth=0.9, capsize=2)
        for place, value in zip(x, y, strict=True):
            speed.text(
                place,
                0.03,
                f"{value:.2f}",
                ha="center",
                va="bottom",
                fontsize=7.5,
                color="white" if arm in ("fixed-7", "adaptive-7", "fixed-3", "none") else "black",
            )
    speed.axhline(1.0, color="#444444", linewidth=0.8)
    speed.set_xticks(range(len(concurrencies)), [f"{c}" for c in concurrencies])
    speed.set(xlabel="requests running at once", ylabel="tokens/s against no speculation", title="Speed of decoding")
    speed.legend(fontsize=8, ncols=2, loc="upper right")
    speed.set_ylim(0, 1.28 * max(r["speedup_range"][1] for r in rows))

    last = [r for r in rows if r["concurrency"] == concurrencies[-1] and r["arm"] in ("fixed-7", "adaptive-7")]
    k = np.arange(1, 8)
    for r in last:
        steps = max(1, r["drafted_by_position"][0])
        color, name = POLICY_COLORS[r["arm"]], r["arm"].replace("-", " K = ")
        drafts.plot(k, np.array(r["verified_by_position"]) / steps, color=color, marker="o", label=f"verified, {name}")
        drafts.plot(
            k,
            np.array(r["accepted_by_position"]) / steps,
            color=color,
            marker="s",
            linestyle=":",
            label=f"accepted, {name}",
        )
    drafts.set(
        xlabel="draft position",
        ylabel="share of drafts",
        title=f"What was verified, {concurrencies[-1]} requests",
        ylim=(0, 1.05),
    )
    drafts.legend(fontsize=8)
    m = result["machine"]
    figure.text(
        0.005,
        0.005,
        f"{m['target']} + {m['method']}, {m['dtype']}, {m['device']}, temperature 1, top-p 0.95",
        fontsize=7,
        color="#555555",
    )
    figure.set_layout_engine("constrained", rect=(0, 0.03, 1, 0.97))  # room for the line below the axes
    return figure
