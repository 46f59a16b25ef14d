"""Cost tables of machines that you do not have: one published, one measured, and rooflines from a data sheet.

    published_b300   the startup profile that vLLM's article on DSpark shows (DeepSeek-V4-Flash, four B300)
    measured         this project's own pair on two CPU cores, one table that every result here can be replayed under
    roofline         time = max(bytes / bandwidth, FLOPs / rate) + overhead, for any model on any GPU

A roofline is a bound, not a measurement: no kernel reaches the peak rates, attention's own arithmetic is left out, and
there are no padded batch sizes, hence no staircase. It has the shape that matters here: flat while the weights are
read, then a straight line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import as_file, files
from typing import Any

import numpy as np

from avref.cost_table import CostTable

CAPTURE_LIMIT = 1024
"""Packed tokens up to which the published profile replays captured graphs, and pads batches to captured sizes."""


@dataclass(frozen=True)
class GPU:
    """Peak rates from a data sheet: dense 16-bit matrix products in FLOP/s, memory bandwidth in bytes/s."""

    flops: float
    bandwidth: float


LARGEST = 2**27
"""Entries of the largest table that a roofline makes, a gigabyte."""
GPUS: Mapping[str, GPU] = {
    # NVIDIA's data sheets, dense figures (those "with sparsity" are twice as high). T4: 256-bit GDDR6 at 10 Gbit/s.
    "T4": GPU(65e12, 320e9),  # FP16; it has no bfloat16
    "A100": GPU(312e12, 2.039e12),  # SXM, 80 GB HBM2e
    "H100": GPU(989e12, 3.35e12),  # SXM, 80 GB HBM3
    "H200": GPU(989e12, 4.8e12),  # SXM, 141 GB HBM3e
}


@dataclass(frozen=True)
class Model:
    """What a roofline needs of a causal LM: parameters read per forward, and cache bytes for one token of context."""

    parameters: float
    kv_bytes_per_token: float = 0.0


# Parameters with embeddings; cache bytes = 2 (keys, values) x layers x key-value heads x head size x 2 bytes.
MODELS: Mapping[str, Model] = {
    "SmolLM2-135M": Model(134.5e6, 2 * 30 * 3 * 64 * 2),
    "SmolLM2-1.7B": Model(1.71e9, 2 * 24 * 32 * 64 * 2),
    "Qwen2.5-0.5B": Model(0.494e9, 2 * 24 * 2 * 64 * 2),
    "Qwen2.5-7B": Model(7.62e9, 2 * 28 * 4 * 128 * 2),
}


def published_b300(*, max_requests: int = 128, max_tokens: int = CAPTURE_LIMIT) -> CostTable:
    """The published cost profile: draft_ms [R_max+1] of one drafting pass, verify_ms [T_max+1] by packed tokens.

    DeepSeek-V4-Flash with DSpark, tensor-parallel on four B300; medians read off the marks of figure 2 of vLLM's
    article of 14 August 2026. Sizes above 256, which the drawing gives to about one token, are put on the multiple of
    16 next to them, where they were measured. Up to 1,024 tokens batches are padded to captured sizes: a staircase.
    Beyond lie five outliers, run without captured graphs, five times slower and more (20.6 ms at 1,024 tokens, 104 at
    1,536). No line is drawn across that cliff, and the default table ends before it: ask for a larger max_tokens to
    have it. Dips in the published curve are levelled by a running maximum, as vLLM does. Raises ValueError for more
    than 4 times the sizes measured (256 requests, 16,384 tokens).
    """
    profile = json.loads((files("avref") / "data" / "cost_profile_b300.json").read_text(encoding="utf-8"))
    verify = [(size if size <= 256 else 16 * round(size / 16), ms) for size, ms in profile["verify_ms"]]
    metadata = {
        "machine": "four B300, tensor parallel",
        "target": "DeepSeek-V4-Flash",
        "drafter": "DSpark",
        "source": profile["source"],
        "tail": f"above {CAPTURE_LIMIT} tokens: no captured graphs, five outlying points",
    }
    size = {"max_requests": max_requests, "max_tokens": max_tokens, "padded_up_to": CAPTURE_LIMIT}
    return CostTable.from_curves(profile["draft_ms"], verify, **size, metadata=metadata)


def measured() -> CostTable:
    """This project's default pair on two CPU cores, up to 32 requests of 8 tokens: verify_ms [33, 257], draft_ms [33].

    Measured by `avref profile`; metadata names machine, dtype, context, target and drafter, and keeps the medians.
    """
    with as_file(files("avref") / "data" / "cost_table_2cores.json") as path:
        return CostTable.load(path)


def roofline(
    parameters: float,
    *,
    flops: float,
    bandwidth: float,
    bytes_per_parameter: float = 2.0,
    kv_bytes_per_token: float = 0.0,
    context: int = 0,
    overhead_ms: float = 0.0,
    draft_parameters: float = 0.0,
    draft_overhead_ms: float = 0.0,
    parallel_draft: bool = True,
    num_speculative_tokens: int = 7,
    max_requests: int = 64,
    max_tokens: int | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> CostTable:
    """A cost table from a data sheet, in milliseconds:

        verify_ms[R, T] = 1000 max((P b + R context kv) / bandwidth, 2 P T / flops) + overhead_ms

    with P parameters of b bytes, and two operations per parameter and token. One pass of the drafter over n tokens
    costs 1000 max(P_d b / bandwidth, 2 P_d n / flops) + draft_overhead_ms, its own cache left out: drafting to depth k
    is one pass over R k tokens (parallel_draft), or k passes over R tokens; depth 0 costs nothing. flops in FLOP/s,
    bandwidth in bytes/s. max_tokens: R_max (1 + num_speculative_tokens) by default. Memory is not checked: whether
    weights and caches fit is for you to see to. Raises ValueError for values that are not positive (negative ones,
    where 0 has a meaning). Source: Williams, Waterman and Patterson, "Roofline", 2009.
    """
    positive = {"parameters": parameters, "flops": flops, "bandwidth": bandwidth, "max_requests": max_requests}
    positive |= {"bytes_per_parameter": bytes_per_parameter, "num_speculative_tokens": num_speculative_tokens}
    at_least_zero = {"kv_bytes_per_token": kv_bytes_per_token, "context": context, "overhead_ms": overhead_ms}
    at_least_zero |= {"draft_parameters": draft_parameters, "draft_overhead_ms": draft_overhead_ms}
    for name, value in (positive | at_least_zero).items():
        if not (value > 0 or (name in at_least_zero and value == 0)):
            raise ValueError(f"{name} is {value}: give a {'value above 0' if name in positive else 'value from 0 on'}")

    def pass_ms(size: float, tokens: Any, cache_bytes: Any = 0.0) -> Any:
        return 1e3 * np.maximum((size * bytes_per_parameter + cache_bytes) / bandwidth, 2 * size * tokens / flops)

    deepest = num_speculative_tokens
    last = max_requests * (1 + deepest) if max_tokens is None else max_tokens
    if max_requests * last > LARGEST:
        most = int((LARGEST / (1 + deepest)) ** 0.5 if max_tokens is None else LARGEST / max_tokens)
        raise ValueError(f"max_requests is {max_requests}: a table of {last:,} tokens goes up to {most:,} requests")
    requests = np.arange(max_requests + 1.0)[:, None]  # [R_max+1, 1]
    tokens = np.arange(last + 1.0)
    verify_ms = pass_ms(parameters, tokens, requests * context * kv_bytes_per_token) + overhead_ms
    depth = np.arange(deepest + 1.0)  # [K+1]
    passes, each = ((depth > 0) * 1.0, requests * depth) if parallel_draft else (depth, requests)
    draft_ms = passes * (pass_ms(draft_parameters, each) + draft_overhead_ms)
    return CostTable(np.broadcast_to(draft_ms, (max_requests + 1, deepest + 1)), verify_ms, metadata=metadata)


def gpu_roofline(
    gpu: str, target: str, drafter: str, *, context: int = 512, max_requests: int = 64, **options: Any
) -> CostTable:
    """`roofline` of a named GPU, target and token-by-token drafter (`GPUS`, `MODELS`), each pass 0.5 ms of overhead.

    `options` go to `roofline` and replace what is set here. Raises ValueError for a name that is not listed.
    """
    for name, known in ((gpu, GPUS), (target, MODELS), (drafter, MODELS)):
        if name not in known:
            raise ValueError(f"{name!r} is not known here: choose one of {', '.join(known)}, or call roofline")
    setting: dict[str, Any] = {**vars(GPUS[gpu]), **vars(MODELS[target]), "context": context, "overhead_ms": 0.5}
    setting |= {"draft_parameters": MODELS[drafter].parameters, "draft_overhead_ms": 0.5, "parallel_draft": False}
    metadata = {"machine": f"one {gpu}, by its data sheet", "target": target, "drafter": drafter, "context": context}
    return roofline(**(setting | {"max_requests": max_requests, "metadata": metadata} | options))
