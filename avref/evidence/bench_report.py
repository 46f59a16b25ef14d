"""The bench's numbers: medians and spread over repeats, ratios within a repeat, Markdown tables and files."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from avref import arms
from avref.evidence.bench_plan import TUNING, Cell, Plan, Unit
from avref.files import write_text
from avref.stats import Stats

Records = Mapping[str, Mapping[str, Any]]
BEST = "best fixed K in hindsight"

ABOUT = {
    "concurrency": "All arms over the number of requests running at once, on the mix of the workloads. `always-trim` "
    "drafts and verifies nothing; `full-draft` verifies adaptively and always drafts K.",
    "workloads": "Off against on: a fixed K against adaptive verification with the same K, at the largest concurrency.",
    "drafters": "Every drafter at its full depth, verified all and with every source of confidence that it offers.",
    "outside": "Beside Hugging Face on the same loaded models: answers of one length, tokens per second of the whole "
    "call, prefill included. At one request the prompts are answered one after the other.",
}


def run_of(record: Mapping[str, Any]) -> arms.Run:
    """A record of the journal as the run that it came from."""
    stats: dict[str, Any] = {k: np.array(v) if isinstance(v, list) else v for k, v in record["stats"].items()}
    return arms.Run(Stats(**stats), record["with_prefill"])


def summary(plan: Plan, records: Records) -> dict[str, Any]:
    """Everything that the tables and figures show.

    `rows` (one per block, case, concurrency and arm), `ratios` (an arm against another), `tuning` (what the trials
    measured), `thresholds` (what was chosen) and `fits` (slope and intercepts after the warm-up, by block and arm).
    """
    result: dict[str, Any] = {"rows": [], "ratios": [], "tuning": [], "thresholds": {}, "fits": {}}
    for block in plan.blocks:
        for cell in plan.cells(block):
            runs = _runs(cell, records)
            rows = _rows(cell, runs)
            result["tuning" if cell.case == TUNING else "rows"] += rows
            result["ratios"] += [_ratio(cell, runs, arm, other, label) for arm, other, label in _pairs(cell, rows)]
    for record in records.values():
        if record["fit"]:
            result["fits"].setdefault(record["block"], {})[record["arm"]] = record["fit"]
        if record["threshold"] is not None and record["case"] != TUNING:
            result["thresholds"][record["arm"]] = record["threshold"]
    return result


def _runs(cell: Cell, records: Records) -> dict[str, dict[int, arms.Run]]:
    """The runs of a cell by arm and repeat; arms without any are left out."""
    runs: dict[str, dict[int, arms.Run]] = {}
    for arm, repeat in itertools.product(cell.arms, range(cell.repeats)):
        record = records.get(Unit(cell.block, cell.case, cell.concurrency, arm, repeat).key)
        if record is not None:
            runs.setdefault(arm.name, {})[repeat] = run_of(record)
    return runs


def _rows(cell: Cell, runs: Mapping[str, Mapping[int, arms.Run]]) -> list[dict[str, Any]]:
    plain = {repeat: run.tokens_per_s for repeat, run in runs.get("none", {}).items()}
    where = {"block": cell.block, "case": cell.case}
    rows = []
    for arm, own in runs.items():
        row = arms.row(cell.concurrency, arm, list(own.values()), [plain.get(r) for r in own])
        steps = sum(run.stats.num_steps for run in own.values())
        drafted = float(sum(row["drafted_by_position"]) / max(1, steps))
        more = {"tokens_per_s_per_user": row["tokens_per_s"] / cell.concurrency, "drafted_per_step": drafted}
        rows.append({**where, **row, **more, "repeats": len(own), "steps": steps})
    return rows


def _pairs(cell: Cell, rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """(arm, the one it is compared with, what that one is called) of a cell."""
    speed = {r["arm"]: r["tokens_per_s"] for r in rows}
    fixed = [a for a in speed if a.startswith("fixed-")]
    pairs: list[tuple[str, str, str]] = []
    if cell.block == "drafters" and cell.case != TUNING:
        for arm in cell.arms:
            own = next((a for a in speed if arm.method and a.startswith(f"{arm.method} fixed-")), None)
            if arm.confidence and own:
                pairs.append((arm.name, own, own))
    if cell.block == "outside":
        pairs = [("none", "hf-generate", "hf-generate")]
        pairs += [(a, "hf-assisted", "hf-assisted") for a in speed if "fixed-" in a]
    if cell.block in ("concurrency", "workloads") and fixed:
        others = [("none", "none"), (fixed[-1], fixed[-1]), ("always-trim", "always-trim")]
        if cell.block == "concurrency":
            best = max(["none", *fixed], key=lambda a: speed.get(a, 0.0))
            others.append((best, f"{BEST} ({best})"))
        pairs = [(a, other, label) for a in speed if a.startswith("adaptive-") for other, label in others]
    return [(a, other, label) for a, other, label in pairs if a in speed and other in speed]


def _ratio(cell: Cell, runs: Mapping[str, Mapping[int, arms.Run]], arm: str, other: str, label: str) -> dict[str, Any]:
    """Speed of an arm over another's: the median of the ratios within a repeat, with lowest and highest."""
    ratios = [run.tokens_per_s / runs[other][r].tokens_per_s for r, run in runs[arm].items() if r in runs[other]]
    return {
        "block": cell.block,
        "case": cell.case,
        "concurrency": cell.concurrency,
        "arm": arm,
        "against": label,
        "ratio": statistics.median(ratios) if ratios else None,
        "range": [min(ratios), max(ratios)] if ratios else None,
        "repeats": len(ratios),
    }


# ---- Markdown ----
def markdown(result: Mapping[str, Any]) -> str:
    """The result as Markdown: the setting, a table of speeds and one of ratios for each block, and what is missing."""
    s, m = result["settings"], result["machine"]
    lines = [
        "# Bench",
        "",
        f"{m['target']} ({s['target_hash']}) with {s['method']}, {m['dtype']}, {m['device']}, {m['threads']} threads, "
        f"torch {m['torch']}, transformers {m['transformers']}; temperature 1, top-p .95, at most {s['max_tokens']} "
        "tokens per answer.",
        "",
        f"Settings are chosen on {s['chosen_on']}; reported are {s['reported_on']}. Arms take turns step by step, "
        "with the same prompts and seeds; each number is the median over repeats, with the lowest and the highest "
        "behind it; ratios are taken within a repeat. Speeds are tokens per second of decoding, prefill apart, while "
        "the batch is full. Every run of an adaptive arm starts from what its warm-up on other prompts taught "
        f"({arms.WARMUP_REFITS} refits or more).",
    ]
    for block in dict.fromkeys(r["block"] for r in result["rows"]):
        lines += ["", f"## {block.capitalize()}", "", ABOUT[block], "", _speeds(result, block)]
        ratios = [r for r in result["ratios"] if r["block"] == block and r["ratio"]]
        if ratios:
            lines += ["", _ratio_table(ratios)]
    lines += _notes(result)
    return "\n".join(lines) + "\n"


def _speeds(result: Mapping[str, Any], block: str) -> str:
    header = ["case", "requests", "arm", "tokens/s", "lowest - highest", "x none", "lowest - highest", "per user"]
    header += ["tokens per request and step", "drafted per step", "verified per step", "repeats"]
    lines = []
    for r in (r for r in result["rows"] if r["block"] == block):
        speed = [f"{r['tokens_per_s']:.1f}", _range(r["tokens_per_s_range"], 1)]
        speed += [f"{r['speedup']:.2f}" if r["speedup"] else "", _range(r["speedup_range"], 2)]
        counts = [r["tokens_per_request_step"], r["drafted_per_step"], r["verified_per_step"]]
        steps = [f"{x:.{n}f}" if r["steps"] else "" for x, n in zip(counts, (2, 1, 1), strict=True)]  # ours only
        user = f"{r['tokens_per_s_per_user']:.2f}"
        lines.append([r["case"], r["concurrency"], r["arm"], *speed, user, *steps, r["repeats"]])
    return _table(lines, header, text=("case", "arm"))


def _ratio_table(ratios: Sequence[Mapping[str, Any]]) -> str:
    header = ["case", "requests", "arm", "against", "ratio", "lowest - highest"]
    names = ("case", "concurrency", "arm", "against")
    lines = [[*(r[n] for n in names), f"{r['ratio']:.2f}", _range(r["range"], 2)] for r in ratios]
    return _table(lines, header, text=("case", "arm", "against"))


def _table(lines: Sequence[Sequence[Any]], header: Sequence[str], text: Sequence[str]) -> str:
    sides = ["left" if name in text else "right" for name in header]
    return tabulate(lines, header, tablefmt="pipe", disable_numparse=True, colalign=sides)


def _range(ends: Sequence[float] | None, digits: int) -> str:
    return f"{ends[0]:.{digits}f} - {ends[1]:.{digits}f}" if ends else ""


def _notes(result: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    if result["thresholds"]:
        chosen = ", ".join(f"{arm} {value:g}" for arm, value in result["thresholds"].items())
        lines += ["", f"Thresholds chosen on the other half of the prompts: {chosen}."]
    for block, fits in result["fits"].items():
        lines += ["", f"Fits after the warm-up ({block}):", ""]
        lines += [
            f"- {arm}: slope {fit['slope']:.3f}, intercepts " + " ".join(f"{b:+.2f}" for b in fit["intercepts"])
            for arm, fit in fits.items()
        ]
    if result["refused"]:
        lines += ["", "Refused:", "", *(f"- {arm}: {why}" for arm, why in result["refused"].items())]
    if result["left"]:
        lines += ["", f"Not run for want of time ({len(result['left'])}):", ""]
        lines += [f"- {key}" for key in result["left"]]
    return lines


def save(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write `bench.json`, `bench.md` and the figures that the blocks give; return their paths."""
    from avref import plots

    (folder / "figures").mkdir(parents=True, exist_ok=True)
    paths = [folder / "bench.json", folder / "bench.md"]
    write_text(paths[0], json.dumps(result, indent=1, allow_nan=False) + "\n")
    write_text(paths[1], markdown(result))
    blocks = {r["block"] for r in result["rows"]}
    for block, name, draw in (("concurrency", "pareto", plots.plot_pareto), ("workloads", "off_on", plots.plot_off_on)):
        if block in blocks:
            paths.append(folder / "figures" / f"{name}.png")
            draw(result).savefig(paths[-1], dpi=150)
    return paths
