"""Interactive figures for the notebooks. Each has a static twin, and redraws one picture in place.

A widget keeps a single PNG image and never an `Output` area: nothing stacks up under the controls, and an exception
in a callback is not swallowed. It is shown in place of the summary line and raised again.
"""

from __future__ import annotations

import html
from typing import Any

import ipywidgets as widgets
from matplotlib.figure import Figure

from avref.estimator import STEP_RULES
from avref.plot_style import png as _png
from avref.plots import plot_damping
from avref.traffic import KINDS, DampingHistory, simulate_damping
from avref.widgets_budget import BudgetExplorer as BudgetExplorer
from avref.widgets_budget import budget_figure as budget_figure
from avref.widgets_feature import FeatureExplorer as FeatureExplorer
from avref.widgets_feature import feature_figure as feature_figure
from avref.widgets_lossless import LosslessExplorer as LosslessExplorer
from avref.widgets_lossless import lossless_figure as lossless_figure
from avref.widgets_pareto import ParetoExplorer as ParetoExplorer
from avref.widgets_pareto import pareto_figure as pareto_figure


def damping_figure(
    *, constant: float = 50.0, refit_interval: int = 100, step: str = "self_concordant", traffic: str = "steady"
) -> Figure:
    """The picture of `DampingExplorer` at one setting; raises ValueError for settings that the simulation refuses."""
    return plot_damping(_simulate(constant, refit_interval, step, traffic))


class DampingExplorer(widgets.VBox):
    """How the damping constant C of n / (n + C), the refit interval and the step rule follow each kind of traffic.

    A block of K = 7 drafts for 8 requests, 2,400 decode steps. Above: slope and intercepts against the truth; below:
    the log-loss that the estimate costs beyond the truth. Source: article, section "Fitting the coefficients".
    """

    def __init__(self) -> None:
        wide = {"description_width": "110px"}
        self.constant = widgets.SelectionSlider(
            options=[0, 5, 20, 50, 100, 200, 500, 2000], value=50, description="constant C", style=wide
        )
        self.refit_interval = widgets.SelectionSlider(
            options=[25, 50, 100, 200, 400], value=100, description="refit every", style=wide
        )
        self.step = widgets.ToggleButtons(options=list(STEP_RULES), description="step rule", style=wide)
        self.traffic = widgets.ToggleButtons(options=list(KINDS), description="traffic", style=wide)
        self.picture = widgets.Image(format="png", layout=widgets.Layout(max_width="100%"))
        self.summary = widgets.HTML()
        controls = (self.constant, self.refit_interval, self.step, self.traffic)
        for control in controls:
            control.observe(self.redraw, names="value")
        super().__init__([*controls, self.summary, self.picture])
        self.redraw()

    def redraw(self, _change: Any = None) -> None:
        """Simulate at the present settings and replace the picture."""
        try:
            history = _simulate(self.constant.value, self.refit_interval.value, self.step.value, self.traffic.value)
            self.picture.value = _png(plot_damping(history))
            self.summary.value = (
                f"mean excess log-loss after the first round: <b>{_mean_excess(history):.4g}</b> nats per draft"
            )
        except Exception as error:
            self.summary.value = f"<b>redrawing failed:</b> {html.escape(str(error))}"
            raise


def _simulate(constant: float, refit_interval: int, step: str, traffic: str) -> DampingHistory:
    return simulate_damping(damping=constant, refit_interval=refit_interval, step=step, traffic=traffic)


def _mean_excess(history: DampingHistory) -> float:
    """Over all graded drafts after the first round, which the cold start alone decides."""
    graded = history.num_graded.sum(dim=1)[1:]
    return float((history.excess_log_loss[1:] * graded).sum() / graded.sum())
