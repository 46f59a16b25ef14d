"""The bench: every arm of the comparison on one loaded target, in one process, resumable, with its evidence kept.

All arms of a repeat answer the same prompts with the same seeds (an adaptive arm's are moved, since its warm-up came
before: `LLM.generate`) and take turns step by step (`arms.race`), in an order
that rotates; only Hugging Face's calls, which cannot be stopped in between, run one after another. What is reported are
medians over repeats with the lowest and the highest, and ratios within a repeat. The cost tables are measured first.
Every adaptive arm is warmed up once on prompts of its own, and every run starts from what the warm-up taught, so no run
depends on which came before it. Prompts of even number in each workload serve to choose settings (the thresholds of the
stopping rules), those of odd number are reported.
"""

from __future__ import annotations

import gc
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from avref import arms, profiling, workloads
from avref.config import METHODS, one_of
from avref.cost_table import CostTable
from avref.evidence import bench_report, bench_setting, outside
from avref.evidence.bench_plan import BLOCKS, CONCURRENCY, TOP_P, TUNING, Arm, Plan, Unit
from avref.evidence.journal import Journal
from avref.llm import LLM


@dataclass
class Built:
    """An arm that is ready to run, what it had learned when the warm-up ended, and the warm-up's fit."""

    llm: LLM
    learned: arms.Learned | None
    fit: dict[str, Any] | None


RECORD = ("block", "case", "concurrency", "repeat", "arm", "seconds", "threshold", "fit", "with_prefill", "stats")


class Runner:
    """Builds, prepares and runs arms on one loaded target; `prompts` are token ids by case."""

    def __init__(
        self, base: LLM, folder: Path, max_tokens: int, prompts: Mapping[str, Sequence[Sequence[int]]], journal: Journal
    ) -> None:
        self.base, self.folder, self.max_tokens, self.prompts = base, folder, max_tokens, prompts
        self.journal = journal
        self.warm = base.prompt_ids(workloads.load(workloads.WARMUP))
        self.built: dict[str, Built] = {}
        self.refused: dict[str, str] = {}

    def forget(self) -> None:
        """Drop all arms: a block has ended."""
        self.built.clear()
        gc.collect()

    def ready(self, unit: Unit, loads: Sequence[int]) -> bool:
        """Build the unit's arm at its first run, with its cost table measured and its estimator warmed up.

        False, and the reason in `refused`, for a drafter that lacks what this confidence reads.
        """
        if unit.arm.name in self.built:
            return True
        try:
            arm = self.chosen(unit)
            llm = arms.build(self.base, arm.config, max(loads))
        except ValueError as error:
            if unit.block != "drafters":
                raise
            self.refused[unit.arm.owner] = str(error)
            return False
        self.built[unit.arm.name] = self._prepared(llm, arm, loads)
        return True

    def run(self, units: Sequence[Unit]) -> list[dict[str, Any]]:
        """One run of arms that are ready and belong to one race (`Unit.race`) -> their records for the journal."""
        first = units[0]
        prompts = arms.chosen(self.prompts[first.case], first.count, first.repeat)
        run = self._outside if first.block == "outside" else self._inside
        return [
            {
                **{name: getattr(unit, name) for name in ("block", "case", "concurrency", "repeat")},
                "arm": unit.arm.name,
                "seconds": run.stats.wall_s,
                "threshold": built.llm.config.threshold if built.llm.config else None,
                "fit": built.fit,
                "with_prefill": run.with_prefill,
                "stats": {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in vars(run.stats).items()},
            }
            for unit, run in zip(units, run(units, prompts), strict=True)
            for built in [self.built[unit.arm.name]]
        ]

    def chosen(self, unit: Unit) -> Arm:
        """The arm, with the value of its threshold that was fastest on the prompts for choosing."""
        if not (arm := unit.arm).tune:
            return arm
        keys = {v: Unit(unit.block, TUNING, unit.concurrency, arm.at(v), 0).key for v in arm.tune}
        best = max(keys, key=lambda v: bench_report.run_of(self.journal.records[keys[v]]).tokens_per_s)
        return Arm(arm.name, arm.at(best).config)

    def _inside(self, units: Sequence[Unit], prompts: Sequence[Sequence[int]]) -> list[arms.Run]:
        for unit in units:
            if learned := self.built[unit.arm.name].learned:
                learned.restore()
        params = arms.params(units[0].count, self.max_tokens, 1000 * units[0].repeat)
        llms = {unit.arm.name: self.built[unit.arm.name].llm for unit in units}
        return list(arms.race(llms, prompts, params, units[0].concurrency).values())

    def _outside(self, units: Sequence[Unit], prompts: Sequence[Sequence[int]]) -> list[arms.Run]:
        """Our arm and Hugging Face's under the same terms: all answers of one length, the whole time counts."""
        (unit,) = units
        top_p, seed, llm = TOP_P[unit.case], 1000 * unit.repeat, self.built[unit.arm.name].llm
        if unit.arm.theirs:
            return [self._theirs(llm, unit.arm, prompts, self.max_tokens, top_p, seed, unit.concurrency)]
        llm.engine.max_num_seqs = unit.concurrency
        llm.generate(prompts, arms.params(unit.count, self.max_tokens, seed, top_p=top_p, ignore_eos=True))
        return [arms.Run(llm.stats, with_prefill=True)]

    def _theirs(
        self, llm: LLM, arm: Arm, prompts: Any, max_tokens: int, top_p: float, seed: int, together: int
    ) -> arms.Run:
        drafter: Any = llm.engine.drafter
        more = drafter.model.model if arm.theirs == "assisted" else None, llm.engine.num_positions
        return outside.generate(self.base.model, prompts, max_tokens, top_p, seed, together, *more)

    def _prepared(self, llm: LLM, arm: Arm, loads: Sequence[int]) -> Built:
        if arm.trims_all:
            llm.engine.override = lambda drafted: 0
        if llm.engine.has_budget:
            llm.cost_table = self._cost_table(llm, arm, max(loads))
            together = min(arms.WARMUP_CONCURRENCY, max(loads))
            further = loads if llm.engine.depth else ()
            arms.warm_up(llm, self.warm, self.max_tokens, together, arms.WARMUP_INTERVAL, further)
            return Built(llm, arms.Learned(llm), arms.fit(llm))
        if arm.theirs:
            self._theirs(llm, arm, self.warm[:1], 2, 1.0, 0, 1)  # the first call is slower than the rest
        else:
            for load in loads if llm.device.type == "cuda" else loads[:1]:  # a GPU's first step of a size is slow
                own = [self.warm[i % len(self.warm)] for i in range(load)]
                arms.measure(llm, own, arms.params(load, 3, 0, ignore_eos=True), load)
        return Built(llm, None, None)

    def _cost_table(self, llm: LLM, arm: Arm, max_num_seqs: int) -> CostTable:
        """Measured once for each method and batch size, and kept beside the journal: a resumed bench decides alike."""
        path = self.folder / "cost-tables" / f"{arm.method}-{max_num_seqs}.json"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            if llm.engine.depth is None:  # it shows its drafter every step, and one without drafts must not cost that
                llm = arms.build(self.base, {**(arm.config or {}), "adaptive_drafting": True}, max_num_seqs)
            profiling.load_or_profile(llm, again=True).save(path)
        return CostTable.load(path)


def bench(
    model: Any = "smollm2",
    method: str = "dflash",
    drafter: Any = None,
    *,
    folder: Path = Path("bench"),
    blocks: Sequence[str] = BLOCKS,
    concurrency: Sequence[int] = CONCURRENCY,
    repeats: int = 3,
    max_tokens: int = 32,
    minutes: float | None = None,
    prompts: str | Path | None = None,
    drafters: Mapping[str, Any] | None = None,
    depth: int = 7,
    device: str | None = None,
    dtype: str = "auto",
    max_model_len: int = 512,
    progress: bool = True,
) -> dict[str, Any]:
    """Run the blocks' arms, write `bench.jsonl`, `bench.json`, `bench.md` and `figures/` under `folder`; the result.

    Runs that the journal holds already are not done again. `minutes` ends the bench before a run that would go beyond
    them (preparing an arm, up to a minute, is not foreseen); what is left is printed and is in the result. `prompts` is
    a file or the name of a set (`prompt_sets`); None is the five shipped workloads. `drafters` maps methods to drafters
    as `speculative_config["model"]` takes them; None is every shipped one, ngram and layer_skip. Speeds are tokens per
    second of decoding, prefill apart; in the block `outside` of the whole call. Raises ValueError for settings that
    make no sense, or that differ from the journal's.
    """
    for name, values, least in (
        ("concurrency", concurrency, 1),
        ("repeats", [repeats], 1),
        ("max_tokens", [max_tokens], 2),
        ("depth", [depth], 1),
    ):
        if not values or min(values) < least:
            raise ValueError(f"{name} is {list(values)}; it must be at least {least}")
    blocks = tuple(dict.fromkeys(blocks))
    for block in blocks:
        one_of("a block", block, BLOCKS)
    for name in (method, *(drafters or ())):
        one_of("a method", name, METHODS)
    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes is {minutes}; give a positive number, or leave it out for no limit")
    texts = bench_setting.halves(prompts)
    base = LLM(model, device=device, dtype=dtype, max_num_seqs=1, max_model_len=max_model_len)
    found = dict(drafters) if drafters is not None else bench_setting.shipped(base.name)
    found[method] = drafter if drafter is not None else found.get(method)
    depths = {name: bench_setting.depth_of(name, value, depth) for name, value in found.items()}
    plan = Plan(method, found, depths, list(texts.reported), sorted(set(concurrency)), repeats, blocks)
    ids = bench_setting.token_ids(base, texts, max_tokens)
    settings = bench_setting.settings(base, plan, max_tokens, texts)
    if drafter is not None or {"concurrency", "workloads"} & set(blocks):
        arms.build(base, arms.speculative(method, found[method], depths[method], adaptive=True), 1)  # it can be loaded
    journal = Journal(folder / "bench.jsonl", settings, RECORD)
    if journal.begun:
        for table in (folder / "cost-tables").glob("*.json"):
            table.unlink()  # left by a journal that is gone
    runner = Runner(base, folder, max_tokens, ids, journal)
    left = _run_all(runner, plan, minutes, progress)
    tables = sorted((folder / "cost-tables").glob("*.json"))
    result = {
        "settings": settings,
        "machine": {**profiling.describe(base), "method": method, "drafter": str(drafter or "shipped")},
        "cost_tables": {path.stem: CostTable.load(path).metadata for path in tables},
        **bench_report.summary(plan, journal.records),
        "refused": runner.refused,
        "left": left,
    }
    bench_report.save(result, folder)
    return result


def _run_all(runner: Runner, plan: Plan, minutes: float | None, progress: bool) -> list[str]:
    """Run what the journal does not hold -> the keys of the runs that did not fit into `minutes`."""
    journal, began = runner.journal, time.monotonic()
    units = [u for block in plan.blocks for u in plan.units(block)]
    left = [u for u in units if u.key not in journal]
    minutes_left = plan.seconds(journal.records, runner.max_tokens) * _pace(journal, units, runner.max_tokens) / 60
    _say(
        f"{len(units)} runs, {len(units) - len(left)} done before; the others take about {minutes_left:.0f} minutes"
        + (" at the pace of those done" if len(left) < len(units) else " on two cores with the default target")
    )
    before = ""
    with tqdm(total=len(left), desc="bench", unit="run", disable=not progress, dynamic_ncols=True) as bar:
        for race, together in itertools.groupby(units, lambda unit: unit.race):
            group = [u for u in together if u.key not in journal and u.arm.owner not in runner.refused]
            if not group:
                continue
            if before and group[0].block != before:
                runner.forget()
            before = group[0].block
            pace = _pace(journal, units, runner.max_tokens)
            seconds = pace * sum(u.seconds(runner.max_tokens) for u in group)
            if minutes is not None and time.monotonic() - began + seconds > 60 * minutes:
                return _say_left(runner, units, minutes)
            bar.set_postfix_str(race, refresh=False)
            ready = [unit for unit in group if runner.ready(unit, plan.loads(unit.block))]
            for unit, record in zip(ready, runner.run(ready) if ready else [], strict=True):
                journal.append(unit.key, record)
            bar.update(len(group))
    return []


def _pace(journal: Journal, units: Sequence[Unit], max_tokens: int) -> float:
    """Seconds taken over seconds guessed, of the runs done."""
    done = [u for u in units if u.key in journal]
    guessed = sum(u.seconds(max_tokens) for u in done)
    return sum(journal.records[u.key]["seconds"] for u in done) / guessed if done else 1.0


def _say_left(runner: Runner, units: Sequence[Unit], minutes: float) -> list[str]:
    left = [u.key for u in units if u.key not in runner.journal and u.arm.owner not in runner.refused]
    _say("\n  ".join([f"{len(left)} runs do not fit into {minutes:g} minutes; another start does them:", *left]))
    return left


def _say(text: str) -> None:
    print(f"avref: bench: {text}", file=sys.stderr, flush=True)
