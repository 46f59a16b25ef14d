"""The budget explorer: one step's budget by load, acceptance, calibration error and machine."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ipywidgets as widgets
import torch
from matplotlib.figure import Figure
from torch import Tensor

from avref.cost_table import CostTable
from avref.evidence import hardware
from avref.evidence.synthetic import acceptance_log_odds
from avref.plots_budget import plot_belief
from avref.pruning import SurvivalProfile, allocate, choose_budget, survival
from avref.widgets_explorer import LABEL, WIDE, Explorer

TABLES = ("two CPU cores", "published B300", "roofline T4", "roofline H100")
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128)
ACCEPTANCES = (0.3, 0.45, 0.6, 0.7, 0.8, 0.9)
ERRORS = (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0)
PAST_STEPS = 20


@lru_cache(maxsize=len(TABLES))
def example_table(name: str) -> CostTable:
    """One of `TABLES`; the rooflines: SmolLM2-1.7B on a T4 and Qwen2.5-7B on an H100, 128 tokens of context.

    Their drafters are SmolLM2-135M and Qwen2.5-0.5B by size, drafting in one parallel pass. Raises ValueError for
    another name.
    """
    if name == "two CPU cores":
        return hardware.measured()
    if name == "published B300":
        return hardware.published_b300()
    shape: dict[str, Any] = {"context": 128, "max_requests": 128, "parallel_draft": True}
    if name == "roofline T4":
        return hardware.gpu_roofline("T4", "SmolLM2-1.7B", "SmolLM2-135M", **shape)
    if name == "roofline H100":
        return hardware.gpu_roofline("H100", "Qwen2.5-7B", "Qwen2.5-0.5B", **shape)
    raise ValueError(f"table is {name!r}; expected one of {', '.join(TABLES)}")


def budget_figure(
    *,
    num_requests: int = 16,
    mean_acceptance: float = 0.7,
    calibration_error: float = 0.0,
    table: str = "published B300",
) -> Figure:
    """The picture of `BudgetExplorer` at one setting; raises ValueError for settings that the tables do not cover."""
    return plot_belief(*_step(num_requests, mean_acceptance, calibration_error, table))


class BudgetExplorer(Explorer):
    """One decode step with K = 7 drafts: how many are verified, what the rule believed, and what it gets.

    Drafts are those of `acceptance_log_odds`; the rules see log-odds that are off by the calibration error. The profile
    comes from the 20 steps before. Source: article, section on the budget.
    """

    def __init__(self) -> None:
        wide: Any = {"style": LABEL, "layout": WIDE}
        self.requests = widgets.SelectionSlider(options=REQUESTS, value=16, description="requests", **wide)
        self.acceptance = widgets.SelectionSlider(options=ACCEPTANCES, value=0.7, description="mean acceptance", **wide)
        self.error = widgets.SelectionSlider(options=ERRORS, value=0.0, description="calibration error", **wide)
        self.table = widgets.ToggleButtons(options=TABLES, value=TABLES[1], description="cost table", style=LABEL)
        self.table.observe(self._offer_requests, names="value")
        super().__init__(self.requests, self.acceptance, self.error, self.table)

    def draw(self) -> tuple[Figure, str]:
        step = _step(self.requests.value, self.acceptance.value, self.error.value, self.table.value)
        return plot_belief(*step), _summary(*step)

    def _offer_requests(self, _change: Any) -> None:
        """Offer the numbers of requests that the chosen table covers; a larger one becomes its largest."""
        known = tuple(n for n in REQUESTS if n <= example_table(self.table.value).max_requests)
        if self.requests.options == known:
            return
        wanted = min(self.requests.value, known[-1])
        self.requests.unobserve(self.redraw, names="value")  # new options jump to the first of them in passing
        self.requests.options = known
        self.requests.value = wanted
        self.requests.observe(self.redraw, names="value")


def _step(num_requests: int, mean_acceptance: float, error: float, table: str) -> tuple[Tensor, Tensor, CostTable, Any]:
    """True and believed survivals [R, K] of a step, the cost table, and the profile that the steps before left."""
    costs = example_table(table)
    costs.verify(num_requests, num_requests)  # refuses what the table does not cover, before anything is simulated
    log_odds = torch.from_numpy(acceptance_log_odds(num_requests, mean_acceptance, num_steps=PAST_STEPS + 1).copy())
    truth, believed = (survival((log_odds + shift).sigmoid()) for shift in (0.0, error))  # [steps, R, K]
    profile = SurvivalProfile()
    for past in believed[:-1]:
        profile.update(past)
    return truth[-1], believed[-1], costs, profile.predict(truth[-1].numel())


def _summary(truth: Tensor, believed: Tensor, table: CostTable, profile: Any) -> str:
    """The decision in words: drafts verified, and the speed against that of true confidences, same rule."""
    num_requests, num_positions = truth.shape
    speed, budgets = [], []
    for seen in (believed, truth):
        budgets.append(choose_budget(seen, table, num_requests, "lookahead", profile))
        verified = torch.arange(num_positions) < allocate(seen, budgets[-1])[:, None]  # [R, K]
        tokens = num_requests + float((truth * verified).sum())
        speed.append(1e3 * tokens / float(table.step_ms(num_requests, num_requests + budgets[-1], num_positions)))
    return (
        f"lookahead verifies <b>{budgets[0]}</b> of {truth.numel()} drafts: <b>{speed[0]:,.0f}</b> tokens/s expected; "
        f"with true confidences {budgets[1]} and {speed[1]:,.0f} ({speed[0] / speed[1] - 1:+.1%})"
    )
