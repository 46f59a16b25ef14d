"""The main job: plain decoding, fixed-length speculation and adaptive verification side by side on one machine.

Every number is measured in the run.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate
from tqdm.auto import tqdm

from avref import profiling, workloads
from avref.config import SamplingParams
from avref.estimator import OnlineAcceptanceEstimator
from avref.llm import LLM
from avref.stats import Stats

FIXED = (1, 3, 7)
WARMUP_CONCURRENCY, WARMUP_INTERVAL, WARMUP_REFITS = 8, 32, 5


@dataclass
class Run:
    """One `generate` of one arm: what `Stats` counted."""

    stats: Stats

    @property
    def decode_s(self) -> float:
        """Seconds in decode steps: drafting, forward, sampling and bookkeeping.

        Prefill is left out; it is the same for every arm.
        """
        s = self.stats
        return (s.draft_ms + s.verify_ms + s.sample_ms + s.other_ms) / 1e3

    @property
    def tokens_per_s(self) -> float:
        """Tokens emitted by decode steps per second of decoding."""
        return (self.stats.num_tokens - self.stats.num_requests) / self.decode_s


def make_arms(base: LLM, method: str, drafter: Any, max_num_seqs: int, depth: int = 7) -> dict[str, LLM]:
    """`none`, `fixed-1`, `fixed-3`, `fixed-7` and `adaptive-7`, all on the same loaded target.

    Every arm has a cache of its own.
    """
    shared: dict[str, Any] = {"max_num_seqs": max_num_seqs, "max_model_len": base.max_model_len, "seed": base.seed}

    def arm(num: int, adaptive: bool) -> LLM:
        config = {
            "method": method,
            "model": drafter,
            "num_speculative_tokens": num,
            "enable_adaptive_verification": adaptive,
        }
        return LLM(base.model, config, base.tokenizer, **shared)

    arms = {"none": LLM(base.model, None, base.tokenizer, **shared)}
    arms |= {f"fixed-{k}": arm(k, False) for k in FIXED if k <= depth}
    return arms | {f"adaptive-{depth}": arm(depth, True)}


def measure(llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], concurrency: int) -> Run:
    """Decode with `concurrency` requests running, until the prompts no longer fill the batch."""
    llm.engine.max_num_seqs = concurrency
    return Run(llm.measure(prompts, params))


def warm_up(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int, concurrency: int = WARMUP_CONCURRENCY) -> int:
    """Fit the estimator on prompts of their own until `WARMUP_REFITS` refits are done; return the steps taken.

    A refit comes every `WARMUP_INTERVAL` steps here, so that it takes seconds.
    """
    estimator = llm.estimator
    assert estimator is not None
    usual, estimator.refit_interval = estimator.refit_interval, WARMUP_INTERVAL
    refits, steps, seed = 0, 0, 50_000
    while refits < WARMUP_REFITS:
        run = measure(llm, prompts, _params(len(prompts), max_tokens, seed), concurrency)
        refits, steps, seed = refits + run.stats.num_refits, steps + run.stats.num_steps, seed + len(prompts)
    estimator.refit_interval = usual
    return steps


def quickstart(
    model: Any = "smollm2",
    method: str = "dflash",
    drafter: Any = None,
    *,
    concurrency: Sequence[int] = (1, 8, 32),
    repeats: int = 3,
    max_tokens: int = 32,
    device: str | None = None,
    dtype: str = "auto",
    max_model_len: int = 512,
    progress: bool = True,
) -> dict[str, Any]:
    """Run all arms, interleaved, and return every number of the result.

    The result holds `rows` (one per arm and concurrency), `cold`, `warm_up`, `estimator`, `settings`, `machine` and
    `cost_table`. Each repeat has prompts of its own from the mix of the five workloads; every arm decodes the same
    prompts with the same seeds. Medians over repeats, with the lowest and the highest.
    """
    for name, value, least in (
        ("repeats", repeats, 1),
        ("max_tokens", max_tokens, 2),
        *(("concurrency", c, 1) for c in concurrency),
    ):
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")
    base = LLM(model, device=device, dtype=dtype, max_num_seqs=1, max_model_len=max_model_len)
    arms = make_arms(base, method, drafter, max(concurrency))
    adaptive = arms["adaptive-7"]
    estimator = adaptive.estimator
    assert estimator is not None
    adaptive.cost_table = profiling.load_or_profile(adaptive)
    warm = base.prompt_ids(workloads.load("warmup"))
    together = min(WARMUP_CONCURRENCY, max(concurrency))
    cold_run = measure(adaptive, warm[::5], _params(len(warm[::5]), max_tokens, 40_000), together)
    estimator.load_state_dict(OnlineAcceptanceEstimator(7).state_dict())  # forget what the cold run taught
    started = time.perf_counter()
    warm_steps = warm_up(adaptive, warm, max_tokens, together)
    warm_s = time.perf_counter() - started
    prompts = base.prompt_ids(workloads.mix())
    jobs = [(repeat, c, name) for repeat in range(repeats) for c in concurrency for name in _rotate(list(arms), repeat)]
    runs: dict[tuple[int, str], list[Run]] = {}
    for repeat, c, name in tqdm(jobs, desc="measuring", unit="run", disable=not progress, dynamic_ncols=True):
        count = max(3, c + c // 2)  # some enter when others leave
        chosen = [prompts[(repeat * count + i) % len(prompts)] for i in range(count)]
        runs.setdefault((c, name), []).append(measure(arms[name], chosen, _params(count, max_tokens, 1000 * repeat), c))
    rows = [
        _row(c, name, runs[c, name], [r.tokens_per_s for r in runs[c, "none"]]) for c in concurrency for name in arms
    ]
    assert adaptive.cost_table is not None
    return {
        "rows": rows,
        "cold": _row(together, "adaptive-7", [cold_run], None),
        "warm_up": {
            "refits": WARMUP_REFITS,
            "steps": warm_steps,
            "seconds": warm_s,
            "refit_interval": WARMUP_INTERVAL,
            "prompts": "warmup",
        },
        "estimator": {
            "slope": float(estimator.slope),
            "intercepts": estimator.intercepts.tolist(),
            "refits": estimator.num_refits,
        },
        "settings": {
            "temperature": 1.0,
            "top_p": 0.95,
            "max_tokens": max_tokens,
            "repeats": repeats,
            "workloads": list(workloads.NAMES),
            "seeds": [1000 * r for r in range(repeats)],
        },
        "machine": profiling.describe(adaptive),
        "cost_table": adaptive.cost_table.metadata,
    }


def _params(count: int, max_tokens: int, seed: int) -> list[SamplingParams]:
    return [SamplingParams(temperature=1.0, top_p=0.95, max_tokens=max_tokens, seed=seed + i) for i in range(count)]


def _rotate(names: list[str], by: int) -> list[str]:
    by %= len(names)
    return names[by:] + names[:by]


def _row(concurrency: int, arm: str, runs: Sequence[Run], plain: Sequence[float] | None) -> dict[str, Any]:
    """Medians and spread of one arm at one concurrency; counts are summed over repeats."""
    speeds = [r.tokens_per_s for r in runs]
    stats = [r.stats for r in runs]
    total = {name: np.sum([getattr(s, name) for s in stats], axis=0) for name in vars(stats[0])}
    ratios = [s / p for s, p in zip(speeds, plain, strict=True)] if plain else []
    return {
        "arm": arm,
        "concurrency": concurrency,
        "tokens_per_s": statistics.median(speeds),
        "tokens_per_s_range": [min(speeds), max(speeds)],
        "speedup": statistics.median(ratios) if ratios else None,
        "speedup_range": [min(ratios), max(ratios)] if ratios else None,
        "tokens_per_s_with_prefill": statistics.median(s.num_tokens / s.wall_s for s in stats),
        "tokens_per_forward": float((total["num_tokens"] - total["num_requests"]) / max(total["num_steps"], 1)),
        "tokens_per_request_step": float(
            (total["num_tokens"] - total["num_requests"]) / max(total["num_request_steps"], 1)
        ),
        "verified_per_step": float(total["verified_by_position"].sum() / max(total["num_steps"], 1)),
        "accepted_by_position": total["accepted_by_position"].tolist(),
        "graded_by_position": total["graded_by_position"].tolist(),
        "verified_by_position": total["verified_by_position"].tolist(),
        "drafted_by_position": total["drafted_by_position"].tolist(),
        "milliseconds": {k: float(total[f"{k}_ms"]) for k in ("prefill", "draft", "verify", "sample", "other")},
        "refits": int(total["num_refits"]),
    }


def table(result: dict[str, Any]) -> str:
    """The result as one readable table."""
    header = [
        "requests",
        "arm",
        "tokens/s",
        "lowest - highest",
        "x none",
        "tokens per\nforward",
        "per request\nand step",
        "drafts verified\nper step",
    ]
    header += ["tokens per forward", "tokens per request and step", "drafts verified per step"]
    lines = [
        [
            r["concurrency"],
            r["arm"],
            f"{r['tokens_per_s']:.0f}",
            "{:.0f} - {:.0f}".format(*r["tokens_per_s_range"]),
            f"{r['speedup']:.2f}",
            f"{r['tokens_per_forward']:.1f}",
            f"{r['tokens_per_request_step']:.2f}",
            f"{r['verified_per_step']:.1f}",
        ]
        for r in result["rows"]
    ]
    m, cold, est = result["machine"], result["cold"], result["estimator"]
    text = [
        f"{m['target']} + {m['method']}, {m['dtype']}, {m['device']}, {m['threads']} threads; "
        "temperature 1, top-p 0.95; decoding only (prefill apart)",
        "",
    ]
    text += [
        tabulate(lines, header, tablefmt="simple", disable_numparse=True, colalign=("right", "left", *["right"] * 6)),
        "",
    ]
    text += ["acceptance by position, accepted / graded:"]
    for r in result["rows"]:
        if r["arm"] in ("fixed-7", "adaptive-7"):
            counts = zip(r["accepted_by_position"], r["graded_by_position"], strict=True)
            shares = "  ".join(f"{accepted}/{graded}" for accepted, graded in counts)
            text.append(f"  {r['concurrency']:>3} requests, {r['arm']:<10}  {shares}")
    w = result["warm_up"]
    text += [
        f"estimator: {est['refits']} refits in all, slope {est['slope']:.3f}, intercepts "
        + " ".join(f"{b:+.2f}" for b in est["intercepts"]),
        f"  warmed up on the warm-up prompts: {w['refits']} refits of {w['refit_interval']} steps, "
        f"{w['seconds']:.0f} s",
        f"  cold (before any refit, {cold['concurrency']} requests): {cold['tokens_per_s']:.0f} tokens/s, "
        f"{cold['verified_per_step']:.1f} drafts verified per step",
    ]
    return "\n".join(text)


def save(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write `quickstart.json` and `figures/quickstart.png` under `folder`."""
    from avref import plots

    path, figures = folder / "quickstart.json", folder / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    plots.plot_quickstart(result).savefig(figures / "quickstart.png", dpi=150)
    return [path, figures / "quickstart.png"]
