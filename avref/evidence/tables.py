"""Cost tables by name, with what drafting costs fitted to a trace's family of drafter.

A table that knows draft_ms by depth is taken as it is. One that knows a single drafting pass (`hardware.measured`,
`hardware.published_b300`) was profiled with a drafter that makes its whole block in one pass over R K tokens;
`drafting` says what it would be for the other families.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from avref.cost_table import CostTable
from avref.drafters.layer_skip import SHARE
from avref.evidence import hardware
from avref.evidence.trace_file import Trace

TABLES = ("measured", "b300", "t4", "a100", "h100", "h200")
ONE_PASS = ("dflash", "dspark")
HEAD_SHARE = 0.1  # of the target's parameters: one layer and its output head, roughly


def named(name: str, trace: Trace, max_requests: int = 64) -> CostTable:
    """A table by name (`TABLES`) or from a file that `CostTable.save` wrote, with the trace's family of drafter.

    A GPU by name is a roofline: SmolLM2-1.7B on a T4 (what fits), Qwen2.5-7B elsewhere, drafted by a head of a tenth of
    its parameters (draft_model: by SmolLM2-135M or Qwen2.5-0.5B). Raises ValueError for a name that is neither.
    """
    method = trace.header["method"]
    if name == "measured":
        return drafting(hardware.measured(), method, trace.num_positions)
    if name == "b300":
        size = max_requests * (1 + trace.num_positions)
        table = hardware.published_b300(max_requests=max_requests, max_tokens=max(hardware.CAPTURE_LIMIT, size))
        return drafting(table, method, trace.num_positions)
    if name in TABLES:
        target, small = ("SmolLM2-1.7B", "SmolLM2-135M") if name == "t4" else ("Qwen2.5-7B", "Qwen2.5-0.5B")
        share = {"layer_skip": SHARE, "ngram": 0.0}.get(method, HEAD_SHARE)
        options: dict[str, Any] = {"parallel_draft": method in ONE_PASS, "num_speculative_tokens": trace.num_positions}
        if method != "draft_model":
            options["draft_parameters"] = share * hardware.MODELS[target].parameters
        if method == "ngram":
            options["draft_overhead_ms"] = 0.0
        return hardware.gpu_roofline(name.upper(), target, small, max_requests=max_requests, **options)
    if not Path(name).is_file():
        raise ValueError(f"no cost table {name!r}: give one of {', '.join(TABLES)}, or a file that `profile` wrote")
    return drafting(CostTable.load(name), method, trace.num_positions)


def drafting(table: CostTable, method: str, num_positions: int) -> CostTable:
    """A table profiled with a drafter of one pass per block, as another family would find it: draft_ms [R_max+1, K+1].

    dflash and dspark draft in that one pass. The others take one pass per draft, over R tokens instead of R K: charged
    as the block pass of R / K requests, K that of the table; layer_skip's pass is a part of the target's forward;
    n-grams cost nothing. A table by depth is left alone, but for n-grams.
    """
    if table.draft_ms.ndim == 2 and method != "ngram":
        return table
    requests = np.arange(table.max_requests + 1)
    if method == "layer_skip":
        one = SHARE * np.array([0.0, *(float(table.verify(r, r)) for r in requests[1:])])
    else:
        block = int(table.metadata.get("num_speculative_tokens", num_positions))
        one = np.array([table.draft(max(1, -(-int(r) // block))) for r in requests])
    depth = np.arange(num_positions + 1)
    if method in ONE_PASS:
        draft_ms = np.array([0.0, *(table.draft(r) for r in requests[1:])])[:, None] * (depth > 0)
    else:
        draft_ms = one[:, None] * depth * (method != "ngram")
    return CostTable(draft_ms, table.verify_ms, metadata={**table.metadata, "drafts_as": method})
