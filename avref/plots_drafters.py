"""Figures about drafters: how each family makes a block, how its acceptance falls, and what its speed comes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.ticker import FixedLocator

from avref.plot_arms import arm_look, arm_name
from avref.plot_style import POLICY_COLORS, STYLE, new_figure

FAMILY_COLORS = {
    "draft_model": "#882255",
    "eagle": "#D55E00",
    "mtp": "#E69F00",
    "dflash": "#0072B2",
    "dspark": "#56B4E9",
    "layer_skip": "#009E73",
    "ngram": "#000000",
}
TARGET, OWN, DRAFT, TEXT = "#C6DBEF", "#FDD0A2", "#C7E9C0", "#F5F5F5"
STATE, FED_BACK = "#2171B5", "#31A354"
Place = tuple[float, float]


# ---- how a block is made: tokens go in below, drafts come out above ----
def _box(axes: Axes, x: float, y: float, text: str, color: str, width: float = 0.8, **style: Any) -> None:
    """A box of height .56 that starts .4 left of x, in columns of the text."""
    look: Any = {"facecolor": color, "edgecolor": "#444444", "linewidth": 0.9} | style
    shape = FancyBboxPatch((x - 0.4, y - 0.28), width, 0.56, boxstyle="round,pad=0,rounding_size=0.08", **look)
    axes.add_patch(shape)
    axes.text(x - 0.4 + width / 2, y, text, ha="center", va="center", fontsize=9)


def _arrow(axes: Axes, start: Place, end: Place, color: str = "#444444", bend: float = 0.0) -> None:
    style: Any = {"arrowstyle": "-|>", "mutation_scale": 10, "color": color, "linewidth": 1.2, "shrinkA": 0}
    axes.add_patch(FancyArrowPatch(start, end, connectionstyle=f"arc3,rad={bend}", shrinkB=0, **style))


def _tokens(axes: Axes, given: Sequence[str], drafted: int = 0) -> None:
    """The bottom row: the given text, its last token pending, and the first drafts where they are fed back."""
    for x, token in enumerate(given):
        _box(axes, x, 0, token, TEXT)
    for k in range(drafted):
        _box(axes, len(given) + k, 0, f"$x_{k + 1}$", DRAFT, linestyle="--")


def _one_by_one(axes: Axes, boxes: Sequence[str], colors: Sequence[str] = (OWN,) * 3) -> None:
    """A pass per draft: pass k reads the token below it and the passes before; its draft goes into the next column."""
    _tokens(axes, ("The", "capital", "of"), drafted=2)
    for k, (text, color) in enumerate(zip(boxes, colors, strict=True)):
        x = 2.0 + k
        _box(axes, x, 2, text, color)
        _box(axes, x, 3, f"$x_{k + 1}$", DRAFT)
        _arrow(axes, (x, 0.28), (x, 1.72))
        _arrow(axes, (x, 2.28), (x, 2.72))
        _arrow(axes, (x - 0.6, 2), (x - 0.4, 2))
        if k < len(boxes) - 1:
            axes.plot([x + 0.4, x + 0.5, x + 0.5], [3, 3, 0], color=FED_BACK, linewidth=1.2)
            _arrow(axes, (x + 0.5, 0), (x + 0.6, 0), FED_BACK)


def _memory(axes: Axes, name: str, color: str, states: bool = False) -> None:
    """What is kept of the text before t, made from its tokens or from the target's hidden states there."""
    _box(axes, 0, 2, name, color, 1.8)
    for x in (0, 1):
        if states:
            _box(axes, x, 1, "state", TARGET)
        _arrow(axes, (x, 1.28 if states else 0.28), (x, 1.72), STATE if states else "#444444")


def _draft_model(axes: Axes) -> str:
    _one_by_one(axes, ("pass 1", "pass 2", "pass 3"))
    _memory(axes, "own cache", OWN)
    return "draft_model: a smaller language model, a pass per draft; it reads text, nothing of the target"


def _eagle(axes: Axes) -> str:
    _one_by_one(axes, ("layer", "layer", "layer"))
    _memory(axes, "keys and values", OWN, states=True)
    _arrow(axes, (1.4, 1.05), (1.75, 1.72), STATE)
    return "eagle: one layer, run once per draft, on the target's newest state, then on its own"


def _mtp(axes: Axes) -> str:
    _one_by_one(axes, ("module 1", "module 2", "module 3"), (OWN, "#FDAE6B", "#FD8D3C"))
    _memory(axes, "keys and values", OWN, states=True)
    _arrow(axes, (1.4, 1.05), (1.75, 1.72), STATE)
    return "mtp: as eagle, but every position has a module of its own"


def _parallel(axes: Axes) -> None:
    _tokens(axes, ("The", "capital", "of"))
    _memory(axes, "keys and values", OWN, states=True)
    _box(axes, 2, 2, "one pass over all slots", OWN, 2.8)
    _arrow(axes, (1.4, 2), (1.6, 2))
    _arrow(axes, (1.4, 1), (1.6, 1), STATE)
    for k in range(3):
        _box(axes, 2 + k, 1, f"slot {k + 1}", OWN)
        _arrow(axes, (2 + k, 1.28), (2 + k, 1.72))
    _arrow(axes, (2, 0.28), (2, 0.72))
    _arrow(axes, (2.4, 0.1), (2.85, 0.72))
    _arrow(axes, (2.4, 0.0), (3.85, 0.72))


def _dflash(axes: Axes) -> str:
    _parallel(axes)
    for k in range(3):
        _box(axes, 2 + k, 3, f"$x_{k + 1}$", DRAFT)
        _arrow(axes, (2 + k, 2.28), (2 + k, 2.72))
    return "dflash: all drafts in one pass; no draft reads another"


def _dspark(axes: Axes) -> str:
    _parallel(axes)
    for k in range(3):
        x = 2.0 + k
        _box(axes, x, 3, "bias", OWN, 0.45)
        _box(axes, x - 0.45, 3, f"$c_{k + 1}$", OWN, 0.3)
        _box(axes, x, 4, f"$x_{k + 1}$", DRAFT, 0.45)
        for right, low, end in ((-0.18, 2.28, -0.18), (-0.3, 2.28, -0.66), (-0.18, 3.28, -0.18)):
            _arrow(axes, (x + right, low), (x + end, low + 0.44))
        if k < 2:  # both read the draft before
            _arrow(axes, (x + 0.05, 3.8), (x + 0.28, 3.28), FED_BACK)
            _arrow(axes, (x + 0.06, 3.95), (x + 0.72, 3.28), FED_BACK, bend=-0.2)
    return "dspark: dflash's pass, then a cheap tail: a bias from the draft before, and a confidence $c_k$"


def _layer_skip(axes: Axes) -> str:
    _one_by_one(axes, ("first layers",) * 3, (TARGET,) * 3)
    _memory(axes, "the target's own cache", TARGET)
    return "layer_skip: the target's own first layers and its head, a pass per draft; nothing is trained"


def _ngram(axes: Axes) -> str:
    _tokens(axes, ("to", "be", "or", "not", "to"))
    for k, word in enumerate(("be", "or", "not")):
        _box(axes, 5 + k, 0, word, DRAFT)
        _arrow(axes, (1 + k, 0.28), (5 + k, 0.28), FED_BACK, bend=-0.35)
    _arrow(axes, (4, -0.28), (0, -0.28), "#444444", bend=-0.1)
    axes.text(2, -0.8, "the last time that this token occurred", ha="center", fontsize=9)
    return "ngram: no model; it copies what followed the same words before"


_DIAGRAMS: Mapping[str, Callable[[Axes], str]] = {
    "draft_model": _draft_model,
    "eagle": _eagle,
    "mtp": _mtp,
    "dflash": _dflash,
    "dspark": _dspark,
    "layer_skip": _layer_skip,
    "ngram": _ngram,
}


@mpl.rc_context(STYLE)
def plot_drafter(method: str) -> Figure:
    """How a family makes a block of three drafts; raises ValueError for a method that there is no drafter for."""
    if method not in _DIAGRAMS:
        raise ValueError(f"method is {method!r}; there are diagrams of {', '.join(map(repr, _DIAGRAMS))}")
    low, high = {"ngram": (-1.0, 1.7), "dspark": (-0.5, 4.5)}.get(method, (-0.5, 3.5))
    figure, (axes,) = new_figure(size=(8.6, 1.0 + 0.62 * (high - low)))
    axes.set_title(_DIAGRAMS[method](axes))
    places = range(-4, 4) if method == "ngram" else range(-2, 3)
    axes.set_xticks(
        range(len(places)), [f"t {n:+d}".replace("+", "+ ").replace("-", "- ") if n else "t" for n in places]
    )
    axes.set(xlim=(-0.6, len(places) - 0.4), ylim=(low, high), yticks=[])
    axes.set(xlabel="place of the input in the text; t is the pending token", ylabel="from input up to draft")
    axes.grid(False)
    kinds = {"given text": TEXT, "the target's": TARGET, "the drafter's own": OWN, "a draft": DRAFT}
    handles = [mpl.patches.Patch(facecolor=c, edgecolor="#444444", label=n) for n, c in kinds.items()]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    return figure


# ---- what it comes to ----
def family_look(name: str) -> dict[str, Any]:
    """Colour of a drafter or its trace in every figure; a suffix ("dflash-greedy") makes the line dashed."""
    family, _, more = name.partition("-")
    return {"color": FAMILY_COLORS.get(family, "#7F7F7F"), "linestyle": "--" if more else "-"}


@mpl.rc_context(STYLE)
def plot_overlaps(found: Mapping[str, tuple[npt.ArrayLike, npt.ArrayLike]], *, least: float = 30.0) -> Figure:
    """Acceptance at each position given an accepted prefix, and how many blocks get that far.

    found: by trace, (overlap [K], weight [K]) as `traces.overlap_by_position` gives them. Positions with fewer than
    `least` rows behind them are left out on the left. A trace's name may carry a suffix ("dflash-greedy": dashed).
    """
    figure, (left, right) = new_figure(1, 2, size=(10.5, 3.8), sharex=True)
    for name, (overlap, weight) in found.items():
        rate, rows = np.asarray(overlap, dtype=float), np.asarray(weight, dtype=float)
        style: Any = {"marker": "o", "markersize": 4, "label": name, **family_look(name)}
        position = np.arange(1, len(rate) + 1)
        left.plot(position, np.where(rows >= least, rate, np.nan), **style)
        right.plot(position, np.append(1.0, rate[:-1]).cumprod(), **style)  # the ends of answers hide no depth
    left.set(xlabel="draft position", ylabel="acceptance given\nan accepted prefix", ylim=(0, 1))
    right.set(xlabel="draft position", ylabel="share of blocks whose\ndrafts before it are accepted", ylim=(0, 1.02))
    left.xaxis.set_major_locator(FixedLocator(range(1, 65)))
    right.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    return figure


@mpl.rc_context(STYLE)
def plot_groups(
    values: Mapping[str, Mapping[str, float]], *, ylabel: str, xlabel: str = "drafter", line: float | None = None
) -> Figure:
    """Bars in groups: values[arm][group], arms in their policy's colour; with `line`, a level to compare with."""
    groups = list(dict.fromkeys(g for by_group in values.values() for g in by_group))
    figure, (axes,) = new_figure(size=(9.5, 3.6))
    width = 0.84 / len(values)
    for i, (arm, by_group) in enumerate(values.items()):
        at = np.array([groups.index(g) for g in by_group]) + (i - (len(values) - 1) / 2) * width
        policy = arm == "none" or arm.startswith(("fixed-", "adaptive-"))
        color = arm_look(arm)["color"] if policy else list(FAMILY_COLORS.values())[3 + i % 4]
        axes.bar(at, list(by_group.values()), 0.92 * width, color=color, label=arm_name(arm) if policy else arm)
    if line is not None:
        axes.axhline(line, color=POLICY_COLORS["none"], linewidth=1.2)
    axes.set_xticks(range(len(groups)), [g.replace("_", " ").replace("-", "\n") for g in groups])
    axes.grid(False, axis="x")
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    return figure
