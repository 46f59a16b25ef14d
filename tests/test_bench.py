"""The bench: what it runs, what it makes of it, and that an interrupted one goes on as if nothing had happened."""

from __future__ import annotations

import itertools
import json
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import tiny
import torch
from matplotlib.figure import Figure

from avref import LLM, arms, cli, hub, plots, workloads
from avref.drafters.draft_model import TinyLlama, TinyLlamaConfig
from avref.evidence import bench, bench_report, bench_setting, outside, prompt_sets
from avref.evidence.bench_plan import BLOCKS, MIX, TUNING, Arm, Plan, Unit
from avref.stats import Stats

METHODS = ("draft_model", "eagle", "mtp", "dflash", "dspark", "layer_skip", "ngram")
WORKLOADS = ("easy", "hard")


def plan(**changes: Any) -> Plan:
    settings = {"concurrency": (1, 8), "repeats": 3, **changes}
    return Plan("dflash", dict.fromkeys(METHODS), dict.fromkeys(METHODS, 7), WORKLOADS, **settings)


def every_unit(p: Plan) -> list[Unit]:
    return [u for block in p.blocks for u in p.units(block)]


def record(unit: Unit, tokens_per_s: float, **changes: Any) -> dict[str, Any]:
    """What the journal would hold of a run of one second."""
    stats = Stats.zeros(7)
    stats.num_tokens, stats.num_requests, stats.num_steps, stats.num_request_steps = int(tokens_per_s), 0, 10, 20
    stats.other_ms, stats.wall_s = 1000.0, 1.0
    return {
        "block": unit.block,
        "case": unit.case,
        "concurrency": unit.concurrency,
        "repeat": unit.repeat,
        "arm": unit.arm.name,
        "seconds": 1.0,
        "threshold": None,
        "fit": None,
        "with_prefill": unit.block == "outside",
        "stats": {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in vars(stats).items()},
        **changes,
    }


# ---- the plan ----
def test_the_plan_holds_every_arm_once_per_repeat():
    p = plan()
    units = every_unit(p)
    assert len({u.key for u in units}) == len(units)
    names = {block: {u.arm.name for u in units if u.block == block} for block in BLOCKS}
    fixed = {f"fixed-{k}" for k in range(1, 8)}
    assert names["concurrency"] == {"none", *fixed, "always-trim", "adaptive-7", "adaptive-7-full-draft"}
    assert names["workloads"] == {"none", "fixed-7", "adaptive-7"}
    assert {"hf-generate", "hf-assisted", "draft_model fixed-7", "none"} == names["outside"]
    reported = {u.arm.name for u in units if u.block == "drafters" and u.case == MIX}
    sources = ("fixed-7", "estimator", "head", "q_max", "threshold", "stop_head")
    assert reported == {"none", *(f"{m} {s}" for m in METHODS for s in sources)}
    assert {u.case for u in units if u.block == "workloads"} == set(WORKLOADS)
    draftings = {u.arm.name: u.arm.config.get("adaptive_drafting") for u in units if "adaptive-7" in u.arm.name}
    assert draftings == {"adaptive-7": None, "adaptive-7-full-draft": False}


def test_arms_take_turns_within_a_repeat_and_trials_come_first():
    units = plan().units("concurrency")
    first = [[u.arm.name for u in units if (u.concurrency, u.repeat) == (8, r)] for r in range(3)]
    assert sorted(first[0]) == sorted(first[1]) and len({names[0] for names in first}) == 3
    assert [u.repeat for u in units] == sorted(u.repeat for u in units)
    cases = [u.case for u in plan().units("drafters")]
    assert cases == sorted(cases, key=[TUNING, MIX].index) and TUNING in cases


def test_the_estimate_of_the_default_plan_is_about_an_hour():
    everything = plan(concurrency=(1, 2, 4, 8, 16, 32, 64))
    five = Plan("dflash", everything.drafters, everything.depths, tuple("abcde"), everything.concurrency)
    minutes = five.seconds([], 32) / 60
    assert 40 < minutes < 75
    keys = [u.key for u in every_unit(five)]
    assert five.seconds(keys, 32) == 0.0
    assert five.seconds(keys[: len(keys) // 2], 32) / 60 < minutes


# ---- the numbers ----
def test_medians_spread_and_ratios_within_a_repeat():
    """Numbers where the ratio of medians is not the median of ratios."""
    p = plan(blocks=("concurrency",), concurrency=(8,))
    speeds = {
        "none": (100, 200, 400),
        "fixed-1": (150, 200, 500),
        "fixed-7": (50, 60, 70),
        "adaptive-7": (300, 220, 400),
    }
    units = {(u.arm.name, u.repeat): u for u in every_unit(p)}
    records = {units[a, r].key: record(units[a, r], v) for a, values in speeds.items() for r, v in enumerate(values)}
    result = bench_report.summary(p, records)
    rows = {r["arm"]: r for r in result["rows"]}
    assert set(rows) == set(speeds)
    row = rows["adaptive-7"]
    assert (row["tokens_per_s"], row["tokens_per_s_range"], row["repeats"]) == (300, [220, 400], 3)
    assert row["speedup"] == 1.1 and row["speedup_range"] == [1.0, 3.0]  # 3, 1.1 and 1; of the medians 1.5
    assert row["tokens_per_s_per_user"] == 300 / 8
    ratios = {r["against"]: r for r in result["ratios"]}
    assert set(ratios) == {"none", "fixed-7", "best fixed K in hindsight (none)"}  # 200 against 200: the first
    assert ratios["fixed-7"]["ratio"] == 400 / 70 and ratios["fixed-7"]["range"] == [220 / 60, 6.0]


def test_a_repeat_that_is_missing_is_left_out_of_the_ratios():
    p = plan(blocks=("workloads",), concurrency=(8,))
    units = {(u.case, u.arm.name, u.repeat): u for u in every_unit(p)}
    runs = {("none", 0): 100, ("fixed-7", 0): 50, ("fixed-7", 1): 80, ("adaptive-7", 1): 160}
    records = {units["easy", a, r].key: record(units["easy", a, r], v) for (a, r), v in runs.items()}
    result = bench_report.summary(p, records)
    rows = {r["arm"]: r for r in result["rows"]}
    assert (rows["fixed-7"]["tokens_per_s"], rows["fixed-7"]["speedup"]) == (65, 0.5)
    assert rows["adaptive-7"]["speedup"] is None
    ratios = {r["against"]: r for r in result["ratios"]}
    assert ratios["fixed-7"]["ratio"] == 2 and ratios["none"]["ratio"] is None
    assert "easy" in bench_report.markdown(full(result)) and "hard" not in bench_report.markdown(full(result))


def full(result: dict[str, Any]) -> dict[str, Any]:
    settings = {"target_hash": "0", "method": "dflash", "max_tokens": 4, "chosen_on": "a", "reported_on": "b"}
    machine = dict.fromkeys(("target", "dtype", "device", "threads", "torch", "transformers"), "x")
    return {"settings": settings, "machine": machine, "refused": {}, "left": [], **result}


# ---- an interrupted bench ----
class Fake:
    """Stands in for the models: every run has a speed that follows from its key, and is counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.fail_at: int | None = None
        monkeypatch.setattr(LLM, "prompt_ids", lambda llm, texts: [[3 + i % 40, 4, 5] for i in range(len(texts))])
        monkeypatch.setattr(bench.Runner, "ready", lambda runner, unit, most: True)
        self.plan = Plan(
            "draft_model", {"draft_model": 0, "ngram": 0}, {"draft_model": 2, "ngram": 2}, workloads.NAMES, (2,), 2
        )
        monkeypatch.setattr(bench.Runner, "run", lambda runner, units: [self.run(unit) for unit in units])
        for name in ("plot_pareto", "plot_off_on"):  # the whole bench below draws them
            monkeypatch.setattr(plots, name, lambda result: Figure((1, 1)))
        self.target = tiny.llama()

    def run(self, unit: Unit) -> dict[str, Any]:
        if len(self.done) == self.fail_at:
            raise KeyboardInterrupt
        self.done.append(unit.key)
        return record(unit, 10 + sum(unit.key.encode()) % 97)

    def bench(self, folder: Path, **changes: Any) -> dict[str, Any]:
        settings = {"concurrency": (2,), "repeats": 2, "max_tokens": 6, "max_model_len": 64, "depth": 2, **changes}
        pair = {"draft_model": self.target, "ngram": None}
        return bench.bench(self.target, "draft_model", folder=folder, drafters=pair, progress=False, **settings)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake(monkeypatch)


def test_a_killed_bench_goes_on_and_gives_the_same_table(fake, tmp_path):
    whole = fake.bench(tmp_path / "whole")
    everything, fake.done = fake.done, []
    assert len(set(everything)) == len(everything)
    fake.fail_at = len(everything) // 2
    with pytest.raises(KeyboardInterrupt):
        fake.bench(tmp_path / "killed")
    journal = tmp_path / "killed" / "bench.jsonl"
    with journal.open("ab") as file:
        file.write(b'{"key": "concurrency | mix | 2 | fixed-2 | 1", "stats": {"num_')  # killed while it wrote
    fake.fail_at = None
    resumed = fake.bench(tmp_path / "killed")
    again = [key for key in everything if fake.done.count(key) == 2]
    races = {u.key: u.race for block in BLOCKS for u in fake.plan.units(block)}
    assert {races[key] for key in again} == {races[everything[len(everything) // 2]]}  # only the race in progress
    assert list(dict.fromkeys(fake.done)) == everything and len(fake.done) == len(everything) + len(again)
    assert resumed == whole
    assert (tmp_path / "killed" / "bench.md").read_text() == (tmp_path / "whole" / "bench.md").read_text()
    assert json.loads(journal.read_text().partition("\n")[0]) == {"settings": whole["settings"]}


@pytest.mark.parametrize("name", ["tuning", "mix", "top-p 1"])
def test_a_file_named_like_a_case_is_refused(name, tmp_path):
    """Its prompts would take the place of those that settings are chosen on, or of the mix."""
    (tmp_path / f"{name}.txt").write_text("one\n\ntwo\n\nthree\n")
    with pytest.raises(ValueError, match="means something else here: rename the file"):
        bench_setting.halves(tmp_path / f"{name}.txt")


def test_other_settings_are_refused_and_more_repeats_are_not(fake, tmp_path):
    fake.bench(tmp_path, blocks=["workloads"], repeats=1)
    with pytest.raises(ValueError, match=r"max_tokens was 6, is 7"):
        fake.bench(tmp_path, blocks=["workloads"], repeats=1, max_tokens=7)
    with pytest.raises(ValueError, match=r"workloads was .*prompts_hash was"):
        fake.bench(tmp_path, blocks=["workloads"], prompts="math")
    fake.target = tiny.llama(seed=5)
    with pytest.raises(ValueError, match="target_hash was"):
        fake.bench(tmp_path, blocks=["workloads"])
    fake.target = tiny.llama()
    before = len(fake.done)
    assert {r["repeats"] for r in fake.bench(tmp_path, blocks=["workloads"], repeats=3)["rows"]} == {3}
    assert len(fake.done) == 3 * before == len(set(fake.done))
    path = tmp_path / "bench.jsonl"
    first, *lines = path.read_text().splitlines()
    record = json.loads(lines[0])
    path.write_text("\n".join([first, json.dumps({"key": record["key"]}), *lines[1:]]) + "\n")
    with pytest.raises(ValueError, match=r"line 2: the record of .* lacks block, .*, stats; delete the line"):
        fake.bench(tmp_path, blocks=["workloads"], repeats=3)
    (tmp_path / "bench.jsonl").write_text("not a journal\n")
    with pytest.raises(ValueError, match=r"bench\.jsonl is no journal of a bench"):
        fake.bench(tmp_path)


def test_runs_beyond_the_minutes_are_named_not_dropped(fake, tmp_path, capsys):
    result = fake.bench(tmp_path, minutes=1e-9, blocks=["workloads", "outside"])
    error = capsys.readouterr().err
    assert not fake.done and not result["rows"] and len(result["left"]) > 20
    assert all(key in error for key in result["left"])
    assert f"({len(result['left'])})" in (tmp_path / "bench.md").read_text()
    assert not fake.bench(tmp_path, blocks=["workloads", "outside"])["left"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": ["speed"]}, "a block is 'speed'; allowed are 'concurrency'"),
        ({"concurrency": [4, 0]}, "concurrency is .*at least 1"),
        ({"concurrency": []}, "concurrency is"),
        ({"max_tokens": 1}, "max_tokens is .*at least 2"),
        ({"minutes": 0}, "minutes is 0"),
        ({"max_tokens": 62}, "the longest prompt has 3 tokens.*raise it to 65"),
        ({"prompts": "no-such-set"}, "no-such-set.*humaneval"),
    ],
)
def test_settings_that_make_no_sense(fake, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        fake.bench(tmp_path, **changes)


# ---- on a tiny pair ----
@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Any, Any]:
    monkeypatch.setenv("AVREF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(arms, "WARMUP_INTERVAL", 3)
    monkeypatch.setattr(
        LLM, "prompt_ids", lambda llm, texts: [[3 + 7 * i % 40, 4 + i % 9, 5] for i in range(len(texts))]
    )
    target = tiny.llama()
    return target, tiny.near(target, 0.3)


def test_the_whole_bench_on_a_tiny_pair(pair, tmp_path):
    target, draft = pair
    drafters = {"draft_model": draft, "ngram": None}
    (tmp_path / "own.txt").write_text("one\ntwo\nthree\n")
    settings = {"concurrency": (1, 2), "repeats": 1, "max_tokens": 4, "max_model_len": 48, "depth": 2}
    result = bench.bench(
        target,
        "draft_model",
        folder=tmp_path,
        drafters=drafters,
        prompts=tmp_path / "own.txt",
        progress=False,
        **settings,
    )
    written = json.loads((tmp_path / "bench.json").read_text(), parse_constant=pytest.fail)
    assert written == json.loads(json.dumps(result))
    text = (tmp_path / "bench.md").read_text()
    for block in BLOCKS:
        assert {r["block"] for r in result["rows"]} == set(BLOCKS)
        for row in (r for r in result["rows"] if r["block"] == block):
            assert f"| {row['arm']} " in text
    arms_run = {(r["block"], r["arm"]): r for r in result["rows"]}
    assert {a for b, a in arms_run if b == "concurrency"} == {
        *("none", "fixed-1", "fixed-2", "always-trim", "adaptive-2", "adaptive-2-full-draft")
    }
    trimmed, fixed = arms_run["concurrency", "always-trim"], arms_run["concurrency", "fixed-2"]
    assert trimmed["verified_per_step"] == 0 < trimmed["drafted_per_step"]
    assert trimmed["tokens_per_request_step"] == 1 < fixed["tokens_per_request_step"]
    drafting = {a for b, a in arms_run if b == "drafters"}
    assert {"draft_model estimator", "draft_model q_max", "draft_model threshold", "ngram head"} < drafting
    assert {"draft_model head", "draft_model stop_head", "ngram estimator"} <= set(result["refused"])
    assert "ngram estimator" in text and "draft_model threshold" in result["thresholds"]
    fit = result["fits"]["concurrency"]["adaptive-2"]
    assert fit["refits"] >= arms.WARMUP_REFITS and len(fit["intercepts"]) == 2
    assert {"hf-generate", "hf-assisted", "none"} <= {a for b, a in arms_run if b == "outside"}
    for figure in ("pareto", "off_on"):
        assert (tmp_path / "figures" / f"{figure}.png").stat().st_size > 10_000
    assert result["cost_tables"]["draft_model-2"]["num_speculative_tokens"] == 2


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_a_run_does_not_depend_on_the_runs_before_it(pair, method):
    """`Learned.restore` gives the same decisions again; without it this arm would have gone on learning."""
    target, draft = pair
    base = LLM(target, max_num_seqs=1, max_model_len=64)
    drafter = draft if method == "draft_model" else None
    llm = arms.build(base, arms.speculative(method, drafter, 3, adaptive=True, adaptive_drafting=False), 4)
    llm.cost_table = tiny.flat_costs()
    prompts = [[3, 4, 5, 3, 4, 5, 3, 4], [6, 7, 6, 7, 6, 7], [8, 9, 10, 8, 9, 10], [11, 11, 11, 11]] * 3
    arms.warm_up(llm, prompts, 12, 4, 3)
    learned = arms.Learned(llm)

    def counts() -> tuple[Any, ...]:
        run = arms.measure(llm, prompts, arms.params(len(prompts), 12, 0), 4)
        s = run.stats
        return s.num_tokens, s.num_steps, s.verified_by_position.tolist(), s.accepted_by_position.tolist()

    def state() -> str:
        fit = llm.estimator.state_dict() if llm.estimator else {}
        record = getattr(llm.engine.drafter, "graded", None)
        return f"{fit} {None if record is None else record.tolist()} {llm.engine.step_count}"

    before = state()
    first = counts()
    assert state() != before
    for _ in range(2):
        learned.restore()
        assert state() == before
        assert counts() == first
    assert llm.engine.drafter is learned.engine.drafter and llm.model is base.model


def racers(pair: tuple[Any, Any]) -> dict[str, LLM]:
    target, draft = pair
    base = LLM(target, max_num_seqs=1, max_model_len=64)
    configs = {"none": None} | {f"fixed-{k}": arms.speculative("draft_model", draft, k, adaptive=False) for k in (1, 3)}
    return {name: arms.build(base, config, 2) for name, config in configs.items()}


def test_arms_of_a_race_take_turns_step_by_step(pair, monkeypatch):
    """Each arm does what it does alone, until the first has ended; all have nearly the same number of tokens."""
    llms, prompts = racers(pair), [[3, 4, 5], [6, 7], [8, 9, 10]]
    params = arms.params(3, 12, 0)
    alone = {name: arms.measure(llm, prompts, params, 2).stats for name, llm in llms.items()}
    most, apart = 2 * (3 + 1) + 2, []  # a step of two requests, with a prefill's first tokens
    for name, llm in llms.items():

        def step(name: str = name, llm: LLM = llm, real: Any = llm.engine.step) -> Any:
            tokens = {n: other.stats.num_tokens for n, other in llms.items() if other.engine.running}
            apart.append((name, tokens.get(name, 0) - min(tokens.values(), default=0)))
            return real()

        monkeypatch.setattr(llm.engine, "step", step)
    for llm in llms.values():
        llm.engine.stats = Stats.zeros(llm.engine.num_positions)
    raced = arms.race(llms, prompts, params, 2)
    assert list(raced) == list(llms)
    for name, run in raced.items():
        for count in ("num_tokens", "num_steps", "num_requests"):
            assert getattr(run.stats, count) <= getattr(alone[name], count)
        assert (run.stats.accepted_by_position <= alone[name].accepted_by_position).all()
        assert run.stats.num_tokens >= max(r.stats.num_tokens for r in raced.values()) - most
        assert 0 < run.decode_s < run.stats.wall_s and not llms[name].engine.running
    assert any(run.stats.num_steps == alone[name].num_steps for name, run in raced.items())
    order = [name for name, _ in apart]
    assert len(set(order[:3])) == 3 and max(ahead for _, ahead in apart) <= most
    assert sum(a != b for a, b in itertools.pairwise(order)) > len(order) // 2


def test_an_arm_that_fails_in_a_race_leaves_no_requests_behind(pair, monkeypatch):
    llms = racers(pair)
    params = arms.params(3, 12, 0)

    def fail() -> Any:
        raise RuntimeError("device lost")

    monkeypatch.setattr(llms["fixed-1"].engine, "decode", fail)
    with pytest.raises(RuntimeError, match="device lost"):
        arms.race(llms, [[3, 4, 5], [6, 7], [8, 9, 10]], params, 2)
    assert not any(llm.engine.running or llm.engine.waiting for llm in llms.values())
    assert arms.measure(llms["none"], [[3, 4, 5], [6, 7], [8]], params, 2).stats.num_tokens > 3


def test_the_threshold_is_the_fastest_trials(tmp_path):
    runner = object.__new__(bench.Runner)
    p = plan(blocks=("drafters",), concurrency=(8,))
    units = p.units("drafters")
    unit = next(u for u in units if u.arm.name == "dflash threshold")
    speeds = {"0.2": 50, "0.4": 90, "0.6": 70, "0.8": 10}
    trials = {u.key: record(u, speeds[u.arm.name.split()[-1]]) for u in units if u.arm.trial_of == "dflash threshold"}
    assert len(trials) == 4
    runner.journal = type("Journal", (), {"records": trials})()
    assert runner.chosen(unit).config["threshold"] == 0.4 and runner.chosen(unit).name == unit.arm.name
    plain = Arm("none")
    assert runner.chosen(Unit("drafters", MIX, 8, plain, 0)) is plain


def test_hugging_face_runs_under_the_same_terms_and_leaves_nothing_behind(pair, monkeypatch):
    target, draft = pair
    llm = LLM(target, {"method": "draft_model", "model": draft, "num_speculative_tokens": 2}, max_model_len=64)
    llm.generate([[3, 4]], arms.params(1, 2, 0))
    before = (target.config._attn_implementation, draft.config._attn_implementation)
    config = {
        k: getattr(draft.generation_config, k, None) for k in ("num_assistant_tokens", "assistant_confidence_threshold")
    }
    seen: list[dict[str, Any]] = []
    batches: list[int] = []
    real = type(target).generate

    def spy(model: Any, *inputs: Any, **options: Any) -> Any:
        batches.append(len(inputs[0])) if model is target else None
        if options.get("assistant_model") is not None:  # the assistant generates too
            its = options["assistant_model"].generation_config
            seen.append({k: getattr(its, k) for k in config} | {"schedule": its.num_assistant_tokens_schedule})
        return real(model, *inputs, **options)

    monkeypatch.setattr(type(target), "generate", spy)
    state = torch.get_rng_state()
    run = outside.generate(target, [[3, 4], [5, 6, 7]], 5, 0.95, 0, 1, draft, 2)
    assert run.stats.num_tokens == 10 and run.tokens_per_s == 10 / run.stats.wall_s
    wanted = {"num_assistant_tokens": 2, "assistant_confidence_threshold": 0.0, "schedule": "constant"}
    assert seen == [wanted, wanted]  # one call for each prompt
    assert outside.generate(target, [[3, 4], [5, 6, 7], [8]], 5, 1.0, 0, 2).stats.num_tokens == 15
    assert batches == [1, 1, 2, 1]  # so many at once
    assert torch.equal(torch.get_rng_state(), state)
    assert (target.config._attn_implementation, draft.config._attn_implementation) == before
    assert {k: getattr(draft.generation_config, k, None) for k in config} == config


def test_an_assistant_with_a_reduced_vocabulary_speaks_the_targets_for_the_time(pair):
    """Hugging Face compares laws over one vocabulary; at temperature 1 a token that cannot be drafted still comes."""
    target = pair[0]
    c = target.config
    shape = {"intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape |= {"hidden_size": c.hidden_size, "head_dim": 8, "vocab_size": c.vocab_size}
    tiny = TinyLlama(TinyLlamaConfig(**shape, max_position_embeddings=64, draft_vocab_size=6))
    assistant = tiny.on(target)
    head = assistant.get_output_embeddings()
    run = outside.generate(target, [[3, 4], [5, 6]], 6, 1.0, 0, 1, assistant, 3)
    assert run.stats.num_tokens == 12
    assert assistant.get_output_embeddings() is head and assistant.config.vocab_size == 6
    full = outside._FullHead(head, assistant.draft_vocab_ids, c.vocab_size)
    states = torch.randn(2, c.hidden_size)
    assert torch.equal(full(states)[:, :6], head(states)) and full(states)[:, 6:].isneginf().all()


# ---- prompts ----
@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.txt", "first\n\n  second  \r\nthird", ["first", "second", "third"]),
        ("a.jsonl", '{"prompt": "a b", "id": 1}\n"plain"\n\n{"question": "q?"}\n', ["a b", "plain", "q?"]),
        ("a.jsonl", '{"question_id": 81, "turns": ["one", "two"]}\n{"prompt": ["p1", "p2"]}', ["one", "p1"]),
        ("a.json", '["x", {"turns": ["y"]}]', ["x", "y"]),
        ("a.jsonl", '\ufeff{"prompt": "line separator \u2028 inside"}', ["line separator \u2028 inside"]),
    ],
)
def test_prompt_files(tmp_path, name, text, expected):
    (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    assert prompt_sets.load(tmp_path / name) == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\n \n", "holds no prompts"),
        ("a.txt", b"caf\xe9", "is not UTF-8 text"),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": ', "line 2 is not valid JSON"),
        ("a.jsonl", b'{"text": "x"}', "line 1 has fields text; it needs one of"),
        ("a.jsonl", b'{"prompt": 7}', "holds 7 where a prompt"),
        ("a.jsonl", b"[[]]", "where a prompt"),
        ("a.json", b'{"prompt": "x"}', "holds a JSON dict; give a list"),
        ("a.csv", b"x", "is no set of prompts; give a file"),
    ],
)
def test_bad_prompt_files_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        prompt_sets.load(tmp_path / name)


def test_a_file_that_is_not_there_and_one_too_short_to_halve(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        prompt_sets.load(tmp_path / "none.txt")
    (tmp_path / "one.txt").write_text("only\n")
    with pytest.raises(ValueError, match="one holds 1 prompt; give at least 2"):
        bench_setting.halves(tmp_path / "one.txt")


def test_settings_are_chosen_on_one_half_and_reported_on_the_other():
    texts = bench_setting.halves(None)
    for name in texts.reported:
        assert len(texts.tuning[name]) == len(texts.reported[name]) == 20
        assert not set(texts.tuning[name]) & set(texts.reported[name])


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache, and a hub that is not there."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")


@pytest.mark.parametrize("name", list(prompt_sets.SOURCES))
def test_offline_a_set_fails_within_seconds(nowhere, name):
    began = time.perf_counter()
    with pytest.raises(RuntimeError, match=r"tried: .*127.0.0.1:9 \(no answer.*pass the file"):
        prompt_sets.load(name)
    assert time.perf_counter() - began < 5


def test_a_network_that_swallows_everything_does_not_hang(nowhere, monkeypatch):
    stop = threading.Event()

    def never(*_: Any, **__: Any) -> None:
        stop.wait(60)
        raise OSError

    monkeypatch.setattr(urllib.request, "urlopen", never)
    monkeypatch.setattr(hub, "TIMEOUT_S", 0.2)
    began = time.perf_counter()
    with pytest.raises(RuntimeError, match="no answer within"):
        prompt_sets.load("gsm8k")
    assert time.perf_counter() - began < 5
    stop.set()


def test_a_set_in_the_hubs_cache_is_read_and_placeholders_are_refused(monkeypatch, tmp_path):
    asked = []

    def snapshot(repo: str, **options: Any) -> str:
        asked.append((repo, options["local_files_only"]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "question.jsonl").write_text('{"prompt": ["turn 1", "turn 2"]}\n')
    assert prompt_sets.load("mt_bench") == ["turn 1"]
    assert asked == [("HuggingFaceH4/mt_bench_prompts", True)]
    (tmp_path / "qualitative").mkdir()
    row = {"turns": [prompt_sets.PLACEHOLDER + " using its script"]}
    (tmp_path / "qualitative" / "test.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(RuntimeError, match="holds placeholders"):
        prompt_sets.load("speed_bench")


# ---- the command line ----
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--blocks", "speed"], "a block is 'speed'"),
        (["--prompts", "nothing.csv"], "is no set of prompts"),
        (["--model", "./no-such-folder"], "does not exist"),
    ],
)
def test_the_command_reports_errors_in_one_line(arguments, message, capsys, tmp_path):
    assert cli.main(["bench", "--output", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_a_race_gives_the_sizes_back_and_profiles_for_all_requests(pair, monkeypatch):
    target, draft = pair
    config = arms.speculative("draft_model", draft, 2, adaptive=True)
    llm = arms.build(LLM(target, max_num_seqs=1, max_model_len=64), config, 4)
    run = arms.measure(llm, [[3, 4, 5], [6, 7]], arms.params(2, 6, 0), 1)
    assert run.stats.num_steps > 0 and llm.engine.max_num_seqs == 4 and llm.cost_table.max_requests == 4
    monkeypatch.setattr(llm.engine, "decode", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        arms.measure(llm, [[3, 4, 5], [6, 7]], arms.params(2, 6, 0), 1)
    assert llm.engine.max_num_seqs == 4


def test_warming_up_goes_on_until_a_depth_can_be_chosen_at_each_load(pair):
    target, _ = pair
    config = arms.speculative("draft_model", target, 7, adaptive=True)  # its own drafter: few steps for many tokens
    llm = arms.build(LLM(target, max_num_seqs=1, max_model_len=64), config, 2)
    llm.cost_table = tiny.flat_costs()
    arms.warm_up(llm, [[3, 4, 5], [6, 7], [8]], 12, 2, 3, loads=(1, 2))
    assert llm.engine.depth.worth(1).seen[1] >= llm.engine.depth.warmup
