"""Notebook 02: its experiments against enumeration, its chi-square power by trying, figures, widget and exercises."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import redraws
from matplotlib.figure import Figure
from matplotlib.image import imread
from scipy.stats import chisquare

from avref import chi_square, exact, leaks, plot_style, plots, widgets_lossless
from avref import exercises_lossless as exercises
from avref.features import FEATURES
from avref.widgets_lossless import LosslessExplorer, lossless_figure

EXACT = 1e-12
NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "02_lossless.ipynb"


def first_law(experiment):
    return exact.first_token(exact.joint_law(experiment))


# ---- the experiments


def test_the_footnote_by_hand_is_the_article_s():
    parts = leaks.paths(leaks.footnote())
    assert parts["accepted"] == pytest.approx([0, 0.5], abs=EXACT)
    assert parts["replaced"] == pytest.approx([0.3, 0], abs=EXACT)
    assert parts["trimmed"] == pytest.approx([0.1, 0.1], abs=EXACT)
    assert first_law(leaks.footnote()) == pytest.approx(first_law(exact.footnote()), abs=EXACT) == [0.4, 0.6]


@pytest.mark.parametrize("score", leaks.SCORES)
def test_the_paths_sum_to_the_enumerated_law(score):
    rng = np.random.default_rng(0)
    trimmed = 0
    for _ in range(60):
        p, q = rng.dirichlet(np.ones(3)), rng.dirichlet(np.ones(3))
        e = leaks.footnote(p.tolist(), q.tolist(), float(rng.choice([*q, 0.0, 1.0])), score)
        parts = leaks.paths(e)
        assert sum(parts.values()) == pytest.approx(first_law(e), abs=EXACT)
        trimmed += 0 < parts["trimmed"].sum() < 1 - EXACT
    assert (trimmed > 10) == (score == "q_sampled")


def test_the_largest_q_never_leaks_and_the_drawn_token_s_q_does():
    grid = np.linspace(0, 1, 9)
    largest = {score: 0.0 for score in leaks.SCORES}
    for score in leaks.SCORES:
        for p in grid:
            for q in grid:
                found = leaks.leak_by_threshold(leaks.two(p), leaks.two(q), score, [0.0, 0.3, 0.5, 0.8, 1.0])
                largest[score] = max(largest[score], found.max())
    assert largest["q_max"] < EXACT and 0.2 < largest["q_sampled"] < 0.25


@pytest.mark.parametrize("a", [0.002, 0.004, 0.1, 0.2, 0.49])
def test_at_the_footnote_s_target_the_leak_is_half_of_the_trimmed_token(a):
    assert exact.leak(leaks.footnote(q=(a, 1 - a))) == pytest.approx(a / 2, abs=EXACT)


@pytest.mark.parametrize("score", leaks.SCORES)
def test_the_engine_s_sampler_emits_the_enumerated_law(score):
    e = leaks.footnote((0.3, 0.5, 0.2), (0.25, 0.15, 0.6), 0.5, score)
    counts = leaks.emitted(e, 8000)
    assert counts.sum() == 8000
    assert chi_square.p_value(counts, first_law(e)) > chi_square.ALPHA
    assert (chi_square.p_value(counts, (0.3, 0.5, 0.2)) < chi_square.ALPHA / 1000) == (score == "q_sampled")


def test_a_tie_broken_by_depth_leaks_and_by_position_does_not():
    e = leaks.tie()
    assert first_law(e) == pytest.approx([0.85, 0.15], abs=EXACT)
    assert leaks.decisions(e) == [(0, 1), (1, 0)]
    assert exact.leak(replace(e, policy=exact.fixed_budget(1))) < EXACT


def test_live_survivals_are_those_that_a_policy_is_shown():
    e, shown = exact.aggregate_early_stop(), []
    exact.joint_law(replace(e, policy=lambda seen: shown.append(seen.survival) or [0, 0]))
    for drafts in ([(0, 0, 0), (0, 0, 0)], [(0, 1, 0), (1, 0, 0)]):
        live = leaks.live_survival(e, drafts)
        assert any(np.allclose(live, table, atol=EXACT) for table in shown)
    assert leaks.live_survival(e, [(0, 0, 0), (1, 0, 0)])[1, 1] == pytest.approx(0.04)


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_leaks_as_it_says(name):
    worst = leaks.worst_leak(name, num_pairs=2)
    assert worst < EXACT if FEATURES[name].lossless else worst > 0.05


def test_what_the_notebook_says_of_the_rules():
    """Section 5: early_stop never gets up these stairs; the other two vary, and are exact. Section 6: the same."""
    stairs, long = exact.costs(1, 2, 2), exact.costs(1, 1.2, 1.4, 1.8, 2.0, 2.4, 2.5, 3.2)
    varied = {}
    for rule in ("stale", "early_stop", "lookahead"):
        e = replace(exact.dspark_appendix(), policy=exact.budget_policy(stairs, rule), num_steps=2)
        assert exact.leak(e) < EXACT
        varied[rule] = len(leaks.decisions(e))
    assert varied["early_stop"] == 1 < min(varied["stale"], varied["lookahead"])
    e = replace(exact.aggregate_early_stop(), policy=exact.safe_drafting(long, "lookahead"), num_steps=2)
    assert exact.leak(e) < EXACT and len(leaks.decisions(e)) == 3


def test_settings_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match=r"'q_mean'.*q_sampled, q_max"):
        leaks.footnote(score="q_mean")
    with pytest.raises(ValueError, match="same vocabulary"):
        leaks.footnote(p=(0.2, 0.3, 0.5))
    with pytest.raises(ValueError, match=r"in \[0, 1\], got 1.5"):
        leaks.two(1.5)
    with pytest.raises(ValueError, match="one request with one draft"):
        leaks.paths(exact.dspark_appendix())


# ---- what a test can see


def test_the_p_value_is_scipy_s():
    counts, target = np.array([30, 45, 25]), np.array([0.3, 0.5, 0.2])
    assert chi_square.p_value(counts, target) == pytest.approx(chisquare(counts, 100 * target).pvalue)


@pytest.mark.parametrize("leak", [0.05, 0.002])
def test_the_samples_needed_are_the_least_that_are_enough(leak):
    laws = (0.5 - leak, 0.5 + leak), (0.5, 0.5)
    n = chi_square.samples_needed(*laws)
    below, enough = chi_square.detection_chance(*laws, [n - 1, n])
    assert below < 0.9 <= enough + 1e-9
    assert chi_square.detected_share(*laws, n, trials=2000) == pytest.approx(0.9, abs=0.03)
    assert n == pytest.approx(20.9 / (4 * leak**2), rel=0.01)  # (3.29 + 1.28)^2 = 20.9


def test_a_law_that_is_right_is_rejected_at_the_level_of_the_test():
    target = np.full(5, 0.2)
    assert chi_square.detection_chance(target, target, [100]) == pytest.approx([chi_square.ALPHA])
    assert chi_square.detected_share(target, target, 1000, trials=20000, alpha=0.05) == pytest.approx(0.05, abs=0.006)


def test_a_large_vocabulary_needs_more_samples_for_the_same_leak():
    needed = []
    for size in (2, 100, 10_000):
        target = np.full(size, 1 / size)
        needed.append(chi_square.samples_needed(target * (1 + 0.1 * np.where(np.arange(size) % 2, 1, -1)), target))
    assert needed == sorted(needed) and needed[2] > 25 * needed[0]


def test_laws_that_cannot_be_compared_are_refused():
    with pytest.raises(ValueError, match="equal up to rounding"):
        chi_square.samples_needed((0.5, 0.5), (0.5, 0.5))
    with pytest.raises(ValueError, match="one sample outside"):
        chi_square.samples_needed((0.5, 0.5), (1.0, 0.0))
    with pytest.raises(ValueError, match="sum to 1"):
        chi_square.samples_needed((0.5, 0.6), (0.5, 0.5))


# ---- the figures


def live_cases():
    e = exact.dspark_appendix()
    return {name: leaks.live_survival(e, [(x, 0)]) for x, name in enumerate("AB")}


FIGURES = {
    "rejection": lambda: plots.plot_rejection((0.5, 0.3, 0.2), (0.2, 0.2, 0.6)),
    "footnote": lambda: lossless_figure(),
    "live": lambda: plots.plot_live_budgets({"one": (live_cases(), exact.costs(1, 2, 2))}),
    "verified": lambda: plots.plot_verified({"one": (np.array([[0.9, np.nan], [0.5, 0.2]]), [1, 2])}),
    "power": lambda: plots.plot_power({"leak .1": (0.4, 0.6)}, (0.5, 0.5), trials=20),
}


@pytest.mark.parametrize("name", FIGURES)
def test_the_figures_are_labelled_and_not_empty(name):
    figure = FIGURES[name]()
    assert isinstance(figure, Figure)
    for axes in figure.axes:
        assert axes.get_xlabel() and (axes.get_ylabel() or axes is not figure.axes[0])
        assert axes.lines or axes.patches or axes.images
        assert axes.get_legend() or name == "verified"
    assert pixels(plot_style.png(figure)).std() > 0.01


def test_the_footnote_s_bars_add_up_to_the_emitted_law():
    bars = lossless_figure().axes[0].containers
    assert np.sum([[bar.get_height() for bar in c] for c in bars[:3]], axis=0) == pytest.approx([0.4, 0.6])
    texts = [text.get_text() for text in lossless_figure(p=0.4, q=0.4).axes[0].texts]
    assert texts == ["emits 0.160\ntarget 0.400", "emits 0.840\ntarget 0.600"]


def test_the_leak_s_steps_end_where_a_token_s_q_is_passed():
    curves = lossless_figure(p=0.5, q=0.2).axes[1].patches
    values, edges, _ = curves[0].get_data()
    assert edges.tolist() == [0, 0.2, 0.8, 1] and values == pytest.approx([0, 0.1, 0])
    assert curves[1].get_data().values == pytest.approx([0, 0, 0])


def test_the_live_budgets_mark_each_best():
    names = [text.get_text() for text in FIGURES["live"]().axes[0].get_legend().get_texts()]
    assert names == ["A: best B = 2", "B: best B = 0"]


# ---- the widget


def pixels(png):
    return imread(io.BytesIO(png), format="png")


def test_every_control_redraws_the_one_picture_at_its_ends_and_middle():
    explorer = LosslessExplorer()
    children, first = explorer.children, explorer.picture.value
    seen = {first}
    for control, values in (
        (explorer.p, (0.0, 0.5, 1.0)),
        (explorer.q, (0.0, 0.5, 1.0)),
        (explorer.threshold, (0.0, 0.5, 1.0)),
        (explorer.score, ("q_max", "q_sampled")),
    ):
        start = control.value
        for value in values:
            before, changes = explorer.picture.value, control.value != value
            control.value = value
            assert (explorer.picture.value != before) == changes
            assert pixels(explorer.picture.value).std() > 0.01 and "leak" in explorer.summary.value
            seen.add(explorer.picture.value)
        control.value = start
    explorer.redraw({"name": "value"})  # back at the first setting
    assert explorer.picture.value == first
    assert explorer.children is children  # nothing stacked up
    assert len(seen) == 1 + 2 + 3 + 2 + 1  # every setting draws a picture of its own


def test_the_summary_gives_the_enumerated_numbers():
    explorer = LosslessExplorer()
    assert "(0.400, 0.600)" in explorer.summary.value and "<b>0.100</b>" in explorer.summary.value
    explorer.score.value = "q_max"
    assert "(0.500, 0.500)" in explorer.summary.value and "<b>0.000</b>" in explorer.summary.value
    explorer.q.value, explorer.threshold.value, explorer.score.value = 0.8, 0.2, "q_sampled"  # q(B) is not below .2
    assert "<b>0.000</b>" in explorer.summary.value


def test_the_static_twin_is_the_same_picture():
    explorer = LosslessExplorer()
    explorer.p.value, explorer.q.value, explorer.threshold.value = 0.7, 0.35, 0.6
    twin = plot_style.png(lossless_figure(p=0.7, q=0.35, threshold=0.6))
    assert (pixels(explorer.picture.value) == pixels(twin)).all()


def test_redrawing_leaks_no_figure_and_only_values_redraw(monkeypatch):
    explorer, before = LosslessExplorer(), plt.get_fignums()
    explorer.q.value = 0.3
    draws = []
    monkeypatch.setattr(widgets_lossless, "plot_footnote", lambda *args: draws.append(args) or plots.new_figure()[0])
    explorer.q.description = "q"
    explorer.p.disabled = True
    assert not draws
    explorer.q.value = 0.4
    assert draws == [(0.5, 0.4, 0.5, "q_sampled")]
    assert plt.get_fignums() == before


def test_a_failing_callback_raises_and_shows_why(monkeypatch):
    explorer = LosslessExplorer()

    def fail(*_):
        raise ValueError("no <law> today")

    monkeypatch.setattr(widgets_lossless, "plot_footnote", fail)
    with pytest.raises(ValueError, match="no <law> today"):
        explorer.redraw({"name": "value"})
    assert "no &lt;law&gt; today" in explorer.summary.value
    with pytest.raises(ValueError):  # also when a control sets it off
        explorer.q.value = 0.6


def test_a_redraw_takes_less_than_a_fifth_of_a_second():
    redraws.assert_quick(LosslessExplorer().q, (0.1, 0.3, 0.6, 0.9, 0.5))


def test_only_the_widgets_import_ipywidgets():
    for path in (NOTEBOOK.parents[1] / "avref").rglob("*.py"):
        if not path.name.startswith("widgets"):
            assert not re.search(r"^\s*(from|import) (ipywidgets|avref.*\bwidgets)", path.read_text(), re.MULTILINE), (
                path
            )


# ---- the exercises


def emitted_law(p, q, verified):
    accepted = np.minimum(p, q) * verified
    rejected = (q * verified).sum() - accepted.sum()
    trimmed = (q * ~verified).sum()
    residual = np.maximum(p - q, 0)
    return accepted + rejected * residual / residual.sum() + trimmed * p


def replaced_from_p(p, q, verified):
    accepted = np.minimum(p, q) * verified
    return accepted + (1 - accepted.sum()) * p


def trimmed_from_the_residual(p, q, verified):
    residual = np.maximum(p - q, 0)
    accepted = np.minimum(p, q) * verified
    return accepted + (1 - accepted.sum()) * residual / residual.sum()


CHECKS = [
    (exercises.check_emitted, emitted_law),
    (exercises.check_worst_drafter, (0.49, 0.51)),
    (exercises.check_may_decide, "abdf"),
    (exercises.check_scaling, lambda n, leak, smaller: n * (leak / smaller) ** 2),
]
MISTAKES = [
    (exercises.check_emitted, replaced_from_p),
    (exercises.check_emitted, trimmed_from_the_residual),
    (exercises.check_emitted, lambda p, q, verified: p),  # as if every decision were lossless
    (exercises.check_emitted, lambda p, q, verified: emitted_law(p, q, verified)[:2]),
    (exercises.check_worst_drafter, (0.5, 0.5)),
    (exercises.check_worst_drafter, (0.2, 0.8)),
    (exercises.check_worst_drafter, (0.4, 0.4)),
    (exercises.check_worst_drafter, (0.2, 0.3, 0.5)),
    (exercises.check_may_decide, "abd"),
    (exercises.check_may_decide, "abdef"),
    (exercises.check_may_decide, "abdfx"),
    (exercises.check_scaling, lambda n, leak, smaller: n * leak / smaller),
]


@pytest.mark.parametrize(("check", "solution"), CHECKS)
def test_a_solution_is_accepted(check, solution, capsys):
    assert check(solution) is True
    assert "right" in capsys.readouterr().out


@pytest.mark.parametrize(("check", "mistake"), MISTAKES)
def test_a_mistake_is_rejected_and_explained(check, mistake, capsys):
    assert check(mistake) is False
    out = capsys.readouterr().out
    assert out.startswith("✗") and "not written" not in out


def test_exercises_not_written_yet_are_told_so(capsys):
    """As they stand in the notebook; one wrong letter is enough to fail the third."""
    cells = [c for c in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
    unsolved = ["".join(c["source"]) for c in cells if "exercises.check_" in "".join(c["source"])]
    assert len(unsolved) == len(CHECKS)
    for source in unsolved:
        exec(source, {"exercises": exercises})
    assert capsys.readouterr().out.count("not written yet") == len(CHECKS)
    for letter in exercises.MAY_DECIDE:
        flipped = "abdf".replace(letter, "") if letter in "abdf" else "abdf" + letter
        assert exercises.check_may_decide(flipped) is False
