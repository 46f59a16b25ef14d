"""Distilling `eagle`: its steps unrolled on many blocks at once.

Later positions are trained on the states that they will meet: the drafter's own ones, not the target's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from avref.drafters.eagle import EagleModel
from avref.drafters.layers import rotary
from avref.train.blocks import Batch, Drafts, Settings, attend_blocks, shape_of, start_from_target


def start(target: Any, settings: Settings, vocab_ids: Tensor) -> EagleModel:
    """A drafter that starts from the target's last layer."""
    model = EagleModel(shape_of(target, settings, len(vocab_ids)))
    model.vocab_ids.copy_(vocab_ids)
    start_from_target(model, target)
    return model


def context_states(context: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
    """(states [B, L, D] one position before each token, states [B, M, D] before each anchor) of a context [B, L, D]."""
    before = F.pad(context[:, :-1], (0, 0, 1, 0))  # nothing stands in front of position 0
    return before, context.gather(1, (anchors - 1)[..., None].expand(-1, -1, context.shape[-1]))


def chain_states(model: EagleModel, embedding: Any, batch: Batch, depth: int) -> Tensor:
    """The drafter's final states [B, M, depth, D] for all blocks, one unrolled step after the other.

    These are what `EagleDrafter.propose` computes with `forced` recorded tokens. A block sees the context before its
    anchor and its own chain; gradients flow back through the chain.
    """
    (layer,), c, anchors = model.decoder_layers, model.config, batch.anchors
    (size, blocks), length = anchors.shape, batch.hidden.shape[1]
    before, state = context_states(model.context(batch.hidden), anchors)
    at = rotary(torch.arange(length), c.head_dim, c.rope_theta)
    keys, values = layer.keys_values(model.joined(embedding(batch.ids[:, :-1]), before), *at)  # [B, L, H_kv, head_dim]
    mask = torch.arange(length) < anchors[..., None]  # [B, M, L]
    same = torch.eye(blocks, dtype=torch.bool).expand(size, -1, -1)  # [B, M, M]
    embedded, own = embedding(batch.tokens(depth)), []
    for k in range(depth):
        x = model.joined(embedded[:, :, k], state)  # [B, M, D]
        at = rotary(anchors + k, c.head_dim, c.rope_theta)
        both = zip((keys, values), layer.keys_values(x, *at), strict=True)
        keys, values = (torch.cat(pair, dim=1) for pair in both)  # [B, L + (k + 1) M, H_kv, head_dim]
        mask = torch.cat([mask, same], dim=-1)
        own.append(layer.finish(x, attend_blocks(layer, layer.queries(x, *at), keys, values, mask)))
        state = model.own(own[-1])
    return model.norm(torch.stack(own, dim=2))


def forward(model: EagleModel, embedding: Any, head: Tensor, batch: Batch, depth: int) -> Drafts:
    """Logits of every slot; the stop head reads the states without shaping them."""
    states = chain_states(model, embedding, batch, depth)
    return Drafts(states @ head.T, model.stop_head(states.detach()))
