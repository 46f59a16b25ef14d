"""Block-parallel drafter (DFlash family): one pass over K slots, target states injected as keys and values.

Slot k predicts the k-th token behind the pending one. Its input is the pending token's embedding joined with the
newest fused target state, plus an embedding of k; it reads the whole context through the target's hidden states of a
few layers, fused to one vector per token and projected to keys and values in every drafter layer. Slots attend
causally, so the first k drafts do not depend on how many are made. No draft reads another draft's token: q at all
positions is known before any is drawn.

Embedding and head rows are the target's own; the head covers a reduced vocabulary of V_d ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from avref.drafters.base import DraftProposal, Enough, draw
from avref.drafters.layers import DrafterConfig, DrafterModel, TrainedDrafter, rotary
from avref.layout import Layout
from avref.packed import attend


class DFlashModel(DrafterModel):
    """The trained part: what all families share, and an embedding per slot."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.slot = nn.Parameter(torch.randn(config.depth, config.hidden_size) * 0.3)

    def block(self, embedding: Tensor, newest: Tensor, depth: int) -> Tensor:
        """Slot inputs [..., depth, D] from the pending token's embedding and the newest context vector [..., D]."""
        return self.joined(embedding, newest)[..., None, :] + self.slot[:depth]


class DFlashDrafter(TrainedDrafter):
    """A `DFlashModel` at work."""

    method = "dflash"
    model_class = DFlashModel

    def enter(self, layout: Layout, tokens: Sequence[Sequence[int]], hidden: Tensor | None) -> None:
        self._write(layout, hidden, [len(own) for own in tokens])

    def extend(
        self, layout: Layout, tokens: Sequence[Sequence[int]], hidden: Tensor | None, kept: Sequence[int]
    ) -> None:
        # rejected tokens are written too: they lie behind every later position until they are overwritten
        self._write(layout, hidden, kept)

    def _write(self, layout: Layout, hidden: Tensor | None, kept: Sequence[int]) -> None:
        assert hidden is not None  # `hidden_layers` asks for the states
        context = self.model.context(hidden)  # [T, D]
        cos, sin = rotary(layout.position, self.model.config.head_dim, self.model.config.rope_theta)
        for i, layer in enumerate(self.model.decoder_layers):
            self.cache.update(i, layout, *layer.keys_values(context, cos, sin))
        self.keep(layout, context, kept)

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
        states = self.states(lengths, pending, depth)
        logits = F.linear(states, self.head).float()  # [R depth, V_d]
        ids, q, drawn = draw(logits, temperature.repeat_interleave(depth), uniforms.flatten(), greedy)
        shape = (len(lengths), depth)
        return DraftProposal(
            self.vocab_ids[ids].view(shape),
            ids.view(shape),
            logits.view(*shape, -1),
            None if q is None else q.view(*shape, -1),
            drawn.view(shape),
            self.vocab_ids,
            stop=self.model.stop_head(states).float().view(shape),
        )

    def states(self, lengths: Sequence[int], pending: Tensor, depth: int) -> Tensor:
        """Final states of all slots [R depth, D]: one pass, before any token is drawn."""
        rows, c = len(lengths), self.model.config
        layout = Layout(lengths, [depth] * rows, pending.device)
        x = self.model.block(self.embedding(pending), self.newest[:rows], depth).flatten(0, 1)  # [R depth, D]
        cos, sin = rotary(layout.position, c.head_dim, c.rope_theta)
        for i, layer in enumerate(self.model.decoder_layers):
            keys, values = self.cache.update(i, layout, *layer.keys_values(x, cos, sin))
            x = layer.finish(x, attend(layer.queries(x, cos, sin), keys, values, layout))
        return cast(Tensor, self.model.norm(x))
