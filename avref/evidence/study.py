"""The study: every claim of the article on every pair, from traces alone, and the studies beside them.

Nothing here runs a model. What a pair predicts is judged on the half of its answers that nothing was fitted on, and
speeds come from replays under two cost tables. Pairs are worked on side by side, a process each.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from avref.config import METHODS
from avref.evidence import claims, study_fits, study_rules, study_scores, study_speed, study_tables, traces
from avref.evidence.claims import Row
from avref.evidence.pair import RESAMPLES, Pair
from avref.evidence.resampling import summary
from avref.evidence.study_tables import table
from avref.files import write_text

FAMILIES = (*METHODS, "dflash-greedy")
FEWEST = 8  # held-out prompts (of a workload with one prompt: answers), which resamples draw
MOST_DRAFTS = 7  # that `hardware.measured` covers at its highest load


def run(sources: Sequence[str | Path] = (), *, workers: int | None = None, effort: float = 1.0) -> dict[str, Any]:
    """The whole study on some traces (names of shipped ones, or files; none given: all that are shipped).

    workers: processes (None: one per core). effort scales the decode steps. Returns what `save` writes: traces, claims,
    studies. Raises ValueError without traces, for one that cannot be read, and for one with too few answers.
    """
    chosen = list(sources) or traces.shipped()
    if not chosen:
        raise ValueError("no trace is shipped, and none was named; record one: python -m avref trace --output t.npz")
    names = [name_of(source) for source in chosen]
    if len(set(names)) < len(names):
        raise ValueError(f"two traces would have one name in the ledger: {', '.join(names)}")
    loaded = [traces.load(source) for source in chosen]  # what cannot be read is refused before anything is worked out
    for name, trace in zip(names, loaded, strict=True):
        if trace.num_positions > MOST_DRAFTS:
            raise ValueError(
                f"{name} holds {trace.num_positions} drafts a block, and the study's measured cost table ends at "
                f"{MOST_DRAFTS}: record it again with --num-speculative-tokens {MOST_DRAFTS}"
            )
    with_logits = next((s for s, t in zip(chosen, loaded, strict=True) if t.logit_q_max is not None), None)
    jobs = [(_once, with_logits, effort), *((_pair, source, effort) for source in chosen)]
    once, *pairs = _work(jobs, min(len(jobs), workers or os.cpu_count() or 1))
    return _gathered(dict(zip(names, pairs, strict=True)), once)


def name_of(source: str | Path) -> str:
    """What the ledger calls a trace: its shipped name, or its file's name."""
    return Path(source).name.removesuffix(".npz").removesuffix("-smollm2")


def _work(jobs: Sequence[tuple[Any, ...]], workers: int) -> list[Any]:
    """What the jobs (a function and its arguments each) return, in their order."""
    if workers < 2:
        return [job(*arguments) for job, *arguments in jobs]
    context = multiprocessing.get_context("spawn")  # torch and forks do not go together
    with ProcessPoolExecutor(workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return [future.result() for future in [pool.submit(*job) for job in jobs]]


def _once(source: str | Path | None, effort: float) -> dict[str, Any]:
    return study_rules.once(None if source is None else Pair(name_of(source), traces.load(source)), effort)


def _pair(source: str | Path, effort: float) -> dict[str, Any]:
    """Everything about one pair: rows by claim, and what the figures draw."""
    pair = Pair(name_of(source), traces.load(source))
    fitted = study_fits.by_workload(pair)
    sweeps = [study_speed.sweep(pair, name, effort=effort) for name in study_speed.SETTINGS]
    parts = [study_scores.rows(pair), study_fits.rows(pair, fitted), *map(study_speed.rows, sweeps)]
    return {
        "trace": {
            **pair.trace.header,
            "offsets": len(pair.trace),
            "answers": len(pair.trace.num_tokens),
            "held_out": len(pair.second),
            "drawn": len(set(pair.drawn(pair.second))),
        },
        "rows": _joined({key: [row] for key, row in part.items()} for part in parts),
        "coefficients": fitted,
        "features": study_scores.feature_table(pair),
        "positions": study_scores.by_position(pair),
        "speeds": [study_speed.figures(one) for one in sweeps],
        "long_run": study_rules.long_run(pair, effort) if study_speed.FULL in sweeps[0].arms[sweeps[0].top] else [],
    }


def _gathered(pairs: Mapping[str, Mapping[str, Any]], once: Mapping[str, Any]) -> dict[str, Any]:
    rows = _joined([{"state": [study_scores.state()]}, *(own["rows"] for own in pairs.values())])
    rows["slope_moves"] = study_fits.slope_moves({name: own["coefficients"] for name, own in pairs.items()})
    few = {name: own["trace"]["drawn"] for name, own in pairs.items() if own["trace"]["drawn"] < FEWEST}
    rows = {key: [_weak(row, few) for row in found] for key, found in rows.items()}
    described = {name: {w: c.described() for w, c in own["coefficients"].items()} for name, own in pairs.items()}
    studies = {
        **{n: {name: own[n] for name, own in pairs.items() if own[n]} for n in ("features", "positions")},
        "coefficients": {name: own for name, own in described.items() if own},
        **{n: [one for own in pairs.values() for one in own[n]] for n in ("speeds", "long_run")},
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


def _joined(parts: Iterable[Mapping[str, Sequence[Row]]]) -> dict[str, list[Row]]:
    """Rows by claim, of all parts."""
    rows = defaultdict[str, list[Row]](list)
    for part in parts:
        for key, more in part.items():
            rows[key].extend(more)
    return dict(rows)


def _weak(row: Row, few: Mapping[str, int]) -> Row:
    """Without a verdict when the pair has too few held-out answers for an interval to mean anything."""
    num = few.get(row.pair.split(",")[0])
    if num is None or row.verdict == claims.UNMEASURED:
        return row
    return replace(row, verdict=claims.UNMEASURED, why=f"{num} held-out answers, too few to resample")


# ---- output ----
ABOUT = """\
Each row is one pair: one recorded trace (`python -m avref trace`). Intervals are the middle 95 % over {resamples}
resamples of prompts with all their answers, not of drafts ({refits} where each is fitted anew: slopes and coefficients;
{waves} for the damping claim: read those as the range); what was fitted before, and the company that a request had, is
not resampled. Intervals over three or four answers, all that a workload of a short trace holds out, are too narrow.
Fits use the first half of each workload's prompts, numbers come from the second. The estimator is the one that serves.

Throughput is replayed under two cost tables, not measured with the engine: "2 cores" is this project's own pair on two
CPU cores, up to 32 requests; "B300" the published profile of DeepSeek-V4-Flash with DSpark on four B300, at up to 64.
Arms are compared on the same luck: the same answers, from the same offsets, and the same fate of the same drafts.
What drafting costs follows from the pair's family: one pass per block (dflash, dspark), one per draft (the others),
nothing (ngram). What the engine itself does is measured by `python -m avref bench`.
"""


def markdown(result: Mapping[str, Any]) -> str:
    """The ledger: a summary, then every claim with its rows, then the studies in numbers."""
    about = ABOUT.format(resamples=RESAMPLES, refits=study_fits.REFITS, waves=study_fits.WAVES)
    lines = ["# The article's claims, measured", "", about, _described(result["traces"])]
    if result["absent"]:
        lines += ["", f"No trace of: {', '.join(result['absent'])}. Claims that need them say so, or lack their rows."]
    summed = [[c["statement"], c["article"], c["verdict"]] for c in result["claims"]]
    lines += ["", table(summed, ["claim", "in the article", "here"])]
    for claim in result["claims"]:
        lines += ["", f"## {claim['statement'][0].upper()}{claim['statement'][1:]}", ""]
        lines += [f"{'Goal' if claim['ours'] else 'Article'}: {claim['article']} ({claim['place']}).", ""]
        lines += [f"Decided by: {claim['decided_by']}. **{claim['verdict'].capitalize()}.**", ""]
        rows = [[r["pair"], r["ours"], _number(r["value"]), r["verdict"], r["why"]] for r in claim["rows"]]
        header = ["pair", "ours", "decides", "verdict", "why"]
        lines.append(table(rows, header) if rows else "No trace to tell by.")
    return "\n".join(lines) + "\n" + study_tables.markdown(result["studies"])


def _described(found: Mapping[str, Mapping[str, Any]]) -> str:
    header = ["pair", "target", "drafter", "drafting", "K", "temperature", "top-p", "offsets", "answers", "held out"]
    names = ("target", "drafter", "draft_sample_method", "num_speculative_tokens", "temperature", "top_p")
    rows = [
        [name, *(h[n] for n in names), f"{h['offsets']:,}", h["answers"], h["held_out"]] for name, h in found.items()
    ]
    return table(rows, header)


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
    write_text(paths[0], json.dumps(result, indent=1, allow_nan=False) + "\n")
    write_text(paths[1], markdown(result))
    for name, figure in plots_study.figures(result["studies"]).items():
        paths.append(folder / f"study_{name}.png")
        figure.savefig(paths[-1], dpi=150)
    return paths
