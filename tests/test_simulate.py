"""Simulation: what a replay counts equals a plain loop on toy tables, and tables, arms and outputs are what they say.

Oracles: steps and milliseconds worked out by hand; a loop over single requests that tries every allocation.
"""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from avref import CostTable, cli
from avref.evidence import fits, hardware, simulate, tables, traces
from avref.evidence.observed import Observed, measure
from avref.evidence.replay import Policy, Replay
from avref.evidence.trace_file import Trace
from avref.metrics import mean_acceptance_length
from avref.pruning import allocate, survival


def trace_header(k: int, max_tokens: int, workloads: tuple[str, ...], **changes: Any) -> dict[str, Any]:
    """What `traces.load` asks of a header, of a trace that no model made."""
    made = dict.fromkeys(("target", "drafter"), "made up") | dict.fromkeys(("temperature", "top_p"), 1.0)
    made |= {"schema_version": 1, "method": "dflash", "draft_sample_method": "probabilistic", "parallel": True}
    made |= {"num_speculative_tokens": k, "dtype": "float32", "top_k": 0, "max_tokens": max_tokens, "seed": 0}
    return {**made, "workloads": list(workloads), **changes}


def made_up(
    answers: int = 20,
    k: int = 3,
    length: int = 24,
    *,
    seed: int = 0,
    head: bool = False,
    logits: bool = True,
    greedy: bool = False,
    workloads: tuple[str, ...] = ("easy", "middle", "hard"),
    **header: Any,
) -> Trace:
    """A trace in which acceptance is logistic in logit(q_max): slope .6, falling intercepts, a level per answer."""
    g = np.random.default_rng(seed)
    num_tokens = g.integers(length // 2, length + 1, answers).astype(np.int32)
    rows, which = int((num_tokens - 1).sum()), np.arange(answers) % len(workloads)
    level = np.repeat(g.normal(1 - which, 0.7), num_tokens - 1)
    feature = np.clip(level[:, None] + 2 * g.normal(size=(rows, k)), -8, 16)
    overlap = 1 / (1 + np.exp(-(0.6 * feature - 0.2 * np.arange(k))))
    drawn = feature if greedy else feature - np.abs(g.normal(0, 0.7, (rows, k)))
    q_x = 1.0 if greedy or not logits else 1 / (1 + np.exp(-drawn))
    p_y = g.uniform(0.3, 1, rows)
    place = np.minimum(np.arange(rows)[:, None] + np.arange(k), rows - 1)
    columns: dict[str, Any] = {
        "workload": which.astype(np.uint8),
        "prompt": (np.arange(answers) // len(workloads)).astype(np.int32),
        "num_tokens": num_tokens,
        "stopped": np.zeros(answers, bool),
        "token": np.zeros(rows, np.int32),
        "num_drafted": np.full(rows, k, np.uint8),
    }
    halves = {"p_y": p_y, "target_entropy": np.ones(rows), "q_y": overlap * p_y[place], "overlap": overlap}
    halves["p_x"] = np.clip(overlap + 0.15 * (drawn - feature + 0.56), 0.02, 0.98) * q_x
    if logits:
        halves |= {"logit_q_max": feature, "margin": np.abs(feature), "logit_q_sampled": drawn}
        halves["entropy"] = -np.clip(2 - 0.4 * feature, 0.01, 9)
    if head:
        halves["head"] = 0.5 * feature + g.normal(size=(rows, k))
    columns |= {name: values.astype(np.float16) for name, values in halves.items()}
    described = trace_header(k, length, workloads, draft_sample_method="greedy" if greedy else "probabilistic")
    return Trace(described | header, **columns)


def certain(kept: np.ndarray, num_tokens: list[int]) -> Trace:
    """Every draft's fate is fixed: accepted where `kept` [N, K] holds. All answers end at the length limit."""
    rows, k = kept.shape
    trace = made_up(len(num_tokens), k, max(num_tokens), workloads=("one",))
    columns = {name: a[:1].repeat(rows, 0) if a.shape[0] > 1 else a for name, a in trace.arrays().items()}
    for name in ("workload", "prompt", "stopped"):
        columns[name] = trace.arrays()[name][: len(num_tokens)]
    columns |= {"num_tokens": np.array(num_tokens, np.int32), "p_y": np.ones(rows, np.float16)}
    g = np.random.default_rng(1)
    sure = np.where(kept, g.uniform(0.7, 0.95, kept.shape), g.uniform(0.05, 0.3, kept.shape)).astype(np.float16)
    columns |= {"q_y": kept.astype(np.float16), "p_x": sure, "overlap": sure, "logit_q_max": np.log(sure / (1 - sure))}
    return Trace(trace.header, **columns)


LINEAR = CostTable(np.full(5, 2.0)[:, None] * [0, 1, 1.5, 2], 10.0 + np.arange(30))
"""Drafting takes 2, 3, 4 ms, a step of T tokens 10 + T ms."""
BROAD = CostTable(np.full(9, 2.0)[:, None] * [0, 1, 1.5, 2], 10.0 + np.arange(60))


# The simulator against sums by hand and against brute force


def test_steps_and_milliseconds_worked_out_by_hand() -> None:
    """One answer of 8 tokens, 7 to decode; drafts kept: 2 at offset 0, none at 3, 1 at 4.

    Offset 0: 3 drafts, 2 kept, 3 tokens: 4 + 14 ms. Offset 3: 3 drafts (4 tokens are left), none kept: 4 + 14.
    Offset 4: 2 drafts (3 left), 1 kept, 2 tokens: 3 + 13. Offset 6: 1 token left, nothing drafted: 11. In all 63 ms.
    """
    kept = np.zeros((7, 3), bool)
    kept[0, :2] = kept[4, :1] = True
    trace = certain(kept, [8])
    outcome = Replay(trace, LINEAR, Policy.fixed(3), num_requests=1).run()
    assert (outcome.stats.num_steps, outcome.total_ms) == (4, 63.0)
    assert outcome.stats.drafted_by_position.tolist() == [3, 3, 2]
    assert outcome.stats.accepted_by_position.tolist() == [2, 1, 0]
    assert outcome.tokens_per_s == pytest.approx(7 / 63 * 1e3)


def test_sums_by_answer_add_up_to_the_run() -> None:
    """Tokens of all answers are those emitted; every step's time counts once for each request; so do resamples."""
    for requests in (2, 8):  # with windows and without
        trace = made_up(30, 3, 40)
        found = measure(trace, BROAD, Policy.adaptive(), requests, np.arange(30), num_steps=120, warmup=np.arange(5))
        stats = found.outcome.stats
        assert found.tokens.sum() == stats.num_tokens - stats.num_requests
        assert found.ms.sum() == pytest.approx(requests * found.outcome.total_ms)
        assert found.resampled(np.ones((1, 30)))[0] == pytest.approx(found.tokens_per_s)
        trimmed = stats.drafted_by_position - stats.verified_by_position
        assert found.trimmed[:, 0].sum() == trimmed[0] and found.trimmed.sum() >= trimmed.max()
        one, most = np.zeros((1, 30)), int(found.ms.argmax())
        one[0, most] = 3
        assert found.resampled(one)[0] == pytest.approx(1e3 * requests * found.tokens[most] / found.ms[most])


def test_arms_are_compared_on_the_same_luck() -> None:
    """A policy that admits everything ends where fixed K ends, step for step, though it draws other random numbers."""
    trace = made_up(20, 3, 40, parallel=False)
    free = CostTable(np.zeros(9), 1.0 + 1e-9 * np.arange(60))
    policy = Policy.adaptive(adaptive_drafting=False)
    for requests in (2, 8):
        one = measure(trace, BROAD, Policy.fixed(3), requests, np.arange(20), num_steps=80, warmup=np.arange(4))
        other = measure(trace, BROAD, policy, requests, np.arange(20), num_steps=80, warmup=np.arange(4), believed=free)
        assert (one.tokens == other.tokens).all() and one.ms == pytest.approx(other.ms)
        assert one.over(other, np.ones((1, 20)))[0] == pytest.approx(1.0)


def test_few_requests_still_see_many_answers_and_the_first_start_anywhere() -> None:
    trace = made_up(40, 3, 200)
    found = measure(trace, LINEAR, Policy.fixed(3), 1, np.arange(40), num_steps=600)
    assert (found.ms > 0).sum() > 12  # an answer takes about 60 steps
    starts: list[int] = []
    for seed in range(30):
        run = Observed(trace, BROAD, Policy.fixed(3), num_requests=8, seed=seed)
        run.run(1)
        starts += run.begin.values()
    assert np.mean(starts) == pytest.approx(0.5 * trace.num_tokens.mean(), rel=0.15)


def best_allocation(survival: list[list[float]], cost: list[float]) -> tuple[int, ...]:
    """Prefixes that maximise (R + sum of survivals) / ms, by trying every one; of equal ones the fewest drafts."""
    every = itertools.product(*(range(len(s) + 1) for s in survival))
    gain = {a: (len(a) + sum(sum(s[:n]) for s, n in zip(survival, a, strict=True))) / cost[sum(a)] for a in every}
    best = max(gain.values())
    return min((a for a, value in gain.items() if value > best * (1 - 1e-9)), key=sum)


def test_replay_equals_a_plain_loop_that_tries_every_allocation() -> None:
    """Certain fates, an oracle that is nearly certain, two requests at a time: every step's tokens and milliseconds."""
    g, lengths = np.random.default_rng(4), [12, 9, 12, 7, 10]
    kept = g.random((sum(lengths) - len(lengths), 3)) < 0.55
    trace = certain(kept, lengths)
    costs = CostTable(np.full(3, 1.0)[:, None] * [0, 1, 1, 1], 6.0 + np.maximum(0, np.arange(20) - 4) ** 1.5)
    policy = Policy.adaptive(confidence="oracle", budget_rule="retrospective", adaptive_drafting=False)
    outcome = Replay(trace, costs, policy, num_requests=2).run()

    waiting, running = list(range(len(lengths))), []
    clock, tokens, steps, verified = 0.0, 0, 0, 0
    while waiting or running:
        while waiting and len(running) < 2:
            running.append([waiting.pop(0), 0])
        capacity = [min(3, lengths[a] - 2 - t) for a, t in running]
        rows = [int(trace.first_row[a]) + t for a, t in running]
        deepest = max(capacity)
        survival = [
            np.cumprod(trace.overlap[r, :n].astype(float)).tolist() for r, n in zip(rows, capacity, strict=True)
        ]
        count = len(running)
        cost = [float(costs.step_ms(count, count + b, deepest)) for b in range(sum(capacity) + 1)]
        admitted = best_allocation(survival, cost)
        clock += cost[sum(admitted)]
        steps, verified = steps + 1, verified + sum(admitted)
        for request, row, n in zip(list(running), rows, admitted, strict=True):
            accepted = next((k for k in range(n) if not kept[row, k]), n)
            request[1] += accepted + 1
            tokens += accepted + 1
            if request[1] == lengths[request[0]] - 1:
                running.remove(request)
    stats = outcome.stats
    assert (stats.num_steps, int(stats.verified_by_position.sum())) == (steps, verified)
    assert stats.num_tokens - stats.num_requests == tokens == sum(lengths) - len(lengths)
    assert outcome.total_ms == pytest.approx(clock)
    assert stats.num_requests == len(lengths)


def test_what_decisions_believe_and_what_is_counted_may_differ() -> None:
    """Believing that tokens are free verifies everything; the time is still the right table's."""
    trace = made_up()
    free = CostTable(np.zeros(5), 1.0 + 1e-9 * np.arange(30))
    _, second = fits.halves(trace)
    policy = Policy.adaptive(adaptive_drafting=False)
    sure = measure(trace, LINEAR, policy, 4, second, num_steps=60, believed=free).outcome
    assert (sure.stats.verified_by_position == sure.stats.drafted_by_position).all()
    fixed = measure(trace, LINEAR, Policy.fixed(3), 4, second, num_steps=60).outcome
    assert sure.total_ms == pytest.approx(fixed.total_ms, rel=0.05)


# Tables


def test_drafting_is_charged_by_family() -> None:
    table = hardware.measured()
    block, single = (float(table.draft(r)) for r in (8, 2))  # a pass over 8 tokens fits in the block pass of 2 requests
    own = {method: tables.drafting(table, method, 7) for method in ("dflash", "dspark", "eagle", "layer_skip", "ngram")}
    for method in ("dflash", "dspark"):
        assert [own[method].draft(8, d) for d in (0, 1, 7)] == [0.0, block, block]
    assert [own["eagle"].draft(8, d) for d in (0, 1, 7)] == pytest.approx([0.0, single, 7 * single])
    assert own["layer_skip"].draft(8, 2) == pytest.approx(2 * 0.8 * float(table.verify(8, 8)))
    assert own["ngram"].draft(8, 7) == 0.0
    by_depth = hardware.gpu_roofline("H100", "Qwen2.5-7B", "Qwen2.5-0.5B", max_requests=4)
    assert tables.drafting(by_depth, "eagle", 7) is by_depth


@pytest.mark.parametrize("name", tables.TABLES)
def test_tables_by_name_cover_what_is_asked(name: str) -> None:
    for trace in (made_up(), made_up(logits=False, method="ngram")):
        table = tables.named(name, trace, 16)
        assert table.max_requests >= 16 and table.token_limit(16) >= 16 * 4
        assert float(table.draft(16, 0)) == 0.0
        assert (table.draft(16, 3) > 0) == (trace.header["method"] != "ngram")


def test_a_table_from_a_file_and_an_unknown_one(tmp_path: Path) -> None:
    LINEAR.save(tmp_path / "mine.json")
    assert tables.named(str(tmp_path / "mine.json"), made_up()).max_requests == 4
    with pytest.raises(ValueError, match=r"'b200'.*measured, b300"):
        tables.named("b200", made_up())


# Every arm


def test_simulation_gives_every_arm_and_says_what_it_left_out() -> None:
    trace = made_up(head=True)
    costs = CostTable(np.full(9, 1.0)[:, None] * [0, 1, 1, 1], 5.0 + 0.5 * np.arange(17))  # 8 requests, 16 tokens
    result = simulate.simulate(trace, costs, [1, 8, 99], effort=0.06)
    rows = {(r["arm"], r["requests"]): r for r in result["rows"]}
    everything = {"none", "fixed-1", "fixed-2", "fixed-3", "always-trim", "adaptive-3", "adaptive-3-full-draft"}
    assert {a for a, r in rows if r == 1} == everything | {"head", "q_max", "oracle"}
    assert any("99 requests" in what for what in result["left_out"])
    assert any("adaptive-3 at 8 requests: 32 tokens" in what for what in result["left_out"])
    for (arm, requests), row in rows.items():
        assert row["tokens_per_s_per_user"] == pytest.approx(row["tokens_per_s"] / requests)
        request_steps = row["steps"] * requests
        assert row["accepted"] <= row["verified"] <= row["drafted"]
        # C134: tokens per request and step are 1 + the sum over positions of accepted / steps
        length = mean_acceptance_length(row["accepted_by_position"], request_steps)
        emitted = row["tokens_per_s"] / 1e3 * (row["draft_ms"] + row["verify_ms"])
        assert emitted == pytest.approx(length * request_steps, rel=0.08), arm
    assert rows["none", 1]["drafted"] == rows["none", 1]["accepted"] == 0.0  # C133: nothing drafted, nothing divided
    assert rows["always-trim", 8]["accepted"] == 0.0 and rows["always-trim", 8]["to_none"] < 1
    assert rows["none", 1]["to_none"] == 1.0
    best = max(rows["none", 1]["tokens_per_s"], *(rows[f"fixed-{k}", 1]["tokens_per_s"] for k in (1, 2, 3)))
    assert rows["oracle", 1]["to_best_fixed"] == pytest.approx(rows["oracle", 1]["tokens_per_s"] / best)
    with pytest.raises(ValueError, match="nothing to simulate: 99 requests: this table covers 1 to 8"):
        simulate.simulate(trace, costs, [99])


def test_accepted_per_step_is_the_sum_of_survivals() -> None:
    """C136, C137: matches behind a rejection do not count; unequal acceptances give sums of products, not powers."""
    kept = np.tile([True, False, True, True], (3000, 1))
    stats = Replay(certain(kept, [3001]), LINEAR4, Policy.fixed(4), num_requests=1).run().stats
    assert stats.accepted_by_position[1:].sum() == 0
    assert stats.accepted_by_position[0] / stats.num_request_steps == pytest.approx(1, abs=0.01)
    trace = made_up(30, 4, 200)
    run = measure(trace, LINEAR4, Policy.fixed(4), 4, np.arange(30), num_steps=1200).outcome.stats
    graded = run.graded_by_position / run.num_request_steps
    rate = run.accepted_by_position / np.maximum(1, run.graded_by_position)
    assert np.cumprod(rate) == pytest.approx(run.accepted_by_position / run.num_request_steps, rel=0.05)
    assert graded[1] == pytest.approx(rate[0], rel=0.03)


LINEAR4 = CostTable(np.full(5, 2.0)[:, None] * [0, 1, 1, 1, 1], 10.0 + np.arange(30))


def test_a_drafter_without_logits_decides_by_its_record() -> None:
    assert {"adaptive-3"} <= set(simulate.arms(made_up(logits=False, head=True, method="ngram")))
    bare = simulate.arms(made_up(logits=False, method="ngram"))
    assert not any(name.startswith("adaptive") for name in bare) and "oracle" in bare


def test_the_estimator_starts_at_what_the_other_half_taught() -> None:
    trace = made_up(60, 3, 40)
    first, _ = fits.halves(trace)
    learned = simulate.learn(trace, first)
    assert learned is not None and float(learned.slope) == pytest.approx(0.6, abs=0.12)
    policy = simulate.warmed(Policy.adaptive(), trace, learned)
    run = Replay(trace, LINEAR, policy, num_requests=2)
    assert run.estimator is not None and float(run.estimator.slope) == pytest.approx(float(learned.slope))
    assert simulate.warmed(Policy.fixed(2), trace, learned) == Policy.fixed(2)


def test_command_prints_and_writes(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "FEWEST", 20)
    monkeypatch.setattr(simulate, "MOST", 40)
    traces.save(made_up(), tmp_path / "mine.npz")
    arguments = ["simulate", "--trace", str(tmp_path / "mine.npz"), "--table", "measured", "--requests", "2", "64"]
    assert cli.main([*arguments, "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "| adaptive-3 " in printed and "64 requests: this table covers 1 to 32" in printed
    result = json.loads((tmp_path / "out" / "simulate.json").read_text())
    assert {r["requests"] for r in result["rows"]} == {2}
    assert (tmp_path / "out" / "simulate.md").read_text() in printed + "\n"
    assert (tmp_path / "out" / "pareto.png").stat().st_size > 10_000
    assert cli.main(["simulate", "--trace", "nothing-of-that-name"]) == 2


def planning_deep() -> Replay:
    """Every block of this token-by-token drafter is planned to its full depth, and may end before."""
    trace = made_up(answers=30, k=4, method="eagle", parallel=False)
    table = CostTable([[0, 0.1, 0.2, 0.3, 0.4]] * 9, [8.0 + t for t in range(41)])
    replay = Replay(trace, table, Policy.adaptive(), num_requests=8)
    depth = replay.depth
    assert depth is not None

    def choose(step: int, num_requests: int, deepest: int, costs: CostTable) -> int:
        depth.in_full = False
        return deepest

    depth.choose = choose  # type: ignore[method-assign]
    return replay


def test_a_token_by_token_block_ends_as_the_engines_does() -> None:
    """Ending it changes no allocation: each step verifies what the whole block's survivals would have it verify."""
    replay, ended = planning_deep(), []
    real, table = replay._allocate, replay.cost_table

    def both(read: Any, capacity: Any, drafted: Any, ids: Any) -> Any:
        budget, depth = copy.deepcopy(replay.budget), replay.depth
        assert budget is not None and depth is not None
        features, admitted, made = real(read, capacity, drafted, ids)
        deepest = int(capacity.max())
        assert replay.estimator is not None and features is not None
        block = survival(replay.estimator.predict(features)[:, :deepest]).double()
        found = torch.from_numpy(drafted)
        live = block.masked_fill(torch.arange(deepest) >= found[:, None], 0.0)
        chosen = budget.choose(live, torch.from_numpy(capacity), ids.tolist(), table)
        assert allocate(live, chosen, found).tolist() == admitted.tolist()
        ended.append(made < deepest)
        return features, admitted, made

    replay._allocate = both  # type: ignore[method-assign]
    stats = replay.run(300).stats
    assert 200 < sum(ended) < 300 and stats.drafted_by_position[3] < stats.drafted_by_position[0]


def test_drafts_that_are_not_made_are_not_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = planning_deep().run(300)
    monkeypatch.setattr(Replay, "_settled", lambda self, block, *rest: block.shape[1])
    full = planning_deep().run(300)
    assert ending.stats.draft_ms < 0.95 * full.stats.draft_ms
    assert ending.tokens_per_s > full.tokens_per_s
