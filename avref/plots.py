"""Every figure of the project, in one place: the style, and what is drawn with it."""

from avref.plot_style import POLICY_COLORS, STYLE, new_figure, save
from avref.plots_budget import (
    plot_allocations,
    plot_belief,
    plot_cost_table,
    plot_cost_tables,
    plot_lookahead,
    plot_rules,
    plot_speeds,
    plot_survival,
)
from avref.plots_estimator import (
    plot_acceptance,
    plot_damping,
    plot_hessian,
    plot_labels,
    plot_newton_step,
    plot_starvation,
)
from avref.plots_evidence import plot_off_on, plot_pareto
from avref.plots_lossless import plot_footnote, plot_live_budgets, plot_power, plot_rejection, plot_verified
from avref.plots_quickstart import plot_drafts, plot_quickstart

__all__ = [
    "POLICY_COLORS",
    "STYLE",
    "new_figure",
    "plot_acceptance",
    "plot_allocations",
    "plot_belief",
    "plot_cost_table",
    "plot_cost_tables",
    "plot_damping",
    "plot_drafts",
    "plot_footnote",
    "plot_hessian",
    "plot_labels",
    "plot_live_budgets",
    "plot_lookahead",
    "plot_newton_step",
    "plot_off_on",
    "plot_pareto",
    "plot_power",
    "plot_quickstart",
    "plot_rejection",
    "plot_rules",
    "plot_speeds",
    "plot_starvation",
    "plot_survival",
    "plot_verified",
    "save",
]
