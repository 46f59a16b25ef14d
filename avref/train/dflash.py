"""Distilling a `dflash` drafter: batches, its network on many blocks at once, the loss, and where it starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from avref.drafters.dflash import DFlashConfig, DFlashModel, rotary
from avref.train.data import Sequences


@dataclass
class Batch:
    """B sequences padded to L states, M blocks each.

    A block's pending token sits at `anchors`; its slot k predicts the token at anchors + k + 1.
    """

    hidden: Tensor  # [B, L, n D]
    pending: Tensor  # [B, M] token ids
    anchors: Tensor  # [B, M]
    valid: Tensor  # [B, M, K] slots with a label
    top_ids: Tensor  # [B, M, K, TOP] draft-vocabulary indices, -1 where the drafter lacks the token
    top_logs: Tensor  # [B, M, K, TOP] the target's log-probabilities


def make_batch(
    data: Sequences, which: Sequence[int], blocks: int, depth: int, to_draft: Tensor, generator: torch.Generator
) -> Batch:
    """`blocks` random anchors in the answer of each sequence (with replacement where it is short)."""
    longest = max(len(data.hidden[i]) for i in which)
    hidden = torch.zeros(len(which), longest, data.hidden[0].shape[1])
    rows: list[list[Tensor]] = [[], [], [], [], []]
    for b, i in enumerate(which):
        states, start = len(data.hidden[i]), data.prompt_lengths[i]
        hidden[b, :states] = data.hidden[i].float()
        anchors = torch.randint(start, max(states, start + 1), (blocks,), generator=generator).clamp_max(states - 1)
        place = anchors[:, None] + torch.arange(depth)  # [M, K]
        valid = (place < states) & (anchors >= start)[:, None]
        place = place.clamp_max(states - 1)
        top_ids, top_logs = to_draft[data.top_ids[i][place].long()], data.top_logs[i][place].float()
        for row, x in zip(rows, (data.ids[i][anchors], anchors, valid, top_ids, top_logs), strict=True):
            row.append(x)
    return Batch(hidden, *(torch.stack(r) for r in rows))


def block_states(
    model: DFlashModel, embedding: Any, hidden: Tensor, pending: Tensor, anchors: Tensor, depth: int
) -> Tensor:
    """The drafter's final states [B, M, depth, D] for all blocks in one pass.

    These are what `DFlashDrafter.propose` computes one step at a time.
    """
    c = model.config
    context = model.context(hidden)  # [B, L, D]
    (batch, length, width), blocks = context.shape, anchors.shape[1]
    newest = context.gather(1, (anchors - 1)[..., None].expand(-1, -1, width))
    x = model.block(embedding(pending), newest, depth).flatten(1, 2)  # [B, M depth, D]
    place = (anchors[..., None] + torch.arange(depth)).flatten(1)  # [B, M depth]
    seen = torch.arange(length) < anchors.repeat_interleave(depth, dim=1)[..., None]  # [B, M depth, L]
    slot, block = torch.arange(blocks * depth) % depth, torch.arange(blocks * depth) // depth
    own = (block[:, None] == block) & (slot[:, None] >= slot)  # [M depth, M depth]
    mask = torch.cat([seen, own.expand(batch, -1, -1)], dim=-1)
    group = c.num_heads // c.num_kv_heads
    bias = torch.zeros(mask.shape).masked_fill_(~mask, float("-inf"))
    bias = bias.repeat(1, group, 1)[:, None]  # [B, 1, G M depth, L + M depth]
    at_context, at_block = (rotary(p, c.head_dim, c.rope_theta) for p in (torch.arange(length), place))
    for layer in model.decoder_layers:
        both = zip(layer.keys_values(context, *at_context), layer.keys_values(x, *at_block), strict=True)
        keys, values = (torch.cat(pair, dim=1).transpose(1, 2) for pair in both)  # [B, H_kv, L + M depth, head_dim]
        q = layer.queries(x, *at_block).unflatten(2, (c.num_kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias)
        x = layer.finish(x, out.unflatten(2, (group, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3))
    return model.norm(x).unflatten(1, (blocks, depth))


def nucleus(logs: Tensor, top_p: float) -> Tensor:
    """Sorted log-probabilities [..., n] -> probabilities after top-p, zero outside (renormalised)."""
    p = logs.exp()
    p = p * ((p.cumsum(-1) - p) < top_p)
    return p / p.sum(-1, keepdim=True)


def loss_and_overlap(
    model: DFlashModel, embedding: Any, head: Tensor, batch: Batch, depth: int, top_p: float
) -> tuple[Tensor, Tensor]:
    """(loss, overlap by position [K]).

    Per slot the loss is 0.5 cross-entropy to the target's distribution p + total variation TV to its top-p form, where
    1 - TV = sum(min(p, q)) is the acceptance probability. A slot counts more when the drafts before it would have been
    accepted, since otherwise it is never used.
    """
    states = block_states(model, embedding, batch.hidden, batch.pending, batch.anchors, depth)  # [B, M, K, D]
    logits = states @ head.T  # [B, M, K, V_d]
    have = batch.top_ids >= 0
    log_q = logits.gather(-1, batch.top_ids.clamp_min(0)) - logits.logsumexp(-1, keepdim=True)
    p = batch.top_logs.exp()
    cross_entropy = -(p * log_q * have).sum(-1) / (p * have).sum(-1).clamp_min(1e-6)
    overlap = (torch.minimum(nucleus(batch.top_logs, top_p), log_q.exp()) * have).sum(-1)  # [B, M, K]
    reach = F.pad(overlap.detach().cumprod(-1)[..., :-1], (1, 0), value=1.0)
    weight = (0.25 + 0.75 * reach) * batch.valid
    loss = (weight * (0.5 * cross_entropy + (1 - overlap))).sum() / weight.sum()
    return loss, (overlap * batch.valid).sum((0, 1)).detach() / batch.valid.sum((0, 1)).clamp_min(1)


def from_target(
    target: Any, layers: tuple[int, ...], num_layers: int, intermediate: int, depth: int, vocab_ids: Tensor
) -> DFlashModel:
    """A drafter that starts from the target's last layers; random where the target is not built like a Llama.

    Of each layer it takes the attention whole and the `intermediate` strongest neurons of the MLP.
    """
    t = target.config.get_text_config()
    intermediate = min(intermediate, getattr(t, "intermediate_size", None) or intermediate)
    head_dim = getattr(t, "head_dim", None) or t.hidden_size // t.num_attention_heads
    theta = (getattr(t, "rope_parameters", None) or {}).get("rope_theta", 10000.0)
    config = DFlashConfig(
        t.hidden_size,
        t.num_attention_heads,
        t.num_key_value_heads,
        head_dim,
        intermediate,
        num_layers,
        depth,
        layers,
        len(vocab_ids),
        theta,
        getattr(t, "rms_norm_eps", 1e-5),
    )
    model = DFlashModel(config)
    model.vocab_ids.copy_(vocab_ids)
    width, last = t.hidden_size, t.num_hidden_layers
    with torch.no_grad():
        eye = torch.eye(width)
        model.fuse.weight.mul_(0.1)
        model.join.weight.mul_(0.1)
        if last - 1 in layers:  # the residual stream in front of the target's last layer
            at = layers.index(last - 1) * width
            model.fuse.weight[:, at : at + width] += eye
        model.join.weight[:, width:] += eye
        model.join.weight[:, :width] += 0.5 * eye
        source = getattr(getattr(target, "model", None), "layers", None)
        if source is None or not hasattr(source[0], "self_attn") or not hasattr(source[0].mlp, "gate_proj"):
            return model
        # not strict: a drafter deeper than the target keeps random layers
        for ours, theirs in zip(model.decoder_layers, source[last - num_layers :], strict=False):
            attention, mlp = theirs.self_attn, theirs.mlp
            ours.q_proj.weight.copy_(attention.q_proj.weight)
            ours.kv_proj.weight.copy_(torch.cat([attention.k_proj.weight, attention.v_proj.weight]))
            ours.o_proj.weight.copy_(attention.o_proj.weight)
            ours.attention_norm.weight.copy_(theirs.input_layernorm.weight)
            ours.mlp_norm.weight.copy_(theirs.post_attention_layernorm.weight)
            strength = (
                mlp.down_proj.weight.norm(dim=0) * mlp.up_proj.weight.norm(dim=1) * mlp.gate_proj.weight.norm(dim=1)
            )
            keep = strength.topk(intermediate).indices
            ours.gate_up.weight.copy_(torch.cat([mlp.gate_proj.weight[keep], mlp.up_proj.weight[keep]]))
            ours.down.weight.copy_(mlp.down_proj.weight[:, keep])
        if hasattr(target.model, "norm"):
            model.norm.weight.copy_(target.model.norm.weight)
    return model
