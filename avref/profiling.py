"""Measuring the cost table: real engine steps on synthetic requests.

Every batch size (powers of two) is measured with a range of numbers of verified drafts (`verified_counts`), drafting at
a few depths, and without any drafting. Each step runs the engine that serves (drafting, forward, sampling, acceptance,
bookkeeping) with depth and number of admitted drafts forced, in rounds of shuffled order, whose drift is taken out
(`_levels`). What drafts cost beyond drafting them, above all the features, is counted with the drafting:

    extra(d)       = rest(d, 0) - rest(0, 0)         rest: sampling and bookkeeping of a step of depth d, B verified
    draft_ms(d)    = drafting(d) + extra(d)
    verify_ms(B)   = forward(K, B) + rest(K, B) - extra(K),   and for B = 0 forward(0, 0) + rest(0, 0)

so a step that drafts nothing costs what plain decoding does. Tables are saved under `models.cache_dir()` and reused for
the same model, drafter, dtype, device and versions.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from tqdm.auto import tqdm

from avref import models, workloads
from avref.config import SamplingParams, whole
from avref.cost_table import CostTable
from avref.engine import Engine, Request
from avref.estimator import OnlineAcceptanceEstimator

if TYPE_CHECKING:
    from avref.llm import LLM

CONTEXT, REPEATS = 128, 5
MOST_REPEATS, ENOUGH_S = 12, 5.0  # small batches, whose steps are short, are timed more often: about so many seconds
PARTS_FROM = 16  # requests
OFTEN = 2  # times a round that steps with few drafts are timed: between them it is decided whether to draft at all
Kind = tuple[int, int]  # a step's (depth drafted, drafts verified)
Steps = dict[Kind, list[tuple[int, float, float, float]]]
"""Round, and milliseconds of drafting, of the forward and of the rest, of every timed step by its kind."""
RECORD = ("graded", "accepted")  # what an n-gram drafter learns from verdicts
STEADY, LONGEST_S = 1.3, 20.0  # mean over shortest time of a step; above it (a busy machine) they go on so long


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Powers of two up to `max_num_seqs`, and that number."""
    return sorted({1 << i for i in range(max_num_seqs.bit_length()) if 1 << i <= max_num_seqs} | {max_num_seqs})


def verified_counts(num_requests: int, depth: int) -> list[int]:
    """Drafts verified in all at which a step is timed: none, 1, 2, 3, 5, ... each, and where many run a part of one.

    With many requests a pruned step mostly lies between none and one each, and there the cost need not be a line. (With
    few, what lies between is less than the noise of timing it.)
    """
    each = {k for k in range(depth + 1) if k in (1, 2, 3, 5, 7, depth) or num_requests <= 2 or k % 4 == 3}
    parts = {num_requests // 4, num_requests // 2} if num_requests >= PARTS_FROM else set()
    return sorted({0, *parts, *(k * num_requests for k in each if k)})


def draft_depths(num_positions: int) -> list[int]:
    """Depths at which drafting is timed: 1, K/2 and K. Token by token it takes longer with each, in parallel hardly."""
    return sorted({1, max(1, num_positions // 2), num_positions})


def describe(llm: LLM) -> dict[str, Any]:
    """What a cost table or a result depends on: device, dtype, threads, versions, target and drafter."""
    on_gpu = llm.device.type == "cuda"
    quantised = getattr(llm.model.config, "quantization_config", None)
    return {
        **({"quantization": str(quantised)} if quantised else {}),
        "device": torch.cuda.get_device_name(llm.device) if on_gpu else processor(),
        "threads": torch.get_num_threads(),
        "dtype": str(llm.dtype).removeprefix("torch."),
        "target": llm.name,
        "target_parameters": sum(p.numel() for p in llm.model.parameters()),
        "method": llm.config.method if llm.config else None,
        "drafter": str(llm.config.model)
        if llm.config and not isinstance(llm.config.model, torch.nn.Module)
        else "loaded model",
        "num_speculative_tokens": llm.engine.num_positions,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def processor() -> str:
    """The CPU's name as the system gives it."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def load_or_profile(llm: LLM, context: int = CONTEXT, repeats: int = REPEATS, again: bool = False) -> CostTable:
    """The saved table for this setting, or a new one, measured now and saved."""
    setting = {**describe(llm), "context": context, "max_num_seqs": llm.engine.max_num_seqs, "repeats": repeats}
    setting |= {
        "depths": draft_depths(llm.engine.num_positions),
        "steps": "uneven, parts, contexts; plain ones apart and often; drift taken out; head rows padded; caught up",
    }
    if llm.config:
        names = ("draft_sample_method", "confidence", "feature", "adaptive_drafting")
        setting |= {name: getattr(llm.config, name) for name in names}
        setting |= {"drafter_parameters": _drafter_parameters(llm.engine.drafter), "room": _positions(llm)}
    key = hashlib.sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()[:16]
    path = models.cache_dir() / "cost-tables" / f"{key}.json"
    if path.is_file() and not again:
        print(f"avref: using the cost table measured before, {path}", file=sys.stderr)
        table = CostTable.load(path)
        _say_if_busy(table)
        return table
    table = profile(llm, context, repeats)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        table.save(path)
        print(f"avref: the cost table is kept as {path}", file=sys.stderr)
    except OSError as error:
        print(f"avref: the cost table could not be saved for next time: {error}", file=sys.stderr)
    return table


def _drafter_parameters(drafter: Any) -> int:
    held = [getattr(value, "model", value) for value in vars(drafter).values()] if drafter else []
    return sum(p.numel() for m in held if isinstance(m, torch.nn.Module) for p in m.parameters())


def profile(llm: LLM, context: int = CONTEXT, repeats: int = REPEATS) -> CostTable:
    """Measure draft and verify milliseconds of a step at `context` cached tokens per request, half to one and a half.

    R goes in powers of two up to `max_num_seqs`, with `verified_counts` drafts verified, and 1, K/2 and K positions
    drafted; there are at least `repeats` rounds, more where steps are short or their times differ: a wrong order of
    neighbouring points is what spoils decisions at small batches. Says so on stderr when the machine was too busy for
    that. Raises ValueError when the LLM has no drafter, or too few positions to time steps of depth K; RuntimeError
    when requests are running.
    """
    if llm.config is None or llm.engine.drafter is None:
        raise ValueError("profiling needs a drafter: pass speculative_config to LLM")
    with llm.claimed():
        return _profile(llm, context, repeats)


def _profile(llm: LLM, context: int, repeats: int) -> CostTable:
    assert llm.config is not None
    depth, limit = llm.config.num_speculative_tokens, llm.engine.max_num_seqs
    room = _positions(llm) - 4 * (depth + 1)
    if room < 1:
        raise ValueError(
            f"{_positions(llm)} positions (max_model_len={llm.max_model_len}, or what the drafter has) are too few to "
            f"time steps of {depth} drafts, which takes more than {4 * (depth + 1)}: raise max_model_len, lower "
            "num_speculative_tokens, or pass a cost_table"
        )
    if context != CONTEXT:  # the usual one is cut to what a small target has room for
        whole("context", context, 1, room)
    context = max(1, min(context, room))
    print(
        f"avref: profiling the cost table, up to {limit} requests of {context} tokens, {repeats} repeats",
        file=sys.stderr,
    )
    draft_points, verify_points, spread = [], [], {}
    sizes = batch_sizes(limit)[::-1]  # a process is slowest at first, and short steps suffer most
    for num_requests in tqdm(sizes, desc="batch sizes", disable=None, leave=False, dynamic_ncols=True):
        steps = _measure(llm, num_requests, depth, context, repeats)
        draft, verify = _points(steps, depth)
        draft_points += [(num_requests, d, ms) for d, ms in draft.items()]
        verify_points += [(num_requests, num_requests + b, ms) for b, ms in verify.items()]
        spread[num_requests] = _spread(steps)
    table = CostTable.from_curves(draft_points, verify_points, max_requests=limit, max_tokens=limit * (depth + 1))
    table.metadata |= {
        **describe(llm),
        "context": context,
        "repeats": repeats,
        "spread": [*spread.items()],
        "draft_points": draft_points,
        "verify_points": verify_points,
    }
    _say_if_busy(table)
    return table


def _say_if_busy(table: CostTable) -> None:
    worst, spread = max(table.metadata.get("spread", ()), key=lambda pair: pair[1], default=(0, 1.0))
    if spread > STEADY:
        print(
            f"avref: the machine was busy when this table was made: with {worst} requests, steps took {spread:.2f} "
            "times their shortest time; when it is quiet, delete the saved table, and it is measured again",
            file=sys.stderr,
        )


def _measure(llm: LLM, num_requests: int, depth: int, context: int, repeats: int) -> Steps:
    """The laps of timed steps, by depth drafted and number of verified drafts."""
    flat = CostTable(np.ones(num_requests + 1), np.ones(num_requests * (depth + 1) + 1))
    engine = Engine(
        llm.engine.target,
        llm.engine.drafter,
        llm.config,
        max_num_seqs=num_requests,
        estimator=OnlineAcceptanceEstimator(depth, device=llm.device) if llm.estimator is not None else None,
        cost_table=flat,
    )
    order = random.Random(0)
    kinds = [(depth, b) for b in verified_counts(num_requests, depth)]  # (depth drafted, drafts verified)
    kinds += [(d, 0) for d in (0, *draft_depths(depth)) if d < depth]
    steps: Steps = {kind: [] for kind in kinds}
    fits = 0  # steps that the requests still have room for
    record = {name: vars(engine.drafter)[name].copy() for name in RECORD if name in vars(engine.drafter)}
    try:
        few = [kind for kind in kinds if kind in ((0, 0), (1, 0)) or 0 < kind[1] <= num_requests]
        often, num_steps = kinds + few * (OFTEN - 1), itertools.count()
        for drafted, b in _rounds(often, order, repeats, lambda: _spread(steps) <= STEADY):
            if fits == 0:
                fits = _refill(engine, llm, num_requests, depth, context)
            engine.override, engine.fixed_depth = _uneven(b, depth, num_requests), drafted
            engine.catch_up()  # what earlier steps without drafts have left is not this step's
            before = engine.watch.read()
            engine.step()
            after = engine.watch.read()
            fits -= 1
            step = {name: after[name] - before[name] for name in after}
            laps = step["draft"], step["verify"], step["sample"] + step["other"]
            steps[drafted, b].append((next(num_steps) // len(often), *laps))
    finally:
        engine.abort()  # the caches are the LLM's
        vars(engine.drafter).update(record)  # and what an n-gram drafter counts
    # the first round warms allocators and caches up; where steps take long, it is one of the few that count
    first = int(next(num_steps) > repeats * len(often))
    return {kind: [laps for laps in own if laps[0] >= first] for kind, own in steps.items()}


def _points(steps: Steps, depth: int) -> tuple[dict[int, float], dict[int, float]]:
    """draft_ms by depth and verify_ms by number of verified drafts, as the module says."""
    depths = draft_depths(depth)
    rest = _levels({d: [(laps[0], laps[3]) for laps in steps[d, 0]] for d in (0, *depths)})
    extra = {d: max(0.0, ms - rest[0]) for d, ms in rest.items()}
    whole = _levels({kind: [(laps[0], sum(laps[2:])) for laps in own] for kind, own in steps.items()})
    by_depth = {d: [laps for kind, own in steps.items() if kind[0] == d for laps in own] for d in depths}
    drafting = _levels({d: [laps[:2] for laps in own] for d, own in by_depth.items()})
    verify = {b: max(0.0, ms - extra[depth]) for (d, b), ms in whole.items() if d == depth and b}
    return {d: drafting[d] + extra[d] for d in depths}, {0: whole[0, 0], **verify}


def _rounds(
    kinds: list[tuple[int, int]], order: random.Random, repeats: int, steady: Callable[[], bool]
) -> Iterator[tuple[int, int]]:
    """Kinds of steps to time, in `repeats` rounds of shuffled order, and in more while they take little time or differ.

    There are `MOST_REPEATS` and one to warm up at most.
    """
    began = time.perf_counter()
    for repeat in range(1 + max(repeats, MOST_REPEATS)):
        seconds = time.perf_counter() - began
        if repeat >= repeats and seconds > ENOUGH_S and (steady() or seconds > LONGEST_S):
            return
        yield from order.sample(kinds, len(kinds))


def _levels(times: Mapping[Any, Sequence[tuple[int, float]]]) -> dict[Any, float]:
    """Typical milliseconds of every kind of step, from the round and the milliseconds of each time it ran.

    The machine's speed drifts, for all kinds of a round alike: log t = kind + round, fitted by medians in turn (Tukey's
    median polish, 1977). The level given is that of a fast round, the lower quartile.
    """
    rounds = sorted({i for own in times.values() for i, _ in own})
    by_round = [[[ms for n, ms in own if n == i] for own in times.values()] for i in rounds]
    logs = np.log(np.maximum([[np.median(ms) for ms in row] for row in by_round], 1e-6))  # [rounds, kinds]
    kinds = np.median(logs, axis=0)
    for _ in range(8):
        drift = np.median(logs - kinds, axis=1)
        kinds = np.median(logs - drift[:, None], axis=0)
    return dict(zip(times, np.exp(kinds + np.quantile(drift, 0.25)).tolist(), strict=True))


def _spread(steps: Steps) -> float:
    """How much longer than its shortest a step takes on average: the median over kinds of steps of mean / minimum."""
    times = [[sum(laps[2:]) for laps in own] for own in steps.values()]
    return statistics.median(statistics.mean(ms) / min(ms) for ms in times)


def _uneven(budget: int, depth: int, num_requests: int) -> Callable[[int], int]:
    """An override that admits `budget` drafts in all, in turn one less and one more than the mean where that can be.

    Pruned steps are uneven, and an uneven step costs more attention than an even one of as many tokens. Less than one
    draft each is one for some, as when a step is drafted to depth 1.
    """
    mean, rest = divmod(budget, num_requests)
    counts = [mean + (i < rest) for i in range(num_requests)]
    for i in range(0, num_requests - 1 if mean else 0, 2):
        if counts[i + 1] < depth:
            counts[i], counts[i + 1] = counts[i] - 1, counts[i + 1] + 1
    turn = itertools.cycle(counts)
    return lambda capacity: min(capacity, next(turn))


def _refill(engine: Engine, llm: LLM, num_requests: int, depth: int, context: int) -> int:
    """Start synthetic requests, run a warm step; return how many full steps still fit.

    Contexts go from half to one and a half of `context`: attention is padded to the longest. They end like the prompts
    that ship for warming up, so that drafts are accepted as on text (acceptance takes longer the further it gets);
    where there is no tokenizer for those, they are random.
    """
    engine.abort()
    order = random.Random(1)
    lengths = [max(1, round(context * (0.5 + (i + 0.5) / num_requests))) for i in range(num_requests)]
    lengths = [min(n, _positions(llm) - 4 * (depth + 1)) for n in order.sample(lengths, num_requests)]
    room = _positions(llm) - max(lengths) - 1
    texts = _warmup_prompts(llm)
    for i, length in enumerate(lengths):
        ids = [order.randrange(llm.vocab_size) for _ in range(length)]
        if texts:
            text = texts[i % len(texts)]
            ids = (text * -(-length // len(text)))[-length:]
        params = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=room)
        engine.add(Request(-1 - i, ids, params, llm.max_model_len, frozenset(), torch.Generator().manual_seed(i)))
    engine.override = lambda capacity: 0
    engine.step()
    return max(1, min(32, room // (depth + 1) - 2))


def _positions(llm: LLM) -> int:
    """Longest sequence that both models can work on."""
    drafter = llm.engine.drafter
    return llm.max_model_len if drafter is None else min(llm.max_model_len, drafter.max_length)


def _warmup_prompts(llm: LLM) -> list[list[int]]:
    if llm.tokenizer is None:
        return []
    try:
        return [ids for ids in llm.prompt_ids(workloads.load(workloads.WARMUP)) if ids]
    except ValueError:  # a tiny model's context or vocabulary has no room for them
        return []
