"""The lossless explorer: the article's footnote under sliders, every law by exact enumeration.

It keeps one PNG image, as the other explorers do: nothing stacks up, and an exception in a callback is raised.
"""

from __future__ import annotations

import html
from typing import Any

import ipywidgets as widgets
import numpy as np
from matplotlib.figure import Figure

from avref import exact, leaks
from avref.plot_style import png as _png
from avref.plots_lossless import plot_footnote


def lossless_figure(*, p: float = 0.5, q: float = 0.2, threshold: float = 0.5, score: str = "q_sampled") -> Figure:
    """The picture of `LosslessExplorer` at one setting: p and q are the probabilities of token A of two.

    Raises ValueError for a score outside `leaks.SCORES` and for probabilities outside [0, 1].
    """
    return plot_footnote(p, q, threshold, score)


class LosslessExplorer(widgets.VBox):
    """What trimming a draft by a threshold does to the emitted law of two tokens, A and B.

    p and q are the target's and the drafter's probability of A. Left: the emitted law by what became of the draft;
    right: the leak at every threshold, for the drawn token's q and for the largest q. Source: article, footnote 1.
    """

    def __init__(self) -> None:
        wide = {"description_width": "110px"}
        self.p = widgets.FloatSlider(0.5, min=0.0, max=1.0, step=0.05, description="target p(A)", style=wide)
        self.q = widgets.FloatSlider(0.2, min=0.0, max=1.0, step=0.05, description="drafter q(A)", style=wide)
        self.threshold = widgets.FloatSlider(0.5, min=0.0, max=1.0, step=0.05, description="threshold", style=wide)
        self.score = widgets.ToggleButtons(
            options=[("drawn token's q", "q_sampled"), ("largest q", "q_max")], description="trimmed by", style=wide
        )
        self.picture = widgets.Image(format="png", layout=widgets.Layout(max_width="100%"))
        self.summary = widgets.HTML()
        controls = (self.p, self.q, self.threshold, self.score)
        for control in controls:
            control.observe(self.redraw, names="value")
        super().__init__([*controls, self.summary, self.picture])
        self.redraw()

    def redraw(self, _change: Any = None) -> None:
        """Enumerate at the present settings and replace the picture."""
        try:
            p, q, rule = self.p.value, self.q.value, (self.threshold.value, self.score.value)
            self.picture.value = _png(plot_footnote(p, q, *rule))
            experiment = leaks.footnote(leaks.two(p), leaks.two(q), *rule)
            a, b = np.sum(list(leaks.paths(experiment).values()), axis=0)
            self.summary.value = f"emits <b>({a:.3f}, {b:.3f})</b>, leak <b>{exact.leak(experiment):.3f}</b>"
        except Exception as error:
            self.summary.value = f"<b>redrawing failed:</b> {html.escape(str(error))}"
            raise
