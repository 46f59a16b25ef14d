"""Interactive figures for the notebooks. Each has a static twin, and redraws one picture in place."""

from __future__ import annotations

import ipywidgets as widgets
from matplotlib.figure import Figure

from avref.estimator import STEP_RULES
from avref.plots import plot_damping
from avref.traffic import KINDS, DampingHistory, simulate_damping
from avref.widgets_budget import BudgetExplorer as BudgetExplorer
from avref.widgets_budget import budget_figure as budget_figure
from avref.widgets_explorer import LABEL, WIDE, Explorer
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


class DampingExplorer(Explorer):
    """How the damping constant C of n / (n + C), the refit interval and the step rule follow each kind of traffic.

    A block of K = 7 drafts for 8 requests, 2,400 decode steps. Above: slope and intercepts against the truth; below:
    the log-loss that the estimate costs beyond the truth. Source: article, section "Fitting the coefficients".
    """

    def __init__(self) -> None:
        self.constant = widgets.SelectionSlider(
            options=[0, 5, 20, 50, 100, 200, 500, 2000], value=50, description="constant C", style=LABEL, layout=WIDE
        )
        self.refit_interval = widgets.SelectionSlider(
            options=[25, 50, 100, 200, 400], value=100, description="refit every (steps)", style=LABEL, layout=WIDE
        )
        self.step = widgets.ToggleButtons(options=list(STEP_RULES), description="step rule", style=LABEL)
        self.traffic = widgets.ToggleButtons(options=list(KINDS), description="traffic", style=LABEL)
        super().__init__(self.constant, self.refit_interval, self.step, self.traffic)

    def draw(self) -> tuple[Figure, str]:
        history = _simulate(self.constant.value, self.refit_interval.value, self.step.value, self.traffic.value)
        excess = f"mean excess log-loss after the first round: <b>{history.mean_excess:.4g}</b> nats per draft"
        return plot_damping(history), excess


def _simulate(constant: float, refit_interval: int, step: str, traffic: str) -> DampingHistory:
    return simulate_damping(damping=constant, refit_interval=refit_interval, step=step, traffic=traffic)
