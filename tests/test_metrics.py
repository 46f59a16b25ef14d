"""Metrics against scikit-learn, brute force, and reported cases."""

import itertools
import math

import numpy as np
import pytest
import sklearn.metrics

from avref.metrics import (
    acceptance_rate,
    auc,
    by_position,
    ece,
    leading_accepts,
    log_loss,
    mean_acceptance_length,
    reliability,
)


def test_auc_counts_pairs_and_gives_ties_one_half():
    rng = np.random.default_rng(0)
    for _ in range(20):
        y, s = rng.integers(0, 2, 40), rng.integers(0, 6, 40) / 5
        pairs = [(a > b) + 0.5 * (a == b) for a, b in itertools.product(s[y == 1], s[y == 0])]
        assert auc(y, s) == pytest.approx(np.mean(pairs))
    assert auc([0, 1, 0, 1], [0.5] * 4) == 0.5  # C132
    assert auc([0, 1, 0, 1], [0.5, 0.5, 0.5, 0.9]) == 0.75


@pytest.mark.parametrize("labels", [[1, 1, 1], [0, 0], []])
def test_auc_of_one_class_is_nan_with_a_warning(labels):
    with pytest.warns(RuntimeWarning, match="undefined"):  # C130
        assert math.isnan(auc(labels, [0.5] * len(labels)))


def test_log_loss_matches_scikit_learn_and_survives_certainty():
    rng = np.random.default_rng(1)
    y, p = rng.integers(0, 2, 500), rng.random(500)
    p[:4], y[:4] = [0, 1, 0, 1], [0, 1, 1, 0]
    assert log_loss(y, p) == pytest.approx(sklearn.metrics.log_loss(y, p))
    assert log_loss([1, 1], [1.0, 1.0]) == pytest.approx(0, abs=1e-12)
    assert log_loss([1], [0.0]) == pytest.approx(36.04, abs=0.01)
    assert math.isnan(log_loss([], []))


def test_ece_closes_both_ends():
    assert ece([1, 0], [0.95, 1.0], 10) == pytest.approx(0.475)  # C124
    assert ece([1], [0.0], 10) == 1.0  # C125
    assert ece([0, 1, 0, 1], [0, 1, 0, 1], 10) == 0.0
    assert ece([1] * 5 + [0] * 5, [0.7] * 10) == pytest.approx(0.2)  # C127
    assert math.isnan(ece([], []))


def test_ece_matches_a_loop_over_bins():
    rng = np.random.default_rng(2)
    p = rng.random(3000)
    y = rng.random(3000) < p**2
    expected = 0.0
    for b in range(15):
        inside = (p >= b / 15) & ((p < (b + 1) / 15) | (b == 14))
        expected += inside.mean() * abs(p[inside].mean() - y[inside].mean())
    assert ece(y, p) == pytest.approx(expected)
    assert expected > 0.1


def test_reliability_keeps_empty_bins_aligned():
    bins = reliability([1, 1, 0], [0.9, 0.8, 0.2], 3)  # C128
    assert bins.count.tolist() == [1, 0, 2] and len(bins.edges) == 4
    np.testing.assert_allclose(bins.mean_prediction, [0.2, np.nan, 0.85])
    np.testing.assert_allclose(bins.mean_label, [0.0, np.nan, 1.0])
    assert ece([1, 1, 0], [0.9, 0.8, 0.2], 50) == pytest.approx((0.1 + 0.2 + 0.2) / 3)  # more bins than drafts


def test_bin_edges_go_to_the_upper_bin():
    assert reliability([1] * 4, [0.0, 0.25, 0.5, 1.0], 4).count.tolist() == [1, 1, 1, 1]


def test_by_position_leaves_out_what_was_not_graded():
    rng = np.random.default_rng(3)
    p = rng.random((400, 3))
    y = (rng.random((400, 3)) < p).astype(float)
    graded = rng.random((400, 3)) < 0.7
    y[~graded], p[~graded] = np.nan, np.nan
    scores = by_position(y, p, graded)
    for k in range(3):
        kept = graded[:, k]
        assert scores.per_position[k].count == kept.sum()
        assert scores.per_position[k].auc == pytest.approx(sklearn.metrics.roc_auc_score(y[kept, k], p[kept, k]))
        assert scores.per_position[k].log_loss == pytest.approx(sklearn.metrics.log_loss(y[kept, k], p[kept, k]))
    later = graded.copy()
    later[:, 0] = False
    for got, mask in ((scores.pooled, graded), (scores.excluding_first, later)):
        assert got.count == mask.sum()
        assert got.auc == pytest.approx(sklearn.metrics.roc_auc_score(y[mask], p[mask]))
        assert got.ece == pytest.approx(ece(y[mask], p[mask]))


def test_by_position_with_a_single_position_has_nothing_left_without_it():
    with pytest.warns(RuntimeWarning, match="undefined"):
        scores = by_position([[1], [0]], [[0.8], [0.3]])
    assert scores.pooled.auc == 1.0 and scores.excluding_first.count == 0
    assert math.isnan(scores.excluding_first.ece)


def test_mean_acceptance_length_counts_the_bonus_token():
    accepted = [70, 55, 42]  # C134: 87 steps, 167 accepted of 259
    assert mean_acceptance_length(accepted, 87) == pytest.approx(2.92, abs=0.005)
    assert np.round(np.array(accepted) / 87, 3).tolist() == [0.805, 0.632, 0.483]
    assert acceptance_rate([167], [259]) == pytest.approx(167 / 259)


def test_no_drafts():
    assert mean_acceptance_length([0, 0], 0) == 1.0 and mean_acceptance_length([0, 0], 50) == 1.0  # C133
    assert mean_acceptance_length([], 50) == 1.0
    assert math.isnan(acceptance_rate([0, 0], [0, 0]))


def test_matches_after_the_first_mismatch_do_not_count():
    assert leading_accepts([1, 0, 1, 0]) == 1  # C136
    assert acceptance_rate([leading_accepts([1, 0, 1, 0])], [4]) == 0.25
    assert leading_accepts([[1, 1], [0, 1], [1, 0]]).tolist() == [2, 0, 1]


def test_length_is_measured_not_a_power_of_the_mean_acceptance():
    """C137: requests of unequal difficulty. Powers of the mean acceptance understate the length."""
    rng = np.random.default_rng(4)
    easy = rng.random((20_000, 1)) < 0.5
    matches = rng.random((20_000, 6)) < np.where(easy, 0.95, 0.35)
    counts = leading_accepts(matches)
    by_place = [(counts > k).sum() for k in range(6)]
    length = mean_acceptance_length(by_place, len(counts))
    assert length == pytest.approx(1 + counts.mean())
    assert length - (1 + sum(matches.mean() ** k for k in range(1, 7))) > 0.5
    assert sum(0.8**k for k in range(1, 9)) == pytest.approx(3.329, abs=1e-3)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: ece([1, 0], [0.5, math.nan]), "nan"),
        (lambda: ece([1, 0], [0.5, 1.5]), "1.5"),
        (lambda: ece([1, 0], [0.5]), r"labels \(2,\) for predictions \(1,\)"),
        (lambda: ece([1], [0.5], 0), "num_bins"),
        (lambda: log_loss([2, 0], [0.5, 0.5]), "2.0"),
        (lambda: auc([1, 0], [math.nan, 0.5]), "NaN"),
        (lambda: auc(["yes"], [0.5]), "labels"),
        (lambda: by_position([1, 0], [0.5, 0.5]), r"\[N, K\]"),
        (lambda: by_position([[1, 0]], [[0.5, 0.5]], [[True]]), "graded"),
        (lambda: mean_acceptance_length([5], 4), "at most one accepted"),
        (lambda: acceptance_rate([5], [4]), "more accepted"),
        (lambda: acceptance_rate([-1], [4]), "counts"),
    ],
)
def test_bad_input_is_named(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_labels_and_predictions_of_other_shapes_are_refused():
    """[N, K] beside [K, N] would give each label another draft's prediction, and plausible scores."""
    y, p = np.array([[1, 0, 1], [0, 1, 0]]), np.array([[0.9, 0.1, 0.8], [0.2, 0.7, 0.3]])
    for score in (auc, log_loss, ece, reliability):
        score(y, p)
        with pytest.raises(ValueError, match=r"labels \(2, 3\) for predictions \(3, 2\)"):
            score(y, p.T)


def test_lengths_of_what_cannot_be_are_refused():
    for wrong in ([2, 2, 1], [0.9, 0.9], [float("nan")]):
        with pytest.raises(ValueError, match="labels must be 0 or 1"):
            leading_accepts(wrong)
    with pytest.raises(ValueError, match="only if those before it were"):
        mean_acceptance_length([1, 5], 10)
    with pytest.raises(ValueError, match="at most one accepted"):
        mean_acceptance_length([0, 0], float("nan"))
