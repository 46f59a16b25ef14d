"""Distilling `mtp`: its modules, one behind the other, on many blocks at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from avref.drafters.layers import DrafterModel, rotary
from avref.drafters.mtp import MTPModel
from avref.train.blocks import Batch, Drafts, Settings, attend_blocks, shape_of, start_from_target
from avref.train.eagle import context_states


@torch.no_grad()
def start(target: Any, settings: Settings, vocab_ids: Tensor) -> MTPModel:
    """A drafter whose modules all start from the target's last layer, small enough to have one of them per depth.

    It reads the last two of `settings.target_layers`; a module has a third of the target's heads, which start at
    random, and a third of its width in the MLP. For a target of width 576 and a depth of 5 that makes 11 MB in
    bfloat16. `settings.num_layers` plays no role: there is one layer per depth.
    """
    shape = shape_of(target, settings, len(vocab_ids))
    kv_heads = max(1, shape.num_kv_heads // 3)
    one = replace(
        shape,
        num_heads=kv_heads * max(1, shape.num_heads // 3 // kv_heads),
        num_kv_heads=kv_heads,
        intermediate_size=min(shape.intermediate_size, max(1, shape.hidden_size // 3)),
        num_layers=1,
        target_layers=shape.target_layers[-2:],
    )
    single, model = DrafterModel(one), MTPModel(replace(one, num_layers=shape.depth))
    start_from_target(single, target)
    for part in ("fuse", "fuse_norm", "embedding_norm", "norm"):
        getattr(model, part).load_state_dict(getattr(single, part).state_dict())
    for layer, join in zip(model.decoder_layers, model.joins, strict=True):
        layer.load_state_dict(single.layers[0].state_dict())
        join.load_state_dict({"weight": single.join.weight[:, : shape.hidden_size]})
    model.vocab_ids.copy_(vocab_ids)
    return model


def chain_states(model: MTPModel, embedding: Any, batch: Batch, depth: int) -> Tensor:
    """The modules' final states [B, M, depth, D] for all blocks.

    These are what `MTPDrafter.propose` computes with `forced` recorded tokens. Of recorded states of more layers than
    the model reads, it takes the last ones; gradients flow back through the modules.
    """
    c, anchors = model.config, batch.anchors
    (size, blocks), length = anchors.shape, batch.hidden.shape[1]
    before, state = context_states(model.context(batch.hidden[..., -len(c.target_layers) * c.hidden_size :]), anchors)
    at_context, embedded_context = torch.arange(length).expand(size, -1), embedding(batch.ids[:, :-1])
    seen = torch.arange(length) < anchors[..., None]  # [B, M, L]
    same = torch.eye(blocks, dtype=torch.bool).expand(size, -1, -1)  # [B, M, M]
    embedded = embedding(batch.tokens(depth))
    chain: list[Tensor] = []  # the blocks' inputs so far, [B, M, D] each
    own: list[Tensor] = []
    for d, layer in enumerate(model.decoder_layers[:depth]):
        x = model.joined(embedded[:, :, d], state, d)
        chain.append(x)
        entries = torch.cat([model.joined(embedded_context, before, d), *chain], dim=1)  # [B, L + (d + 1) M, D]
        place = torch.cat([at_context, *(anchors + i for i in range(d + 1))], dim=1)
        keys, values = layer.keys_values(entries, *rotary(place, c.head_dim, c.rope_theta))
        queries = layer.queries(x, *rotary(anchors + d, c.head_dim, c.rope_theta))
        mask = torch.cat([seen, same.repeat(1, 1, d + 1)], dim=-1)
        own.append(layer.finish(x, attend_blocks(layer, queries, keys, values, mask)))
        state = model.own(own[-1])
    return model.norm(torch.stack(own, dim=2))


def forward(model: MTPModel, embedding: Any, head: Tensor, batch: Batch, depth: int) -> Drafts:
    """Logits of every slot; the stop head reads the states without shaping them."""
    states = chain_states(model, embedding, batch, depth)
    return Drafts(states @ head.T, model.stop_head(states.detach()))
