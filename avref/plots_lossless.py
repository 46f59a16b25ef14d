"""Figures about losslessness: rejection sampling, the footnote's paths, what a live budget sees, power of a test."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from avref import leaks
from avref.cost_table import CostTable
from avref.exact import Floats
from avref.plot_style import POLICY_COLORS, STYLE, TRUTH, new_figure

_TARGET, _DRAFTER = "#444444", "#56B4E9"
_PATHS = {  # what became of the draft -> colour, legend
    "accepted": ("#0072B2", "accepted"),
    "replaced": ("#E69F00", "rejected: from the residual"),
    "trimmed": ("#CCCCCC", "trimmed: from p"),
}
_SCORES = {"q_sampled": ("#D55E00", "drawn token's q"), "q_max": ("#009E73", "largest q")}
_CASES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
_ABOVE: Any = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "fontsize": 9, "borderaxespad": 0.2}


def letters(count: int) -> list[str]:
    """Names of the first tokens: A, B, C, ..."""
    return [chr(ord("A") + x) for x in range(count)]


@mpl.rc_context(STYLE)
def plot_rejection(p: npt.ArrayLike, q: npt.ArrayLike) -> Figure:
    """Rejection sampling of one draft, p and q [V]: both laws, and the target's bars put together again.

    Right: min(p, q), emitted by acceptance, and on top max(0, p - q), what rejections have to fill in.
    """
    target, draft = np.asarray(p, dtype=float), np.asarray(q, dtype=float)
    figure, (laws, parts) = new_figure(1, 2, size=(10.0, 3.6), sharey=True)
    x = np.arange(len(target))
    laws.bar(x - 0.2, target, 0.38, color=_TARGET, label="target p")
    laws.bar(x + 0.2, draft, 0.38, color=_DRAFTER, label="drafter q")
    overlap = np.minimum(target, draft)
    accepted, replaced = _PATHS["accepted"][0], _PATHS["replaced"][0]
    parts.bar(x, overlap, 0.6, color=accepted, label="min(p, q): accepted drafts")
    parts.bar(x, target - overlap, 0.6, bottom=overlap, color=replaced, label="max(0, p − q): replaced ones")
    _outline(parts, target, 0.6)
    for axes in (laws, parts):
        axes.set_xticks(x, letters(len(x)))
        axes.grid(False, axis="x")
        axes.set_ylim(0, 1.28 * max(target.max(), draft.max()))
        axes.set_xlabel("token")
        axes.legend(fontsize=9, loc="upper left", ncols=1)
    laws.set_ylabel("probability")
    return figure


@mpl.rc_context(STYLE)
def plot_footnote(p: float, q: float, threshold: float, score: str) -> Figure:
    """The footnote at one setting: the emitted law by what became of the draft, and the leak at every threshold.

    p and q are the probabilities of token A of two. Left: bars against the target's outline. Right: total variation.
    """
    target, draft = leaks.two(p), leaks.two(q)
    margins = {"left": 0.08, "right": 0.98, "top": 0.84, "bottom": 0.14, "wspace": 0.22}
    figure, (law, curve) = new_figure(1, 2, size=(10.0, 4.0), margins=margins)
    _draw_paths(law, target, leaks.paths(leaks.footnote(target, draft, threshold, score)))
    _draw_leaks(curve, target, draft, threshold, score)
    return figure


def _draw_paths(axes: Axes, target: Sequence[float], parts: Mapping[str, Floats]) -> None:
    x, bottom = np.arange(len(target)), np.zeros(len(target))
    for name, (color, label) in _PATHS.items():
        axes.bar(x, parts[name], 0.6, bottom=bottom, color=color, edgecolor="white", linewidth=0.6, label=label)
        bottom = bottom + parts[name]
    _outline(axes, target, 0.6)
    for place, total, right in zip(x.tolist(), bottom, target, strict=True):
        axes.text(place, max(total, right) + 0.02, f"emits {total:.3f}\ntarget {right:.3f}", ha="center", fontsize=9)
    axes.set_xticks(x, letters(len(x)))
    axes.grid(False, axis="x")
    axes.set(xlabel="token", ylabel="probability", ylim=(0, 1.18), xlim=(-0.6, len(target) - 0.4))
    axes.set_yticks([0, 0.5, 1])
    axes.legend(**_ABOVE, ncols=2)


def _outline(axes: Axes, target: npt.ArrayLike, width: float) -> None:
    heights = np.asarray(target, dtype=float)
    axes.bar(np.arange(len(heights)), heights, width, fill=False, edgecolor="black", linestyle="--", label="target p")


def _draw_leaks(axes: Axes, target: Sequence[float], draft: Sequence[float], threshold: float, score: str) -> None:
    # Trimming changes only where the threshold passes some q(x): one value between two of them stands for all.
    steps = sorted({0.0, *draft, 1.0})
    middles = [(a + b) / 2 for a, b in itertools.pairwise(steps)]
    for name, (color, label) in _SCORES.items():
        heights = leaks.leak_by_threshold(target, draft, name, middles)
        axes.stairs(heights, steps, baseline=None, color=color, linewidth=2.2, label=f"by the {label}")
    here = float(leaks.leak_by_threshold(target, draft, score, [threshold])[0])
    axes.plot(threshold, here, "o", color=_SCORES[score][0], markersize=9, label=f"here: {here:.3f}")
    axes.set(xlabel="threshold (a draft that scores below is trimmed)", ylabel="leak (total variation)")
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.01, 0.31), xticks=[0, 0.5, 1], yticks=[0, 0.1, 0.2, 0.3])
    axes.legend(**_ABOVE, ncols=2)


@mpl.rc_context(STYLE)
def plot_live_budgets(panels: Mapping[str, tuple[Mapping[str, Floats], CostTable]]) -> Figure:
    """What a budget over live survivals sees: tokens per ms by B, a line for every draft that might be drawn.

    panels: title -> (what was drafted -> survivals [R, K], costs). A ring marks the best budget of each line.
    """
    figure, all_axes = new_figure(1, len(panels), size=(5.2 * len(panels), 3.6), sharey=True)
    for axes, (title, (cases, costs)) in zip(all_axes, panels.items(), strict=True):
        for i, (name, live) in enumerate(cases.items()):
            best = np.sort(live, axis=None)[::-1]
            tokens = len(live) + np.arange(len(best) + 1)
            rate = (len(live) + np.append(0.0, best.cumsum())) / costs.step_ms(len(live), tokens)
            style: Any = {"color": _CASES[i % len(_CASES)], "linewidth": 3.2 - 1.4 * i, "marker": "o", "markersize": 4}
            axes.plot(rate, label=f"{name}: best B = {rate.argmax()}", **style)
            ring: Any = {"markersize": 15 + 5 * i, "markerfacecolor": "none", "markeredgewidth": 1.6}
            axes.plot(rate.argmax(), rate.max(), "o", color=style["color"], **ring)
        axes.set_xticks(range(len(rate)))
        axes.set(xlabel="budget B (drafts verified)", title=title)
        axes.margins(x=0.12, y=0.2)
        axes.legend(loc="lower left", fontsize=9)
    all_axes[0].set_ylabel("expected tokens per ms")
    return figure


@mpl.rc_context(STYLE)
def plot_verified(cases: Mapping[str, tuple[Floats, Sequence[int]]]) -> Figure:
    """Survivals [R, K] with the verified drafts framed, a panel for each thing that might have been drafted.

    cases: title -> (survivals, admitted [R]); NaN marks a draft that was not made.
    """
    shape = next(iter(cases.values()))[0].shape
    figure, all_axes = new_figure(1, len(cases), size=(1.0 + 1.3 * shape[1] * len(cases), 1.0 + 0.75 * shape[0]))
    for axes, (title, (live, admitted)) in zip(all_axes, cases.items(), strict=True):
        axes.imshow(live, cmap="Blues", vmin=0, vmax=1.3, aspect="auto")
        for r, k in np.ndindex(*live.shape):
            value, drafted = live[r, k], not np.isnan(live[r, k])
            color = "white" if drafted and value > 0.7 else "black"
            axes.text(k, r, f"{value:.2f}" if drafted else "not drafted", ha="center", va="center", color=color)
        for r, n in enumerate(admitted):
            if n:
                frame: Any = {"fill": False, "edgecolor": POLICY_COLORS["adaptive-7"], "linewidth": 2.6}
                axes.add_patch(mpl.patches.Rectangle((-0.47, r - 0.44), n - 0.06, 0.88, **frame))
        axes.set_xticks(range(shape[1]), [str(k + 1) for k in range(shape[1])])
        axes.set_yticks(range(shape[0]))
        axes.grid(False)
        axes.set(xlabel="draft position", ylabel="request", title=title)
    return figure


@mpl.rc_context(STYLE)
def plot_power(laws: Mapping[str, Sequence[float]], target: Sequence[float], *, trials: int = 400) -> Figure:
    """Chance that a chi-square test notices each law, against the number of samples; dots are simulated tests."""
    from avref import chi_square  # scipy.stats takes seconds to import

    figure, (axes,) = new_figure(size=(8.6, 3.8))
    n = np.logspace(1.5, 7, 120)
    for i, (name, law) in enumerate(laws.items()):
        color = _CASES[i % len(_CASES)]
        axes.plot(n, chi_square.detection_chance(law, target, n), color=color, label=name)
        some = [chi_square.samples_needed(law, target, chance=chance) for chance in (0.1, 0.5, 0.9)]
        shares = [chi_square.detected_share(law, target, count, trials=trials, seed=i) for count in some]
        axes.plot(some, shares, "o", color=color, markersize=5)
    axes.axhline(chi_square.ALPHA, label=f"false alarms: {chi_square.ALPHA:g}", **TRUTH)
    axes.set_xscale("log")
    axes.set(xlabel="samples", ylabel="chance that the test rejects", ylim=(-0.03, 1.05))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
