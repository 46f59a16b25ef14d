"""Packed variable-length forward: many requests, a different number of tokens each, no padding in linear layers.

All tokens of a step lie behind one another in one sequence `[1, T]`. Every linear layer therefore works on exactly T
rows (but for the head of small steps on a CPU, see `SLOW_HEAD_ROWS`). Only attention must know which request a token
belongs to: it reads that from a `Layout`, writes the new keys and values into the request's row of a `KVCache`, and
makes one call per layer for all requests, on a CPU sometimes two (queries and keys padded to rectangles; the padding is
masked, never computed in a linear layer). Rollback of a rejected draft is a shorter length: stale keys lie beyond every
later query's position until they are overwritten.

The hook is transformers' `AttentionInterface`: an attention function registered by name. No mask function of that name
is registered, so the model builds no mask of its own and `packed_attention` alone is responsible for causality;
`parity.check_parity` proves it at load time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from avref.layout import Block, Layout

ATTENTION = "avref"
SLOW_HEAD_ROWS = range(6, 16)
"""On a CPU the matrix library takes up to 2.5 times as long for logits of so many rows as for those of 16."""


class KVCache:
    """Keys and values per layer, one row per running request: buffers [rows, length, H_kv, D], grown as needed."""

    def __init__(self, max_rows: int, max_length: int) -> None:
        self.max_rows, self.max_length = max_rows, max_length  # no buffer grows beyond these
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, layer: int, layout: Layout, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [T, H_kv, D]; return all of the layout's rows, views [R, context, H_kv, D]."""
        keys, values = self._buffers(layer, layout, key, value)
        rows = layout.row + layout.first_row if layout.first_row else layout.row
        keys[rows, layout.position] = key
        values[rows, layout.position] = value
        here = slice(layout.first_row, layout.first_row + layout.num_rows)
        return keys[here, : layout.context], values[here, : layout.context]

    def _buffers(self, layer: int, layout: Layout, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        rows, length = layout.first_row + layout.num_rows, layout.context
        if rows > self.max_rows or length > self.max_length:
            raise ValueError(
                f"the cache holds {self.max_rows} requests of {self.max_length} tokens; "
                f"{rows} requests of {length} tokens were asked for"
            )
        old = self.layers.get(layer)
        if old is None or old[0].shape[0] < rows or old[0].shape[1] < length:
            have_rows, have_length = (0, 0) if old is None else old[0].shape[:2]
            new_rows = min(self.max_rows, max(rows, 2 * have_rows)) if rows > have_rows else have_rows
            wanted = max(256, -(-length * 3 // 2 // 64) * 64)
            new_length = min(self.max_length, wanted) if length > have_length else have_length
            grown = tuple(x.new_zeros(new_rows, new_length, *x.shape[1:]) for x in (key, value))
            if old is not None:
                for new, buffer in zip(grown, old, strict=True):
                    new[:have_rows, :have_length] = buffer
            self.layers[layer] = (grown[0], grown[1])
        return self.layers[layer]

    def clear(self) -> None:
        """Forget everything. A NaN left behind would survive any mask: 0 * NaN is NaN."""
        self.layers.clear()

    def move(self, source: int, target: int) -> None:
        """Copy one request's row over another: how the running rows stay consecutive when a request leaves."""
        for keys, values in self.layers.values():
            if source < keys.shape[0]:
                keys[target], values[target] = keys[source], values[source]


# What the forward in progress works on. Not a keyword of the model's call: some models of older releases drop those.
_BATCH: ContextVar[tuple[KVCache, Layout] | None] = ContextVar("avref batch", default=None)


def packed_attention(
    module: Any,  # the attention layer; `layer_idx` says which
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, H_kv, T, D]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over each request's own cached context -> ([1, T, H, D], None).

    The signature is the one that `AttentionInterface` asks for.
    """
    batch = _BATCH.get()
    if batch is None or attention_mask is not None or kwargs.get("s_aux") is not None:
        raise RuntimeError(
            "packed attention serves packed forwards without a mask or attention sinks; this model needs another path"
        )
    cache, layout = batch
    keys, values = cache.update(module.layer_idx, layout, key[0].transpose(0, 1), value[0].transpose(0, 1))
    return attend(query[0].transpose(0, 1), keys, values, layout, scaling, sliding_window, softcap)[None], None


def attend(
    query: Tensor,  # [T, H, D]
    keys: Tensor,  # [R, L, H_kv, D]
    values: Tensor,
    layout: Layout,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of every query over its own row's keys, block by block of the layout -> [T, H, D]."""
    blocks = [_attend(query, keys, values, block, scaling, window, softcap) for block in layout.blocks]
    if len(blocks) == 1:
        return blocks[0]
    out = blocks[0].new_empty(len(query), *blocks[0].shape[1:])
    for block, own in zip(layout.blocks, blocks, strict=True):
        out[block.tokens] = own
    return out


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block: Block,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """One attention call for a block's m tokens -> [m, H, D].

    The G query heads that share a key head are folded into query rows ([n, H_kv, G q, D]): the same arithmetic as
    grouped-query attention, several times faster on a CPU.
    """
    kv_heads = keys.shape[2]
    group = query.shape[1] // kv_heads
    q = block.pad(query).unflatten(2, (kv_heads, group))  # [n, q, H_kv, G, D]
    q = q.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [n, H_kv, G q, D]
    keys, values = block.keys(keys).transpose(1, 2), block.keys(values).transpose(1, 2)  # [n, H_kv, L, D]
    mask = block.mask(group, window, q.dtype)
    if softcap is None:
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scaling)
    else:
        scores = q @ keys.transpose(-1, -2) * (scaling if scaling is not None else q.shape[-1] ** -0.5)
        out = torch.softmax(softcap * torch.tanh(scores / softcap) + mask, dim=-1) @ values
    out = out.unflatten(2, (group, block.width)).permute(0, 3, 1, 2, 4).flatten(2, 3)  # [n, q, H, D]
    return block.unpad(out)


def _register() -> None:
    """Make the attention function known to transformers; here, because importing its modeling code takes seconds."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, packed_attention)


class PackedModel:
    """A Hugging Face causal LM with a `KVCache`, called on packed tokens.

    Raises ValueError when `max_length` is beyond what the packed path serves right (`longest_context`).
    """

    def __init__(self, model: Any, max_rows: int, max_length: int) -> None:
        limit, reason = longest_context(model)
        if limit is not None and max_length > limit:
            raise ValueError(
                f"{type(model).__name__} can be run up to {limit} tokens here, not {max_length}, because {reason}; "
                f"pass max_model_len={limit} or less"
            )
        _register()
        self.model, self.device = model, model.device
        self.cache = KVCache(max_rows, max_length)

    @torch.inference_mode()
    def forward(
        self, ids: Tensor, layout: Layout, logit_rows: Tensor | None = None, hidden_layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """One forward over the packed tokens ids [T] -> (logits [N, V], hidden states [T, n D] or None).

        The logits are those at the packed indices `logit_rows` [N] (None: all T). The hidden states are the model's at
        the n `hidden_layers`, side by side; None when none is asked for.
        """
        if self.model.config._attn_implementation != ATTENTION:
            self.model.set_attn_implementation(ATTENTION)
        num_logits = len(ids) if logit_rows is None else len(logit_rows)
        if self.device.type == "cpu" and num_logits in SLOW_HEAD_ROWS:
            rows = torch.arange(num_logits) if logit_rows is None else logit_rows
            logit_rows = F.pad(rows, (0, SLOW_HEAD_ROWS.stop - num_logits))
        token = _BATCH.set((self.cache, layout))
        try:
            out = self.model(
                input_ids=ids[None],
                position_ids=layout.position[None],
                use_cache=False,
                logits_to_keep=0 if logit_rows is None else logit_rows,
                output_hidden_states=bool(hidden_layers),
            )
        finally:
            _BATCH.reset(token)
        hidden = torch.cat([out.hidden_states[i][0] for i in hidden_layers], dim=-1) if hidden_layers else None
        return out.logits[0, :num_logits], hidden


@contextmanager
def plain_attention(model: Any) -> Iterator[Any]:
    """Inside, the model is an ordinary Hugging Face model again (for `generate` and as the parity reference)."""
    before = model.config._attn_implementation
    softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)  # older releases' sdpa drops it
    eager = softcap is not None or not getattr(model, "_supports_sdpa", True)
    model.set_attn_implementation("eager" if eager else "sdpa")
    try:
        yield model
    finally:
        model.set_attn_implementation(before)


def longest_context(model: Any) -> tuple[int | None, str]:
    """The longest sequence that packed forwards serve right, and why; None: the model's own limit.

    Two things of a longer one never reach an attention function, and short prompts cannot show it: a chunked mask
    (Llama 4), and rotary frequencies that a single long sequence changes for all tokens of a forward (longrope,
    dynamic scaling), so for the requests beside it too.
    """
    config = model.config.get_text_config()
    limits: list[tuple[int, str]] = []
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk and "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        limits.append((chunk, f"its layers attend within chunks of {chunk}"))
    rope = getattr(config, "rope_parameters", None) or {}
    for own in (rope, *(v for v in rope.values() if isinstance(v, dict))):  # one for all layers, or one per kind
        if own.get("rope_type") in ("longrope", "dynamic"):
            trained = own.get("original_max_position_embeddings")
            first = trained or getattr(config, "original_max_position_embeddings", config.max_position_embeddings)
            limits.append((first, f"its {own['rope_type']} scaling changes every request's positions beyond {first}"))
    return min(limits, default=(None, ""))
