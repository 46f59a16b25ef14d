"""What the trained drafters (eagle, mtp, dflash, dspark) are built from, and what their classes have in common.

All of them read the target's hidden states, fused to one vector per token; embedding and head rows are the target's
own, and the head covers a reduced vocabulary of V_d ids.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from avref.config import SpeculativeConfig
from avref.drafters.base import DraftProposal, Enough
from avref.layout import Layout, send
from avref.packed import KVCache

if TYPE_CHECKING:
    from avref.llm import LLM


@dataclass
class DrafterConfig:
    """Shape of a trained drafter.

    `target_layers` index the target's `hidden_states` (0 is the embedding, the last one is after the final norm);
    `depth` is K, the most positions it was trained to draft.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    num_layers: int
    depth: int
    target_layers: tuple[int, ...]
    vocab_size: int
    rope_theta: float = 10000.0
    eps: float = 1e-5

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            kind, least = ((int, float), 1e-12) if name in ("rope_theta", "eps") else (int, 0)
            numbers = value if isinstance(value, tuple) else (value,)
            if not all(isinstance(n, kind) and not isinstance(n, bool) and least <= n < math.inf for n in numbers):
                raise ValueError(f"a drafter's {name} is {value!r}; expected numbers, at least {least}")


def rotary(position: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary embedding at integer positions [...] -> [..., 1, head_dim] each (Su et al. 2021)."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, device=position.device, dtype=torch.float32) / head_dim)
    angle = (position[..., None].float() * frequency).repeat(*([1] * position.dim()), 2)[..., None, :]
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to x [..., H, head_dim]."""
    a, b = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-b, a], dim=-1) * sin.to(x.dtype)


class DecoderLayer(nn.Module):
    """A pre-norm decoder layer in pieces: whoever calls it decides which keys and values its queries see."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        d, h = c.hidden_size, c.head_dim
        self.attention_norm, self.mlp_norm = nn.RMSNorm(d, c.eps), nn.RMSNorm(d, c.eps)
        self.q_proj, self.o_proj = nn.Linear(d, c.num_heads * h, bias=False), nn.Linear(c.num_heads * h, d, bias=False)
        self.kv_proj = nn.Linear(d, 2 * c.num_kv_heads * h, bias=False)
        self.gate_up = nn.Linear(d, 2 * c.intermediate_size, bias=False)
        self.down = nn.Linear(c.intermediate_size, d, bias=False)
        self.head_dim, self.num_heads, self.num_kv_heads = h, c.num_heads, c.num_kv_heads
        self.drop = nn.Dropout(0.0)  # training sets its rate

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
        x = x + self.drop(self.o_proj(attended.flatten(-2)))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return cast(Tensor, x + self.drop(self.down(F.silu(gate) * up)))


class StopHead(nn.Module):
    """Log-odds that a draft is accepted, from the state that produces its q (after SpecDec++, arXiv 2405.19715).

    Two small layers on the drafter's own hidden state [..., D] -> [...]. They read nothing of the drafted token, so
    stopping by them is lossless.
    """

    def __init__(self, width: int, inner: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, 1)

    def forward(self, states: Tensor) -> Tensor:
        return cast(Tensor, self.down(F.silu(self.up(states))).squeeze(-1))


class DrafterModel(nn.Module):
    """The parts that all trained families share: fusing the target's states, joining them with a token, final norm.

    Embedding and head belong to the target.
    """

    vocab_ids: Tensor  # [V_d] the target's ids of the draft vocabulary, sorted

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        c = self.config = config
        self.fuse = nn.Linear(len(c.target_layers) * c.hidden_size, c.hidden_size, bias=False)
        self.fuse_norm = nn.RMSNorm(c.hidden_size, c.eps)
        self.join = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.embedding_norm = nn.RMSNorm(c.hidden_size, c.eps)
        self.layers = nn.ModuleList(DecoderLayer(c) for _ in range(c.num_layers))
        self.norm = nn.RMSNorm(c.hidden_size, c.eps)
        self.stop_head = StopHead(c.hidden_size)
        self.drop = nn.Dropout(0.0)  # training sets its rate
        self.register_buffer("vocab_ids", torch.zeros(c.vocab_size, dtype=torch.long))

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        """`layers` with the type of its members, which a ModuleList does not keep."""
        return cast("list[DecoderLayer]", list(self.layers))

    def context(self, hidden: Tensor) -> Tensor:
        """Target states [..., n D] -> one context vector per token [..., D]."""
        parts = hidden.unflatten(-1, (len(self.config.target_layers), self.config.hidden_size))
        parts = F.rms_norm(parts, parts.shape[-1:], eps=self.config.eps)  # layers differ tenfold in scale
        return cast(Tensor, self.fuse_norm(self.fuse(self.drop(parts.flatten(-2)))))

    def joined(self, embedding: Tensor, state: Tensor) -> Tensor:
        """A token's embedding [..., D] and the state before it [..., D] -> one input vector [..., D]."""
        return cast(Tensor, self.join(torch.cat([self.embedding_norm(embedding), state], dim=-1)))


class TrainedDrafter:
    """A `DrafterModel` at work: its own packed cache holds the context's keys and values of every drafter layer.

    A family sets `method`, `config_class` and `model_class`, and writes `enter`, `extend` and `propose`.
    """

    method: ClassVar[str]
    config_class: ClassVar[type[DrafterConfig]] = DrafterConfig
    model_class: ClassVar[type[DrafterModel]]
    has_stop_head: ClassVar[bool] = True
    model: Any

    def __init__(self, model: DrafterModel, target: Any, max_rows: int, max_length: int) -> None:
        weights = target.get_output_embeddings().weight
        self.model = copy.deepcopy(model).to(device=weights.device, dtype=weights.dtype).eval().requires_grad_(False)
        self.embedding = target.get_input_embeddings()
        self.vocab_ids = self.model.vocab_ids.to(weights.device)  # [V_d]
        self.head = weights[self.vocab_ids].detach()  # [V_d, D]
        self.hidden_layers = tuple(model.config.target_layers)
        self.max_length = max_length
        self.cache = KVCache(max_rows, max_length + model.config.depth)
        # [rows, D] the context vector in front of each request's pending token
        self.newest = torch.zeros(max_rows, model.config.hidden_size, device=weights.device, dtype=weights.dtype)

    @classmethod
    def load(cls, config: SpeculativeConfig, llm: LLM, max_rows: int) -> Self:
        """The drafter of `config.model`: a loaded model of the family, a folder, or None for the shipped one.

        Raises ValueError when it cannot draft K tokens, or was made for a target of another width, depth or vocabulary.
        """
        from avref.drafters import weights

        model = config.model
        if not isinstance(model, cls.model_class):
            model = weights.load(config, llm, cls.config_class, cls.model_class)
        trained, width = model.config, llm.model.config.get_text_config().hidden_size
        again = f"train one for it: python -m avref train {cls.method}"
        if config.num_speculative_tokens > trained.depth:
            raise ValueError(
                f"num_speculative_tokens={config.num_speculative_tokens}, but this {cls.method} drafter was trained to "
                f"draft {trained.depth} tokens; use at most that many"
            )
        if trained.hidden_size != width:
            raise ValueError(
                f"this {cls.method} drafter was trained for a target of width {trained.hidden_size}, {llm.name} has "
                f"{width}; {again}"
            )
        weights.check_vocab_ids(model.vocab_ids, llm.vocab_size, cls.method)
        deepest = llm.model.config.get_text_config().num_hidden_layers
        if not 0 <= min(trained.target_layers) <= max(trained.target_layers) <= deepest:
            raise ValueError(
                f"this drafter reads hidden states {', '.join(map(str, trained.target_layers))}; {llm.name} has hidden "
                f"states 0 to {deepest}; {again}"
            )
        return cls(model, llm.model, max_rows, llm.max_model_len)

    def enter(self, layout: Layout, tokens: Sequence[Sequence[int]], hidden: Tensor | None) -> None:
        raise NotImplementedError

    def extend(
        self, layout: Layout, tokens: Sequence[Sequence[int]], hidden: Tensor | None, kept: Sequence[int]
    ) -> None:
        raise NotImplementedError

    def propose(
        self,
        lengths: Sequence[int],
        pending: Tensor,
        depth: int,
        temperature: Tensor,
        uniforms: Tensor,
        greedy: bool,
        forced: Tensor | None = None,
        enough: Enough | None = None,
    ) -> DraftProposal:
        raise NotImplementedError

    def keep(self, layout: Layout, context: Tensor, kept: Sequence[int]) -> None:
        """Remember each row's state at its last final token; context [T, D] are those of a chunk's tokens."""
        last = layout.first + send(list(kept), layout.first.device) - 1  # [R]
        own = self.newest[layout.first_row : layout.first_row + layout.num_rows]
        own.copy_(torch.where((last >= layout.first)[:, None], context[last.clamp_min(0)], own))

    def clear(self) -> None:
        self.cache.clear()

    def move(self, source: int, target: int) -> None:
        self.cache.move(source, target)
        self.newest[target] = self.newest[source]
