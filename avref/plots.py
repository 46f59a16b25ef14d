"""Every figure of the project, in one place: the style, and what is drawn with it."""

from avref.plot_style import POLICY_COLORS, STYLE, new_figure, save
from avref.plots_budget import plot_cost_table, plot_survival
from avref.plots_estimator import (
    plot_acceptance,
    plot_damping,
    plot_hessian,
    plot_labels,
    plot_newton_step,
    plot_starvation,
)
from avref.plots_quickstart import plot_drafts, plot_quickstart

__all__ = [
    "POLICY_COLORS",
    "STYLE",
    "new_figure",
    "plot_acceptance",
    "plot_cost_table",
    "plot_damping",
    "plot_drafts",
    "plot_hessian",
    "plot_labels",
    "plot_newton_step",
    "plot_quickstart",
    "plot_starvation",
    "plot_survival",
    "save",
]
