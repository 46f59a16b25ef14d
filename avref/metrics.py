"""How good a confidence is (AUC, log-loss, calibration), and how long an accepted run is.

Labels are 1 for an accepted draft and 0 for the first rejection; only graded drafts belong here (a trimmed position or
one behind a rejection has no label). Probabilities are predictions in [0, 1]. Undefined values are NaN, never 0.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Reliability:
    """Calibration by bin, all arrays [num_bins] and aligned: an empty bin has count 0 and NaN means.

    ``edges`` [num_bins + 1]; bin b holds edges[b] <= p < edges[b + 1], the last one its upper edge too.
    """

    edges: Floats
    count: npt.NDArray[np.int64]
    mean_prediction: Floats
    mean_label: Floats


@dataclass(frozen=True)
class Scores:
    """AUC, log-loss and ECE of ``count`` graded drafts; NaN where undefined."""

    count: int
    auc: float
    log_loss: float
    ece: float


@dataclass(frozen=True)
class PositionScores:
    """Scores of every draft position, of all pooled, and of all but the first position pooled."""

    per_position: tuple[Scores, ...]
    pooled: Scores
    excluding_first: Scores


def auc(labels: npt.ArrayLike, scores: npt.ArrayLike) -> float:
    """Probability that an accepted draft scores above a rejected one, ties counting one half (mid-rank).

    labels and scores have the same shape and are pooled. NaN with a RuntimeWarning when only one class is present.
    Raises ValueError for labels other than 0 and 1 and for scores that are NaN.
    """
    y, s = _binary(labels), _flat(scores, "scores")
    _same_shape(labels, scores)
    if np.isnan(s).any():
        raise ValueError("scores hold NaN: leave out drafts that were not graded")
    if len(np.unique(y)) < 2:
        warnings.warn(f"AUC of {len(y)} drafts with one label is undefined: NaN", RuntimeWarning, stacklevel=2)
        return float("nan")
    from sklearn.metrics import roc_auc_score  # imported here, it takes a second

    return float(roc_auc_score(y, s))


def log_loss(labels: npt.ArrayLike, probabilities: npt.ArrayLike) -> float:
    """Mean of ``-(y log p + (1 - y) log(1 - p))`` in nats, p kept 2.2e-16 away from 0 and 1; NaN without drafts.

    So a certain prediction that fails costs 36 nats, not infinity. Raises ValueError as `ece` does.
    """
    y, p = _binary(labels), _probabilities(probabilities)
    _same_shape(labels, probabilities)
    if len(y) == 0:
        return float("nan")
    p = np.clip(p, np.finfo(np.float64).eps, 1 - np.finfo(np.float64).eps)
    return float(-np.where(y == 1, np.log(p), np.log1p(-p)).mean())


def reliability(labels: npt.ArrayLike, probabilities: npt.ArrayLike, num_bins: int = 15) -> Reliability:
    """Mean prediction and mean label in bins of equal width over [0, 1], both ends closed."""
    if num_bins < 1:
        raise ValueError(f"num_bins must be 1 or more, got {num_bins}")
    y, p = _binary(labels), _probabilities(probabilities)
    _same_shape(labels, probabilities)
    edges = np.linspace(0.0, 1.0, num_bins + 1)
    bins = np.minimum(np.searchsorted(edges, p, side="right") - 1, num_bins - 1)  # p = 1 belongs to the last bin
    count = np.bincount(bins, minlength=num_bins)
    with np.errstate(invalid="ignore"):  # 0 / 0 is the NaN of an empty bin
        mean_prediction = np.bincount(bins, weights=p, minlength=num_bins) / count
        mean_label = np.bincount(bins, weights=y, minlength=num_bins) / count
    return Reliability(edges, count, mean_prediction, mean_label)


def ece(labels: npt.ArrayLike, probabilities: npt.ArrayLike, num_bins: int = 15) -> float:
    """Expected calibration error: sum over bins of ``count / n * |mean prediction - mean label|``.

    Bins have equal width and both ends closed (15 of them by default; the article gives no number). NaN without
    drafts. Raises ValueError for probabilities outside [0, 1] or NaN, labels other than 0 and 1, unequal shapes.
    """
    bins = reliability(labels, probabilities, num_bins)
    total = bins.count.sum()
    if total == 0:
        return float("nan")
    gaps = np.abs(bins.mean_prediction - bins.mean_label)
    return float(np.nansum(bins.count * gaps) / total)


def by_position(
    labels: npt.ArrayLike, probabilities: npt.ArrayLike, graded: npt.ArrayLike | None = None, num_bins: int = 15
) -> PositionScores:
    """AUC, log-loss and ECE per draft position, pooled, and pooled without the first position.

    labels and probabilities [N, K], one row per block of drafts; graded [N, K] marks the drafts that have a label
    (default: all); what is elsewhere is ignored. Source: the article's tables, with and without the first position.
    """
    y, p = np.asarray(labels), np.asarray(probabilities, dtype=np.float64)
    if y.ndim != 2 or y.shape != p.shape:
        raise ValueError(f"labels and probabilities must both have shape [N, K], got {y.shape} and {p.shape}")
    mask = np.ones(y.shape, dtype=bool) if graded is None else np.asarray(graded, dtype=bool)
    if mask.shape != y.shape:
        raise ValueError(f"graded must have the shape of labels, {y.shape}, got {mask.shape}")

    def scores(columns: slice) -> Scores:
        chosen = mask[:, columns]
        kept_y, kept_p = y[:, columns][chosen], p[:, columns][chosen]
        return Scores(len(kept_y), auc(kept_y, kept_p), log_loss(kept_y, kept_p), ece(kept_y, kept_p, num_bins))

    per_position = tuple(scores(slice(k, k + 1)) for k in range(y.shape[1]))
    return PositionScores(per_position, scores(slice(None)), scores(slice(1, None)))


def leading_accepts(matches: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Number of accepted drafts: the matches before the first mismatch. matches [..., K] of 0 and 1 -> [...].

    Raises ValueError for anything but 0 and 1.
    """
    _binary(matches)
    return np.cumprod(np.asarray(matches, dtype=np.int64), axis=-1).sum(axis=-1)


def mean_acceptance_length(accepted_by_position: npt.ArrayLike, steps: int) -> float:
    """Tokens emitted per request and step: ``1 + sum over positions of accepted[k] / steps``.

    The 1 is the token that every step emits beside its accepted drafts (bonus or replacement); a step that a stop token
    ends inside its drafts has none, so for such traffic take `Stats.tokens_per_request_step`. accepted_by_position [K]
    counts the accepted drafts of each position, steps the (request, step) pairs. accepted[k] / steps is the measured
    survival of position k, so no assumption of equal or independent acceptances enters (p + p^2 + ... would). 1.0 when
    nothing was accepted, or before the first step.
    """
    accepted = _counts(accepted_by_position, "accepted_by_position")
    if not steps >= 0 or accepted.max(initial=0) > steps:
        raise ValueError(f"at most one accepted draft per position and step, got {accepted.tolist()} in {steps} steps")
    if (np.diff(accepted) > 0).any():
        raise ValueError(f"a draft is accepted only if those before it were, got {accepted.tolist()} by position")
    return 1.0 + float(accepted.sum()) / steps if steps else 1.0


def acceptance_rate(accepted_by_position: npt.ArrayLike, drafted_by_position: npt.ArrayLike) -> float:
    """``sum accepted / sum drafted``, NaN when nothing was drafted.

    Say which count is given: per draft made, a trimmed draft lowers the rate; per draft verified, it does not.
    """
    accepted = _counts(accepted_by_position, "accepted_by_position")
    drafted = _counts(drafted_by_position, "drafted_by_position")
    if accepted.shape != drafted.shape or (accepted > drafted).any():
        raise ValueError(f"more accepted than drafted: {accepted.tolist()} of {drafted.tolist()}")
    return float(accepted.sum() / drafted.sum()) if drafted.sum() else float("nan")


def _flat(values: npt.ArrayLike, name: str) -> Floats:
    try:
        return np.asarray(values, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be numbers ({error})") from None


def _binary(labels: npt.ArrayLike) -> Floats:
    y = _flat(labels, "labels")
    known = np.isin(y, (0.0, 1.0))
    if not known.all():
        raise ValueError(f"labels must be 0 or 1, got {y[~known][0]}: leave out drafts that were not graded")
    return y


def _probabilities(values: npt.ArrayLike) -> Floats:
    p = _flat(values, "probabilities")
    inside = (p >= 0) & (p <= 1)
    if not inside.all():
        raise ValueError(f"probabilities must lie in [0, 1], got {p[~inside][0]}: leave out ungraded drafts")
    return p


def _same_shape(labels: npt.ArrayLike, predictions: npt.ArrayLike) -> None:
    """Read row by row, [N, K] beside [K, N] would pair each label with another draft's prediction."""
    if np.shape(labels) != np.shape(predictions):
        raise ValueError(f"labels {np.shape(labels)} for predictions {np.shape(predictions)}: give one each, alike")


def _counts(values: npt.ArrayLike, name: str) -> Floats:
    counts = _flat(values, name)
    if not (np.isfinite(counts) & (counts >= 0)).all():
        raise ValueError(f"{name} must be counts, 0 or more, got {counts.tolist()}")
    return counts
