"""The look of every figure: one palette for colour-blind readers too, one colour per policy, one way to save.

Figures are plain `matplotlib.figure.Figure` objects, made without pyplot: nothing is registered globally, so drawing
the same picture a thousand times leaks nothing. In a notebook, `%matplotlib inline` shows one that ends a cell.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
    "retrospective": "#999933",
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
    "axes.axisbelow": True,
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
    """Write `figures/<name>.png` in the working folder; in a checkout at its root, and there below `figures/local`.

    So running a notebook leaves the pictures that come with a checkout alone, which show another machine. With
    AVREF_FIGURES set in the environment they are written anew (CONTRIBUTING).
    """
    here = Path.cwd()
    root = next((folder for folder in (here, *here.parents) if (folder / "avref" / "plots.py").is_file()), None)
    folder = (root or here) / "figures"
    path = (folder / "local" if root and not os.environ.get("AVREF_FIGURES") else folder) / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=dpi)
    return path


def png(figure: Figure) -> bytes:
    """The picture as the bytes of a PNG file, for a widget that keeps one."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=90, pil_kwargs={"compress_level": 1})  # a redraw waits for this
    return buffer.getvalue()
