"""Every figure of the project: one style, one palette that colour-blind readers can tell apart, one colour per policy.

Figures are plain `matplotlib.figure.Figure` objects, made without pyplot: nothing is registered globally, so drawing
the same picture a thousand times leaks nothing. In a notebook, `%matplotlib inline` shows one that ends a cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from avref.traffic import DampingHistory

# Fixed lengths are an ordered family, so they share a hue; the rest are apart in hue and in lightness.
POLICY_COLORS = {
    "none": "#7F7F7F",
    "fixed-1": "#9ECAE1",
    "fixed-3": "#4292C6",
    "fixed-7": "#08519C",
    "adaptive-7": "#D55E00",
    "stale": "#CC79A7",
    "early_stop": "#E69F00",
    "lookahead": "#000000",
    "newton": "#882255",
    "self_concordant": "#009E73",
}
TRUTH: Any = {"color": "#444444", "linestyle": (0, (4, 2)), "linewidth": 1.2}
STYLE: Any = {
    "figure.dpi": 100,
    "figure.facecolor": "white",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E5E5E5",
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}


def new_figure(
    rows: int = 1,
    columns: int = 1,
    *,
    size: tuple[float, float] = (8.0, 3.2),
    margins: dict[str, float] | None = None,
    **options: Any,
) -> tuple[Figure, list[Axes]]:
    """A figure of rows x columns axes in the project's style, size in inches; `options` go to `Figure.subplots`.

    With `margins` (as for `Figure.subplots_adjust`) matplotlib searches no layout, which halves the drawing time.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, layout=None if margins else "constrained")
        axes = figure.subplots(rows, columns, squeeze=False, **options)
        if margins:
            figure.subplots_adjust(**margins)
    return figure, list(axes.flat)


def save(fig: Figure, name: str, *, dpi: int = 150) -> Path:
    """Write `figures/<name>.png` at the project's root (or, outside a checkout, in the working folder)."""
    here = Path.cwd()
    root = next((folder for folder in (here, *here.parents) if (folder / "avref" / "plots.py").is_file()), here)
    path = root / "figures" / f"{name}.png"
    path.parent.mkdir(exist_ok=True)
    fig.savefig(path, dpi=dpi)
    return path


@mpl.rc_context(STYLE)
def plot_damping(*histories: DampingHistory, positions: Sequence[int] | None = None) -> Figure:
    """Slope, intercepts and excess log-loss over time against the truth, for one run or several on the same traffic.

    `positions` (0-based) are the intercepts drawn: by default the first, middle and last position for one run, the
    first for several. An estimate that leaves the picture is named with its extreme value.
    Raises ValueError without a run.
    """
    if not histories:
        raise ValueError("plot_damping got no history; pass what avref.traffic.simulate_damping returns")
    last = histories[0].intercepts.shape[1] - 1
    if positions is None:
        positions = (0, last // 2, last) if len(histories) == 1 else (0,)
    margins = {"left": 0.12, "right": 0.89, "top": 0.95, "bottom": 0.08, "hspace": 0.14}
    figure, (slope, intercepts, excess) = new_figure(
        3, 1, size=(8.0, 6.4), margins=margins, sharex=True, height_ratios=(2, 3, 3)
    )
    slope.set_title(histories[0].label if len(histories) == 1 else histories[0].traffic + " traffic")
    _draw_slopes(slope, histories)
    _draw_intercepts(intercepts, histories, positions)
    _draw_excess(excess, histories)
    return figure


def _draw_slopes(axes: Axes, histories: Sequence[DampingHistory]) -> None:
    axes.axhline(histories[0].true_slope, label="truth", **TRUTH)
    for history in histories:
        _draw_rounds(axes, history, history.slope, label=history.step)
    _limit(axes, 0.0, 2 * histories[0].true_slope, [(history, history.slope) for history in histories])
    axes.set_ylabel("slope")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.0, ncols=3)


def _draw_intercepts(axes: Axes, histories: Sequence[DampingHistory], positions: Sequence[int]) -> None:
    truth = histories[0].true_intercepts[:, list(positions)].numpy()  # [steps, positions]
    for column, position in enumerate(positions):
        alpha = 1.0 - 0.6 * column / len(positions)  # deeper positions are paler
        axes.plot(truth[:, column], alpha=alpha, **TRUTH)
        for history in histories:
            _draw_rounds(axes, history, history.intercepts[:, position], alpha=alpha)
        axes.annotate(
            f"position {position + 1}",
            (1.0, truth[-1, column]),
            xycoords=("axes fraction", "data"),
            xytext=(3, 0),
            textcoords="offset points",
            fontsize=8,
            va="center",
        )
    estimates = [(history, history.intercepts[:, list(positions)]) for history in histories]
    _limit(axes, truth.min() - 1.5, truth.max() + 1.5, estimates)
    axes.set_ylabel("intercept (log-odds)")


def _draw_excess(axes: Axes, histories: Sequence[DampingHistory]) -> None:
    for history in histories:
        _draw_rounds(axes, history, history.excess_log_loss.clamp_min(1e-6))
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 1e-4), max(high, 1.0))
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")  # plain numbers: a formula per tick takes most of the drawing time
    axes.set(ylabel="excess log-loss\n(nats per draft)", xlabel="decode steps")


def _draw_rounds(axes: Axes, history: DampingHistory, values: Tensor, **options: Any) -> None:
    """A value per round, as the flat piece that is in force during the round."""
    axes.stairs(values, history.edges, baseline=None, color=POLICY_COLORS[history.step], linewidth=1.6, **options)


def _limit(axes: Axes, low: float, high: float, estimates: Sequence[tuple[DampingHistory, Tensor]]) -> None:
    """Keep the axis around the truth; say so when an estimate goes outside."""
    axes.set_ylim(low, high)
    history, values = max(estimates, key=lambda pair: float(pair[1].abs().max()))
    farthest = float(values.flatten()[values.abs().argmax()])
    if not low <= farthest <= high:
        text = f"{history.step} leaves the picture: {farthest:,.1f}".replace("-", "\N{MINUS SIGN}")
        style: Any = {"color": POLICY_COLORS[history.step], "fontsize": 9, "ha": "right", "va": "top"}
        axes.text(0.99, 0.95, text, transform=axes.transAxes, **style)
