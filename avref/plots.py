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
from avref.plots_drafters import plot_drafter, plot_groups, plot_overlaps
from avref.plots_estimator import (
    plot_acceptance,
    plot_damping,
    plot_hessian,
    plot_labels,
    plot_newton_step,
    plot_starvation,
)
from avref.plots_evidence import plot_off_on, plot_pareto
from avref.plots_feature import (
    plot_by_position,
    plot_certainty,
    plot_coefficients,
    plot_drafters,
    plot_feature,
    plot_near_certainty,
    plot_reliability,
    plot_shapes,
    plot_workloads,
)
from avref.plots_lossless import plot_footnote, plot_live_budgets, plot_power, plot_rejection, plot_verified
from avref.plots_pareto import on_frontier, plot_frontier, plot_load
from avref.plots_quickstart import plot_drafts, plot_quickstart
from avref.plots_simulate import plot_simulation

__all__ = [
    "POLICY_COLORS",
    "STYLE",
    "new_figure",
    "on_frontier",
    "plot_acceptance",
    "plot_allocations",
    "plot_belief",
    "plot_by_position",
    "plot_certainty",
    "plot_coefficients",
    "plot_cost_table",
    "plot_cost_tables",
    "plot_damping",
    "plot_drafter",
    "plot_drafters",
    "plot_drafts",
    "plot_feature",
    "plot_footnote",
    "plot_frontier",
    "plot_groups",
    "plot_hessian",
    "plot_labels",
    "plot_live_budgets",
    "plot_load",
    "plot_lookahead",
    "plot_near_certainty",
    "plot_newton_step",
    "plot_off_on",
    "plot_overlaps",
    "plot_pareto",
    "plot_power",
    "plot_quickstart",
    "plot_rejection",
    "plot_reliability",
    "plot_rules",
    "plot_shapes",
    "plot_simulation",
    "plot_speeds",
    "plot_starvation",
    "plot_survival",
    "plot_verified",
    "plot_workloads",
    "save",
]
