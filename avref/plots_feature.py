"""Figures about features and coefficients: acceptance by feature, calibration, workloads, drafters, positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from avref import features, metrics
from avref.evidence.resampling import Estimate, estimate
from avref.plot_style import STYLE, TRUTH, new_figure
from avref.plots_drafters import family_look

ARTICLE_WORKLOADS = {  # mean draft entropy (nats), slope, first intercept: DeepSeek-V4-Flash with DSpark
    "gsm8k": (0.562, 0.5365, 0.478),
    "humaneval": (0.669, 0.5135, 0.486),
    "speed-bench, low entropy": (0.703, 0.5087, 0.610),
    "mt-bench": (0.800, 0.5495, 0.181),
    "speed-bench, high entropy": (1.077, 0.5197, -0.089),
}
"""The article's fits of one pair by workload (section "Slope against intercept")."""

FEWEST = 50
"""Positions with fewer labelled drafts than this are left out of pictures and tables by position."""

_CYCLE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#000000")
_SOURCES = {
    "logit_q_max": ("#D55E00", "estimator"),
    "no fit": ("#7F7F7F", "q_max, no fit"),
    "head": ("#0072B2", "head"),
}
_POINTS = 12  # groups of equally many drafts
Floats = npt.NDArray[np.float64]


@mpl.rc_context(STYLE)
def plot_certainty(logits: torch.Tensor, temperature: float = 1.0) -> Figure:
    """Draft distributions as bars, the top token's dark, with its probability and log-odds; logits [drafts, V]."""
    q = (logits.double() / temperature).softmax(-1).numpy()
    f = features.logit_q_max(logits, temperature)
    figure, all_axes = new_figure(1, len(q), size=(3.2 * len(q), 2.9), sharey=True)
    for axes, row, value in zip(all_axes, q, f.tolist(), strict=True):
        top = int(row.argmax())
        axes.bar(range(len(row)), row, color=["#9ECAE1" if x != top else "#08519C" for x in range(len(row))])
        axes.set_xticks(range(len(row)), [chr(ord("A") + x) for x in range(len(row))])
        axes.set(xlabel="token", ylim=(0, 1.05), title=f"max q = {row[top]:.3f},  log-odds {value:+.2f}")
        axes.grid(False, axis="x")
    all_axes[0].set_ylabel("probability q")
    return figure


@mpl.rc_context(STYLE)
def plot_near_certainty() -> Figure:
    """Three ways to compute the log-odds in float32, against the truth: two tokens whose logits are a gap apart."""
    gap = torch.linspace(8, 45, 400)  # [n]
    logits = torch.stack((gap, torch.zeros_like(gap)), -1)
    q = logits.softmax(-1)[:, 0]
    sum_minus_1 = (logits - logits.amax(-1, keepdim=True)).exp().sum(-1) - 1
    ways = {
        "log q − log(1 − q)": q.log() - (1 - q).log(),
        "−log(sum of exponentials − 1)": -sum_minus_1.log(),
        "−log(rest), as here": features.logit_q_max(logits),
    }
    figure, (axes,) = new_figure(size=(8.0, 3.6))
    axes.plot(gap, gap.clamp(max=features.MAX_LOG_ODDS), label="truth, clamped to 40", zorder=5, **TRUTH)
    for (name, f), color, width in zip(ways.items(), ("#E69F00", "#D55E00", "#009E73"), (5.0, 1.4, 2.2), strict=True):
        axes.plot(gap, f.clamp(max=features.MAX_LOG_ODDS), color=color, linewidth=width, label=name, alpha=0.85)
    axes.set(xlabel="gap between the two logits (nats)", ylabel="log-odds of the top token")
    axes.legend(loc="lower right")
    return figure


@mpl.rc_context(STYLE)
def plot_shapes(panels: Mapping[str, tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]]) -> Figure:
    """Acceptance against each feature, in log-odds, where the fit is a straight line: title -> (f, labels, confidence).

    Dots are groups of equally many drafts; a group in which all have one label is left out.
    """
    figure, all_axes = new_figure(1, len(panels), size=(2.1 * len(panels), 3.0), sharey=True)
    for axes, (title, (f, labels, confidence)) in zip(all_axes, panels.items(), strict=True):
        values, c = np.asarray(f, dtype=float), np.asarray(confidence, dtype=float)
        x, y = _grouped(values, np.asarray(labels))
        inside = (y > 0) & (y < 1)
        axes.plot(x[inside], _log_odds(y[inside]), "o", color=_CYCLE[0], markersize=5, label="measured")
        order = _within(values, x.min(), x.max())
        axes.plot(values[order], _log_odds(c[order].clip(1e-7, 1 - 1e-7)), color=_CYCLE[1], label="fit")
        axes.set(xlabel=title)
    all_axes[0].set_ylabel("log-odds of acceptance")
    all_axes[0].legend(fontsize=9)
    return figure


@mpl.rc_context(STYLE)
def plot_reliability(panels: Mapping[str, tuple[npt.ArrayLike, npt.ArrayLike]], num_bins: int = 15) -> Figure:
    """Reliability diagrams, a panel each: title -> (labels, probabilities). A dot's area is its share of the drafts."""
    figure, all_axes = new_figure(1, len(panels), size=(4.2 * len(panels), 4.0), sharey=True)
    for axes, (title, (labels, p)) in zip(all_axes, panels.items(), strict=True):
        _draw_reliability(axes, labels, p, num_bins)
        axes.set_title(f"{title}: ECE {metrics.ece(labels, p, num_bins):.4f}")
    all_axes[0].legend(loc="upper left", fontsize=9)
    return figure


@mpl.rc_context(STYLE)
def plot_feature(
    name: str, f: npt.ArrayLike, labels: npt.ArrayLike, positions: npt.ArrayLike, p: npt.ArrayLike, num_bins: int = 15
) -> Figure:
    """One feature on labelled drafts: acceptance and confidence p against it by position, and the reliability of p.

    All arrays [M]; positions from 0. Those with fewer than `FEWEST` drafts are left out on the left.
    """
    x, y, k, c = np.asarray(f, dtype=float), np.asarray(labels), np.asarray(positions), np.asarray(p, dtype=float)
    margins = {"left": 0.07, "right": 0.98, "top": 0.9, "bottom": 0.14, "wspace": 0.18}
    figure, (curves, calibration) = new_figure(1, 2, size=(10.0, 4.0), margins=margins)
    for position in np.unique(k):
        own = k == position
        if own.sum() < FEWEST:
            continue
        color, (mean, share) = _CYCLE[position % len(_CYCLE)], _grouped(x[own], y[own])
        order = _within(x[own], mean.min(), mean.max())
        curves.plot(x[own][order], c[own][order], color=color, label=f"position {position + 1}")
        curves.plot(mean, share, "o", color=color, markersize=4)
    curves.set(xlabel=name, ylabel="acceptance", ylim=(-0.03, 1.03), title="dots: measured, lines: confidence")
    curves.legend(fontsize=8, ncols=2)
    _draw_reliability(calibration, y, c, num_bins)
    calibration.set_title("reliability")
    calibration.legend(fontsize=8, loc="upper left")
    return figure


@mpl.rc_context(STYLE)
def plot_coefficients(slopes: Sequence[float], intercepts: Sequence[float]) -> Figure:
    """What each coefficient does to the curve: several slopes at intercept 0, several intercepts at slope 0.5."""
    figure, (left, right) = new_figure(1, 2, size=(10.0, 3.6), sharey=True)
    f = np.linspace(-4, 8, 200)
    shapes = [(left, w, 0.0, f"slope {w:g}") for w in slopes]
    shapes += [(right, 0.5, b, f"intercept {b:+g}") for b in intercepts]
    for axes, w, b, label in shapes:
        axes.plot(f, 1 / (1 + np.exp(-(w * f + b))), color=_CYCLE[len(axes.lines) % len(_CYCLE)], label=label)
    for axes in (left, right):
        axes.plot(f, 1 / (1 + np.exp(-f)), label="max q itself", **TRUTH)
        axes.set(xlabel="feature, log-odds of the top token")
        axes.legend(loc="lower right", fontsize=9)
    left.set_ylabel("confidence c")
    return figure


@mpl.rc_context(STYLE)
def plot_workloads(rows: Mapping[str, tuple[float, npt.ArrayLike, npt.ArrayLike]]) -> Figure:
    """Slope and first intercept of each workload against its mean draft entropy, with the article's as diamonds.

    rows: workload -> (entropy in nats, slopes, first intercepts); of each the value and then those of resamples.
    """
    figure, both = new_figure(1, 2, size=(10.0, 3.8))
    for column, (axes, name) in enumerate(zip(both, ("slope", "first intercept (log-odds)"), strict=True)):
        for i, (workload, row) in enumerate(rows.items()):
            axes.errorbar(*_bar(row[0], estimate(row[1 + column])), fmt="o", color=_CYCLE[i], capsize=3, label=workload)
        theirs = np.array(list(ARTICLE_WORKLOADS.values()))
        axes.plot(theirs[:, 0], theirs[:, 1 + column], "D", color="#BBBBBB", label="the article's five")
        axes.set(xlabel="mean draft entropy (nats)", ylabel=name)
        axes.margins(0.1)
    both[0].set_ylim(0, max(1.0, 1.1 * max(float(np.max(row[1])) for row in rows.values())))
    both[1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


@mpl.rc_context(STYLE)
def plot_drafters(rows: Mapping[str, tuple[float, Sequence[float], npt.ArrayLike]]) -> Figure:
    """Slopes of several drafters (dot: all traffic, ticks: workload by workload), and intercepts by position.

    rows: drafter -> (slope, slopes by workload, intercepts [K], NaN where there are too few labels).
    """
    figure, (slopes, intercepts) = new_figure(1, 2, size=(10.0, 1.8 + 0.35 * max(4, len(rows))))
    for i, (name, (slope, by_workload, b)) in enumerate(rows.items()):
        look = family_look(name)
        slopes.plot(by_workload, [i] * len(by_workload), "|", color=look["color"], markersize=12)
        slopes.plot(slope, i, "o", color=look["color"], markersize=8)
        values = np.asarray(b, dtype=float)
        intercepts.plot(np.arange(len(values)) + 1, values, marker="o", label=name, markersize=4, **look)
    slopes.axvspan(0.45, 0.59, color="#EEEEEE", label="article, between pairs")
    slopes.set_yticks(range(len(rows)), list(rows))
    slopes.set(xlabel="slope (dot: all, ticks: each workload)", ylabel="drafter", ylim=(len(rows) - 0.5, -0.5))
    slopes.set_xlim(left=0)
    slopes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 1))
    deepest = max(len(np.asarray(b)) for _, _, b in rows.values())
    intercepts.set(xlabel="draft position", ylabel="intercept (log-odds)", xticks=range(1, deepest + 1))
    intercepts.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


@mpl.rc_context(STYLE)
def plot_by_position(scores: Mapping[str, Sequence[Mapping[str, Estimate]]], shown: npt.ArrayLike) -> Figure:
    """AUC, log-loss and ECE by position, as `study_scores.by_position` returns them, at `shown` (from 0)."""
    places = np.asarray(shown)
    figure, panels = new_figure(1, 3, size=(11.0, 3.4))
    measures = {"auc": "AUC (higher is better)", "log_loss": "log-loss (nats)", "ece": "ECE"}
    for axes, (measure, title) in zip(panels, measures.items(), strict=True):
        for i, (name, rows) in enumerate(scores.items()):
            color, label = _SOURCES.get(name, (_CYCLE[3 + i], name))
            x = places + 1 + 0.08 * (i - 1)
            bars = [_bar(at, rows[k][measure]) for at, k in zip(x.tolist(), places, strict=True)]
            for n, bar in enumerate(bars):
                axes.errorbar(*bar, fmt="o", color=color, capsize=3, label="" if n else label)
            axes.plot(x, [bar[1] for bar in bars], color=color, linewidth=1)
        axes.set(xlabel="draft position", ylabel=title, xticks=places + 1)
    panels[0].legend(fontsize=9)
    return figure


def _bar(x: float, e: Estimate) -> tuple[float, float, Any]:
    """x, y and the two lengths of an error bar; none where there is no interval."""
    lengths = np.nan_to_num(np.array([[e.value - e.low], [e.high - e.value]])).clip(0)
    return x, e.value, lengths


def _draw_reliability(axes: Axes, labels: npt.ArrayLike, p: npt.ArrayLike, num_bins: int) -> None:
    bins = metrics.reliability(labels, p, num_bins)
    kept = bins.count > 0
    x, y, share = bins.mean_prediction[kept], bins.mean_label[kept], bins.count[kept] / bins.count.sum()
    axes.plot([0, 1], [0, 1], label="calibrated", **TRUTH)
    axes.vlines(x, np.minimum(x, y), np.maximum(x, y), color="#E69F00", linewidth=2, label="gap")
    axes.scatter(x, y, s=12 + 900 * share, color="#0072B2", alpha=0.75, label="bin (area: share of drafts)")
    axes.set(xlabel="predicted acceptance", ylabel="measured acceptance", xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))


def _grouped(f: Floats, labels: npt.NDArray[Any]) -> tuple[Floats, Floats]:
    """(mean feature, share accepted) of about `_POINTS` groups of equally many drafts, by rising feature."""
    parts = np.array_split(np.argsort(f, kind="stable"), max(1, min(_POINTS, len(f) // 10)))
    return np.array([f[i].mean() for i in parts]), np.array([labels[i].mean() for i in parts])


def _within(f: Floats, low: float, high: float) -> npt.NDArray[np.int64]:
    """Indices of at most 200 drafts with a feature from `low` to `high`, in rising order."""
    order = np.argsort(f, kind="stable")
    order = order[(f[order] >= low) & (f[order] <= high)]
    return order[np.linspace(0, len(order) - 1, min(200, len(order))).astype(np.int64)]


def _log_odds(p: Floats) -> Floats:
    return np.asarray(np.log(p) - np.log1p(-p))
