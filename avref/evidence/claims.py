"""The ledger: what the article says, with its number and where it stands, beside ours on every pair, and the verdict.

A row's verdict is read off its interval, which comes from resampling requests: "confirmed" when all of it lies where
the claim says, "not confirmed" otherwise, with the reason; "not measurable here" where a pair lacks what it takes. A
claim is confirmed when every pair on which it can be measured confirms it. Claims that fail stay in the ledger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from avref.evidence.resampling import Estimate, summary

CONFIRMED, FAILED, UNMEASURED = "confirmed", "not confirmed", "not measurable here"


@dataclass(frozen=True)
class Row:
    """One pair's answer to a claim. `value` is the number that decides; `details` go to the JSON file only."""

    pair: str
    ours: str
    verdict: str
    why: str = ""
    value: Estimate | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """A statement of the article. `decided_by`: what our number is, and where it must lie."""

    key: str
    statement: str
    article: str
    place: str
    decided_by: str
    ours: bool = False  # not the article's: a goal of this project


def absent(pair: str, why: str) -> Row:
    """The row of a pair on which a claim cannot be measured."""
    return Row(pair, "", UNMEASURED, why)


def judged(
    pair: str,
    ours: str,
    value: Estimate,
    *,
    above: float = float("-inf"),
    below: float = float("inf"),
    details: Mapping[str, Any] | None = None,
) -> Row:
    """A row whose verdict follows from its interval: confirmed when all of it lies between `above` and `below`."""
    if above < value.low and value.high < below:
        return Row(pair, ours, CONFIRMED, "", value, details or {})
    if value.low != value.low:
        return Row(pair, ours, UNMEASURED, "too few drafts for an interval", value, details or {})
    outside = value.high <= above or value.low >= below
    return Row(pair, ours, FAILED, "the opposite" if outside else "within the noise", value, details or {})


SPEC = 'section "Puntuar la Distribución"'
HEAD = 'section "Frente a un cabezal de confianza entrenado"'
FIT = 'section "Ajuste de los Coeficientes"'
ROLES = 'section "Pendiente frente a intersección"'
BENCH = 'section "Benchmarks"'
LIMITS = 'section "Limitaciones"'

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "best_lossless",
        "logit(q_max) has the lowest log-loss of the lossless features",
        ".4284; then -log(-log q_max) .4289, margin .4437, entropy .4577, log q_max .4813",
        SPEC + ", feature table",
        "log-loss of the best other lossless feature less that of logit(q_max), held out: above 0",
    ),
    Claim(
        "drawn_token",
        "features of the drawn token rank better (and bias the output)",
        "AUC .8553 against .8336; the footnote's policy emits (.4, .6) for (.5, .5)",
        SPEC + ", feature table, and footnote 1",
        "AUC of logit(q_sampled) less that of logit(q_max): above 0; the bias by exact enumeration",
    ),
    Claim(
        "no_fit",
        "used without a fit, q_max is several times worse calibrated",
        "ECE .0736 against .0100, 7 times",
        SPEC + ", feature table",
        "ECE of q_max over ECE of the fit, held out: above 2",
    ),
    Claim(
        "head_first",
        "the trained head predicts best at position 1, the estimator deeper",
        "all positions: AUC .8191 head, .8336 estimator; without the first: .8075, .8352; .08 apart at the last",
        HEAD,
        "AUC of the estimator less that of the head: below 0 at position 1, above 0 at the others pooled",
    ),
    Claim(
        "past_block",
        "both fall at positions past the block that the drafter was trained on",
        "after position 5 of 7",
        HEAD + ", figure",
        "AUC past the trained depth less AUC up to it, of both: below 0",
    ),
    Claim(
        "shared_slope",
        "one slope for all positions costs nothing",
        ".0002 AUC, .0003 log-loss",
        FIT + ", design decision 1",
        "held-out log-loss with one slope less that with K: below .002",
    ),
    Claim(
        "slope_sensitive",
        "predictions are more sensitive to an error of the slope than of the intercepts",
        "no number",
        FIT + ", design decision 1",
        "rise of the log-loss when the slope is .1 off, over that when all intercepts are: above 1",
    ),
    Claim(
        "slope_stable",
        "from workload to workload the slope stays and the intercepts follow the entropy",
        "slope .51 to .55, r = -.08 with the draft entropy; first intercept r = -.89",
        ROLES + ", table by workload",
        "r of the first intercept with the mean draft entropy of a workload: below -.5, and |r| of the slope smaller",
    ),
    Claim(
        "slope_moves",
        "the slope moves between pairs and drafting modes",
        ".45 to .59 between pairs; .50 sampled, .65 greedy drafting (pull request 52228)",
        ROLES + ", table by pair",
        "this pair's slope less that of the first pair of the ledger: apart from 0, and by more than its workloads are",
    ),
    Claim(
        "damping",
        "damping steadies the deep positions, which have few labels",
        "no number; n / (n + 50)",
        FIT + ", design decision 2",
        "spread of the intercepts of the deeper half over rounds, undamped over damped: above 1",
    ),
    Claim(
        "position_1",
        "position 1 is rarely the one that is trimmed first",
        "no number",
        HEAD + ", last paragraph",
        "share of requests trimmed in a step that lose position 1 already: below 1 / K",
    ),
    Claim(
        "beats_fixed",
        "adaptive verification beats fixed verification of the same K on every workload at concurrency 64",
        "+9 % to +34 % (pull request 52228), all data sets and pairs",
        BENCH + ", figure of gains",
        "tokens/s over fixed K, the workload with the least: above 1",
    ),
    Claim(
        "gains_with_load",
        "and gains more with load",
        "no number; the Pareto curves part with concurrency",
        BENCH + ", Pareto curves",
        "gain over fixed K at the highest load less that at the lowest: above 0",
    ),
    Claim(
        "tie",
        "estimator and trained head tie on throughput at all concurrencies",
        "+2.1 % sampled drafting, -.6 % greedy, in favour of the estimator (pull request 52228)",
        BENCH,
        "tokens/s with the estimator over that with the head, the concurrency furthest from 1: between .97 and 1.03",
    ),
    Claim(
        "pareto",
        "adaptive verification lies on the frontier of tokens/s against tokens/s per user",
        "at 5 of 7 concurrencies",
        BENCH + ", Pareto curve of MiMo + DFlash",
        "share of concurrencies at which no fixed K (0 to K) at any is 1 % better in both: at least 5/7, as measured",
    ),
    Claim(
        "smaller_fixed",
        "at some concurrency a smaller fixed K still beats it",
        "no number",
        BENCH + ", Pareto curve of DSV4 + DSpark",
        "tokens/s of the best smaller K over adaptive verification, where that is largest: above 1.01",
    ),
    Claim(
        "token_by_token",
        "drafters that draft token by token gain less",
        "no number for MTP and EAGLE against DFlash and DSpark",
        LIMITS,
        "gain over fixed K at the highest load with a pass for each draft, less that with one pass for all: below 0",
    ),
    Claim(
        "state",
        "the statistics of a round take O(K^2) memory, whatever the traffic",
        "O(K^2) against O(N B K) for the labels",
        FIT,
        "numbers that the estimator keeps between refits, over (K + 1)^2",
    ),
    Claim(
        "oracle",
        "the estimator's throughput comes near that of the true acceptance probabilities",
        "at least .95",
        "goal of this project",
        "tokens/s with the estimator over the oracle's, at the highest load: at least .95",
        ours=True,
    ),
    Claim(
        "online",
        "the online fit is as good as the best fixed coefficients in hindsight",
        "within .003",
        "goal of this project",
        "log-loss of predictions made before each verdict, less that of the best constants: below .003",
        ours=True,
    ),
    Claim(
        "never_slower",
        "with adaptive drafting it is never slower than not speculating",
        "at least .97",
        "goal of this project",
        "tokens/s over no speculation, the concurrency with the least: at least .97",
        ours=True,
    ),
    Claim(
        "hindsight",
        "with adaptive drafting it is at least as fast as the best fixed K (0 to K) in hindsight",
        "at least .97",
        "goal of this project",
        "tokens/s over the best fixed K, the concurrency with the least: at least .97",
        ours=True,
    ),
)


def verdict(rows: Sequence[Row]) -> str:
    """A claim's verdict over its pairs, with how many of them confirm it."""
    counted = [r for r in rows if r.verdict != UNMEASURED]
    if not counted:
        return UNMEASURED
    good = sum(r.verdict == CONFIRMED for r in counted)
    name = CONFIRMED if good == len(counted) else FAILED
    return f"{name} ({good} of {len(counted)})" if len(counted) > 1 else name


def ledger(rows: Mapping[str, Sequence[Row]]) -> list[dict[str, Any]]:
    """Every claim with its rows, as JSON holds it. Raises ValueError for rows of a claim that is not listed."""
    unknown = set(rows) - {c.key for c in CLAIMS}
    if unknown:
        raise ValueError(f"rows for claims that the ledger does not hold: {sorted(unknown)}")
    return [
        {**vars(c), "verdict": verdict(rows.get(c.key, ())), "rows": [summary(vars(r)) for r in rows.get(c.key, ())]}
        for c in CLAIMS
    ]
