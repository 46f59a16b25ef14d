"""Recording a trace: the target's own answers, then what a drafter would have drafted at every offset of them.

Pass 1, here, samples the answers with the engine, without speculation. Pass 2 walks along them (`walk`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from avref.config import SamplingParams, whole
from avref.evidence.bench_setting import drafter_hash, fingerprint
from avref.evidence.journal import Journal
from avref.evidence.trace_file import SCHEMA_VERSION, Trace
from avref.evidence.walk import BATCH, Answer, walk

if TYPE_CHECKING:
    from avref.llm import LLM

PARALLEL = ("dflash", "ngram")  # families in which no draft reads another draft


def record(
    llm: LLM,
    prompts: Mapping[str, Sequence[str | Sequence[int]]],
    params: SamplingParams | None = None,
    *,
    offsets: int | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
    use_tqdm: bool = False,
    journal: Path | None = None,
) -> Trace:
    """Record a trace of the LLM's drafter on its target's answers.

    prompts: workload name -> texts (answered behind the chat template where there is one) or lists of token ids.
    params: how answers are sampled, and the p and q that are compared (None: temperature 1, top-p .95); max_tokens
    overrides theirs. offsets: stop at so many, answering every prompt as often as it takes, the workloads in turn
    (None: one answer to each prompt). The same seed gives the same trace. The LLM must be idle. journal: a file that
    keeps every finished batch, so that a recording that was killed goes on there and gives the same trace.

    Raises ValueError without a drafter, without prompts, when prompt, answer and a last block do not fit in, and for a
    journal of other settings.
    """
    params = SamplingParams(temperature=1.0, top_p=0.95) if params is None else params
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params is {params!r}; give SamplingParams(...)")
    if not isinstance(prompts, Mapping) or any(isinstance(own, str) for own in prompts.values()):
        raise ValueError("prompts maps the name of each workload to a list of texts, or of lists of token ids")
    params = params if max_tokens is None else replace(params, max_tokens=max_tokens)
    if llm.config is None or llm.engine.drafter is None:
        raise ValueError("a trace needs a drafter: pass speculative_config to LLM")
    if offsets is not None:
        whole("offsets", offsets, 1)
    whole("max_tokens", params.max_tokens, 2)  # an answer of one token has nothing to draft
    if llm.engine.running or llm.engine.waiting:
        raise RuntimeError("generate is running on this LLM; wait for it, or record with another LLM")
    encoded = {
        name: [llm.prompt_ids([p])[0] if isinstance(p, str) else llm._encode([p])[0] for p in prompts[name]]
        for name in prompts
    }
    _check_room(llm, encoded, params.max_tokens)
    header = _header(llm, list(encoded), params, seed)
    done = Journal(journal, {**header, **_identity(llm, encoded, offsets)})
    answers = _sample(llm, encoded, params, offsets, seed, done)
    if not answers:
        raise ValueError("no answer is longer than one token, so there is nothing to draft: raise max_tokens")
    try:
        arrays = walk(llm, answers, params, seed, use_tqdm, done)
    finally:
        llm.engine.abort()  # forgets the rows that pass 2 wrote
    return Trace(header, **arrays)


def _header(llm: LLM, workloads: list[str], params: SamplingParams, seed: int) -> dict[str, Any]:
    c = llm.config
    assert c is not None
    return {
        "schema_version": SCHEMA_VERSION,
        "target": _name(llm.name),
        "method": c.method,
        "drafter": "loaded model" if isinstance(c.model, torch.nn.Module) else _name(c.model or "shipped"),
        "draft_sample_method": c.draft_sample_method,
        "parallel": c.method in PARALLEL,
        "num_speculative_tokens": c.num_speculative_tokens,
        "dtype": str(llm.dtype).removeprefix("torch."),
        "temperature": float(params.temperature),
        "top_p": float(params.top_p),
        "top_k": params.top_k,
        "max_tokens": params.max_tokens,
        "seed": seed,
        "workloads": workloads,
    }


def _identity(llm: LLM, prompts: Mapping[str, list[list[int]]], offsets: int | None) -> dict[str, Any]:
    """What a journal's batches depend on beside the trace's header."""
    assert llm.config is not None
    return {
        "offsets": offsets,
        "rows": min(BATCH, llm.engine.max_num_seqs),
        "prompts_hash": hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16],
        "target_hash": fingerprint(llm.model),
        "drafter_hash": drafter_hash(llm.config.method, llm.config.model),
    }


def _name(model: Any) -> str:
    """A hub id or name as it is; of a folder its own name, not where it lies."""
    return Path(model).name if isinstance(model, (str, Path)) and Path(model).exists() else str(model)


def _check_room(llm: LLM, prompts: Mapping[str, list[list[int]]], max_tokens: int) -> None:
    assert llm.engine.drafter is not None
    longest = max((len(ids) for group in prompts.values() for ids in group), default=0)
    if longest == 0:
        raise ValueError("prompts hold nothing to answer: give at least one prompt, of at least one token")
    limit, depth = min(llm.max_model_len, llm.engine.drafter.max_length), llm.engine.num_positions
    if longest + max_tokens + depth > limit:
        raise ValueError(
            f"a prompt of {longest} tokens, {max_tokens} tokens of answer and {depth} drafts pass the {limit} tokens "
            "that target and drafter have room for; lower max_tokens or raise max_model_len"
        )


def _sample(
    llm: LLM,
    prompts: Mapping[str, list[list[int]]],
    params: SamplingParams,
    offsets: int | None,
    seed: int,
    journal: Journal,
) -> list[Answer]:
    """Answers of two tokens or more, workloads in turn; the last is cut where the offsets are enough."""
    from avref.llm import LLM as Plain

    rows = min(BATCH, llm.engine.max_num_seqs)
    sampler = Plain(llm.model, None, llm.tokenizer, max_num_seqs=rows, max_model_len=llm.max_model_len)
    sampler.eos_ids = llm.eos_ids
    groups = [[(w, i, ids) for i, ids in enumerate(group)] for w, group in enumerate(prompts.values())]
    turns = [item for one_of_each in itertools.zip_longest(*groups) for item in one_of_each if item is not None]
    jobs = itertools.cycle(turns) if offsets is not None else iter(turns)
    answers: list[Answer] = []
    count = made = 0
    full = params.max_tokens - 1  # offsets of the longest answer: no more answers than can be needed are begun
    wanted = lambda: 2 * rows if offsets is None else min(2 * rows, -(-(offsets - count) // full))  # noqa: E731
    while batch := list(itertools.islice(jobs, wanted())):
        if (key := f"answers {made}") not in journal:
            seeds = [((params.seed or 0) * 1_000_003 + seed * 10_007 + made + i) % 2**63 for i in range(len(batch))]
            outputs = sampler.generate([ids for _, _, ids in batch], [replace(params, seed=s) for s in seeds])
            journal.append(key, {"answers": [(o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in outputs]})
        made += len(batch)
        for (workload, prompt, ids), (answer, reason) in zip(batch, journal.records[key]["answers"], strict=True):
            own = answer if offsets is None else answer[: offsets - count + 1]
            if len(own) < 2 or count == offsets:
                continue
            stopped = reason == "stop" and len(own) == len(answer)
            answers.append(Answer(workload, prompt, ids, own, stopped))
            count += len(own) - 1
        if count == offsets or (made >= 100 * len(turns) and not answers):
            break
    return answers
