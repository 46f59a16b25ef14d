"""Does the packed forward reproduce a model? Settled at load time, since a wrong one would decode on without a word."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from avref.layout import Layout
from avref.packed import PackedModel, plain_attention

LIMITS = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Largest difference of logits that is rounding, in units of their spread. Where the plain model's own logits change
when a token is appended (kernels that depend on the size), three times that change is allowed, as long as that is at
most `MOST` times this."""
MOST = 4


@torch.inference_mode()
def check_parity(model: Any) -> float:
    """Largest difference between packed and plain logits on two short prompts, relative to the spread of the logits.

    Allowed is rounding (`LIMITS`). The second forward continues both rows after a rollback, so the cache is covered
    too. Raises RuntimeError, with the reason, for a model that would decode silently wrong: when a layer keeps its past
    anywhere but in the packed cache (recurrent, hybrid, an attention of its own), when a sliding window does not reach
    the attention, and when logits differ for a reason not known here (a position bias of the model's own, say).
    """
    name, limit = type(model).__name__, LIMITS.get(model.dtype, 1e-4)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    rows = [[(7 * i + 3) % vocabulary for i in range(9)], [(11 * i + 5) % vocabulary for i in range(6)]]
    cached = [5, 3]  # so many tokens of each are there before the second forward
    with plain_attention(model):
        plain = [model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0] for ids in rows]
    expected = torch.cat([p[n:] for p, n in zip(plain, cached, strict=True)]).float()
    if not bool(expected.isfinite().all()):
        raise RuntimeError(
            f"{name} gives NaN or infinite logits on a plain forward; check its weights and its dtype ({model.dtype})"
        )
    try:
        logits, packed, windows = _after_a_rollback(model, rows, cached)
    except Exception as error:
        raise RuntimeError(f"{name} cannot run the packed forward: {error}") from error
    config = model.config.get_text_config()
    if len(packed.cache.layers) < config.num_hidden_layers:
        raise RuntimeError(
            f"{name}: {len(packed.cache.layers)} of {config.num_hidden_layers} layers attend through transformers' "
            "attention interface. The others are recurrent or have an attention of their own, whose state packed "
            "forwards neither separate by request nor roll back; it cannot be used here"
        )
    if (
        "sliding_attention" in (getattr(config, "layer_types", None) or ())
        and getattr(config, "sliding_window", None) not in windows
    ):
        raise RuntimeError(
            f"{name}: its sliding window of {config.sliding_window} tokens does not reach the attention function, "
            "which would attend to the whole context; it cannot be used here"
        )
    spread = expected.std().clamp_min(1e-6)
    longer = [[*ids, 1] for ids in rows]
    with plain_attention(model):
        again = [model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0] for ids in longer]
    noise = max(float((a[:-1] - p).abs().max() / spread) for a, p in zip(again, plain, strict=True))
    if 3 * noise <= MOST * limit:  # more is no rounding: the model looks ahead
        limit = max(limit, 3 * noise)
    difference = float((logits - expected).abs().max() / spread)
    if not difference <= limit:
        raise RuntimeError(
            f"{name}: packed logits differ from the plain model's by {difference:.2g} of their spread (allowed "
            f"in {str(model.dtype).removeprefix('torch.')}: {limit:g}). Its attention does something that the packed "
            "path does not know (as an encoder's, which looks ahead); it cannot be used here"
        )
    return difference


def _after_a_rollback(
    model: Any, rows: list[list[int]], cached: list[int]
) -> tuple[Tensor, PackedModel, set[int | None]]:
    """Logits behind the first `cached` tokens of each row, and what the forwards left: the cache, the windows seen.

    First those tokens and two wrong drafts are written; the second forward rolls the drafts back and goes on.
    """
    drafts = [[*ids[:n], 1, 1] for ids, n in zip(rows, cached, strict=True)]
    rest = [ids[n:] for ids, n in zip(rows, cached, strict=True)]
    packed = PackedModel(model, len(rows), max(map(len, rows)) + 2)
    for starts, chunks in (([0, 0], drafts), (cached, rest)):
        layout = Layout(starts, [len(c) for c in chunks], model.device)
        ids = torch.tensor(list(itertools.chain.from_iterable(chunks)), device=model.device)
        logits, _ = packed.forward(ids, layout)
    return logits.float(), packed, layout.windows
