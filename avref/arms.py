"""Arms: ways of decoding that run side by side on one loaded target, and the one way in which they are measured.

The quick start and the bench build, warm up and measure their arms here, and make their rows here.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from avref import profiling
from avref.config import SamplingParams
from avref.llm import LLM
from avref.stats import Stats

WARMUP_CONCURRENCY, WARMUP_INTERVAL, WARMUP_REFITS = 8, 32, 5
WARMUP_STEPS, WARMUP_TOKENS = 16, 24  # at each further load: twice what a first choice of the depth needs
MILLISECONDS = ("prefill", "draft", "verify", "sample", "other")
Item = TypeVar("Item")


@dataclass
class Run:
    """What `Stats` counted in one run of one arm, and its speed; `with_prefill` says which time the speed is over."""

    stats: Stats
    with_prefill: bool = False

    @property
    def decode_s(self) -> float:
        """Seconds in decode steps: drafting, forward, sampling and bookkeeping.

        Prefill is left out, the drafter's share of it too (a draft model reads the prompt once, as the target does).
        """
        s = self.stats
        return (s.draft_ms + s.verify_ms + s.sample_ms + s.other_ms) / 1e3

    @property
    def tokens_per_s(self) -> float:
        """Tokens emitted by decode steps per second of decoding; `with_prefill`: all tokens per second in all."""
        if self.with_prefill:
            return self.stats.num_tokens / self.stats.wall_s
        return (self.stats.num_tokens - self.stats.num_requests) / self.decode_s


def build(base: LLM, config: Mapping[str, Any] | None, max_num_seqs: int) -> LLM:
    """An arm on the target that `base` has loaded, with a cache (and a drafter) of its own; None is plain decoding."""
    shared: dict[str, Any] = {"max_num_seqs": max_num_seqs, "max_model_len": base.max_model_len, "seed": base.seed}
    return LLM(base.model, config, base.tokenizer, **shared)


def speculative(method: str, drafter: Any, num: int, adaptive: bool, **more: Any) -> dict[str, Any]:
    """The `speculative_config` of an arm: `num` drafts, verified all (fixed) or adaptively."""
    own = {"method": method, "model": drafter, "num_speculative_tokens": num}
    return {**own, "enable_adaptive_verification": adaptive, **more}


def params(count: int, max_tokens: int, seed: int, **more: Any) -> list[SamplingParams]:
    """Sampling at temperature 1 and top-p .95 (unless `more` says otherwise); request i has seed `seed + i`."""
    settings: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "max_tokens": max_tokens, **more}
    return [SamplingParams(**settings, seed=seed + i) for i in range(count)]


def chosen(prompts: Sequence[Item], count: int, repeat: int) -> list[Item]:
    """The `count` prompts of one repeat: the next ones of the list, from its start again once it is used up."""
    return [prompts[(repeat * count + i) % len(prompts)] for i in range(count)]


def measure(llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], concurrency: int) -> Run:
    """Decode with `concurrency` requests running, until the prompts no longer fill the batch."""
    return race({"": llm}, prompts, params, concurrency)[""]


def race(
    llms: Mapping[str, LLM], prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], concurrency: int
) -> dict[str, Run]:
    """`measure` for several arms on the same prompts; they take turns, always the one with the fewest tokens so far.

    A machine's own speed drifts within seconds, often by more than the arms differ. Taking turns step by step, all
    arms meet the same machine, so that ratios of their speeds do not carry the drift. For the same reason all stop
    when the first one can no longer fill its batch. Arms with equally many tokens go in the given order.
    """
    for llm in llms.values():
        if llm.engine.has_budget and llm.cost_table is None:
            llm.cost_table = profiling.load_or_profile(llm)  # for all requests that it may run, not for so many
    before = {name: llm.engine.max_num_seqs for name, llm in llms.items()}
    for llm in llms.values():
        llm.engine.max_num_seqs = concurrency
    running = {name: llm.measuring(prompts, params) for name, llm in llms.items()}
    tokens = dict.fromkeys(llms, 0)
    try:
        while next(running[name := min(running, key=tokens.__getitem__)], None) is not None:
            tokens[name] = llms[name].stats.num_tokens
    finally:
        for name, llm in llms.items():
            llm.engine.max_num_seqs = before[name]
        for steps in running.values():
            steps.close()  # no requests are left behind
    return {name: Run(llm.stats) for name, llm in llms.items()}


def warm_up(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    concurrency: int = WARMUP_CONCURRENCY,
    interval: int = WARMUP_INTERVAL,
    loads: Sequence[int] = (),
) -> int:
    """Let an adaptive arm learn from prompts of their own until `WARMUP_REFITS` refits; return the steps taken.

    A refit comes every `interval` steps here, so that it takes seconds; an arm without an estimator takes as many
    steps as those refits need. At each of the `loads` a few steps follow, since what drafting is worth depends on the
    number of requests (`depth`).
    """
    estimator = llm.estimator
    usual = estimator.refit_interval if estimator else 0
    if estimator:
        estimator.refit_interval = interval
    refits, steps, seed = 0, 0, 50_000
    while refits < WARMUP_REFITS if estimator else steps < WARMUP_REFITS * interval:
        run = measure(llm, prompts, params(len(prompts), max_tokens, seed), concurrency)
        refits, steps, seed = refits + run.stats.num_refits, steps + run.stats.num_steps, seed + len(prompts)
    if estimator:
        estimator.refit_interval = usual
    for load in sorted(set(loads) - {concurrency}):
        own, at_load = [prompts[i % len(prompts)] for i in range(load)], 0
        while at_load < WARMUP_STEPS:
            run = measure(llm, own, params(load, WARMUP_TOKENS, seed, ignore_eos=True), load)
            at_load, seed = at_load + run.stats.num_steps, seed + load
        steps += at_load
    return steps


class Learned:
    """What an arm's engine has learned so far, to go back to: a run then does not depend on which ran before it.

    Kept is everything that the engine changes as it decodes (estimator, running profiles, step count), and the record
    of an n-gram drafter; the models and the requests are not touched.
    """

    _FIXED = ("target", "drafter", "config", "cost_table", "override", "on_finish", "max_num_seqs")
    _REQUESTS = ("waiting", "running", "watch", "stats")

    def __init__(self, llm: LLM) -> None:
        self.engine = llm.engine
        self.state = {k: v for k, v in vars(self.engine).items() if k not in (*self._FIXED, *self._REQUESTS)}
        self.record = {k: v for k, v in self._drafter().items() if k in profiling.RECORD}
        self.state, self.record = self._copy(self.state), self._copy(self.record)

    def restore(self) -> None:
        """Put it back, as often as wanted."""
        vars(self.engine).update(self._copy(self.state))
        self._drafter().update(self._copy(self.record))

    def _drafter(self) -> dict[str, Any]:
        return vars(self.engine.drafter) if self.engine.drafter is not None else {}

    @torch.inference_mode()
    def _copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """A deep copy in which references to the engine and to what is fixed stay what they are."""
        kept = [self.engine, *(getattr(self.engine, name) for name in (*self._FIXED, *self._REQUESTS))]
        return copy.deepcopy(state, {id(x): x for x in kept})


def fit(llm: LLM) -> dict[str, Any] | None:
    """Coefficients of an arm's estimator, for a report; None without one."""
    e = llm.estimator
    return None if e is None else {"slope": float(e.slope), "intercepts": e.intercepts.tolist(), "refits": e.num_refits}


def rotate(items: Sequence[Item], by: int) -> list[Item]:
    """The items from place `by` on, then those before: no arm is always the first to run."""
    by %= len(items)
    return [*items[by:], *items[:by]]


def deepest(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of a quick start's rows, the longest fixed length and the adaptive arm: they come last."""
    return list(dict.fromkeys(r["arm"] for r in rows))[-2:]


def row(concurrency: int, arm: str, runs: Sequence[Run], plain: Sequence[float | None] | None) -> dict[str, Any]:
    """Medians and spread of one arm at one concurrency; counts are summed over repeats.

    `plain` holds what the speed is compared with in each run's own repeat (None where that is missing).
    """
    speeds = [r.tokens_per_s for r in runs]
    stats = [r.stats for r in runs]
    total = {name: np.sum([getattr(s, name) for s in stats], axis=0) for name in vars(stats[0])}
    ratios = [s / p for s, p in zip(speeds, plain, strict=True) if p] if plain else []
    emitted = total["num_tokens"] - total["num_requests"]
    return {
        "arm": arm,
        "concurrency": concurrency,
        "tokens_per_s": statistics.median(speeds),
        "tokens_per_s_range": [min(speeds), max(speeds)],
        "speedup": statistics.median(ratios) if ratios else None,
        "speedup_range": [min(ratios), max(ratios)] if ratios else None,
        "tokens_per_s_with_prefill": statistics.median(s.num_tokens / s.wall_s for s in stats),
        "tokens_per_forward": float(emitted / max(total["num_steps"], 1)),
        "tokens_per_request_step": float(emitted / total["num_request_steps"]) if total["num_request_steps"] else 1.0,
        "verified_per_step": float(total["verified_by_position"].sum() / max(total["num_steps"], 1)),
        **{name: values.tolist() for name, values in total.items() if name.endswith("_by_position")},
        "milliseconds": {k: float(total[f"{k}_ms"]) for k in MILLISECONDS},
        "refits": int(total["num_refits"]),
    }
