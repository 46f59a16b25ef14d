"""What distilling any drafter needs: batches of blocks, attention over context and block, the loss, a starting point.

A block is a drafter's view of one decode step: it stands behind a pending token of a recorded answer and predicts the
K tokens that follow, each given the recorded tokens before it. Many blocks share one pass over the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from avref.drafters.layers import DecoderLayer, DrafterConfig, DrafterModel
from avref.train.data import Sequences


class Settings(Protocol):
    """What a family's `start` reads of the training settings (`loop.Settings`)."""

    @property
    def depth(self) -> int: ...
    @property
    def target_layers(self) -> tuple[int, ...]: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...


@dataclass
class Batch:
    """B sequences padded to L states, M blocks each.

    A block's pending token sits at `anchors`; its slot k predicts the token at anchors + k + 1.
    """

    hidden: Tensor  # [B, L, n D] the target's states; empty for a family that reads none
    ids: Tensor  # [B, L + 1]
    anchors: Tensor  # [B, M]
    valid: Tensor  # [B, M, K] slots with a label
    top_ids: Tensor  # [B, M, K, TOP] draft-vocabulary indices, -1 where the drafter lacks the token
    top_logs: Tensor  # [B, M, K, TOP] the target's log-probabilities

    def tokens(self, depth: int) -> Tensor:
        """The pending token and the recorded ones behind it, what slots 0 .. depth - 1 have read: [B, M, depth]."""
        place = (self.anchors[..., None] + torch.arange(depth)).clamp_max(self.ids.shape[1] - 1)
        return self.ids.gather(1, place.flatten(1)).view(place.shape)


class Drafts(NamedTuple):
    """What a family's network says on every slot of a batch."""

    logits: Tensor  # [B, M, K, V_d]
    stop: Tensor | None  # [B, M, K] log-odds of the stop head; None for a family without one
    confidence: Tensor | None = None  # [B, M, K] log-odds of a confidence head


class Family(Protocol):
    """A module of `avref.train` that knows how one family starts and how it drafts on a whole batch."""

    @staticmethod
    def start(target: Any, settings: Any, vocab_ids: Tensor) -> nn.Module:
        """An untrained drafter for this target with the draft vocabulary vocab_ids [V_d]."""

    @staticmethod
    def forward(model: Any, embedding: Any, head: Tensor, batch: Batch, depth: int) -> Drafts:
        """The first `depth` slots of every block; head [V_d, D] are the target's rows of the draft vocabulary."""


def make_batch(
    data: Sequences, which: Sequence[int], blocks: int, depth: int, to_draft: Tensor, generator: torch.Generator
) -> Batch:
    """`blocks` random anchors in the answer of each sequence (with replacement where it is short)."""
    states = [data.states(i) for i in which]
    longest = max(len(s) for s in states)
    hidden = torch.zeros(len(which), longest, states[0].shape[1])
    ids = torch.zeros(len(which), longest + 1, dtype=torch.long)
    rows: list[list[Tensor]] = [[], [], [], []]
    for b, (i, own) in enumerate(zip(which, states, strict=True)):
        length, start = len(own), data.prompt_lengths[i]
        hidden[b, :length], ids[b, : length + 1] = own, data.ids[i]
        anchors = torch.randint(start, max(length, start + 1), (blocks,), generator=generator).clamp_max(length - 1)
        place = anchors[:, None] + torch.arange(depth)  # [M, K]
        valid = (place < length) & (anchors >= start)[:, None]
        place = place.clamp_max(length - 1)
        top_ids, top_logs = to_draft[data.top_ids[i][place].long()], data.top_logs[i][place].float()
        for row, x in zip(rows, (anchors, valid, top_ids, top_logs), strict=True):
            row.append(x)
    return Batch(hidden, ids, *(torch.stack(r) for r in rows))


def attend_blocks(layer: DecoderLayer, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query attention of queries [B, N, H, h] over keys and values [B, S, H_kv, h] under a mask [B, N, S]."""
    group = layer.num_heads // layer.num_kv_heads
    bias = torch.zeros(mask.shape).masked_fill_(~mask, float("-inf")).repeat(1, group, 1)[:, None]  # [B, 1, G N, S]
    q = queries.unflatten(2, (layer.num_kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, H_kv, G N, h]
    out = F.scaled_dot_product_attention(q, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=bias)
    return out.unflatten(2, (group, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def nucleus(logs: Tensor, top_p: float) -> Tensor:
    """Sorted log-probabilities [..., n] -> probabilities after top-p, zero outside (renormalised).

    Where the n recorded tokens hold less than top_p, the nucleus goes on beyond them, and holds top_p at least.
    """
    p = logs.exp()
    p = p * ((p.cumsum(-1) - p) < top_p)
    return p / p.sum(-1, keepdim=True).clamp_min(top_p)


def loss_and_overlap(
    drafts: Drafts, batch: Batch, top_p: float, cross_entropy_weight: float = 0.5
) -> tuple[Tensor, Tensor]:
    """(loss, overlap by position [K]).

    Per slot the loss is a weight times the cross-entropy to the target's distribution p + total variation TV to its
    top-p form, where 1 - TV = sum(min(p, q)) is the acceptance probability. TV is what counts; cross-entropy moves
    tokens that q gives next to nothing, where TV has hardly a gradient. A slot counts more when the drafts before it
    would have been accepted, since otherwise it is never used. Stop and confidence heads learn that acceptance
    probability as a soft label (DSpark, arXiv 2607.05147) under the same weights.
    """
    logits, have = drafts.logits, batch.top_ids >= 0
    log_q = logits.gather(-1, batch.top_ids.clamp_min(0)) - logits.logsumexp(-1, keepdim=True)
    p = batch.top_logs.exp()
    cross_entropy = -(p * log_q * have).sum(-1) / (p * have).sum(-1).clamp_min(1e-6)
    overlap = (torch.minimum(nucleus(batch.top_logs, top_p), log_q.exp()) * have).sum(-1)  # [B, M, K]
    label = overlap.detach().clamp(0, 1)
    reach = F.pad(label.cumprod(-1)[..., :-1], (1, 0), value=1.0)
    weight = (0.25 + 0.75 * reach) * batch.valid
    per_slot = cross_entropy_weight * cross_entropy + (1 - overlap)
    for head in (drafts.stop, drafts.confidence):
        if head is not None:
            per_slot = per_slot + F.binary_cross_entropy_with_logits(head, label, reduction="none")
    return (weight * per_slot).sum() / weight.sum(), (label * batch.valid).sum((0, 1)) / batch.valid.sum(
        (0, 1)
    ).clamp_min(1)


def shape_of(target: Any, settings: Settings, vocab_size: int) -> DrafterConfig:
    """A drafter's configuration with the target's width, heads and rotary base."""
    t = target.config.get_text_config()
    return DrafterConfig(
        t.hidden_size,
        t.num_attention_heads,
        getattr(t, "num_key_value_heads", None) or t.num_attention_heads,
        getattr(t, "head_dim", None) or t.hidden_size // t.num_attention_heads,
        min(settings.intermediate_size, getattr(t, "intermediate_size", None) or settings.intermediate_size),
        settings.num_layers,
        settings.depth,
        tuple(settings.target_layers),
        vocab_size,
        (getattr(t, "rope_parameters", None) or {}).get("rope_theta", 10000.0),
        getattr(t, "rms_norm_eps", 1e-5),
    )


@torch.no_grad()
def start_from_target(model: DrafterModel, target: Any) -> None:
    """Fill a drafter from the target's last layers; what has no counterpart there keeps its random start.

    The fused state starts as the residual stream in front of the target's last layer, a joined input as that state plus
    half the token's embedding. Of each layer it takes the attention whole (where the shapes agree) and the strongest
    neurons of the MLP; nothing where the target is not built like a Llama.
    """
    c, last = model.config, target.config.get_text_config().num_hidden_layers
    width, eye = c.hidden_size, torch.eye(c.hidden_size)
    model.fuse.weight.mul_(0.1)
    model.join.weight.mul_(0.1)
    if last - 1 in c.target_layers:
        at = c.target_layers.index(last - 1) * width
        model.fuse.weight[:, at : at + width] += eye
    model.join.weight[:, width:] += eye
    model.join.weight[:, :width] += 0.5 * eye
    body = getattr(target, "model", None)
    source = getattr(body, "layers", None)
    if source is None or not hasattr(source[0], "self_attn") or not hasattr(source[0].mlp, "gate_proj"):
        return
    # not strict: a drafter deeper than the target keeps random layers
    for ours, theirs in zip(model.decoder_layers, source[last - c.num_layers :], strict=False):
        attention, mlp = theirs.self_attn, theirs.mlp
        if ours.q_proj.weight.shape == attention.q_proj.weight.shape:
            ours.q_proj.weight.copy_(attention.q_proj.weight)
            ours.kv_proj.weight.copy_(torch.cat([attention.k_proj.weight, attention.v_proj.weight]))
            ours.o_proj.weight.copy_(attention.o_proj.weight)
        ours.attention_norm.weight.copy_(theirs.input_layernorm.weight)
        ours.mlp_norm.weight.copy_(theirs.post_attention_layernorm.weight)
        keep = strongest_neurons(mlp, c.intermediate_size)
        ours.gate_up.weight.copy_(torch.cat([mlp.gate_proj.weight[keep], mlp.up_proj.weight[keep]]))
        ours.down.weight.copy_(mlp.down_proj.weight[:, keep])
    if hasattr(body, "norm"):
        model.norm.weight.copy_(target.model.norm.weight)


def strongest_neurons(mlp: Any, count: int) -> Tensor:
    """Indices [count] of a Llama MLP's neurons with the largest product of their three weight norms."""
    strength = mlp.down_proj.weight.norm(dim=0) * mlp.up_proj.weight.norm(dim=1) * mlp.gate_proj.weight.norm(dim=1)
    return cast(Tensor, strength.topk(count).indices)
