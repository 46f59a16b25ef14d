"""Every figure of the project, in one place: the style, and what is drawn with it."""

from avref.plot_style import POLICY_COLORS, STYLE, new_figure, save
from avref.plots_estimator import (
    plot_acceptance,
    plot_damping,
    plot_hessian,
    plot_labels,
    plot_newton_step,
    plot_starvation,
)
from avref.plots_quickstart import plot_quickstart

__all__ = [
    "POLICY_COLORS",
    "STYLE",
    "new_figure",
    "plot_acceptance",
    "plot_damping",
    "plot_hessian",
    "plot_labels",
    "plot_newton_step",
    "plot_quickstart",
    "plot_starvation",
    "save",
]
