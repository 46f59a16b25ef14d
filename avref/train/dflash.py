"""Distilling `dflash`: its network on many blocks at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from avref.drafters.dflash import DFlashModel
from avref.drafters.layers import rotary
from avref.train.blocks import Batch, Drafts, Settings, attend_blocks, shape_of, start_from_target


def start(target: Any, settings: Settings, vocab_ids: Tensor) -> DFlashModel:
    """A drafter that starts from the target's last layers."""
    model = DFlashModel(shape_of(target, settings, len(vocab_ids)))
    model.vocab_ids.copy_(vocab_ids)
    start_from_target(model, target)
    return model


def block_states(model: DFlashModel, embedding: Any, batch: Batch, depth: int) -> Tensor:
    """The drafter's final states [B, M, depth, D] for all blocks in one pass.

    These are what `DFlashDrafter.propose` computes one step at a time.
    """
    c, anchors = model.config, batch.anchors
    context = model.context(batch.hidden)  # [B, L, D]
    (size, length, width), blocks = context.shape, anchors.shape[1]
    newest = context.gather(1, (anchors - 1)[..., None].expand(-1, -1, width))
    x = model.block(embedding(batch.tokens(1)[..., 0]), newest, depth).flatten(1, 2)  # [B, M depth, D]
    place = (anchors[..., None] + torch.arange(depth)).flatten(1)  # [B, M depth]
    seen = torch.arange(length) < anchors.repeat_interleave(depth, dim=1)[..., None]  # [B, M depth, L]
    slot, block = torch.arange(blocks * depth) % depth, torch.arange(blocks * depth) // depth
    own = (block[:, None] == block) & (slot[:, None] >= slot)  # [M depth, M depth]
    mask = torch.cat([seen, own.expand(size, -1, -1)], dim=-1)
    at_context, at_block = (rotary(p, c.head_dim, c.rope_theta) for p in (torch.arange(length), place))
    for layer in model.decoder_layers:
        both = zip(layer.keys_values(context, *at_context), layer.keys_values(x, *at_block), strict=True)
        keys, values = (torch.cat(pair, dim=1) for pair in both)  # [B, L + M depth, H_kv, head_dim]
        x = layer.finish(x, attend_blocks(layer, layer.queries(x, *at_block), keys, values, mask))
    return model.norm(x).unflatten(1, (blocks, depth))


def forward(model: DFlashModel, embedding: Any, head: Tensor, batch: Batch, depth: int) -> Drafts:
    """Logits of every slot; the stop head reads the states without shaping them."""
    states = block_states(model, embedding, batch, depth)
    return Drafts(states @ head.T, model.stop_head(states.detach()))
