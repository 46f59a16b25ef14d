"""The main job: plain decoding, fixed-length speculation and adaptive verification side by side on one machine.

Every number is measured in the run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate
from tqdm.auto import tqdm

from avref import arms, profiling, workloads
from avref.arms import Run
from avref.config import METHODS, one_of
from avref.evidence.bench_setting import check_room, depth_of
from avref.files import write_text
from avref.llm import LLM

FIXED = (1, 3, 7)


def make_arms(base: LLM, method: str, drafter: Any, max_num_seqs: int, depth: int = 7) -> dict[str, LLM]:
    """`none`, `fixed-1`, `fixed-3`, `fixed-7` and `adaptive-7`, all on the same loaded target.

    Every arm has a cache of its own. A drafter that was trained for fewer positions (mtp: 5) takes the place of 7.
    """
    depth = depth_of(method, drafter, depth)
    configs: dict[str, Any] = {"none": None}
    lengths = (*(k for k in FIXED if k < depth), depth)
    configs |= {f"fixed-{k}": arms.speculative(method, drafter, k, adaptive=False) for k in lengths}
    configs[f"adaptive-{depth}"] = arms.speculative(method, drafter, depth, adaptive=True)
    return {name: arms.build(base, config, max_num_seqs) for name, config in configs.items()}


def quickstart(
    model: Any = "smollm2",
    method: str = "dflash",
    drafter: Any = None,
    *,
    concurrency: Sequence[int] = (1, 8, 32),
    repeats: int = 3,
    max_tokens: int = 24,
    device: str | None = None,
    dtype: str = "auto",
    max_model_len: int = 512,
    progress: bool = True,
) -> dict[str, Any]:
    """Run all arms, interleaved step by step (`arms.race`), and return every number of the result.

    The result holds `rows` (one per arm and concurrency), `cold`, `warm_up`, `estimator`, `settings`, `machine` and
    `cost_table`. Each repeat has prompts of its own from the mix of the five workloads; every arm decodes the same
    prompts with the same seeds (an adaptive arm's are moved, since its warm-up came before: `LLM.generate`). Medians
    over repeats, with the lowest and the highest. `estimator` is None for n-grams, which keep their own record.
    """
    for name, value, least in (
        ("repeats", repeats, 1),
        ("max_tokens", max_tokens, 2),
        *(("concurrency", c, 1) for c in concurrency),
    ):
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")
    one_of("method", method, METHODS)
    concurrency = list(dict.fromkeys(concurrency))
    base = LLM(model, device=device, dtype=dtype, max_num_seqs=1, max_model_len=max_model_len)
    prompts = base.prompt_ids(workloads.mix())
    check_room(base, prompts, max_tokens)
    llms = make_arms(base, method, drafter, max(concurrency))
    *_, (name, adaptive) = llms.items()
    adaptive.cost_table = profiling.load_or_profile(adaptive)
    warm = base.prompt_ids(workloads.load("warmup"))
    together = min(arms.WARMUP_CONCURRENCY, max(concurrency))
    fresh = arms.Learned(adaptive)
    cold_run = arms.measure(adaptive, warm[::5], arms.params(len(warm[::5]), max_tokens, 40_000), together)
    fresh.restore()  # forget what the cold run taught
    started = time.perf_counter()
    warm_steps = arms.warm_up(adaptive, warm, max_tokens, together, arms.WARMUP_INTERVAL, concurrency)
    warm_s = time.perf_counter() - started
    jobs = [(r, c) for r in range(repeats) for c in concurrency]
    runs: dict[tuple[int, str], list[Run]] = {}
    for repeat, c in tqdm(jobs, desc="measuring", unit="race", disable=not progress, dynamic_ncols=True):
        count = max(4, c + min(c // 2, 8))  # some enter when others leave
        own = arms.chosen(prompts, count, repeat), arms.params(count, max_tokens, 1000 * repeat)
        racing = {arm: llms[arm] for arm in arms.rotate(list(llms), repeat)}
        for arm, run in arms.race(racing, *own, c).items():
            runs.setdefault((c, arm), []).append(run)
    plain = {c: [run.tokens_per_s for run in runs[c, "none"]] for c in concurrency}
    assert adaptive.cost_table is not None
    return {
        "rows": [arms.row(c, arm, runs[c, arm], plain[c]) for c in concurrency for arm in llms],
        "cold": arms.row(together, name, [cold_run], None),
        "warm_up": {
            "refits": arms.WARMUP_REFITS,
            "steps": warm_steps,
            "seconds": warm_s,
            "refit_interval": arms.WARMUP_INTERVAL,
            "prompts": "warmup",
        },
        "estimator": arms.fit(adaptive),
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


def table(result: dict[str, Any]) -> str:
    """The result as one readable table."""
    header = ["requests", "arm", "tokens/s", "lowest - highest", "x none", "tokens per\nforward"]
    header += ["per request\nand step", "drafts verified\nper step"]
    lines, shares = [], []
    for r in result["rows"]:
        speed = [f"{r['tokens_per_s']:.0f}", "{:.0f} - {:.0f}".format(*r["tokens_per_s_range"]), f"{r['speedup']:.2f}"]
        counts = [f"{r['tokens_per_forward']:.1f}", f"{r['tokens_per_request_step']:.2f}"]
        lines.append([r["concurrency"], r["arm"], *speed, *counts, f"{r['verified_per_step']:.1f}"])
        if r["arm"] in arms.deepest(result["rows"]):
            pairs = zip(r["accepted_by_position"], r["graded_by_position"], strict=True)
            own = "  ".join(f"{accepted}/{graded}" for accepted, graded in pairs)
            shares.append(f"  {r['concurrency']:>3} requests, {r['arm']:<10}  {own}")
    m, cold, est, w = (result[name] for name in ("machine", "cold", "estimator", "warm_up"))
    sides = ("right", "left", *["right"] * 6)
    return "\n".join(
        [
            f"{m['target']} + {m['method']}, {m['dtype']}, {m['device']}, {m['threads']} threads; "
            "temperature 1, top-p 0.95; decoding only (prefill apart)",
            "",
            tabulate(lines, header, tablefmt="simple", disable_numparse=True, colalign=sides),
            "",
            "acceptance by position, accepted / graded:",
            *shares,
            *_fitted(est),
            f"  warmed up on the warm-up prompts: {w['steps']} steps, {w['seconds']:.0f} s",
            f"  cold (nothing learned before, {cold['concurrency']} requests): {cold['tokens_per_s']:.0f} tokens/s, "
            f"{cold['verified_per_step']:.1f} drafts verified per step",
        ]
    )


def _fitted(estimator: dict[str, Any] | None) -> list[str]:
    if estimator is None:
        return ["no estimator: the drafter's own record is the confidence"]
    intercepts = " ".join(f"{b:+.2f}" for b in estimator["intercepts"])
    return [f"estimator: {estimator['refits']} refits in all, slope {estimator['slope']:.3f}, intercepts {intercepts}"]


def save(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write `quickstart.json` and `figures/quickstart.png` under `folder`."""
    from avref import plots

    path, figures = folder / "quickstart.json", folder / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(result, indent=1) + "\n")
    plots.plot_quickstart(result).savefig(figures / "quickstart.png", dpi=150)
    return [path, figures / "quickstart.png"]
