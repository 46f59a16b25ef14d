"""`python -m avref selfcheck`: is the engine right, lossless and fast on this machine?

Each figure stands beside its bar, in one report to paste into a bug report. Speed rows are ratios (`avref.speed`), both
sides interleaved in one process. On a CPU the CUDA rows stay empty.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from tabulate import tabulate

from avref import exact, profiling
from avref.llm import LLM
from avref.parity import check_parity
from avref.speed import (
    Row,
    forward_rows,
    generate_rows,
    import_row,
    method_rows,
    sampling_rows,
    speculative_rows,
)

CUDA_ROWS = {
    "packed": "packed forward / batched forward, 64 requests x 8 tokens",
    "ragged": "ragged (1 to 8 tokens) / uniform",
    "cost ratio": "32 requests x 8 tokens / x 1 token",
    "sampling": "acceptance with top-p",
    "whole step": "adaptive / fixed-7, 32 requests",
}
"""What the rows for CUDA are called, and how the names of the rows begin whose figures they repeat."""


@dataclass
class Report:
    machine: dict[str, Any]
    rows: list[Row]


def run(
    model: Any = "smollm2",
    method: str = "dflash",
    drafter: Any = None,
    *,
    device: str | None = None,
    dtype: str = "auto",
    quick: bool = False,
) -> Report:
    """All checks (`quick`: parity and losslessness only)."""
    llm = LLM(model, device=device, dtype=dtype, max_num_seqs=64, max_model_len=512)
    rows = [*correctness(llm)]
    if not quick:
        for part in (forward_rows, sampling_rows, method_rows, generate_rows, import_row):
            rows += _announced(part, llm)
        rows += _announced(lambda base: speculative_rows(base, method, drafter), llm, "speculative_rows")
        rows += cuda_rows(rows, llm.device.type == "cuda")
    return Report(profiling.describe(llm), rows)


def cuda_rows(rows: list[Row], on_gpu: bool) -> Iterator[Row]:
    """The figures that decide on a GPU, again under names of their own; empty where there is none."""
    for name, start in CUDA_ROWS.items():
        row = next((r for r in rows if r.name.startswith(start)), None)
        yield replace(row, name=f"CUDA: {name}") if on_gpu and row else Row(f"CUDA: {name}", None, None)


def render(report: Report) -> str:
    """The report as text."""
    verdict = {True: "pass", False: "FAIL", None: ""}
    lines = [
        [
            r.name,
            _measured(r),
            "" if r.bar is None else f"{'at most' if r.at_most else 'at least'} {r.bar:g}",
            verdict[r.ok],
        ]
        for r in report.rows
    ]
    machine = ", ".join(f"{k} {v}" for k, v in report.machine.items() if v is not None)
    return f"avref selfcheck: {machine}\n\n" + tabulate(lines, ["check", "measured", "bar", ""], tablefmt="simple")


def passed(report: Report) -> bool:
    """No row misses its bar."""
    return all(r.ok is not False for r in report.rows)


def _announced(part: Callable[[LLM], Iterator[Row]], llm: LLM, name: str | None = None) -> Iterator[Row]:
    print(f"avref: selfcheck, {(name or part.__name__).replace('_', ' ')}", file=sys.stderr)
    for row in part(llm):  # as they come: a run that is cut short has still said what it saw
        print(f"  {row.name}: {_measured(row)}", file=sys.stderr, flush=True)
        yield row
    gc.collect()


def _measured(row: Row) -> str:
    return "" if row.value is None else f"{row.value:.3g} {row.unit}".rstrip()


# ---- right ----
def correctness(llm: LLM) -> Iterator[Row]:
    """Packed logits against the plain model; the published counterexamples and the lossless rules by enumeration."""
    yield Row(
        "packed logits against plain ones, largest difference over their spread",
        check_parity(llm.model),
        {torch.float32: 1e-4}.get(llm.dtype, 8e-2),
        unit="",
    )
    yield from exact_rows()


def exact_rows() -> Iterator[Row]:
    """By enumeration: the published counterexamples are reproduced, and the default rule emits the target's law."""

    def distance(experiment: exact.Experiment, expected: tuple[float, float]) -> float:
        emitted = exact.first_token(exact.joint_law(experiment))
        return max(abs(a - b) for a, b in zip(emitted, expected, strict=True))

    yield Row("article's footnote emits (.4, .6), off by", distance(exact.footnote(), (0.4, 0.6)), 1e-12, unit="")
    yield Row(
        "DSpark appendix emits (.85, .15), off by", distance(exact.dspark_appendix(), (0.85, 0.15)), 1e-12, unit=""
    )
    staircase = exact.costs(1.0, 2.0, 2.0)
    for rule in ("lookahead", "stale", "early_stop"):
        experiment = replace(exact.dspark_appendix(), policy=exact.budget_policy(staircase, rule), num_steps=2)  # type: ignore[arg-type]
        yield Row(f"total variation from the target's law, {rule}, two steps", exact.leak(experiment), 1e-12, unit="")
