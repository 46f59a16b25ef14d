"""Claims on prediction: features, the fit, the head. All fitted on the first half of a pair's answers, judged on the
second, with labels from one draw of the verdicts on every block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from avref import exact
from avref.estimator import OnlineAcceptanceEstimator
from avref.evidence.claims import CONFIRMED, FAILED, Row, absent, judged
from avref.evidence.pair import FEATURE, Pair
from avref.evidence.resampling import Estimate, Floats, ScoreSums, by_answer, estimate, ratio
from avref.features import FEATURES

LOSSLESS = [f.name for f in FEATURES.values() if f.lossless and f.name != "q_max"]  # those that are fitted
DRAWN = [f.name for f in FEATURES.values() if not f.lossless]
NO_LOGITS = "an n-gram drafter has no logits, so no features"
NO_HEAD = "this drafter has no confidence head"
PERTURBED = 0.1


def measures(scores: ScoreSums, weights: Floats) -> dict[str, Any]:
    """AUC, log-loss and ECE with their intervals, and on how many drafts."""
    found = {name: estimate(getattr(scores, name)(weights)) for name in ("auc", "log_loss", "ece")}
    return {**found, "drafts": len(scores.y)}


def feature_table(pair: Pair) -> dict[str, dict[str, Any]]:
    """AUC, log-loss and ECE on held-out answers of every feature, of q_max without a fit, and of the head."""
    if not pair.has_logits:
        return {}
    names = [*LOSSLESS, *DRAWN, *_unfitted(pair)]
    return {name: measures(pair.scores(name), pair.weights) for name in names}


def by_position(pair: Pair) -> dict[str, list[dict[str, Any]]]:
    """The same by draft position, for the estimator, q_max without a fit, and the head."""
    if not pair.has_logits:
        return {}
    places = [np.array([k]) for k in range(pair.trace.num_positions)]
    names = [FEATURE, *_unfitted(pair)]
    return {name: [measures(pair.scores(name, k), pair.weights) for k in places] for name in names}


def _unfitted(pair: Pair) -> list[str]:
    return ["no fit"] if pair.trace.head is None else ["no fit", "head"]


def best_lossless(pair: Pair) -> Row:
    loss = {name: pair.scores(name).log_loss(pair.weights) for name in LOSSLESS}
    others = [name for name in LOSSLESS if name != FEATURE]
    rival = min(others, key=lambda name: loss[name][0])
    difference = estimate(loss[rival] - loss[FEATURE])
    listed = ", ".join(f"{name} {loss[name][0]:.4f}" for name in sorted(LOSSLESS, key=lambda n: loss[n][0]))
    row = judged(pair.name, f"{listed}; margin {difference.text(4)}", difference, above=0.0)
    if row.why == "within the noise":
        beaten = [name for name in others if estimate(loss[name] - loss[FEATURE]).low > 0]
        why = f"tied with {rival}" + (f"; below {', '.join(beaten)}" if beaten else "")
        return replace(row, why=why)
    return row


def drawn_token(pair: Pair) -> Row:
    if pair.greedy:
        return absent(pair.name, "greedy drafts are the top token: both features are the same")
    sampled, top = (pair.scores(name).auc(pair.weights) for name in ("logit_q_sampled", FEATURE))
    law = exact.first_token(exact.joint_law(exact.footnote()))
    ours = f"AUC {sampled[0]:.4f} against {top[0]:.4f}; the footnote's policy emits ({law[0]:.2f}, {law[1]:.2f})"
    return judged(pair.name, ours, estimate(sampled - top), above=0.0)


def no_fit(pair: Pair) -> Row:
    raw, fitted = pair.scores("no fit"), pair.scores(FEATURE)
    ece = raw.ece(pair.weights), fitted.ece(pair.weights)
    mean = ratio(by_answer(raw.p, raw.answers, raw.num_answers), raw.count, pair.weights[:1])[0]
    ours = f"ECE {ece[0][0]:.4f} against {ece[1][0]:.4f}; mean q_max {mean:.3f}, accepted {raw.y.mean():.3f}"
    return judged(pair.name, ours, estimate(ece[0] / ece[1]), above=2.0)


def head_first(pair: Pair) -> Row:
    if pair.trace.head is None or not pair.has_logits:
        return absent(pair.name, NO_HEAD)
    deeper = np.arange(1, pair.trace.num_positions)
    at_first, at_deeper = (
        estimate(pair.scores(FEATURE, places).auc(pair.weights) - pair.scores("head", places).auc(pair.weights))
        for places in (np.array([0]), deeper)
    )
    ours = f"AUC, estimator less head: position 1 {at_first.text()}, deeper {at_deeper.text()}"
    details = {"position 1": at_first, "deeper": at_deeper}
    first, rest = judged(pair.name, ours, at_first, below=0.0), judged(pair.name, ours, at_deeper, above=0.0)
    where, row = ("position 1", first) if first.verdict != CONFIRMED else ("deeper", rest)
    return replace(row, why=row.why and f"{where}: {row.why}", details=details)


def past_block(pair: Pair) -> Row:
    k, trained_depth = pair.trace.num_positions, pair.trained_depth
    if pair.trace.head is None or not pair.has_logits:
        return absent(pair.name, NO_HEAD)
    if trained_depth is None or trained_depth >= k:
        return absent(pair.name, f"the drafter was trained on {trained_depth or k} positions, all that it drafts here")
    inside, past = np.arange(trained_depth), np.arange(trained_depth, k)
    falls = {
        name: estimate(pair.scores(name, past).auc(pair.weights) - pair.scores(name, inside).auc(pair.weights))
        for name in (FEATURE, "head")
    }
    ours = "; ".join(f"{name} {value.text()}" for name, value in falls.items())
    return judged(pair.name, ours, max(falls.values(), key=lambda e: e.high), below=0.0)


def shared_slope(pair: Pair) -> Row:
    one, many = pair.scores(FEATURE), pair.scores(FEATURE, shared_slope=False)
    loss = estimate(one.log_loss(pair.weights) - many.log_loss(pair.weights))
    auc = estimate(many.auc(pair.weights) - one.auc(pair.weights))
    slopes = pair.fitted(FEATURE, shared_slope=False).slope.tolist()
    ours = f"log-loss {loss.text(4)}, AUC {auc.text(4)}; "
    ours += f"the {len(slopes)} slopes: {min(slopes):.2f} to {max(slopes):.2f}"
    return judged(pair.name, ours, loss, below=0.002)


def slope_sensitive(pair: Pair) -> Row:
    base = pair.scores(FEATURE)
    by_slope, by_intercepts = (_rise(pair, base, **{which: PERTURBED}) for which in ("slope", "intercepts"))
    rises = [ratio(rise, base.count, pair.weights) for rise in (by_slope, by_intercepts)]
    ours = f"log-loss +{rises[0][0]:.4f} by the slope, +{rises[1][0]:.4f} by the intercepts"
    return judged(pair.name, ours, estimate(rises[0] / rises[1]), above=1.0)


def _rise(pair: Pair, base: ScoreSums, *, slope: float = 0.0, intercepts: float = 0.0) -> Floats:
    """Mean rise of the summed log-loss, by answer [A], when coefficients are off by so much, up and down."""
    fitted, total = pair.fitted(FEATURE), np.zeros(base.num_answers)
    values = pair.values(FEATURE)[pair.held.row, pair.held.position]
    for sign in (1, -1):
        w = float(fitted.slope) + sign * slope
        b = fitted.intercepts.numpy()[pair.held.position] + sign * intercepts
        total += pair.held.scores(1 / (1 + np.exp(-(w * values + b)))).loss - base.loss
    return total / 2


def state(num_positions: tuple[int, ...] = (1, 7, 16, 64)) -> Row:
    """The estimator's numbers, counted: the same whatever the traffic, so there is nothing to resample."""

    def numbers(k: int) -> int:
        return sum(getattr(value, "numel", lambda: 1)() for value in OnlineAcceptanceEstimator(k).state_dict().values())

    counts = {k: numbers(k) for k in num_positions}
    most = max(counts[k] / (k + 1) ** 2 for k in num_positions[1:])
    ours = ", ".join(f"K = {k}: {n}" for k, n in counts.items()) + "; 9 K + 4 for every K, so O(K)"
    linear = all(n == 9 * k + 4 for k, n in counts.items())
    return Row("any", ours, CONFIRMED if linear else FAILED, "", Estimate(most, most, most), {"numbers": counts})


_BY_FEATURE = (best_lossless, drawn_token, no_fit, shared_slope, slope_sensitive)


def rows(pair: Pair) -> dict[str, Row]:
    """The rows of all claims here but `state`."""
    no_logits = None if pair.has_logits else absent(pair.name, NO_LOGITS)
    by_feature = {f.__name__: no_logits or f(pair) for f in _BY_FEATURE}
    return by_feature | {f.__name__: f(pair) for f in (head_first, past_block)}
