"""Claims on the coefficients: by workload, by pair, from round to round, and against the best constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from avref.estimator import OnlineAcceptanceEstimator
from avref.evidence import fits
from avref.evidence.claims import CONFIRMED, FAILED, Row, absent, judged
from avref.evidence.pair import FEATURE, Pair
from avref.evidence.resampling import Floats, by_answer, estimate, ratio
from avref.evidence.study_scores import NO_LOGITS

REFITS = 40  # resamples that are fitted anew
WAVES = 16  # resamples of runs over many rounds
ROUND = 100  # decode steps
AT = (8, 32)  # requests running at once in the online runs
ROUNDS = 6  # at least so many, by going over the held-out answers again, with new verdicts each time
FEWEST_WORKLOADS = 3


@dataclass(frozen=True)
class Coefficients:
    """Slope and first intercept of a fit, [num + 1] each: of all the answers, and of resamples of them."""

    slope: Floats
    first: Floats
    intercepts: list[float]
    entropy: Floats  # mean draft entropy, nats
    acceptance: float

    def described(self) -> dict[str, Any]:
        own = {name: estimate(getattr(self, name)) for name in ("slope", "first", "entropy")}
        return {**own, "intercepts": self.intercepts, "acceptance": self.acceptance}


def coefficients(pair: Pair, answers: np.ndarray, seed: int = 0) -> Coefficients:
    """The estimator on some answers, both halves, and on resamples of them."""
    values, drafts = pair.values(FEATURE), pair.drafts.of(answers)
    whole = fits.fit(values, drafts)
    weights = pair.resampled(answers, REFITS, seed)
    again = [fits.fit(values, drafts.drawn(w), start=whole, rounds=3) for w in weights[1:]]
    all_fits = [whole, *again]
    entropy = -pair.values("entropy")[drafts.row, drafts.position]
    sums, counts = (by_answer(x, drafts.answer, drafts.num_answers) for x in (entropy, np.ones(len(drafts))))
    return Coefficients(
        np.array([float(e.slope) for e in all_fits]),
        np.array([float(e.intercepts[0]) for e in all_fits]),
        whole.intercepts.tolist(),
        ratio(sums, counts, weights),
        float(drafts.label.mean()),
    )


def by_workload(pair: Pair) -> dict[str, Coefficients]:
    """Fits of every workload of the pair, and of all of them together under the name "all"."""
    if not pair.has_logits:
        return {}
    t = pair.trace
    found = {"all": coefficients(pair, np.arange(len(t.num_tokens)))}
    for name in t.header["workloads"]:
        answers = t.answers_of(name)
        if len(answers) > 1:
            found[name] = coefficients(pair, answers, seed=len(found))
    return found


def slope_stable(pair: Pair, found: Mapping[str, Coefficients]) -> Row:
    own = {name: c for name, c in found.items() if name != "all"}
    if len(own) < FEWEST_WORKLOADS:
        return absent(pair.name, f"{len(own)} workload(s): too few to correlate")
    slope, first, entropy = (np.stack([getattr(c, n) for c in own.values()]) for n in ("slope", "first", "entropy"))
    r_slope, r_first = _correlation(slope, entropy), _correlation(first, entropy)
    ours = f"slope {slope[:, 0].min():.2f} to {slope[:, 0].max():.2f}, r = {r_slope[0]:.2f}; "
    ours += f"first intercept {first[:, 0].min():+.2f} to {first[:, 0].max():+.2f}, r = {estimate(r_first).text(2)}"
    row = judged(pair.name, ours, estimate(r_first), below=-0.5, details={"slope": estimate(r_slope)})
    if row.verdict == CONFIRMED and abs(r_slope[0]) >= abs(r_first[0]):
        return replace(row, verdict=FAILED, why="the slope follows the entropy as much")
    return row


def _correlation(a: Floats, b: Floats) -> Floats:
    """Pearson's r over workloads on every resample: [W, num + 1] twice -> [num + 1]."""
    a, b = a - a.mean(axis=0), b - b.mean(axis=0)
    return np.asarray((a * b).sum(axis=0) / np.sqrt((a**2).sum(axis=0) * (b**2).sum(axis=0)))


def slope_moves(found: Mapping[str, Mapping[str, Coefficients]]) -> list[Row]:
    """Each pair's slope against the first pair's; `found` is `by_workload` of every pair."""
    fitted = {name: own for name, own in found.items() if own}
    rows = [absent(name, NO_LOGITS) for name in found if name not in fitted]
    if len(fitted) < 2:
        return rows + [absent(name, "no other pair to compare with") for name in fitted]
    reference = next(iter(fitted))
    base = fitted[reference]["all"].slope
    for name in list(fitted)[1:]:
        own = fitted[name]["all"].slope
        change = estimate(own - base)
        spread = max(_spread(fitted[reference]), _spread(fitted[name]))
        ours = f"{estimate(own).text(2)} against {estimate(base).text(2)} of {reference}; workloads {spread:.2f} apart"
        apart, far = change.low > 0 or change.high < 0, abs(change.value) > spread
        why = "" if apart and far else "workloads of one pair differ as much" if apart else "within the noise"
        rows.append(Row(name, ours, FAILED if why else CONFIRMED, why, change))
    return rows


def _spread(own: Mapping[str, Coefficients]) -> float:
    """Standard deviation of the slope over a pair's workloads."""
    slopes = [c.slope[0] for name, c in own.items() if name != "all"]
    return float(np.std(slopes)) if len(slopes) > 1 else 0.0


# ---- round by round ----
def served(pair: Pair, answers: np.ndarray, at: int) -> tuple[fits.Drafts, np.ndarray]:
    """Drafts of several passes over some answers, verdicts drawn anew each time, and the number of each one's block."""
    parts: list[fits.Drafts] = []
    turns: list[np.ndarray] = []
    base = 0
    while base < ROUNDS * ROUND * at:
        drafts = fits.draw(pair.trace, seed=100 + len(parts)).of(answers)
        turn = fits.serving_order(pair.trace, drafts)
        parts.append(drafts)
        turns.append(turn + base)
        base += int(turn.max()) + 1
    names = ("row", "position", "answer", "label")
    columns: dict[str, Any] = {n: np.concatenate([getattr(p, n) for p in parts]) for n in names}
    return replace(parts[0], **columns), np.concatenate(turns)


def warm(pair: Pair, **settings: Any) -> OnlineAcceptanceEstimator:
    """An estimator that starts where the first half left it."""
    start = pair.fitted()
    return OnlineAcceptanceEstimator(start.num_positions, slope=start.slope, intercept=start.intercepts, **settings)


def online_fit(pair: Pair) -> Row:
    """Log-loss of what was predicted before each verdict, over the best constants, fitted to those same verdicts.

    Every held-out answer is served once: going over them again would predict an answer by a fit to that very answer.
    Where they are too few for so many rounds, rounds are shorter.
    """
    values, found = pair.values(FEATURE), {}
    drafts = fits.draw(pair.trace, seed=100).of(pair.second)
    turn = fits.serving_order(pair.trace, drafts)
    for at in AT:
        length = max(1, min(ROUND * at, (int(turn.max()) + 1) // ROUNDS))
        run = fits.online(values, drafts, turn, length, warm(pair))
        best = fits.predict(fits.fit(values, drafts, start=pair.fitted()), values, drafts)
        online, constant = drafts.scores(run.predictions), drafts.scores(best)
        found[at] = estimate(ratio(online.loss - constant.loss, online.count, pair.weights))
    ours = "; ".join(f"{at} requests {found[at].text(4)}" for at in AT)
    worst = max(found.values(), key=lambda e: e.high)
    return judged(pair.name, ours, worst, below=0.003, details={f"at {at}": found[at] for at in AT})


def damping(pair: Pair, resamples: int = WAVES) -> Row:
    """How far the intercepts of the deeper half wander from round to round, damped (50) and undamped."""
    values, at = pair.values(FEATURE), AT[0]
    drafts, turn = served(pair, pair.second, at)
    deep = np.arange(pair.trace.num_positions) >= pair.trace.num_positions // 2
    spreads = []
    for w in pair.resampled(pair.second, resamples):
        index = np.repeat(np.arange(len(drafts)), w[drafts.answer].astype(np.int64))
        part, order = drafts.where(index), turn[index]
        runs = [fits.online(values, part, order, ROUND * at, warm(pair, damping=c)) for c in (0.0, 50.0)]
        spreads.append([float(run.intercepts[1:, deep].std(axis=0).mean()) for run in runs])
    undamped, damped = np.array(spreads).T
    graded = np.bincount(drafts.position, minlength=pair.trace.num_positions) / (int(turn.max()) / (ROUND * at) + 1)
    ours = f"{undamped[0]:.3f} undamped, {damped[0]:.3f} damped; {graded[-1]:.0f} drafts a round at the last position"
    return judged(pair.name, ours, estimate(undamped / damped), above=1.0)


def rows(pair: Pair, found: Mapping[str, Coefficients]) -> dict[str, Row]:
    if not pair.has_logits:
        return dict.fromkeys(("slope_stable", "online", "damping"), absent(pair.name, NO_LOGITS))
    return {"slope_stable": slope_stable(pair, found), "online": online_fit(pair), "damping": damping(pair)}
