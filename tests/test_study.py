"""The study: intervals over requests, fits by the estimator itself, verdicts, and the whole of it on small traces.

Oracles: `avref.metrics` (scikit-learn) on drafts that are really repeated, scikit-learn's logistic regression, brute
force for the long-run rule, and intervals that are known because an answer's drafts are all alike.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from test_simulate import made_up

from avref import cli, metrics
from avref.cost_table import CostTable
from avref.evidence import (
    claims,
    fits,
    long_run,
    observed,
    study,
    study_fits,
    study_rules,
    study_scores,
    study_speed,
    traces,
)
from avref.evidence.claims import CONFIRMED, FAILED, UNMEASURED, Row
from avref.evidence.pair import Pair
from avref.evidence.resampling import Estimate, ScoreSums, by_answer, estimate, ratio, resample
from avref.pruning import choose_budget

# Resampling


def labelled(num_answers: int = 9, num: int = 400, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(labels, probabilities with ties and both ends, answers)."""
    g = np.random.default_rng(seed)
    p = np.round(g.random(num), 2)
    p[:6] = [0.0, 1.0, 1.0, 0.0, 0.5, 0.5]
    return (g.random(num) < p).astype(int), p, g.integers(0, num_answers, num)


def test_every_measure_on_a_resample_equals_metrics_on_the_repeated_drafts() -> None:
    y, p, answers = labelled()
    weights = resample(9, 5, seed=3)
    sums = ScoreSums(y, p, answers, 9)
    found = {"auc": sums.auc(weights), "log_loss": sums.log_loss(weights), "ece": sums.ece(weights)}
    for i, w in enumerate(weights):
        again = np.repeat(np.arange(len(y)), w[answers].astype(int))
        for name, values in found.items():
            assert values[i] == pytest.approx(getattr(metrics, name)(y[again], p[again]), abs=1e-12), name


@pytest.mark.parametrize(
    ("y", "p", "name", "value"),
    [
        ([1, 0], [0.95, 1.0], "ece", 0.475),  # C124: a confidence of exactly 1 is in the last bin (in one bin here)
        ([1], [0.0], "ece", 1.0),  # C125
        ([0, 1, 0, 1], [0.0, 1.0, 0.0, 1.0], "ece", 0.0),
        ([1] * 5 + [0] * 5, [0.7] * 10, "ece", 0.2),  # C127: all predictions equal
        ([1, 1, 0], [0.9, 0.8, 0.2], "ece", (0.1 + 0.2 + 0.2) / 3),  # C128: most bins are empty
        ([1, 0, 1, 0], [0.5] * 4, "auc", 0.5),  # C132: ties
        ([0, 1, 0, 1], [0.5, 0.5, 0.5, 0.9], "auc", 0.75),
    ],
)
def test_measures_by_hand(y: list[int], p: list[float], name: str, value: float) -> None:
    sums = ScoreSums(y, p, np.arange(len(y)) % 2, 2)
    assert getattr(sums, name)(np.ones((1, 2)))[0] == pytest.approx(value)


def test_undefined_measures_are_nan_and_never_fail() -> None:
    """C130: one label only; C133: an answer without drafts; a resample that misses the only rejection."""
    sums = ScoreSums([1, 1, 0], [0.4, 0.6, 0.5], [0, 0, 1], 3)
    weights = np.array([[1.0, 1, 1], [2, 0, 1], [0, 0, 3], [1, 2, 0]])
    auc, loss = sums.auc(weights), sums.log_loss(weights)
    assert np.isnan(auc).tolist() == [False, True, True, False] and np.isnan(loss).tolist() == [
        False,
        False,
        True,
        False,
    ]
    assert estimate([np.nan, np.nan]).text() == "nan [nan, nan]"
    assert estimate(auc).low == estimate(auc).high == 0.5


def test_traces_of_more_drafts_than_the_measured_table_covers_are_refused(tmp_path: Path) -> None:
    traces.save(made_up(20, 8), tmp_path / "long.npz")
    with pytest.raises(ValueError, match=r"long holds 8 drafts a block.*--num-speculative-tokens 7"):
        study.run([tmp_path / "long.npz"], workers=1)


def test_requests_are_resampled_and_not_drafts() -> None:
    """Ten answers of 200 drafts, five with all of them accepted: the spread is that of 10 things, not of 2,000."""
    answers = np.repeat(np.arange(10), 200)
    y = (answers < 5).astype(float)
    weights = resample(10, 2000, seed=1)
    rate = estimate(ratio(by_answer(y, answers, 10), by_answer(np.ones(2000), answers, 10), weights))
    assert rate.value == 0.5
    assert rate.high - rate.low == pytest.approx(2 * 1.96 * np.sqrt(0.25 / 10), rel=0.15)  # of drafts: .044
    assert (weights.sum(axis=1) == 10).all() and (weights == weights.round()).all()


def test_only_held_out_answers_are_resampled() -> None:
    pair = Pair("p", made_up(24))
    assert set(pair.first) & set(pair.second) == set() and len(pair.first) + len(pair.second) == 24
    assert (pair.weights[:, pair.first] == 0).all() and (pair.weights.sum(axis=1) == len(pair.second)).all()
    keys = {(w, p) for w, p in zip(pair.trace.workload[pair.first], pair.trace.prompt[pair.first], strict=True)}
    held = {(w, p) for w, p in zip(pair.trace.workload[pair.second], pair.trace.prompt[pair.second], strict=True)}
    assert not keys & held and {w for w, _ in held} == {0, 1, 2}
    with pytest.raises(ValueError, match="1 answer"):
        fits.halves(made_up(1))


def test_answers_to_one_prompt_are_drawn_together() -> None:
    """Three answers to each prompt of one workload; of another, which has one prompt, answers are drawn."""
    t = made_up(24)
    workload = np.repeat(np.array([0, 1], np.uint8), 12)
    prompt = np.r_[np.repeat(np.arange(4), 3), np.zeros(12)].astype(np.int32)
    t = dataclasses.replace(t, workload=workload, prompt=prompt)
    weights = Pair("p", t).resampled(np.arange(24))
    assert (weights[0] == 1).all()
    by_prompt = weights[:, :12].reshape(-1, 4, 3)
    assert (by_prompt == by_prompt[:, :, :1]).all() and (weights[1:, :12] != 1).any()
    assert (weights[:, 12:].reshape(-1, 4, 3).std(axis=2) > 0).any()
    pair = Pair("p", dataclasses.replace(t, prompt=np.repeat(np.arange(2, dtype=np.int32), 6)[np.arange(24) % 12]))
    assert len(np.unique(pair.trace.prompt[pair.second])) == 1  # of two prompts a workload, one is held out
    assert len(set(pair.drawn(pair.second))) == len(pair.second) and (pair.weights.std(axis=0) > 0).any()


# Fits


def test_the_fit_is_the_logistic_regression_of_the_labels() -> None:
    trace = made_up(200, 3, 30)
    drafts = fits.draw(trace)
    feature = traces.features(trace)
    fitted = fits.fit(feature, drafts)
    columns = np.column_stack([feature[drafts.row, drafts.position], np.eye(3)[drafts.position]])
    reference = LogisticRegression(C=1e9, fit_intercept=False, tol=1e-10, max_iter=1000).fit(columns, drafts.label)
    slope, *intercepts = reference.coef_[0]
    assert float(fitted.slope) == pytest.approx(slope, abs=2e-3)
    assert fitted.intercepts.tolist() == pytest.approx(intercepts, abs=4e-3)
    assert fits.predict(fitted, feature, drafts) == pytest.approx(reference.predict_proba(columns)[:, 1], abs=2e-3)
    assert slope == pytest.approx(0.6, abs=0.06)  # the law that the trace was made with


def test_an_online_prediction_knows_nothing_of_its_own_round() -> None:
    """Labels turned over from some block on leave every prediction up to the end of that block's round as it was."""
    pair = Pair("p", made_up(40))
    feature, drafts = pair.values("logit_q_max"), pair.held
    turn = fits.serving_order(pair.trace, drafts)
    late = turn >= 150
    flipped = fits.Drafts(
        drafts.row, drafts.position, drafts.answer, np.where(late, 1 - drafts.label, drafts.label), 3, 40
    )
    one, other = (fits.online(feature, d, turn, 50, fits.OnlineAcceptanceEstimator(3)) for d in (drafts, flipped))
    early = turn < 200
    assert (one.predictions[early] == other.predictions[early]).all()
    assert not np.allclose(one.predictions[~early], other.predictions[~early])
    assert len(one.slopes) == turn.max() // 50 + 2


def test_serving_order_is_by_offset() -> None:
    pair = Pair("p", made_up(10))
    turn = fits.serving_order(pair.trace, pair.held)
    order = np.argsort(turn, kind="stable")
    assert (np.diff(pair.trace.offset[pair.held.row][order]) >= 0).all()
    assert set(turn) == set(range(len(np.unique(pair.held.row))))


# Verdicts


def test_verdicts_follow_the_whole_interval() -> None:
    judge = lambda low, high, **bounds: claims.judged("p", "", Estimate((low + high) / 2, low, high), **bounds)  # noqa: E731
    assert judge(0.1, 0.2, above=0.0).verdict == CONFIRMED
    assert (judge(-0.1, 0.2, above=0.0).verdict, judge(-0.1, 0.2, above=0.0).why) == (FAILED, "within the noise")
    assert judge(-0.2, -0.1, above=0.0).why == "clearly not"
    assert judge(0.98, 1.01, above=0.97, below=1.03).verdict == CONFIRMED
    assert judge(0.98, 1.04, above=0.97, below=1.03).verdict == FAILED
    assert judge(float("nan"), float("nan"), above=0.0).verdict == UNMEASURED


def test_a_claim_is_confirmed_when_every_pair_that_can_confirms_it() -> None:
    good, bad, none = (Row("p", "", v) for v in (CONFIRMED, FAILED, UNMEASURED))
    assert claims.verdict([good, none]) == "confirmed"
    assert claims.verdict([good, bad, none]) == "not confirmed (1 of 2)"
    assert claims.verdict([none]) == claims.verdict([]) == UNMEASURED
    with pytest.raises(ValueError, match="made_up_claim"):
        claims.ledger({"made_up_claim": [good]})


# The long-run objective


def test_growth_equals_brute_force_and_the_ratio_rule_at_its_own_rate() -> None:
    g = np.random.default_rng(0)
    for _ in range(60):
        n = int(g.integers(1, 9))
        best, tail = (np.sort(g.random(n))[::-1] for _ in range(2))
        cost = np.append(1.0, 1 + np.cumsum(g.choice([0.0, 0.3, 1.0], n)))
        rate, expected = g.uniform(0.2, 1.5), n
        for b in range(n):
            scale = min(best[b] / tail[b], 4)
            gains = [best[b] + scale * sum(tail[b + 1 : e]) - rate * (cost[e] - cost[b]) for e in range(b + 1, n + 1)]
            if max(gains) <= 1e-12:
                expected = b
                break
        assert long_run.growth(best, cost, tail, rate) == expected
    table = CostTable(np.zeros(2), np.array([1.0, 1.0, 1.5, 1.8, 3.0]))
    survival = np.array([[0.9, 0.6, 0.1]])
    chosen = choose_budget(survival, table, 1, "lookahead", profile=np.array([0.9, 0.6, 0.1]))
    reached = (1 + survival[0, :chosen].sum()) / float(table.verify(1, 1 + chosen))
    assert long_run.growth(survival[0], table.verify_ms[1:], survival[0], reached) == chosen


def test_the_worked_example() -> None:
    """59 % easy tokens: .92 of the ratio's rate, checked by decoding them; 59 % easy steps: the best there is."""
    found = long_run.example()
    assert found["tokens"]["long run"]["to_ratio"] == pytest.approx(0.92, abs=0.005)
    assert found["tokens"]["best"]["to_ratio"] == pytest.approx(1.0)
    assert found["steps"]["long run"]["rate"] == pytest.approx(found["steps"]["best"]["rate"])
    assert found["steps"]["long run"]["to_ratio"] > 1.01
    g, ms = np.random.default_rng(0), 0.0
    for share, c, b in zip((0.59, 0.41), (0.985, 0.5), found["tokens"]["ratio"]["budgets"], strict=True):
        accepted = np.cumprod(g.random((40000, b)) < c, axis=1).sum(axis=1)
        ms += share * (1 + 0.312 * b) / (1 + accepted.mean())
    assert 1 / ms == pytest.approx(found["tokens"]["ratio"]["rate"], rel=0.01)


# Studies beside the ledger


def test_only_the_retrospective_rule_leaks() -> None:
    leaks = study_rules.leaks()
    assert leaks["retrospective"] == pytest.approx(0.1575, abs=1e-6)
    assert all(leaks[rule] < 1e-12 for rule in ("stale", "early_stop", "lookahead"))


def test_wrong_tables_are_wrong_as_they_say() -> None:
    table = CostTable(
        np.full(3, 2.0)[:, None] * [0, 1, 1], np.array([[5.0] * 7, [1, 1, 2, 3, 4, 5, 6.0], [1, 1, 2, 3, 4, 5, 8.0]])
    )
    made = study_rules.distorted(table)
    assert made["everything x 2"].step_ms(2, 4, 2) == 2 * table.step_ms(2, 4, 2)
    assert len(set(made["flat"].verify(1, np.arange(1, 7)))) == 1
    assert float(made["tilted up by half"].verify(2, 6) / table.verify(2, 6)) == pytest.approx(1.25)
    assert float(made["drafts for free"].draft(2, 2)) == 0.0
    assert all((t.verify(2, np.arange(1, 7)) > 0).all() for t in made.values())


def test_hindsight_is_a_floor_on_steady_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_rules, "INTERVALS", (50, 200))
    monkeypatch.setattr(study_rules.traffic, "KINDS", ("steady",))
    rows = [r for r in study_rules.tracking(400) if r["traffic"] == "steady"]
    floor = next(r["excess"] for r in rows if r["step"] == "constant")
    assert 0 <= floor < 0.002 and all(r["excess"] > floor for r in rows if "damping" in r)


# The whole


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("study")
    kinds = {
        "dspark": made_up(24, 3, 20, head=True, method="dspark", parallel=False),
        "ngram": made_up(18, 3, 16, seed=3, logits=False, head=True, method="ngram"),
    }
    for name, trace in kinds.items():
        traces.save(trace, folder / f"{name}.npz")
    patch = pytest.MonkeyPatch()
    patch.setattr(study_speed, "SETTINGS", {"measured": (1, 4), "b300": (2, 8)})
    patch.setattr(study_rules, "RULES_AT", {"measured": (1,), "b300": (4,)})
    patch.setattr(study_rules, "DAMPING", (0.0, 50.0))
    patch.setattr(study_rules, "INTERVALS", (100,))
    patch.setattr(study_rules, "WRONG_AT", {"measured": 4})
    patch.setattr(observed, "WARMUP_STEPS", 8)
    patch.setattr(study_fits, "AT", (1, 2))
    patch.setattr(study_fits, "ROUNDS", 2)
    patch.setattr(study_fits, "REFITS", 8)
    result = study.run([folder / f"{name}.npz" for name in kinds], workers=1, effort=0.02)
    patch.undo()
    return result, folder


def test_the_study_holds_every_claim_with_a_verdict(small: tuple[dict[str, Any], Path]) -> None:
    result, _ = small
    assert [c["key"] for c in result["claims"]] == [c.key for c in claims.CLAIMS]
    rows = {c["key"]: c["rows"] for c in result["claims"]}
    for key, found in rows.items():
        assert found, key
        for row in found:
            assert row["verdict"] in (CONFIRMED, FAILED, UNMEASURED)
            assert bool(row["ours"]) or row["why"], (key, row)
            assert row["verdict"] == UNMEASURED or row["value"]["value"] is not None, (key, row)
    by_pair = {(key, r["pair"].split(",")[0]): r for key, found in rows.items() for r in found}
    assert "n-gram" in by_pair["best_lossless", "ngram"]["why"]
    assert by_pair["head_first", "dspark"]["verdict"] != UNMEASURED
    assert "no confidence head" in by_pair["tie", "ngram"]["why"]
    assert {r["pair"].split(", ")[1] for r in rows["beats_fixed"]} == {"2 cores", "B300"}
    assert set(result["absent"]) == {"draft_model", "eagle", "mtp", "dflash", "layer_skip", "dflash-greedy"}


def test_a_pair_with_few_answers_gets_numbers_but_no_verdict() -> None:
    row = Row("short, 2 cores", "1.2", CONFIRMED, "", Estimate(1.2, 1.1, 1.3))
    weak = study._weak(row, {"short": 4})
    assert (weak.verdict, weak.value, weak.ours) == (UNMEASURED, row.value, "1.2") and "4 held-out" in weak.why
    assert study._weak(row, {"other": 4}) is row


def test_greedy_drafting_has_no_drawn_token_to_read() -> None:
    greedy, sampled = (Pair("p", made_up(18, greedy=greedy)) for greedy in (True, False))
    assert study_scores.drawn_token(greedy).verdict == UNMEASURED
    assert study_scores.drawn_token(sampled).value is not None
    moved = study_fits.slope_moves({p.name + str(p.greedy): study_fits.by_workload(p) for p in (greedy, sampled)})
    assert [row.pair for row in moved] == ["pFalse"] and "of pTrue" in moved[0].ours


def test_its_output_is_valid_json_a_ledger_and_figures(small: tuple[dict[str, Any], Path]) -> None:
    result, folder = small
    paths = study.save(result, folder / "out")
    again = json.loads((folder / "out" / "claims.json").read_text(), parse_constant=pytest.fail)  # no NaN
    assert again == result
    text = (folder / "out" / "claims.md").read_text()
    assert all(c.statement[1:] in text and c.article in text for c in claims.CLAIMS)
    assert "No trace of: draft_model" in text and "2 cores" in text and "long-run objective" in text
    names = {p.stem.removeprefix("study_") for p in paths if p.suffix == ".png"}
    by_pair = {"features", "positions", "coefficients", "throughput", "workloads"}
    assert names == by_pair | {"tracking", "rules", "wrong_tables", "long_run"}


def test_what_cannot_be_studied_is_refused(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "shipped", lambda: [])
    assert cli.main(["study"]) == 2
    assert "no trace is shipped" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"no trace at .*gone\.npz"):
        study.run([tmp_path / "gone.npz"], workers=1)
    with pytest.raises(ValueError, match="two traces would have one name"):
        study.run(["dflash", "elsewhere/dflash.npz"], workers=1)
