"""Notebooks 01 and 04: what they say of features and slopes, their figures, the feature explorer, and the exercises."""

import io
import json
import re
from dataclasses import replace
from functools import lru_cache
from itertools import permutations
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import redraws
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread

from avref import OnlineAcceptanceEstimator, features, metrics, plot_style, plots, widgets_feature
from avref import exercises_feature as feature_exercises
from avref import exercises_slope as slope_exercises
from avref.evidence import study_scores, traces
from avref.evidence.pair import Pair
from avref.plots_feature import ARTICLE_WORKLOADS, FEWEST
from avref.widgets_feature import FeatureExplorer, feature_figure, positions

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
TWINS = ("q_max", "log_q_max", "loglog_q_max", "logit_q_max")


@pytest.fixture(scope="module")
def pair():
    """A part of the shipped trace, spread over its workloads, with a head that knows the overlap up to noise."""
    whole = traces.load("dflash")
    t = whole.take(np.linspace(0, len(whole.num_tokens) - 1, min(60, len(whole.num_tokens))).astype(int))
    noise = np.random.default_rng(0).normal(0, 1, t.overlap.shape)
    overlap = t.overlap.astype(float).clip(0.001, 0.999)
    return Pair("dflash", replace(t, head=(np.log(overlap / (1 - overlap)) + noise).astype(np.float16)))


@pytest.fixture
def explorer(pair):
    return FeatureExplorer(pair)


# ---- what the notebooks say


def test_rising_transforms_share_their_auc_by_position_and_pooled_until_they_are_fitted(pair):
    held, k = pair.held, pair.held.position
    aucs = {}
    for name in TWINS:
        values = pair.values(name)[held.row, k]
        aucs[name] = [metrics.auc(held.label[k == 0], values[k == 0]), metrics.auc(held.label, values)]
    for name in TWINS:
        assert aucs[name] == pytest.approx(aucs["logit_q_max"], abs=1e-4)
    fitted = {name: pair.confidence(name, held) for name in TWINS if name != "q_max"}
    for c in fitted.values():  # within a position the fit is one more rising function
        assert metrics.auc(held.label[k == 0], c[k == 0]) == pytest.approx(aucs["q_max"][0], abs=1e-4)
    pooled = [metrics.auc(held.label, c) for c in fitted.values()]
    assert max(pooled) - min(pooled) > 1e-4


def test_the_usual_forms_jump_where_the_notebook_says(pair):
    lines = {line.get_label(): line for line in plots.plot_near_certainty().axes[0].lines}
    truth, rest = lines["truth, clamped to 40"].get_ydata(), lines["−log(rest), as here"].get_ydata()
    assert np.abs(np.asarray(rest) - np.asarray(truth)).max() < 1e-3
    for name in ("log q − log(1 − q)", "−log(sum of exponentials − 1)"):
        f = np.asarray(lines[name].get_ydata())
        assert 15.5 < f[f < 40].max() < 17.5 and (f == 40).sum() > 200


def slope_and_intercept(noise, greedy, num=5000):
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(num, 50, generator=generator) * 5 * torch.rand(num, 1, generator=generator)
    q, p = z.softmax(-1), (z + noise * torch.randn(num, 50, generator=generator)).softmax(-1)
    chance = p.gather(-1, q.argmax(-1, keepdim=True))[:, 0] if greedy else torch.minimum(p, q).sum(-1)
    accepted = (torch.rand(num, generator=generator) < chance).long()
    est = OnlineAcceptanceEstimator(1, damping=0.0)
    for _ in range(25):
        est.observe(features.logit_q_max(z)[:, None], accepted, torch.ones_like(accepted))
        est.refit()
    return est.slope.item(), est.intercepts.item()


def test_greedy_drafting_is_steeper_and_lower_and_a_perfect_greedy_drafter_has_slope_1():
    assert slope_and_intercept(0.0, True) == pytest.approx((1, 0), abs=0.1)
    for noise in (0.5, 1.0):
        sampled, greedy = slope_and_intercept(noise, False), slope_and_intercept(noise, True)
        assert greedy[0] > sampled[0] + 0.3 and greedy[1] < sampled[1] - 0.5
    assert slope_and_intercept(2.0, False)[0] > slope_and_intercept(0.5, False)[0]  # a worse drafter, a steeper slope


def test_the_article_s_table_gives_the_article_s_correlations():
    entropy, slope, first = np.array(list(ARTICLE_WORKLOADS.values())).T
    assert np.corrcoef(slope, entropy)[0, 1] == pytest.approx(-0.08, abs=0.005)
    assert np.corrcoef(first, entropy)[0, 1] == pytest.approx(-0.89, abs=0.005)
    assert np.ptp(slope) == pytest.approx(0.041, abs=5e-4) and np.ptp(first) == pytest.approx(0.699, abs=5e-4)
    assert slope_exercises._share(first, entropy) == pytest.approx(6 / 120)


# ---- the figures


def some_panels(pair):
    own = pair.held.where(pair.held.position == 0)
    return {n: (pair.values(n)[own.row, 0], own.label, pair.confidence(n, own)) for n in ("entropy", "logit_q_max")}


FIGURES = {
    "certainty": lambda pair: plots.plot_certainty(torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 3.0]])),
    "near": lambda pair: plots.plot_near_certainty(),
    "shapes": lambda pair: plots.plot_shapes(some_panels(pair)),
    "reliability": lambda pair: plots.plot_reliability({"a": ([0, 1, 1], [0.2, 0.4, 1.0]), "b": ([1, 0], [0.5, 0.5])}),
    "feature": lambda pair: feature_figure(pair),
    "coefficients": lambda pair: plots.plot_coefficients((0.25, 1.0), (-1.0, 1.0)),
    "workloads": lambda pair: plots.plot_workloads({"math": (1.0, [0.5, 0.4, 0.6], [-0.2, -0.3, 0.0])}),
    "drafters": lambda pair: plots.plot_drafters({"a": (0.5, [0.4, 0.6], [0.1, np.nan])}),
    "positions": lambda pair: plots.plot_by_position(study_scores.by_position(pair), [0, 1]),
}


@pytest.mark.parametrize("name", FIGURES)
def test_the_figures_are_labelled_and_not_empty(name, pair):
    figure = FIGURES[name](pair)
    assert isinstance(figure, Figure)
    for axes in figure.axes:
        assert axes.get_xlabel() and (axes.get_ylabel() or axes is not figure.axes[0])
        assert axes.lines or axes.patches or axes.collections
    assert pixels(plot_style.png(figure)).std() > 0.01
    assert name == "certainty" or any(axes.get_legend() for axes in figure.axes)


def test_the_reliability_diagram_shows_the_bins_of_the_metric(pair):
    y, p = pair.held.label, pair.confidence("no fit", pair.held)
    (axes,) = plots.plot_reliability({"raw": (y, p)}, num_bins=10).axes
    bins = metrics.reliability(y, p, 10)
    kept, dots = bins.count > 0, axes.collections[-1]
    assert np.asarray(dots.get_offsets()) == pytest.approx(np.stack((bins.mean_prediction, bins.mean_label), 1)[kept])
    assert (dots.get_sizes() - 12) / 900 == pytest.approx(bins.count[kept] / len(y))
    assert axes.get_title(loc="left") == f"raw: ECE {metrics.ece(y, p, 10):.4f}"


def test_the_dots_are_means_of_equal_groups_and_the_line_is_the_confidence():
    f, labels = np.arange(120.0), (np.arange(120) >= 60).astype(int)
    curves = plots.plot_feature("f", f, labels, np.zeros(120, int), f / 200).axes[0]
    line, dots = curves.lines
    assert np.asarray(dots.get_xdata()) == pytest.approx(np.arange(4.5, 120, 10))
    assert np.asarray(dots.get_ydata()).tolist() == [0] * 6 + [1] * 6
    assert np.asarray(line.get_ydata()) == pytest.approx(np.asarray(line.get_xdata()) / 200)


def test_positions_with_few_drafts_are_left_out():
    k = np.repeat([0, 1], [FEWEST, FEWEST - 1])
    curves = plots.plot_feature("f", np.arange(len(k)), k * 0, k, k * 0.0).axes[0]
    assert [text.get_text() for text in curves.get_legend().get_texts()] == ["position 1"]


def test_a_head_is_drawn_where_there_is_one(pair):
    (auc, *_) = FIGURES["positions"](pair).axes
    names = [text.get_text() for text in auc.get_legend().get_texts()]
    assert names == ["estimator", "q_max, no fit", "head"]


# ---- the widget


def pixels(png):
    return imread(io.BytesIO(png), format="png")


def test_every_control_redraws_the_one_picture_at_its_ends_and_middle(explorer):
    children, first, seen = explorer.children, explorer.picture.value, {explorer.picture.value}
    places = [value for _, value in explorer.position.options]
    for control, values in (
        (explorer.feature, ("log_q_max", "logit_q_max", "q_max")),
        (explorer.position, (places[0], places[len(places) // 2], places[-1])),
        (explorer.num_bins, (5, 15, 60)),
    ):
        start = control.value
        for value in values:
            before, changes = explorer.picture.value, control.value != value
            control.value = value
            assert (explorer.picture.value != before) == changes
            assert pixels(explorer.picture.value).std() > 0.01 and "AUC" in explorer.summary.value
            seen.add(explorer.picture.value)
        control.value = start
    assert explorer.picture.value == first and explorer.children is children  # nothing stacked up
    assert len(seen) >= 1 + 2 + 1 + 2


def test_the_summary_gives_the_metrics(explorer, pair):
    y, c = pair.held.label, pair.confidence("logit_q_max", pair.held)
    for value in (metrics.auc(y, c), metrics.log_loss(y, c), metrics.ece(y, c)):
        assert f"<b>{value:.4f}</b>" in explorer.summary.value
    assert "(lossless)" in explorer.summary.value
    explorer.feature.value, explorer.position.value = "logit_q_sampled", 1
    own = pair.held.where(pair.held.position == 0)
    assert f"<b>{metrics.auc(own.label, pair.confidence('logit_q_sampled', own)):.4f}</b>" in explorer.summary.value
    assert "not lossless" in explorer.summary.value and f"{len(own):,} held-out" in explorer.summary.value


def test_the_static_twin_is_the_same_picture(explorer, pair):
    explorer.feature.value, explorer.position.value, explorer.num_bins.value = "margin", 1, 30
    twin = plot_style.png(feature_figure(pair, feature="margin", position=1, num_bins=30))
    assert (pixels(explorer.picture.value) == pixels(twin)).all()


def test_redrawing_leaks_no_figure_and_only_values_redraw(explorer, monkeypatch):
    before, draws = plt.get_fignums(), []
    explorer.num_bins.value = 10
    monkeypatch.setattr(widgets_feature, "plot_feature", lambda *a: draws.append(a[0]) or plots.new_figure()[0])
    explorer.feature.description = "the feature"
    explorer.position.disabled = True
    assert not draws
    explorer.feature.value = "entropy"
    assert draws == ["entropy"] and plt.get_fignums() == before


def test_a_failing_callback_raises_and_shows_why(explorer, monkeypatch):
    def fail(*_):
        raise ValueError("no <drafts> today")

    monkeypatch.setattr(widgets_feature, "plot_feature", fail)
    with pytest.raises(ValueError, match="no <drafts> today"):
        explorer.redraw({"name": "value"})
    assert "no &lt;drafts&gt; today" in explorer.summary.value
    with pytest.raises(ValueError):  # also when a control sets it off
        explorer.num_bins.value = 60


def test_a_redraw_takes_less_than_a_fifth_of_a_second(explorer):
    redraws.assert_quick(explorer.feature, ("margin", "entropy", "log_q_max", "q_max", "logit_q_max"))


def test_a_feature_or_position_that_is_not_there_is_refused(pair):
    with pytest.raises(ValueError, match=r"'q_mean'.*'logit_q_max'"):
        feature_figure(pair, feature="q_mean")
    with pytest.raises(ValueError, match=r"position 9 .* 0 \(all\) or one of \[1,"):
        feature_figure(pair, position=9)
    counts = np.bincount(pair.held.position)
    assert all(counts[k - 1] >= FEWEST for k in positions(pair))


# ---- the exercises


def log_odds(logits, temperature):
    shifted = (logits - logits.max()) / temperature
    return -shifted.exp().sort(descending=True).values[1:].sum().log()


def naive_log_odds(logits, temperature):
    q = (logits / temperature).softmax(-1).max()
    return q.log() - (1 - q).log()


def auc(labels, scores):
    accepted, rejected = scores[labels == 1][:, None], scores[labels == 0]
    return (accepted > rejected).mean() + (accepted == rejected).mean() / 2


def ece(labels, probabilities, num_bins):
    bins = np.minimum((probabilities * num_bins).astype(int), num_bins - 1)
    return np.abs(np.bincount(bins, weights=probabilities - labels)).sum() / len(labels)


def unweighted_ece(labels, probabilities, num_bins):
    bins = metrics.reliability(labels, probabilities, num_bins)
    return np.nanmean(np.abs(bins.mean_prediction - bins.mean_label))


def intercept(slope, f, labels):
    b = 0.0
    for _ in range(50):
        c = 1 / (1 + np.exp(-(slope * f + b)))
        b += (labels - c).sum() / (c * (1 - c)).sum()
    return b


@lru_cache
def orders(b):
    return [np.array(order) for order in permutations(b)]


def chance(a, b):
    found = np.array([abs(np.corrcoef(a, order)[0, 1]) for order in orders(tuple(b))])
    return (found >= abs(np.corrcoef(a, b)[0, 1]) - 1e-9).mean()


def one_sided(a, b):
    found = np.array([np.corrcoef(a, order)[0, 1] for order in orders(tuple(b))])
    return (found <= np.corrcoef(a, b)[0, 1] + 1e-9).mean()


CHECKS = [
    (feature_exercises.check_log_odds, log_odds),
    (feature_exercises.check_auc, auc),
    (feature_exercises.check_ece, ece),
    (feature_exercises.check_keeps_ranking, "ace"),
    (slope_exercises.check_crossing, lambda slope, b: b / (1 - slope)),
    (slope_exercises.check_intercept, intercept),
    (slope_exercises.check_statements, "bce"),
    (slope_exercises.check_chance, chance),
]
MISTAKES = [
    (feature_exercises.check_log_odds, naive_log_odds),  # infinite where float32 q is 1
    (feature_exercises.check_log_odds, lambda logits, t: log_odds(logits, 1.0)),
    (feature_exercises.check_log_odds, lambda logits, t: (logits.sort().values[-1] - logits.sort().values[-2]) / t),
    (feature_exercises.check_auc, lambda y, s: (s[y == 1][:, None] > s[y == 0]).mean()),  # ties count nothing
    (feature_exercises.check_auc, lambda y, s: ((s >= 0.5) == y).mean()),
    (feature_exercises.check_ece, unweighted_ece),
    (feature_exercises.check_ece, lambda y, p, n: np.abs(p - y).mean()),
    (feature_exercises.check_ece, lambda y, p, n: abs(p.mean() - y.mean())),
    (feature_exercises.check_keeps_ranking, "abce"),
    (feature_exercises.check_keeps_ranking, "ac"),
    (feature_exercises.check_keeps_ranking, "acez"),
    (slope_exercises.check_crossing, lambda slope, b: -b / slope),  # where c is one half
    (slope_exercises.check_intercept, lambda slope, f, y: np.log(y.mean() / (1 - y.mean()))),
    (slope_exercises.check_intercept, lambda slope, f, y: np.log(y.mean() / (1 - y.mean())) - slope * f.mean()),
    (slope_exercises.check_statements, "bceg"),
    (slope_exercises.check_statements, "be"),
    (slope_exercises.check_chance, one_sided),
    (slope_exercises.check_chance, lambda a, b: abs(np.corrcoef(a, b)[0, 1])),
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


@pytest.mark.parametrize(("check", "letters", "right"), [(*c, c[1]) for c in CHECKS if isinstance(c[1], str)])
def test_one_wrong_letter_is_enough_to_fail(check, letters, right):
    answers = feature_exercises.KEEPS_RANKING if check is CHECKS[3][0] else slope_exercises.STATEMENTS
    for letter in answers:
        assert check(right.replace(letter, "") if letter in right else right + letter) is False


@pytest.mark.parametrize(
    ("notebook", "exercises"),
    [("01_the_feature", feature_exercises), ("04_slope_and_intercepts", slope_exercises)],
)
def test_exercises_not_written_yet_are_told_so(notebook, exercises, capsys):
    text = (FOLDER / f"{notebook}.ipynb").read_text(encoding="utf-8")
    cells = ["".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
    unsolved = [source for source in cells if "exercises.check_" in source]
    assert len(unsolved) == 4
    for source in unsolved:
        exec(source, {"exercises": exercises})
    assert capsys.readouterr().out.count("not written yet") == 4
    assert len(re.findall("Guess first", text)) >= 4
