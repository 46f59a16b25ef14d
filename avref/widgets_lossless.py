"""The lossless explorer: the article's footnote under sliders, every law by exact enumeration."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets
import numpy as np
from matplotlib.figure import Figure

from avref import exact, leaks
from avref.plots_lossless import plot_footnote
from avref.widgets_explorer import LABEL, WIDE, Explorer


def lossless_figure(*, p: float = 0.5, q: float = 0.2, threshold: float = 0.5, score: str = "q_sampled") -> Figure:
    """The picture of `LosslessExplorer` at one setting: p and q are the probabilities of token A of two.

    Raises ValueError for a score outside `leaks.SCORES` and for probabilities outside [0, 1].
    """
    return plot_footnote(p, q, threshold, score)


class LosslessExplorer(Explorer):
    """What trimming a draft by a threshold does to the emitted law of two tokens, A and B.

    p and q are the target's and the drafter's probability of A. Left: the emitted law by what became of the draft;
    right: the leak at every threshold, for the drawn token's q and for the largest q. Source: article, footnote 1.
    """

    def __init__(self) -> None:
        unit: Any = {"min": 0.0, "max": 1.0, "step": 0.05, "style": LABEL, "layout": WIDE}
        self.p = widgets.FloatSlider(0.5, description="target p(A)", **unit)
        self.q = widgets.FloatSlider(0.2, description="drafter q(A)", **unit)
        self.threshold = widgets.FloatSlider(0.5, description="threshold", **unit)
        self.score = widgets.ToggleButtons(
            options=[("drawn token's q", "q_sampled"), ("largest q", "q_max")], description="trimmed by", style=LABEL
        )
        super().__init__(self.p, self.q, self.threshold, self.score)

    def draw(self) -> tuple[Figure, str]:
        p, q, rule = self.p.value, self.q.value, (self.threshold.value, self.score.value)
        experiment = leaks.footnote(leaks.two(p), leaks.two(q), *rule)
        a, b = np.sum(list(leaks.paths(experiment).values()), axis=0)
        summary = f"emits <b>({a:.3f}, {b:.3f})</b>, leak <b>{exact.leak(experiment):.3f}</b>"
        return plot_footnote(p, q, *rule), summary
