"""Block-parallel drafter (DFlash family): one pass over K slots, target states injected as keys and values.

Slot k predicts the k-th token behind the pending one. Its input is the pending token's embedding joined with the
newest fused target state, plus an embedding of k; it reads the whole context through the target's hidden states of a
few layers, fused to one vector per token and projected to keys and values in every drafter layer. Slots attend
causally, so the first k drafts do not depend on how many are made. No draft reads another draft's token: q at all
positions is known before any is drawn.

Embedding and head rows are the target's own; the head covers a reduced vocabulary of V_d ids.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from avref.config import SpeculativeConfig
from avref.drafters.base import DraftProposal, draw
from avref.packed import KVCache, Layout, attend

if TYPE_CHECKING:
    from avref.llm import LLM


@dataclass
class DFlashConfig:
    """Shape of the network.

    `target_layers` index the target's `hidden_states` (0 is the embedding, the last one is after the final norm).
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    num_layers: int
    block_size: int
    target_layers: tuple[int, ...]
    vocab_size: int
    rope_theta: float = 10000.0
    eps: float = 1e-5


def rotary(position: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary embedding at integer positions [...] -> [..., 1, head_dim] each (Su et al. 2021)."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, device=position.device, dtype=torch.float32) / head_dim)
    angle = (position[..., None].float() * frequency).repeat(*([1] * position.dim()), 2)[..., None, :]
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to x [..., H, head_dim]."""
    a, b = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-b, a], dim=-1) * sin.to(x.dtype)


class DFlashLayer(nn.Module):
    """A pre-norm decoder layer whose keys and values come from target states (context) and from the block itself."""

    def __init__(self, c: DFlashConfig) -> None:
        super().__init__()
        d, h = c.hidden_size, c.head_dim
        self.attention_norm, self.mlp_norm = nn.RMSNorm(d, c.eps), nn.RMSNorm(d, c.eps)
        self.q_proj, self.o_proj = nn.Linear(d, c.num_heads * h, bias=False), nn.Linear(c.num_heads * h, d, bias=False)
        self.kv_proj = nn.Linear(d, 2 * c.num_kv_heads * h, bias=False)
        self.gate_up = nn.Linear(d, 2 * c.intermediate_size, bias=False)
        self.down = nn.Linear(c.intermediate_size, d, bias=False)
        self.head_dim, self.num_heads, self.num_kv_heads = h, c.num_heads, c.num_kv_heads

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., D] -> keys (rotated) and values [..., H_kv, head_dim]."""
        both = self.kv_proj(self.attention_norm(x)).unflatten(-1, (2 * self.num_kv_heads, self.head_dim))
        key, value = both.chunk(2, dim=-2)
        return rotate(key, cos, sin), value

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [..., D] -> rotated queries [..., H, head_dim]."""
        return rotate(self.q_proj(self.attention_norm(x)).unflatten(-1, (self.num_heads, self.head_dim)), cos, sin)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual connections and MLP behind the attention output [..., H, head_dim]."""
        x = x + self.o_proj(attended.flatten(-2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class DFlashModel(nn.Module):
    """The trained part: fusing target states, block inputs, layers, final norm.

    Embedding and head belong to the target.
    """

    vocab_ids: Tensor  # [V_d] the target's ids of the draft vocabulary, sorted

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        c = self.config = config
        self.fuse = nn.Linear(len(c.target_layers) * c.hidden_size, c.hidden_size, bias=False)
        self.fuse_norm = nn.RMSNorm(c.hidden_size, c.eps)
        self.join = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.embedding_norm = nn.RMSNorm(c.hidden_size, c.eps)
        self.slot = nn.Parameter(torch.randn(c.block_size, c.hidden_size) * 0.3)
        self.layers = nn.ModuleList(DFlashLayer(c) for _ in range(c.num_layers))
        self.norm = nn.RMSNorm(c.hidden_size, c.eps)
        self.register_buffer("vocab_ids", torch.zeros(c.vocab_size, dtype=torch.long))

    @property
    def decoder_layers(self) -> list[DFlashLayer]:
        """`layers` with the type of its members, which a ModuleList does not keep."""
        return cast("list[DFlashLayer]", list(self.layers))

    def context(self, hidden: Tensor) -> Tensor:
        """Target states [..., n D] -> one context vector per token [..., D]."""
        parts = hidden.unflatten(-1, (len(self.config.target_layers), self.config.hidden_size))
        parts = F.rms_norm(parts, parts.shape[-1:], eps=self.config.eps)  # layers differ tenfold in scale
        return self.fuse_norm(self.fuse(parts.flatten(-2)))

    def block(self, embedding: Tensor, newest: Tensor, depth: int) -> Tensor:
        """Slot inputs [..., depth, D] from the pending token's embedding and the newest context vector [..., D]."""
        joined = self.join(torch.cat([self.embedding_norm(embedding), newest], dim=-1))
        return joined[..., None, :] + self.slot[:depth]


class DFlashDrafter:
    """A `DFlashModel` at work: its own packed cache holds the context's keys and values per drafter layer."""

    def __init__(self, model: DFlashModel, target: Any, max_rows: int, max_length: int) -> None:
        weights = target.get_output_embeddings().weight
        self.model = copy.deepcopy(model).to(device=weights.device, dtype=weights.dtype).eval().requires_grad_(False)
        self.embedding = target.get_input_embeddings()
        self.vocab_ids = self.model.vocab_ids.to(weights.device)  # [V_d]
        self.head = weights[self.vocab_ids].detach()  # [V_d, D]
        self.hidden_layers = tuple(model.config.target_layers)
        self.max_length, self.max_depth = max_length, model.config.block_size
        self.cache = KVCache(max_rows, max_length + model.config.block_size)
        self.newest = torch.zeros(max_rows, model.config.hidden_size, device=weights.device, dtype=weights.dtype)

    @classmethod
    def load(cls, config: SpeculativeConfig, llm: LLM, max_rows: int) -> DFlashDrafter:
        """The drafter of `config.model`: a loaded `DFlashModel`, a folder, or None for the shipped one.

        Raises ValueError when it cannot draft K tokens, or was made for a target of another width, depth or vocabulary.
        """
        from avref.drafters import weights

        model = config.model
        if not isinstance(model, DFlashModel):
            model = weights.load(config, llm, DFlashConfig, DFlashModel)
        trained, width = model.config, llm.model.config.get_text_config().hidden_size
        if config.num_speculative_tokens > trained.block_size:
            raise ValueError(
                f"num_speculative_tokens={config.num_speculative_tokens}, but this dflash drafter was trained for "
                f"blocks of {trained.block_size}; use at most that many"
            )
        if trained.hidden_size != width:
            raise ValueError(
                f"this dflash drafter was trained for a target of width {trained.hidden_size}, {llm.name} has {width}; "
                "train one for it: python -m avref train dflash"
            )
        if len(model.vocab_ids.unique()) < len(model.vocab_ids) or int(model.vocab_ids.min()) < 0:
            raise ValueError(
                "this dflash drafter's vocab_ids hold a token twice or a negative id; fetch or train it again"
            )
        deepest, last_id = llm.model.config.get_text_config().num_hidden_layers, int(model.vocab_ids.max())
        if not 0 <= min(trained.target_layers) <= max(trained.target_layers) <= deepest or last_id >= llm.vocab_size:
            raise ValueError(
                f"this drafter reads hidden states {', '.join(map(str, trained.target_layers))} and drafts up to "
                f"token id {last_id}; {llm.name} has hidden states 0 to {deepest} and ids 0 to {llm.vocab_size - 1}; "
                "train one for it: python -m avref train dflash"
            )
        return cls(model, llm.model, max_rows, llm.max_model_len)

    def enter(self, layout: Layout, tokens: Sequence[Sequence[int]], hidden: Tensor | None) -> None:
        self._write(layout, hidden, layout.last)

    def extend(
        self, layout: Layout, tokens: Sequence[Sequence[int]], hidden: Tensor | None, kept: Sequence[int]
    ) -> None:
        # rejected tokens are written too: they lie behind every later position until they are overwritten
        self._write(layout, hidden, layout.first + torch.tensor(kept, device=layout.first.device) - 1)

    def _write(self, layout: Layout, hidden: Tensor | None, newest: Tensor) -> None:
        assert hidden is not None  # `hidden_layers` asks for the states
        context = self.model.context(hidden)  # [T, D]
        cos, sin = rotary(layout.position, self.model.config.head_dim, self.model.config.rope_theta)
        for i, layer in enumerate(self.model.decoder_layers):
            self.cache.update(i, layout, *layer.keys_values(context, cos, sin))
        self.newest[layout.first_row : layout.first_row + layout.num_rows] = context[newest]

    def clear(self) -> None:
        self.cache.clear()

    def move(self, source: int, target: int) -> None:
        self.cache.move(source, target)
        self.newest[target] = self.newest[source]

    def propose(
        self, lengths: Sequence[int], pending: Tensor, depth: int, temperature: Tensor, uniforms: Tensor, greedy: bool
    ) -> DraftProposal:
        rows, c = len(lengths), self.model.config
        layout = Layout(lengths, [depth] * rows, pending.device)
        x = self.model.block(self.embedding(pending), self.newest[:rows], depth).flatten(0, 1)  # [R depth, D]
        cos, sin = rotary(layout.position, c.head_dim, c.rope_theta)
        for i, layer in enumerate(self.model.decoder_layers):
            keys, values = self.cache.update(i, layout, *layer.keys_values(x, cos, sin))
            x = layer.finish(x, attend(layer.queries(x, cos, sin), keys, values, layout))
        logits = F.linear(self.model.norm(x), self.head).float()  # [R depth, V_d]
        ids, q, drawn = draw(logits, temperature.repeat_interleave(depth), uniforms.flatten(), greedy)
        shape = (rows, depth)
        return DraftProposal(
            self.vocab_ids[ids].view(shape),
            ids.view(shape),
            logits.view(*shape, -1),
            None if q is None else q.view(*shape, -1),
            drawn.view(shape),
            self.vocab_ids,
        )
