"""What notebook 05 leans on: the synthetic drafts, the simulation of rules, its figures, the widget, the exercises."""

import io
import itertools

import matplotlib.pyplot as plt
import numpy as np
import pytest
import redraws
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread

from avref import exercises_budget, plots, widgets, widgets_budget
from avref.cost_table import CostTable
from avref.evidence import synthetic
from avref.evidence.hardware import gpu_roofline, measured, published_b300
from avref.plot_style import png
from avref.pruning import allocate, survival


def pixels(picture):
    return imread(io.BytesIO(picture), format="png")


def example(num_requests=3, num_steps=40):
    log_odds = synthetic.acceptance_log_odds(num_requests, 0.6, num_steps=num_steps)
    return survival(torch.tensor(log_odds).sigmoid())


# ---- the simulation


@pytest.mark.parametrize("mean", [0.1, 0.45, 0.9])
def test_synthetic_drafts_have_the_mean_acceptance_asked_for(mean):
    log_odds = synthetic.acceptance_log_odds(16, mean, num_steps=4000)
    assert log_odds.shape == (4000, 16, 7)
    assert synthetic.sigmoid(log_odds).mean() == pytest.approx(mean, abs=0.005)
    by_request = log_odds.mean(axis=2)
    assert np.corrcoef(by_request[1:].ravel(), by_request[:-1].ravel())[0, 1] == pytest.approx(0, abs=0.02)


def test_persistence_carries_a_requests_difficulty_over_and_leaves_its_law():
    log_odds = synthetic.acceptance_log_odds(16, 0.45, num_steps=4000, persistence=0.9)
    assert synthetic.sigmoid(log_odds).mean() == pytest.approx(0.45, abs=0.02)
    by_request = log_odds.mean(axis=2)
    share = 2.0**2 / (2.0**2 + 2.3**2 / 7)  # of the variance of the mean, that of the request
    found = np.corrcoef(by_request[1:].ravel(), by_request[:-1].ravel())[0, 1]
    assert found == pytest.approx(0.9 * share, abs=0.03)


def test_a_simulated_rule_equals_the_plain_loop_over_slots():
    """Tokens counted draft by draft from the allocation, against the sums by rank; with and without a wrong belief."""
    log_odds = synthetic.acceptance_log_odds(3, 0.6, num_steps=30, num_positions=4, seed=5)
    table = CostTable(np.full((4, 5), 0.7) * (np.arange(5) > 0), 5 + 0.4 * np.arange(16.0))
    for error, depth in itertools.product((0.0, 2.0, -2.0), (None, 2)):
        run = synthetic.simulate_rules(table, log_odds, calibration_error=error, depth=depth)
        for name, budgets in run.budgets.items():
            tokens = ms = 0.0
            for z, budget in zip(log_odds[:, :, :depth], budgets, strict=True):
                truth, believed = (survival(torch.tensor(z + shift).sigmoid()) for shift in (0.0, error))
                admitted = allocate(believed, int(budget)).tolist()
                tokens += 3 + sum(float(truth[r, :n].sum()) for r, n in enumerate(admitted))
                ms += float(table.step_ms(3, 3 + int(budget), depth))
            assert run.rules[name] == pytest.approx(1e3 * tokens / ms), (name, error, depth)


def test_fixed_lengths_and_no_speculation_by_hand():
    log_odds = np.zeros((1, 2, 2))  # every confidence .5
    run = synthetic.simulate_rules(CostTable([[0, 0, 0], [0, 1, 2], [0, 2, 4]], [9, 9, 10, 11, 12, 13, 14]), log_odds)
    # 2 tokens without drafts, 2 x .5 and 2 x .25 more; all-trimmed drafting pays for both positions
    np.testing.assert_allclose(run.fixed, [2000 / (10 + 4), 3000 / (12 + 2), 3500 / (14 + 4)])
    assert run.no_speculation == pytest.approx(2000 / 10)
    assert run.relative["lookahead"] == pytest.approx(run.rules["lookahead"] / run.fixed.max())


def test_what_the_notebook_says_about_the_rules():
    b300, drafts = published_b300(), synthetic.acceptance_log_odds(16, 0.45, num_steps=60)
    run = synthetic.simulate_rules(b300, drafts)
    assert run.relative["early_stop"] < 0.8 and not run.budgets["early_stop"].any()
    assert run.rules["lookahead"] > 0.97 * run.rules["retrospective"] and run.relative["lookahead"] > 1.1
    by_error = [
        synthetic.simulate_rules(b300, drafts, calibration_error=e, rules=["lookahead"]).rules["lookahead"]
        for e in (-3, -1, 0, 1, 3)
    ]
    relative = np.array(by_error) / by_error[2]
    assert relative[1] > 0.93 and relative[3] > 0.93 and relative[0] < 0.95 and relative[4] < 0.95


def test_what_the_notebook_says_about_drafting():
    t4 = gpu_roofline("T4", "SmolLM2-1.7B", "SmolLM2-135M", context=128)
    drafts = synthetic.acceptance_log_odds(1, 0.3, num_steps=100)
    by_depth = [synthetic.simulate_rules(t4, drafts, depth=d, rules=["lookahead"]) for d in (0, 1, 7)]
    none, one, seven = (run.rules["lookahead"] for run in by_depth)
    assert seven < none < one and none == pytest.approx(by_depth[0].no_speculation)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: synthetic.acceptance_log_odds(2, 1.0), "mean_acceptance"),
        (lambda: synthetic.acceptance_log_odds(2, 0.5, persistence=1.0), "persistence"),
        (lambda: synthetic.simulate_rules(measured(), np.zeros((1, 1, 7)), rules=["greedy"]), "greedy"),
        (lambda: synthetic.simulate_rules(measured(), np.zeros((1, 99, 7))), "not profiled"),
        (lambda: widgets.budget_figure(table="abacus"), "abacus"),
    ],
)
def test_bad_input_is_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()


# ---- the figures


def test_every_figure_is_labelled():
    S, table = example(), CostTable(np.zeros(4), 5 + np.arange(25.0))
    run = synthetic.simulate_rules(table, np.zeros((2, 3, 7)))
    figures = [
        plots.plot_cost_tables({"a": table, "b": measured()}, requests=(1, 2)),
        plots.plot_allocations(S[0], (2, 9)),
        plots.plot_rules({"one": run, "two": run}),
        plots.plot_lookahead(S[0], np.linspace(1, 0, 21), table, admitted=0),
        plots.plot_belief(S[0], S[1], table, None),
        plots.plot_speeds([1, 2], {"a": [3, 4]}, xlabel="x (ms)", ylabel="y"),
    ]
    for figure in figures:
        assert isinstance(figure, Figure)
        assert figure.axes[0].get_ylabel() and all(axes.get_xlabel() for axes in figure.axes)
        assert pixels(png(figure)).std() > 0.01


def test_the_lookahead_figure_shows_the_prediction_of_the_rule():
    S, mean = torch.tensor([[0.9, 0.3, 0.2]]), np.array([0.8, 0.6, 0.4])
    figure = plots.plot_lookahead(S, mean, CostTable([0, 1.0], [0, 9, 10, 11, 12]), admitted=1)
    left, right = figure.axes
    heights = [round(patch.get_height(), 4) for patch in left.patches]
    assert heights == [0.9, 0.3, 0.2]  # admitted; read; .4 x .3 / .6
    rates = [1e3 * (1 + sum(heights[:b])) / (10 + b) for b in range(4)]
    np.testing.assert_allclose(right.lines[0].get_ydata(), rates[:2], rtol=1e-6)
    np.testing.assert_allclose(right.lines[1].get_ydata(), rates[2:], rtol=1e-6)


def test_the_belief_figure_pays_by_the_truth():
    truth, believed = torch.tensor([[0.2, 0.1], [0.9, 0.8]]), torch.tensor([[0.9, 0.8], [0.5, 0.4]])
    figure = plots.plot_belief(truth, believed, CostTable(np.ones(3), np.full(9, 9.0)), None)
    lines = {line.get_label().split(":")[0]: line for line in figure.axes[0].lines}
    np.testing.assert_allclose(lines["true"].get_ydata(), 100 * np.array([2, 2.2, 2.3, 3.2, 4.0]), rtol=1e-6)
    np.testing.assert_allclose(lines["believed"].get_ydata(), 100 * np.array([2, 2.9, 3.7, 4.2, 4.6]), rtol=1e-6)


# ---- the widget


def test_every_control_redraws_the_one_picture_at_its_ends_and_middle():
    explorer = widgets.BudgetExplorer()
    children = explorer.children
    for control in (explorer.requests, explorer.acceptance, explorer.error, explorer.table):
        start = control.value
        options = control.options
        for value in (options[0], options[len(options) // 2], options[-1]):
            before = explorer.picture.value
            changed = value != control.value
            control.value = value
            assert (explorer.picture.value != before) == changed and pixels(explorer.picture.value).std() > 0.01
            assert "tokens/s expected" in explorer.summary.value
        control.value = start
    assert explorer.children is children  # nothing stacked up


def test_a_table_offers_the_requests_that_it_covers_in_one_redraw(monkeypatch):
    explorer = widgets.BudgetExplorer()
    explorer.requests.value = 128
    draws = []
    monkeypatch.setattr(widgets_budget, "plot_belief", lambda *step: draws.append(step) or plots.new_figure()[0])
    explorer.table.value = "two CPU cores"
    assert explorer.requests.options[-1] == explorer.requests.value == 32 and len(draws) == 1
    explorer.requests.value = 4
    explorer.table.value = "roofline T4"
    assert explorer.requests.options[-1] == 128 and explorer.requests.value == 4 and len(draws) == 3
    explorer.error.description = "error"  # only a change of value redraws
    assert len(draws) == 3


def test_the_static_twin_is_the_same_picture():
    explorer = widgets.BudgetExplorer()
    explorer.error.value, explorer.requests.value = 3.0, 4
    twin = png(widgets.budget_figure(num_requests=4, calibration_error=3.0))
    assert (pixels(explorer.picture.value) == pixels(twin)).all()


def test_overconfidence_verifies_more_and_costs_speed():
    budgets, gains = {}, {}
    for error in (-3.0, 0.0, 3.0):
        summary = widgets_budget._summary(*widgets_budget._step(64, 0.45, error, "published B300"))
        budgets[error] = int(summary.split("<b>")[1].split("<")[0])
        gains[error] = float(summary.rsplit("(", 1)[1].rstrip("%)"))
    assert budgets[-3.0] < budgets[0.0] < budgets[3.0]
    assert gains[0.0] == 0 and gains[-3.0] < 0 and gains[3.0] < 0


def test_redrawing_leaks_no_figure():
    explorer = widgets.BudgetExplorer()
    before = plt.get_fignums()
    for value in (4, 16, 4):
        explorer.requests.value = value
    assert plt.get_fignums() == before


def test_a_failing_callback_raises_and_shows_why(monkeypatch):
    explorer = widgets.BudgetExplorer()

    def fail(*_, **__):
        raise ValueError("no <budget> today")

    monkeypatch.setattr(widgets_budget, "choose_budget", fail)
    with pytest.raises(ValueError, match="no <budget> today"):
        explorer.redraw({"name": "value"})
    assert "no &lt;budget&gt; today" in explorer.summary.value
    with pytest.raises(ValueError):  # also when a control sets it off
        explorer.requests.value = 4


def test_a_redraw_takes_less_than_a_fifth_of_a_second():
    redraws.assert_quick(widgets.BudgetExplorer().requests, (64, 128, 32, 64, 128, 64))


# ---- the exercises


def tail(profile, admitted, s):
    return np.minimum(s, profile[admitted + 1 :] * min(s / profile[admitted], 4.0))


def depth_for(mean, ms):
    rates = [(1 + sum(mean[:d])) / ms[d] for d in range(len(ms))]
    return max(range(len(ms)), key=lambda d: (round(rates[d], 12), -d))


MAY = {
    "largest probability of q_k": True,
    "probability of x_k under q_k": False,
    "survival of x_(k+1), same request": False,
    "survival of another request's last draft": True,
    "verdicts of past steps": True,
    "the number of slots whose live survival is above 0.5": False,
}
SOLUTIONS = [
    (exercises_budget.check_turning_point, lambda flops, bandwidth, size: size * flops / (2 * bandwidth)),
    (exercises_budget.check_predicted_tail, tail),
    (exercises_budget.check_draft_depth, depth_for),
    (exercises_budget.check_what_may_decide, MAY),
]
MISTAKES = [
    (exercises_budget.check_turning_point, lambda flops, bandwidth, size: flops / bandwidth),
    (exercises_budget.check_turning_point, lambda flops, bandwidth, size: size * flops / bandwidth),
    (exercises_budget.check_predicted_tail, lambda m, b, s: m[b + 1 :]),
    (exercises_budget.check_predicted_tail, lambda m, b, s: m[b + 1 :] * s / m[b]),  # without the cap at four times
    (exercises_budget.check_predicted_tail, lambda m, b, s: np.append(s, tail(m, b, s))),
    (exercises_budget.check_predicted_tail, lambda m, b, s: tail(m, b, s) * float("nan")),
    (exercises_budget.check_turning_point, lambda *_: float("nan")),
    (exercises_budget.check_draft_depth, lambda mean, ms: len(mean)),
    (exercises_budget.check_draft_depth, lambda mean, ms: max(1, depth_for(mean, ms))),
    (
        exercises_budget.check_draft_depth,
        lambda mean, ms: [*(s * m < n - m for s, m, n in zip(mean, ms, ms[1:], strict=False)), True].index(True),
    ),
    (exercises_budget.check_what_may_decide, MAY | {"probability of x_k under q_k": True}),
    (exercises_budget.check_what_may_decide, MAY | {"verdicts of past steps": False}),
    (exercises_budget.check_what_may_decide, dict.fromkeys(MAY, False)),
]


@pytest.mark.parametrize(("check", "solution"), SOLUTIONS)
def test_a_solution_is_accepted(check, solution, capsys):
    assert check(solution) is True
    assert "right" in capsys.readouterr().out


@pytest.mark.parametrize(("check", "mistake"), MISTAKES)
def test_a_mistake_is_rejected_and_explained(check, mistake, capsys):
    assert check(mistake) is False
    out = capsys.readouterr().out
    assert out.startswith("✗") and "not written" not in out


@pytest.mark.parametrize("check", [check for check, _ in SOLUTIONS])
@pytest.mark.parametrize("nothing", [None, ...])
def test_an_exercise_not_written_yet_is_told_so(check, nothing, capsys):
    empty = check is exercises_budget.check_what_may_decide
    assert check(dict.fromkeys(MAY, nothing) if empty else lambda *_: None) is False
    assert "not written yet" in capsys.readouterr().out
