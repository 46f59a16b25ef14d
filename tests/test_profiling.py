"""Profiling measures real steps and leaves nothing behind; the command line says what went wrong in one line."""

from __future__ import annotations

import json
import random
import sys

import numpy as np
import pytest
import tiny
import torch

from avref import LLM, SamplingParams, arms, cli, profiling, quickstart, selfcheck, speed
from avref.cost_table import CostTable
from avref.engine import Engine
from avref.stats import Stopwatch


def adaptive_llm(**options):
    target = tiny.llama()
    config = {
        "method": "draft_model",
        "model": tiny.near(target, 0.3),
        "num_speculative_tokens": 3,
        "enable_adaptive_verification": True,
    }
    return LLM(target, config, max_num_seqs=4, max_model_len=96, **options)


def test_batch_sizes_end_at_the_limit():
    assert profiling.batch_sizes(1) == [1]
    assert profiling.batch_sizes(6) == [1, 2, 4, 6]
    assert profiling.batch_sizes(8) == [1, 2, 4, 8]


def test_profile_covers_every_batch_and_leaves_the_engine_alone():
    llm = adaptive_llm()
    before = llm.estimator.state_dict()
    table = profiling.profile(llm, context=16, repeats=2)
    assert (table.max_requests, table.max_tokens) == (4, 16)
    assert {tuple(p[:2]) for p in table.metadata["verify_points"]} == {
        (r, r + b) for r in (1, 2, 4) for b in profiling.verified_counts(r, 3)
    }
    assert (table.step_ms(4, [4, 8, 12, 16]) > 0).all()
    assert table.metadata["dtype"] == "float32" and table.metadata["context"] == 16
    assert llm.engine.running == [] and llm.engine.stats.num_steps == 0 and llm.engine.override is None
    after = llm.estimator.state_dict()
    assert all((before[k] == after[k]).all() if hasattr(before[k], "all") else before[k] == after[k] for k in before)


def test_the_table_holds_the_whole_step(monkeypatch):
    """Every lap of a step takes a time of its own, and what drafts add outside of drafting is counted with it."""
    laps = {"prefill": 100.0, "draft": 1.0, "verify": 2.0, "sample": 3.0, "other": 4.0}

    def lap(self, name):
        caller = sys._getframe(1)
        if name != "other" or caller.f_code.co_name == "step":
            self.totals[name] += laps[name]
        elif caller.f_code.co_name == "decode" and caller.f_locals.get("proposal") is not None:
            self.totals[name] += 0.5

    monkeypatch.setattr(Stopwatch, "lap", lap)
    monkeypatch.setattr(profiling, "MOST_REPEATS", 1)
    table = profiling.profile(adaptive_llm(), context=16, repeats=2)
    assert {round(p[-1], 9) for p in table.metadata["draft_points"]} == {1.5}
    assert {round(p[-1], 9) for p in table.metadata["verify_points"]} == {9.0}


def test_a_busy_machine_is_measured_longer_and_named(monkeypatch, capsys):
    """Every other step takes seven times as long: more steps are timed, and the message says why."""
    real, count = Stopwatch.lap, [0]

    def lap(self, name):
        real(self, name)
        if name == "verify":
            count[0] += 1
            self.totals[name] += 100.0 if stalls and count[0] % 2 == 0 else 10.0

    monkeypatch.setattr(Stopwatch, "lap", lap)
    monkeypatch.setattr(profiling, "ENOUGH_S", 0.0)
    found = {}
    for stalls in (False, True):
        profiling.profile(adaptive_llm(), context=16, repeats=3)
        found[stalls] = count[0], capsys.readouterr().err
        count[0] = 0
    assert found[True][0] > 2 * found[False][0]
    assert "the machine was busy" in found[True][1] and "the machine was busy" not in found[False][1]


def test_rounds_go_on_while_the_times_differ(monkeypatch):
    monkeypatch.setattr(profiling, "ENOUGH_S", 0.0)
    kinds = [(1, 0), (1, 1)]
    count = lambda steady: len(list(profiling._rounds(kinds, random.Random(0), 3, lambda: steady))) // 2  # noqa: E731
    assert (count(True), count(False)) == (3, 1 + profiling.MOST_REPEATS)
    monkeypatch.setattr(profiling, "LONGEST_S", 0.0)
    assert count(False) == 3
    times = {0: [1.0, 2.0, 3.0], 1: [1.0, 1.0, 7.0], 2: [2.0, 3.0, 4.0]}
    assert profiling._spread({(1, b): [(0, 9.0, ms - 0.5, 0.5) for ms in own] for b, own in times.items()}) == 2


def test_a_drift_that_all_kinds_share_is_taken_out():
    """Every round has a speed of its own, and some steps stall: the ratios of the kinds are found all the same."""
    rng, true = np.random.default_rng(0), {"a": 50.0, "b": 52.0, "c": 90.0}
    times: dict[str, list[tuple[int, float]]] = {kind: [] for kind in true}
    for i, pace in enumerate(np.exp(rng.normal(0, 0.3, size=12))):
        for kind in ("a", "b", "c", "a"):
            stall = 3.0 if rng.random() < 0.15 else 1.0
            times[kind].append((i, true[kind] * pace * stall * np.exp(rng.normal(0, 0.01))))
    found = profiling._levels(times)
    assert found["b"] / found["a"] == pytest.approx(52 / 50, abs=0.02)
    assert found["c"] / found["a"] == pytest.approx(90 / 50, abs=0.04)
    assert profiling._levels({0: [(4, 7.0)], 1: [(4, 14.0)]}) == pytest.approx({0: 7.0, 1: 14.0})


def test_the_first_generate_profiles_once_and_the_table_is_reused(tmp_path, monkeypatch):
    monkeypatch.setenv("AVREF_CACHE", str(tmp_path))
    calls = []
    real = profiling.profile
    monkeypatch.setattr(profiling, "profile", lambda *a, **k: calls.append(1) or real(*a, **k))
    for _ in range(2):
        llm = adaptive_llm()
        llm.generate([[3, 4, 5]], SamplingParams(max_tokens=4, seed=0))
        assert llm.cost_table is not None
    assert len(calls) == 1
    (path,) = (tmp_path / "cost-tables").glob("*.json")
    assert CostTable.load(path).max_requests == 4
    path.write_text(path.read_text()[:-40])
    with pytest.raises(ValueError, match=path.name):
        adaptive_llm().generate([[3, 4, 5]], SamplingParams(max_tokens=4, seed=0))


def test_a_cost_table_for_fewer_requests_is_refused():
    small = CostTable.from_curves([(1, 1.0), (2, 1.0)], [(1, 1.0), (8, 2.0)], max_requests=2, max_tokens=8)
    with pytest.raises(ValueError, match="covers 2 requests, max_num_seqs is 4"):
        adaptive_llm(cost_table=small)


def test_profiling_plain_decoding_is_refused():
    with pytest.raises(ValueError, match="needs a drafter"):
        profiling.profile(LLM(tiny.llama(), max_num_seqs=2, max_model_len=64))


def test_too_few_positions_to_time_are_refused(tmp_path, monkeypatch):
    """Four full steps must fit, in the drafter too, or drafts that were never verified would look almost free."""
    monkeypatch.setenv("AVREF_CACHE", str(tmp_path))
    target, config = tiny.llama(), {"method": "draft_model", "num_speculative_tokens": 7}
    adaptive = {**config, "enable_adaptive_verification": True}
    for length, drafter in ((32, target), (128, tiny.llama(1, max_position_embeddings=24))):
        llm = LLM(target, {**adaptive, "model": drafter}, max_num_seqs=2, max_model_len=length)
        with pytest.raises(ValueError, match=r"are too few to time steps of 7 drafts, .* pass a cost_table"):
            llm.generate([[3, 4]], SamplingParams(max_tokens=4))
        assert not list(tmp_path.glob("cost-tables/*"))
    short = LLM(target, {**config, "model": tiny.llama(1, max_position_embeddings=48)}, max_num_seqs=1)
    timed, add = [], Engine.add

    def watch(self, request):
        timed.append(request)
        add(self, request)

    monkeypatch.setattr(Engine, "add", watch)
    profiling.profile(short, repeats=1)
    assert max(r.num_cached for r in timed) < 48
    assert max(len(r.prompt_ids) for r in timed) <= 16


def test_no_timed_step_pays_what_others_have_left(monkeypatch):
    """A drafter that idled is shown what it missed before the next drafts; in a profile many steps would pay for it."""
    target = tiny.llama()
    config = {"method": "dflash", "model": tiny.dflash(target), "num_speculative_tokens": 3}
    llm = LLM(target, {**config, "enable_adaptive_verification": True}, max_num_seqs=2, max_model_len=128)
    owed, decode = {True: [], False: []}, Engine.decode

    def watch(self):
        if self.fixed_depth is not None:
            owed[self.fixed_depth > 0].append(sum(len(r.owed) for r in self.running))
        decode(self)
        assert self.fixed_depth != 0 or all(r.owed for r in self.running)

    monkeypatch.setattr(Engine, "decode", watch)
    profiling.profile(llm, repeats=1)
    assert set(owed[True]) == {0} and len(owed[False]) > 4


def test_requests_that_run_are_not_profiled_away(tmp_path, monkeypatch):
    """Timing uses the caches of the LLM: whoever is in the middle of an answer would go on with another's."""
    monkeypatch.setenv("AVREF_CACHE", str(tmp_path))
    llm = adaptive_llm()
    llm.cost_table = profiling.profile(llm, repeats=1)
    steps = llm.measuring([[3, 4, 5]] * 6, SamplingParams(max_tokens=9, seed=0))
    next(steps)
    with pytest.raises(RuntimeError, match="already running on this LLM, or its cost table"):
        profiling.profile(llm)
    llm.cost_table = None
    with pytest.raises(RuntimeError, match="already running on this LLM"):
        llm.generate([[3, 4]])
    steps.close()
    assert not list(tmp_path.glob("cost-tables/*"))


def test_quickstart_on_a_tiny_pair_writes_every_row(tmp_path, monkeypatch):
    """The whole job with a tiny target that is its own drafter: rows, ranges, table and picture."""
    monkeypatch.setenv("AVREF_CACHE", str(tmp_path))
    monkeypatch.setattr(arms, "WARMUP_INTERVAL", 4)
    monkeypatch.setattr(LLM, "prompt_ids", lambda self, texts: [[3 + i % 40, 4, 5] for i in range(len(texts))])
    target = tiny.llama()
    result = quickstart.quickstart(
        target, "draft_model", target, concurrency=(1, 3), repeats=2, max_tokens=8, max_model_len=64, progress=False
    )
    rows = {(r["arm"], r["concurrency"]): r for r in result["rows"]}
    assert set(rows) == {(a, c) for a in ("none", "fixed-1", "fixed-3", "fixed-7", "adaptive-7") for c in (1, 3)}
    for (arm, _), row in rows.items():
        assert row["tokens_per_s_range"][0] <= row["tokens_per_s"] <= row["tokens_per_s_range"][1]
        assert all(
            a <= g <= v <= d
            for a, g, v, d in zip(
                row["accepted_by_position"],
                row["graded_by_position"],
                row["verified_by_position"],
                row["drafted_by_position"],
                strict=True,
            )
        )
        assert (row["verified_per_step"] == 0) == (arm == "none") or arm == "adaptive-7"  # drafts as dear as the target
    fixed = rows["fixed-3", 3]
    assert sum(fixed["accepted_by_position"]) > 0.8 * sum(fixed["graded_by_position"])  # its own drafter, but for top-p
    assert fixed["tokens_per_request_step"] > 2
    assert result["estimator"]["refits"] >= arms.WARMUP_REFITS
    text = quickstart.table(result)
    assert "adaptive-7" in text and "cold" in text
    paths = quickstart.save(result, tmp_path)
    assert json.loads(paths[0].read_text())["rows"] == result["rows"]
    assert paths[1].stat().st_size > 10_000


def test_quickstart_with_a_drafter_of_five_positions_compares_five(tmp_path, monkeypatch):
    """The deepest arms are those of the drafter's own depth, in rows, table and picture."""
    monkeypatch.setenv("AVREF_CACHE", str(tmp_path))
    monkeypatch.setattr(arms, "WARMUP_INTERVAL", 4)
    monkeypatch.setattr(LLM, "prompt_ids", lambda self, texts: [[3 + i % 40, 4, 5] for i in range(len(texts))])
    target = tiny.llama()
    drafter = tiny.dflash(target, block=5)
    depth = 5
    own = dict(concurrency=(1, 2), repeats=1, max_tokens=6, max_model_len=64, progress=False)
    result = quickstart.quickstart(target, "dflash", drafter, **own)
    deepest = [f"fixed-{depth}", f"adaptive-{depth}"]
    assert arms.deepest(result["rows"]) == deepest
    assert {r["arm"] for r in result["rows"]} == {"none", "fixed-1", "fixed-3", *deepest}
    assert quickstart.table(result).count(f"adaptive-{depth}") == 4  # two loads: a row each, and its acceptance
    assert all(path.stat().st_size for path in quickstart.save(result, tmp_path))


def test_selfcheck_quick_passes_and_fails_visibly():
    report = selfcheck.run(tiny.llama(), quick=True)
    assert selfcheck.passed(report), selfcheck.render(report)
    report.rows.append(selfcheck.Row("something slow", 2.0, 1.0))
    report.rows.append(selfcheck.Row("CUDA: packed", None, None))
    assert not selfcheck.passed(report)
    assert "FAIL" in selfcheck.render(report)


def test_selfchecks_speed_rows_run_on_a_tiny_target(monkeypatch):
    """Values mean nothing at this size; every row must come out, finite and with its bar."""
    monkeypatch.setattr(speed, "CONTEXT", 16)
    llm = LLM(tiny.llama(), max_num_seqs=64, max_model_len=64)
    rows = [*speed.forward_rows(llm), *speed.method_rows(llm)]
    timed = [r for r in rows if not r.name.startswith("CUDA")]
    assert len(timed) == 16 + 2 + 6
    assert all(r.value > 0 and r.bar is not None for r in timed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quickstart", "--model", "./no-such-folder"], "does not exist"),
        (["generate", "hello", "--model", "./no-such-folder"], "does not exist"),
        (["generate", "hello", "--method", "no-such-method"], "allowed are"),
        (["generate", "hello", "--dtype", "int3"], "dtype is 'int3'"),
        (["train", "dflash", "--model", "./no-such-folder"], "does not exist"),
    ],
)
def test_the_command_line_reports_errors_in_one_line(arguments, message, capsys):
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_no_command_prints_help(capsys):
    assert cli.main([]) == 2
    assert "quickstart" in capsys.readouterr().out


def test_profiling_leaves_an_n_gram_drafters_record_alone():
    config = {"method": "ngram", "num_speculative_tokens": 3, "enable_adaptive_verification": True}
    llm = LLM(tiny.llama(), config, max_num_seqs=2, max_model_len=96)
    drafter = llm.engine.drafter
    drafter.graded[2, 0], drafter.accepted[2, 0] = 5, 3
    graded, accepted = drafter.graded.copy(), drafter.accepted.copy()
    seen = []
    real = drafter.grade
    drafter.grade = lambda *a: (seen.append(a), real(*a))
    profiling.profile(llm, context=16, repeats=1)
    assert seen and (drafter.graded == graded).all() and (drafter.accepted == accepted).all()


def test_a_profile_that_breaks_off_leaves_no_requests(monkeypatch):
    llm = adaptive_llm()
    real, count = Stopwatch.lap, [0]

    def lap(self, name):
        real(self, name)
        count[0] += 1
        if count[0] == 40:
            raise KeyboardInterrupt

    monkeypatch.setattr(Stopwatch, "lap", lap)
    with pytest.raises(KeyboardInterrupt):
        profiling.profile(llm, context=16, repeats=1)
    monkeypatch.undo()
    llm.cost_table = tiny.flat_costs()
    assert llm.generate([[3, 4, 5]], SamplingParams(max_tokens=4, seed=0))


def test_tables_are_kept_apart_by_what_drafts_and_how(tmp_path, monkeypatch):
    """Loaded drafters have no name: their size tells them apart. So do the ways of drawing drafts."""
    monkeypatch.setenv("AVREF_CACHE", str(tmp_path))
    monkeypatch.setattr(profiling, "profile", lambda *a: tiny.flat_costs())
    target = tiny.llama()
    config = {"method": "draft_model", "num_speculative_tokens": 3, "enable_adaptive_verification": True}
    drafters = [tiny.near(target, 0.3), tiny.llama(num_hidden_layers=1)]
    for model in drafters:
        for how in ("probabilistic", "greedy"):
            llm = LLM(target, {**config, "model": model, "draft_sample_method": how}, max_num_seqs=4, max_model_len=96)
            for _ in range(2):
                profiling.load_or_profile(llm)
    assert len(list((tmp_path / "cost-tables").glob("*.json"))) == 4


def test_profiling_runs_on_text_where_there_is_a_tokenizer(monkeypatch):
    """Each context ends as a warm-up prompt does; without a tokenizer the tokens are random."""
    llm = adaptive_llm()
    assert profiling._warmup_prompts(llm) == []
    llm.tokenizer = tiny.tokenizer(["<unk>", "<s>", "</s>"])
    monkeypatch.setattr(llm, "prompt_ids", lambda texts: [[7, 8, 9], [], [5]])
    assert profiling._warmup_prompts(llm) == [[7, 8, 9], [5]]
    entered = []
    monkeypatch.setattr(profiling.Engine, "add", lambda self, r: (entered.append(r.prompt_ids), self.waiting.append(r)))
    profiling.profile(llm, context=16, repeats=1)
    assert all(p == [5] * len(p) if p[-1] == 5 else p == ([7, 8, 9] * 9)[-len(p) :] for p in entered)
    assert {len(p) for p in entered} == {16, 12, 20, 10, 14, 18, 22}  # of one, two and four requests


def test_a_stopwatch_forgets_a_run_that_was_broken_off():
    watch = Stopwatch(torch.device("cpu"))
    watch.lap("verify")
    watch._events.append(("verify", None, None))  # on a GPU
    watch.reset()
    assert set(watch.read().values()) == {0.0}


@pytest.mark.parametrize("num_requests", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("depth", [1, 3, 7])
def test_verified_counts_and_how_they_are_spread(num_requests, depth):
    """Each count comes out exactly, no request gets more than it drafted, and pruned steps are uneven."""
    counts = profiling.verified_counts(num_requests, depth)
    assert counts[0] == 0 and counts[-1] == num_requests * depth and num_requests in counts
    for total in counts:
        admit = profiling._uneven(total, depth, num_requests)
        admitted = [admit(depth) for _ in range(num_requests)]
        assert sum(admitted) == total and 0 <= min(admitted) and max(admitted) <= depth
    assert any(0 < b < num_requests for b in counts) == (num_requests >= 16)
    if (num_requests, depth) == (8, 7):
        assert counts == [0, 8, 16, 24, 40, 56]
        spread = profiling._uneven(16, 7, 8)
        assert [spread(7) for _ in range(8)] == [1, 3] * 4


def test_a_table_of_a_busy_machine_says_so_whenever_it_is_used(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AVREF_CACHE", str(tmp_path))
    for spread, said in (([(1, 1.0), (4, 9.65)], True), ([(1, 1.0), (4, 1.01)], False)):
        table = tiny.flat_costs()
        table.metadata["spread"] = spread
        monkeypatch.setattr(profiling, "profile", lambda *a, table=table: table)
        llm = adaptive_llm()
        profiling.load_or_profile(llm, again=True)
        capsys.readouterr()
        profiling.load_or_profile(llm)
        assert ("with 4 requests, steps took 9.65 times" in capsys.readouterr().err) == said
