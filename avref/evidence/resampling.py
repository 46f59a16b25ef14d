"""Intervals from resampling requests: prompts with all their answers are drawn with replacement, never single drafts.

Drafts of one answer are alike (one topic, one difficulty), so that resampling drafts would give intervals far too
narrow. A resample is a vector of weights, how often each answer was drawn; every measure here is a function of sums by
answer, so that all resamples are one matrix product:

    log-loss, ECE    sums by answer (and bin)
    AUC              wins[a, b] = pairs (accepted draft of a, rejected draft of b) in the right order, ties one half;
                     AUC = w' wins w / (w' accepted)(w' rejected)
    tokens/s         tokens and milliseconds by answer

Source: Efron and Tibshirani, "An Introduction to the Bootstrap", 1993 (percentile interval, cluster as the unit).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
NUM_BINS = 15


@dataclass(frozen=True)
class Estimate:
    """A measured value and the middle 95 % of what it is on resampled answers; NaN where it is undefined."""

    value: float
    low: float
    high: float

    def text(self, digits: int = 3) -> str:
        """The value and, in brackets, its interval: ``0.428 [0.420, 0.437]``."""
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def resample(num_answers: int, num: int = 300, seed: int = 0) -> Floats:
    """Weights of the answers, [num + 1, A]: row 0 counts each once (the value itself), the others are resamples."""
    if num_answers < 1:
        raise ValueError("there is no answer to resample: give at least one")
    drawn = np.random.default_rng(seed).multinomial(num_answers, np.full(num_answers, 1 / num_answers), size=num)
    return np.concatenate([np.ones((1, num_answers)), drawn])


def estimate(values: npt.ArrayLike) -> Estimate:
    """The first of `values` [num + 1] with the 2.5 % and 97.5 % quantiles of the others; undefined ones left out."""
    found = np.asarray(values, dtype=np.float64)
    others = found[1:][np.isfinite(found[1:])]
    low, high = np.quantile(others, [0.025, 0.975]) if len(others) else (np.nan, np.nan)
    return Estimate(float(found[0]), float(low), float(high))


def ratio(numerator: Floats, denominator: Floats, weights: Floats) -> Floats:
    """Sum over sum on every resample, [num + 1] from two sums by answer [A]."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((weights @ numerator) / (weights @ denominator))


def by_answer(values: npt.ArrayLike, answers: npt.ArrayLike, num_answers: int) -> Floats:
    """Sums of `values` [M] by the answer [M] that they belong to, [A]."""
    weights = np.asarray(values, dtype=np.float64)
    return np.asarray(np.bincount(np.asarray(answers), weights=weights, minlength=num_answers), dtype=np.float64)


class ScoreSums:
    """What AUC, log-loss and ECE of some labelled drafts need, by answer.

    labels [M] of 0 and 1, probabilities [M], and answers [M], from 0 to A - 1, whose drafts they are. The measures are
    those of `avref.metrics` (15 bins of equal width; probabilities kept 2.2e-16 away from 0 and 1).
    """

    def __init__(self, labels: npt.ArrayLike, probabilities: npt.ArrayLike, answers: npt.ArrayLike, num: int) -> None:
        self.y, self.p = np.asarray(labels, dtype=np.float64), np.asarray(probabilities, dtype=np.float64)
        self.answers, self.num_answers = np.asarray(answers), num
        self.count = self._by_answer(np.ones(len(self.y)))  # [A]
        p = np.clip(self.p, np.finfo(np.float64).eps, 1 - np.finfo(np.float64).eps)
        self.loss = self._by_answer(-np.where(self.y == 1, np.log(p), np.log1p(-p)))  # [A]

    def log_loss(self, weights: Floats) -> Floats:
        """Nats per draft on every resample, [num + 1]."""
        return ratio(self.loss, self.count, weights)

    def ece(self, weights: Floats) -> Floats:
        """Expected calibration error on every resample, [num + 1]: sum over bins of |sum p - sum y| / count."""
        bins = np.minimum((self.p * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        gap = np.zeros((self.num_answers, NUM_BINS))
        np.add.at(gap, (self.answers, bins), self.p - self.y)
        with np.errstate(invalid="ignore"):
            return np.asarray(np.abs(weights @ gap).sum(axis=1) / (weights @ self.count))

    def auc(self, weights: Floats) -> Floats:
        """Chance that an accepted draft scores above a rejected one, on every resample, [num + 1]."""
        wins, accepted = self._wins(), self._by_answer(self.y)
        with np.errstate(invalid="ignore"):
            pairs = (weights @ accepted) * (weights @ (self.count - accepted))
            return np.asarray(np.einsum("na,ab,nb->n", weights, wins, weights, optimize=True) / pairs)

    def _wins(self) -> Floats:
        """[A, A] of accepted drafts of a (rows) above rejected drafts of b (columns), ties one half."""
        levels, level = np.unique(self.p, return_inverse=True)
        rejected = np.zeros((len(levels), self.num_answers))
        np.add.at(rejected, (level[self.y == 0], self.answers[self.y == 0]), 1.0)
        below = rejected.cumsum(axis=0) - rejected / 2  # [levels, A]
        wins = np.zeros((self.num_answers, self.num_answers))
        np.add.at(wins, self.answers[self.y == 1], below[level[self.y == 1]])
        return wins

    def _by_answer(self, values: Floats) -> Floats:
        return by_answer(values, self.answers, self.num_answers)


def summary(values: dict[str, Any]) -> dict[str, Any]:
    """`values` with every `Estimate` as the three numbers that JSON can hold; NaN becomes null."""

    def plain(value: Any) -> Any:
        if isinstance(value, Estimate):
            return {name: plain(x) for name, x in vars(value).items()}
        if isinstance(value, dict):
            return {str(name): plain(x) for name, x in value.items()}
        if isinstance(value, (list, tuple, np.ndarray)):
            return [plain(x) for x in value]
        if isinstance(value, (float, np.floating)):
            return float(value) if np.isfinite(value) else None
        return value.item() if isinstance(value, np.generic) else value

    return {name: plain(value) for name, value in values.items()}
