"""One small module per draft position on the target's last states (multi-token prediction, DeepSeek-V3, 2412.19437).

Module d drafts position d of a block from the token there and the state in front of it:

    x_d = joined_d(embedding(token_d), state_{d-1}) = E_d norm(embedding(token_d)) + state_{d-1}
    s_d = layer_d(x_d; keys and values of module d over the context and over x_0 .. x_d)
    q_d = softmax(head norm(s_d) / T)

state_{-1} is the target's fused state in front of the pending token, state_d the norm of s_d. The modules share the
norms, embedding and head; the last two are the target's own, with the head reduced to V_d ids.

Two things are simpler than in DeepSeek-V3, where the modules run over every position one behind the other. Over the
context, a module's keys and values come from entries built from the target's own states (joined_d of token i and the
fused state of i - 1); so `extend` needs a projection per module and no attention. And a module adds the state as it is:
what the other half of the joining matrix could do, the fusing matrix and the module before can do as well.
"""

from __future__ import annotations

from typing import ClassVar, cast

from torch import Tensor, nn

from avref.drafters.eagle import EagleDrafter
from avref.drafters.layers import DrafterConfig, DrafterModel, rotary
from avref.layout import Layout
from avref.packed import attend


class MTPModel(DrafterModel):
    """The trained part: a decoder layer and a joining matrix E_d [D, D] per depth.

    Raises ValueError unless there are as many layers as depths.
    """

    def __init__(self, config: DrafterConfig) -> None:
        if config.num_layers != config.depth:
            raise ValueError(
                f"num_layers={config.num_layers} and depth={config.depth}, but an mtp drafter has one module per "
                "depth; use the same number for both"
            )
        super().__init__(config)
        del self.join
        self.joins = nn.ModuleList(nn.Linear(config.hidden_size, config.hidden_size, bias=False) for _ in self.layers)

    def joined(self, embedding: Tensor, state: Tensor, module: int = 0) -> Tensor:
        """A token's embedding [..., D] and the state before it [..., D] -> the input of one module [..., D]."""
        return cast(Tensor, self.joins[module](self.embedding_norm(embedding)) + state)

    def own(self, state: Tensor) -> Tensor:
        """A module's state s [..., D] at the scale of the context vectors, for the next module."""
        return cast(Tensor, self.fuse_norm(state))


class MTPDrafter(EagleDrafter):
    """An `MTPModel` at work: it follows the target as eagle does, with a cache layer per module."""

    method = "mtp"
    model_class: ClassVar[type[DrafterModel]] = MTPModel

    def write(self, layout: Layout, embedded: Tensor, states: Tensor) -> None:
        c = self.model.config
        cos, sin = rotary(layout.position, c.head_dim, c.rope_theta)
        for d, layer in enumerate(self.model.decoder_layers):
            self.cache.update(d, layout, *layer.keys_values(self.model.joined(embedded, states, d), cos, sin))

    def own(self, k: int, layout: Layout, embedded: Tensor, state: Tensor) -> Tensor:
        """The own state [R, D] of draft position k; later modules of the block will see its entry too."""
        c, (layer, *later) = self.model.config, self.model.decoder_layers[k:]
        x = self.model.joined(embedded, state, k)
        cos, sin = rotary(layout.position, c.head_dim, c.rope_theta)
        keys, values = self.cache.update(k, layout, *layer.keys_values(x, cos, sin))
        for d, other in enumerate(later, start=k + 1):
            self.cache.update(d, layout, *other.keys_values(x, cos, sin))
        return cast(Tensor, layer.finish(x, attend(layer.queries(x, cos, sin), keys, values, layout)))
