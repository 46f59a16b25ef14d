"""Figures about the estimator: tracking and damping, one Newton step, the arrowhead, labels, starvation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from avref.estimator import OnlineAcceptanceEstimator
from avref.plot_style import POLICY_COLORS, STYLE, TRUTH, new_figure
from avref.traffic import DampingHistory, StarvationHistory


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
    margins = {"left": 0.13, "right": 0.89, "top": 0.95, "bottom": 0.08, "hspace": 0.14}
    figure, (slope, intercepts, excess) = new_figure(
        3, 1, size=(8.0, 6.4), margins=margins, sharex=True, height_ratios=(2, 3, 3)
    )
    title = histories[0].label if len(histories) == 1 else histories[0].traffic + " traffic"
    slope.set_title(title, y=1.0)  # a fixed height saves a search for it
    _draw_slopes(slope, histories)
    _draw_intercepts(intercepts, histories, positions)
    _draw_excess(excess, histories)
    return figure


def _draw_slopes(axes: Axes, histories: Sequence[DampingHistory]) -> None:
    axes.axhline(histories[0].true_slope, label="truth", **TRUTH)
    for history in histories:
        _draw_rounds(axes, history, history.slope, label=history.step)
    _limit(axes, 0.0, 2 * histories[0].true_slope, [(history, history.slope) for history in histories])
    axes.set(ylabel="slope", yticks=(0.0, histories[0].true_slope, 2 * histories[0].true_slope))
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.0, ncols=3)


def _draw_intercepts(axes: Axes, histories: Sequence[DampingHistory], positions: Sequence[int]) -> None:
    truth = histories[0].true_intercepts[:, list(positions)].numpy()  # [steps, positions]
    steps = range(0, len(truth), 10)  # a dashed line through every step takes a quarter of the drawing time
    for column, position in enumerate(positions):
        alpha = 1.0 - 0.6 * column / len(positions)  # deeper positions are paler
        axes.plot(steps, truth[steps, column], alpha=alpha, **TRUTH)
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
    _limit(axes, truth.min() - 1.5, truth.max() + 1.5, estimates, corner=0.74)
    axes.locator_params(axis="y", nbins=4)
    axes.set_ylabel("intercept (log-odds)")


def _draw_excess(axes: Axes, histories: Sequence[DampingHistory]) -> None:
    for history in histories:
        _draw_rounds(axes, history, history.excess_log_loss.clamp_min(1e-6))
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 1e-4), max(high, 1.0))
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")  # plain numbers: a formula per tick takes most of the drawing time
    axes.locator_params(axis="x", nbins=5)  # of all three: a tick costs a millisecond
    axes.set(ylabel="excess log-loss\n(nats per draft)", xlabel="decode steps")


def _draw_rounds(axes: Axes, history: DampingHistory, values: Tensor, **options: Any) -> None:
    """A value per round, as the flat piece that is in force during the round."""
    axes.stairs(values, history.edges, baseline=None, color=POLICY_COLORS[history.step], linewidth=1.6, **options)


def _limit(
    axes: Axes, low: float, high: float, estimates: Sequence[tuple[DampingHistory, Tensor]], corner: float = 0.95
) -> None:
    """Keep the axis around the truth; say so, at the height `corner`, when an estimate goes outside."""
    axes.set_ylim(low, high)
    history, values = max(estimates, key=lambda pair: float(pair[1].abs().max()))
    farthest = float(values.flatten()[values.abs().argmax()])
    if not low <= farthest <= high:
        text = f"{history.step} leaves the picture: {farthest:,.0f}".replace("-", "\N{MINUS SIGN}")
        box = {"facecolor": "white", "edgecolor": "none", "pad": 2}
        style: Any = {"color": POLICY_COLORS[history.step], "fontsize": 9, "ha": "right", "va": "top", "bbox": box}
        axes.text(0.99, corner, text, transform=axes.transAxes, **style)


@mpl.rc_context(STYLE)
def plot_acceptance(f: Tensor, label: Tensor, curves: Mapping[str, Tensor], *, num_bins: int = 12) -> Figure:
    """Accepted share of one position's drafts by feature (equal counts per bin, bars of two standard errors) and fits.

    f and label are [N]; each curve holds the confidence of the same drafts.
    """
    order = f.argsort()
    figure, (axes,) = new_figure(size=(8.0, 3.6))
    bins = [(f[rows].mean(), label[rows].double().mean(), len(rows)) for rows in order.chunk(num_bins)]
    x, share, count = (np.array(column, dtype=float) for column in zip(*bins, strict=True))
    error = 2 * np.sqrt(share * (1 - share) / count)
    axes.errorbar(x, share, error, fmt="o", color="black", markersize=4, linewidth=1, label="drafts, in bins")
    for (name, curve), color in zip(curves.items(), ("#7F7F7F", "#E69F00", "#009E73", "#08519C"), strict=False):
        axes.plot(f[order], curve[order], color=color, label=name)
    axes.set(xlabel="feature: log-odds of the drafter's top token", ylabel="accepted (share)", ylim=(-0.03, 1.03))
    axes.legend(loc="lower right")
    return figure


@mpl.rc_context(STYLE)
def plot_hessian(hessian: Tensor) -> Figure:
    """The Hessian of slope and intercepts with its entries: an arrowhead, zeros left blank."""
    figure, (axes,) = new_figure(size=(5.2, 4.2))
    names = ["slope", *(f"$\\beta_{k}$" for k in range(1, len(hessian)))]
    axes.imshow(hessian.clamp_min(1.0).log10().numpy(), cmap="Blues", vmax=1.6 * float(hessian.max().log10()))
    for row, column in hessian.nonzero().tolist():
        axes.text(column, row, f"{hessian[row, column]:.0f}", ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(names)), names)
    axes.grid(False)
    axes.set_title("Hessian of a round's log-loss")
    return figure


@mpl.rc_context(STYLE)
def plot_newton_step(start: float, num_accepted: int, *, num_drafts: int = 100, axes: Axes | None = None) -> Figure:
    """One refit as a picture: the round's log-loss over a single intercept, the parabola fitted at `start`, both steps.

    All features are 0, so that the intercept is the log-odds of acceptance; `num_accepted` of `num_drafts` drafts were
    accepted. A step that leaves the picture is named with where it lands.
    """
    if axes is None:
        _, (axes,) = new_figure(size=(6.0, 4.0))
    c = 1 / (1 + np.exp(-start))
    gradient, curvature = num_drafts * c - num_accepted, num_drafts * c * (1 - c)
    b = np.linspace(min(-6.0, start - 2), max(6.0, start + 2), 400)
    loss = num_drafts * np.logaddexp(0, b) - num_accepted * b
    at_start = num_drafts * np.logaddexp(0, start) - num_accepted * start
    parabola = at_start + gradient * (b - start) + curvature / 2 * (b - start) ** 2
    axes.plot(b, loss, color="black", label="log-loss")
    axes.plot(b, parabola, color="black", linestyle=":", label="its parabola at the start")
    axes.plot(start, at_start, "o", color="black", markersize=7, label="start")
    for step, marker in (("newton", "v"), ("self_concordant", "^")):
        landing = _refit_intercept(start, num_accepted, num_drafts, step)
        inside = b[0] <= landing <= b[-1]
        height = num_drafts * np.logaddexp(0, landing) - num_accepted * landing
        name = step if inside else f"{step}: {landing:,.0f}".replace("-", "\N{MINUS SIGN}")
        x, y = (landing, height) if inside else (np.nan, np.nan)
        axes.plot(x, y, marker, color=POLICY_COLORS[step], markersize=9, linestyle="none", label=name)
    axes.set_ylim(-0.08 * loss.max(), 1.1 * loss.max())
    axes.set(xlabel="intercept (log-odds)", ylabel=f"log-loss of {num_drafts} drafts (nats)")
    axes.set_title(f"{num_accepted} of {num_drafts} accepted, start at {start:g}")
    axes.legend(fontsize=8)
    figure = axes.figure
    assert isinstance(figure, Figure)
    return figure


def _refit_intercept(start: float, num_accepted: int, num_drafts: int, step: str) -> float:
    estimator = OnlineAcceptanceEstimator(1, intercept=start, step=step)
    verdicts = (torch.arange(num_drafts) < num_accepted).long()
    estimator.observe(torch.zeros(num_drafts, 1), verdicts, torch.ones_like(verdicts))
    estimator.refit()
    return float(estimator.intercepts)


@mpl.rc_context(STYLE)
def plot_labels(num_accepted: Tensor, num_verified: Tensor, num_positions: int) -> Figure:
    """What each draft of one step teaches: accepted, the first rejection, behind a rejection, never verified."""
    kinds = {"accepted": "#0072B2", "first rejection": "#D55E00", "behind a rejection": "#CCCCCC", "trimmed": "#FFFFFF"}
    k, accepted, verified = torch.arange(num_positions), num_accepted[:, None], num_verified[:, None]
    kind = torch.where(k >= verified, 3, torch.where(k < accepted, 0, torch.where(k == accepted, 1, 2)))  # [R, K]
    figure, (axes,) = new_figure(size=(6.4, 0.8 + 0.4 * len(kind)))
    axes.imshow(kind.numpy(), cmap=mpl.colors.ListedColormap(list(kinds.values())), vmin=0, vmax=3, aspect="auto")
    axes.grid(False)
    for row, column in np.ndindex(*kind.shape):
        label = {0: "1", 1: "0"}.get(int(kind[row, column]), "")
        axes.text(column, row, label, ha="center", va="center", color="white", fontweight="bold")
        axes.add_patch(mpl.patches.Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="#999999"))
    axes.set_xticks(range(num_positions), [str(position + 1) for position in range(num_positions)])
    axes.set_yticks(range(len(kind)))
    axes.set(xlabel="draft position", ylabel="request")
    patches = [mpl.patches.Patch(facecolor=c, edgecolor="#999999", label=name) for name, c in kinds.items()]
    axes.legend(handles=patches, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


@mpl.rc_context(STYLE)
def plot_starvation(*histories: StarvationHistory) -> Figure:
    """Drafts verified per step through an outage, one line per probe interval; the bad stretch is shaded."""
    figure, (axes,) = new_figure(size=(8.0, 3.4))
    for history, color in zip(histories, (POLICY_COLORS["adaptive-7"], POLICY_COLORS["fixed-7"]), strict=False):
        name = f"a probe every {history.probe_interval} steps" if history.probe_interval else "no probes"
        axes.plot(history.budgets, color=color, label=name)
    bad = np.flatnonzero(histories[0].acceptance < 0.5)
    axes.axvspan(bad[0], bad[-1], color="#EEEEEE", zorder=0, label="2 % of drafts accepted")
    slots = histories[0].num_requests * histories[0].num_positions
    axes.set(xlabel="decode steps", ylabel=f"drafts verified (of {slots})", ylim=(-0.5, slots + 0.5))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
