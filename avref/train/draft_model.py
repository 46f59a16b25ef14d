"""Distilling `draft_model`: a Llama of a few layers on the target's embedding and head, teacher-forced.

It reads no states of the target, so one causal pass over the recorded sequences serves all their blocks: slot k of a
block behind anchor a is the model's answer at position a + k. Like every trained family it drafts a reduced vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from avref.drafters.draft_model import TinyLlama, TinyLlamaConfig
from avref.train.blocks import Batch, Drafts, Settings, shape_of, strongest_neurons


def start(target: Any, settings: Settings, vocab_ids: Tensor) -> TinyLlama:
    """A draft model that starts from the target's first and last layers and its final norm."""
    c, t = shape_of(target, settings, len(vocab_ids)), target.config.get_text_config()
    model = TinyLlama(
        TinyLlamaConfig(
            c.hidden_size,
            c.intermediate_size,
            c.num_layers,
            c.num_heads,
            c.num_kv_heads,
            c.head_dim,
            target.get_output_embeddings().weight.shape[0],
            getattr(t, "max_position_embeddings", None) or 2048,
            len(vocab_ids),
            c.rope_theta,
            c.eps,
        )
    )
    model.vocab_ids.copy_(vocab_ids)
    _start_from_target(model, target)
    return model


@torch.no_grad()
def _start_from_target(model: TinyLlama, target: Any) -> None:
    """Half the layers (rounded up) from the target's first ones, the rest from its last.

    Of each it takes the attention whole and the strongest neurons of the MLP; nothing where the target is not built
    like a Llama.
    """
    body = getattr(target, "model", None)
    source = getattr(body, "layers", None)
    if source is None or not hasattr(source[0], "self_attn") or not hasattr(source[0].mlp, "gate_proj"):
        return
    count = model.config.num_hidden_layers
    first, last = (count + 1) // 2, count // 2
    chosen = [*source[:first], *source[max(0, len(source) - last) :]]
    # not strict: a draft model far deeper than the target keeps random layers
    for ours, theirs in zip(model.model.layers, chosen, strict=False):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weight = getattr(theirs.self_attn, name).weight
            if weight.shape == getattr(ours.self_attn, name).weight.shape:
                getattr(ours.self_attn, name).weight.copy_(weight)
        ours.input_layernorm.weight.copy_(theirs.input_layernorm.weight)
        ours.post_attention_layernorm.weight.copy_(theirs.post_attention_layernorm.weight)
        keep = strongest_neurons(theirs.mlp, model.config.intermediate_size)
        ours.mlp.gate_proj.weight.copy_(theirs.mlp.gate_proj.weight[keep])
        ours.mlp.up_proj.weight.copy_(theirs.mlp.up_proj.weight[keep])
        ours.mlp.down_proj.weight.copy_(theirs.mlp.down_proj.weight[:, keep])
    if hasattr(body, "norm"):
        model.model.norm.weight.copy_(target.model.norm.weight)


def forward(model: TinyLlama, embedding: Any, head: Tensor, batch: Batch, depth: int) -> Drafts:
    """Logits of every slot; the head runs once for each position that some block asks for. No stop head."""
    ids = batch.ids[:, :-1]  # [B, L]; what pads a short sequence lies behind all that its blocks read
    states = model(embedding(ids)).flatten(0, 1)  # [B L, D]
    length = ids.shape[1]
    place = (batch.anchors[..., None] + torch.arange(depth)).clamp_max(length - 1)  # [B, M, depth]
    place = place + length * torch.arange(len(ids))[:, None, None]
    wanted, slot = place.flatten().unique(return_inverse=True)
    logits = states[wanted] @ head.T  # [positions, V_d]
    return Drafts(logits.index_select(0, slot).view(*place.shape, -1), None)
