"""How good a drafter is: its overlap with the target on the target's own held-out samples, by position."""

from __future__ import annotations

from typing import Any

from avref import workloads
from avref.config import SamplingParams
from avref.evidence import traces
from avref.llm import LLM


def held_out_overlap(
    llm: LLM,
    method: str = "dflash",
    drafter: Any = None,
    *,
    num_speculative_tokens: int = 7,
    per_workload: int = 40,
    max_tokens: int = 96,
    top_p: float = 0.95,
) -> dict[str, list[float]]:
    """Overlap sum(min(p, q)) by position on fresh samples for the evaluation prompts: one row per workload, and "all".

    Position k counts given that the drafts before it were accepted (`traces.overlap_by_position`). `drafter` is what
    `speculative_config["model"]` takes for this method: a folder, a loaded model, or None for the one shipped.
    """
    config = {"method": method, "model": drafter, "num_speculative_tokens": num_speculative_tokens}
    speculative = LLM(llm.model, config, llm.tokenizer, max_num_seqs=32, max_model_len=llm.max_model_len, seed=llm.seed)
    prompts = {name: workloads.load(name, per_workload) for name in workloads.NAMES}
    trace = traces.record(
        speculative, prompts, SamplingParams(temperature=1.0, top_p=top_p, max_tokens=max_tokens), seed=llm.seed
    )
    parts = {name: traces.overlap_by_position(trace, name)[0].tolist() for name in workloads.NAMES}
    return {"all": traces.overlap_by_position(trace)[0].tolist(), **parts}
