"""The study: every claim of the article on every pair, from traces alone, and the studies beside them.

Nothing here runs a model. What a pair predicts is judged on the half of its answers that nothing was fitted on, and
speeds come from replays under two cost tables. Pairs are worked on side by side, a process each.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from avref.config import METHODS
from avref.evidence import claims, study_fits, study_rules, study_scores, study_speed, traces
from avref.evidence.claims import Row
from avref.evidence.pair import Pair
from avref.evidence.resampling import summary

FAMILIES = (*METHODS, "dflash-greedy")
FEWEST = 8  # held-out answers


def run(
    sources: Sequence[str | Path] = (), *, workers: int | None = None, effort: float = 1.0, beside: bool = True
) -> dict[str, Any]:
    """The whole study on some traces (names of shipped ones, or files; none given: all that are shipped).

    workers: processes (None: one per core). effort scales the decode steps. beside: also the
    studies that are made once. Returns what `save` writes: traces, claims, studies. Raises ValueError without traces,
    for one that cannot be read, and for one with too few answers.
    """
    chosen = list(sources) or traces.shipped()
    if not chosen:
        raise ValueError("no trace is shipped, and none was named; record one: python -m avref trace --output t.npz")
    names = [name_of(source) for source in chosen]
    if len(set(names)) < len(names):
        raise ValueError(f"two traces would have one name in the ledger: {', '.join(names)}")
    for source in chosen:
        traces.load(source)  # what cannot be read is refused before anything is worked out
    jobs = [(_pair, (source, effort)) for source in chosen]
    if beside:
        with_logits = next((s for s in chosen if traces.load(s).logit_q_max is not None), None)
        jobs.insert(0, (_once, (with_logits, effort)))  # type: ignore[arg-type]
    done = _work(jobs, min(len(jobs), workers or os.cpu_count() or 1))
    once = done.pop(0) if beside else {}
    return _gathered(dict(zip(names, done, strict=True)), once)


def name_of(source: str | Path) -> str:
    """What the ledger calls a trace: its shipped name, or its file's name."""
    return Path(source).name.removesuffix(".npz").removesuffix("-smollm2")


def _work(jobs: Sequence[tuple[Any, tuple[Any, ...]]], workers: int) -> list[Any]:
    if workers < 2:
        return [job(*arguments) for job, arguments in jobs]
    context = multiprocessing.get_context("spawn")  # torch and forks do not go together
    with ProcessPoolExecutor(workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return [future.result() for future in [pool.submit(job, *arguments) for job, arguments in jobs]]


def _once(source: str | Path | None, effort: float) -> dict[str, Any]:
    return study_rules.once(None if source is None else Pair(name_of(source), traces.load(source)), effort)


def _pair(source: str | Path, effort: float) -> dict[str, Any]:
    """Everything about one pair: rows by claim, and what the figures draw."""
    pair = Pair(name_of(source), traces.load(source))
    fitted = study_fits.by_workload(pair)
    rows: dict[str, list[Row]] = {
        key: [row]
        for key, row in {
            **study_scores.rows(pair, trained_depth(pair)),
            **study_fits.rows(pair, fitted),
        }.items()
    }
    sweeps = [study_speed.sweep(pair, table, effort=effort) for table in study_speed.SETTINGS]
    for one in sweeps:
        for key, row in study_speed.rows(one).items():
            rows.setdefault(key, []).append(row)
    return {
        "trace": {
            **pair.trace.header,
            "offsets": len(pair.trace),
            "answers": len(pair.trace.num_tokens),
            "held_out": len(pair.second),
        },
        "rows": rows,
        "coefficients": fitted,
        "features": study_scores.feature_table(pair),
        "positions": study_scores.by_position(pair),
        "speeds": [study_speed.figures(one) for one in sweeps],
        "long_run": study_rules.long_run(pair, effort) if study_speed.FULL in sweeps[0].arms[sweeps[0].top] else [],
    }


def trained_depth(pair: Pair) -> int | None:
    """Positions that a shipped drafter was trained on; None where that is not known."""
    from avref.drafters import weights

    path = weights.shipped(pair.trace.header["method"]) / "config.json"
    if pair.trace.header["drafter"] != "shipped" or not path.is_file():
        return None
    depth = json.loads(path.read_text()).get("depth")
    return None if depth is None else int(depth)


def _gathered(pairs: Mapping[str, Mapping[str, Any]], once: Mapping[str, Any]) -> dict[str, Any]:
    rows: dict[str, list[Row]] = {"state": [study_scores.state()]}
    for own in pairs.values():
        for key, more in own["rows"].items():
            rows.setdefault(key, []).extend(more)
    rows["slope_moves"] = study_fits.slope_moves({name: own["coefficients"] for name, own in pairs.items()})
    few = {name: own["trace"]["held_out"] for name, own in pairs.items() if own["trace"]["held_out"] < FEWEST}
    rows = {key: [_weak(row, few) for row in found] for key, found in rows.items()}
    described = {name: {w: c.described() for w, c in own["coefficients"].items()} for name, own in pairs.items()}
    studies = {
        "features": {name: own["features"] for name, own in pairs.items() if own["features"]},
        "positions": {name: own["positions"] for name, own in pairs.items() if own["positions"]},
        "coefficients": {name: own for name, own in described.items() if own},
        "speeds": [one for own in pairs.values() for one in own["speeds"]],
        "long_run": [row for own in pairs.values() for row in own["long_run"]],
        **once,
    }
    return summary(
        {
            "traces": {name: own["trace"] for name, own in pairs.items()},
            "absent": [name for name in FAMILIES if name not in pairs],
            "claims": claims.ledger(rows),
            "studies": studies,
        }
    )


def _weak(row: Row, few: Mapping[str, int]) -> Row:
    """Without a verdict when the pair has too few held-out answers for an interval to mean anything."""
    num = few.get(row.pair.split(",")[0])
    if num is None or row.verdict == claims.UNMEASURED:
        return row
    return replace(row, verdict=claims.UNMEASURED, why=f"{num} held-out answers, too few to resample")


# ---- output ----
ABOUT = """\
Each row is one pair: one recorded trace (`python -m avref trace`). Intervals are the middle 95 % over {resamples}
resamples of whole answers, not of drafts; what was fitted before, and the company that a request had, is not resampled.
Intervals over three or four answers, all that a workload of a short trace holds out, are too narrow. Fits use the first
half of each workload's prompts, numbers come from the second. The estimator is the one that serves.

Throughput is replayed under two cost tables, not measured with the engine: "2 cores" is this project's own pair on two
CPU cores, up to 32 requests; "B300" the published profile of DeepSeek-V4-Flash with DSpark on four B300, at up to 64.
Arms are compared on the same luck: the same answers, from the same offsets, and the same fate of the same drafts.
What drafting costs follows from the pair's family: one pass per block (dflash, dspark), one per draft (the others),
nothing (ngram). What the engine itself does is measured by `python -m avref bench`.
"""


def markdown(result: Mapping[str, Any]) -> str:
    """The ledger: a summary, then every claim with its rows, then the studies in numbers."""
    from avref.evidence import study_tables
    from avref.evidence.pair import RESAMPLES

    lines = ["# The article's claims, measured", "", ABOUT.format(resamples=RESAMPLES), _table(result["traces"])]
    if result["absent"]:
        lines += ["", f"No trace of: {', '.join(result['absent'])}. Claims that need them say so, or lack their rows."]
    summed = [[c["statement"], c["article"], c["verdict"]] for c in result["claims"]]
    lines += ["", tabulate(summed, ["claim", "in the article", "here"], tablefmt="pipe", disable_numparse=True)]
    for claim in result["claims"]:
        lines += ["", f"## {claim['statement'][0].upper()}{claim['statement'][1:]}", ""]
        lines += [f"{'Goal' if claim['ours'] else 'Article'}: {claim['article']} ({claim['place']}).", ""]
        lines += [f"Decided by: {claim['decided_by']}. **{claim['verdict'].capitalize()}.**", ""]
        rows = [[r["pair"], r["ours"], _number(r["value"]), r["verdict"], r["why"]] for r in claim["rows"]]
        header = ["pair", "ours", "decides", "verdict", "why"]
        lines.append(tabulate(rows, header, tablefmt="pipe", disable_numparse=True) if rows else "No trace to tell by.")
    return "\n".join(lines) + "\n" + study_tables.markdown(result["studies"])


def _table(found: Mapping[str, Mapping[str, Any]]) -> str:
    header = ["pair", "target", "drafter", "drafting", "K", "temperature", "top-p", "offsets", "answers", "held out"]
    names = ("target", "drafter", "draft_sample_method", "num_speculative_tokens", "temperature", "top_p")
    rows = [
        [name, *(h[n] for n in names), f"{h['offsets']:,}", h["answers"], h["held_out"]] for name, h in found.items()
    ]
    return tabulate(rows, header, tablefmt="pipe", disable_numparse=True)


def _number(value: Mapping[str, Any] | None) -> str:
    if value is None or value["value"] is None:
        return ""
    ends = [f"{value[n]:.3g}" if value[n] is not None else "?" for n in ("low", "high")]
    return f"{value['value']:.3g} [{', '.join(ends)}]"


def save(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write `claims.json`, `claims.md` and a figure per study; return their paths."""
    from avref import plots_study

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "claims.json", folder / "claims.md"]
    paths[0].write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    paths[1].write_text(markdown(result))
    for name, figure in plots_study.figures(result["studies"]).items():
        paths.append(folder / f"study_{name}.png")
        figure.savefig(paths[-1], dpi=150)
    return paths
