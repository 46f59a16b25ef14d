"""Pearson's chi-square test on emitted tokens, and what it can see: how many samples a leak of a given size takes.

With n samples, and V tokens of target probability p, the statistic is ``sum((count - n p)^2 / (n p))``. When the
samples follow another law it grows like n times ``sum((law - p)^2 / p)``: halving a leak takes four times the samples.
The test rejects when its p-value falls below alpha.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import chi2, ncx2

from avref.exact import Floats

ALPHA = 1e-3
"""Chance of rejecting a law that is right, as in the project's own tests."""


def p_value(counts: npt.ArrayLike, target: npt.ArrayLike) -> float:
    """Chance that counts [V] drawn from the target lie this far from it or farther (Pearson's test, V - 1 degrees)."""
    return float(chi2.sf(_statistic(np.asarray(counts), _law(target)), len(_law(target)) - 1))


def detection_chance(law: npt.ArrayLike, target: npt.ArrayLike, n: npt.ArrayLike, *, alpha: float = ALPHA) -> Floats:
    """Chance that the test rejects the target (p-value below alpha) on n samples of the law; shape of n.

    The statistic then follows the noncentral chi-square law with V - 1 degrees of freedom and noncentrality
    ``n * sum((law - target)^2 / target)``, up to the approximation that every cell expects 5 samples or more.
    """
    degrees = len(_law(target)) - 1
    critical = float(chi2.isf(alpha, degrees))
    noncentrality = np.asarray(n, dtype=float) * _distance(law, target)
    # At 0 the chance is alpha, but scipy wants a positive number; from ten critical values on it is 1, but slow.
    return ncx2.sf(critical, degrees, noncentrality.clip(1e-300, 10 * (critical + 100)))


def samples_needed(law: npt.ArrayLike, target: npt.ArrayLike, *, alpha: float = ALPHA, chance: float = 0.9) -> int:
    """The least n at which the test rejects the target with this chance; ValueError when the two laws are equal."""
    distance = _distance(law, target)
    if distance < 1e-20:
        raise ValueError("the two laws are equal up to rounding: no number of samples tells them apart")
    low, high = 0.0, 1.0 / distance
    while detection_chance(law, target, high, alpha=alpha) < chance:
        low, high = high, 2 * high
    while high - low > 0.5 and high - low > 1e-9 * high:
        middle = (low + high) / 2
        below = detection_chance(law, target, middle, alpha=alpha) < chance
        low, high = (middle, high) if below else (low, middle)
    return int(np.ceil(high))


def detected_share(
    law: npt.ArrayLike, target: npt.ArrayLike, n: int, *, trials: int = 500, alpha: float = ALPHA, seed: int = 0
) -> float:
    """`detection_chance` by trying: the share of trials, n samples of the law each, in which the test rejects."""
    p = _law(target)
    counts = np.random.default_rng(seed).multinomial(n, _law(law), size=trials)  # [trials, V]
    return float((_statistic(counts, p) > chi2.isf(alpha, len(p) - 1)).mean())


def _statistic(counts: npt.NDArray[Any], p: Floats) -> Floats:
    expected = counts.sum(axis=-1, keepdims=True) * p
    return ((counts - expected) ** 2 / expected).sum(axis=-1)


def _law(values: npt.ArrayLike) -> Floats:
    law = np.asarray(values, dtype=float)
    if law.ndim != 1 or len(law) < 2 or not ((law >= 0).all() and abs(law.sum() - 1) < 1e-9):
        raise ValueError(f"a law needs two or more probabilities that sum to 1, got {np.round(law, 4).tolist()[:8]}")
    return law


def _distance(law: npt.ArrayLike, target: npt.ArrayLike) -> float:
    a, p = _law(law), _law(target)
    if len(a) != len(p) or not (p > 0).all():
        raise ValueError("the target must give every token of the law a chance: one sample outside shows the leak")
    return float(((a - p) ** 2 / p).sum())
