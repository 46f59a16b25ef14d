"""One layer that drafts token by token on the target's states and then on its own (after EAGLE-3, arXiv 2503.01840).

The entry at position i joins token i with the state of position i - 1:

    entry_i = joined(embedding(token_i), state_{i-1}),   state_{-1} = 0
    s_i     = layer(entry_i; keys and values of entries 0 .. i)
    q       = softmax(head norm(s_i) / T)                for the token at i + 1

While the target has processed position i - 1, state_{i-1} is its fused hidden state there. While drafting there is
none yet, and the drafter's own s_{i-1} stands in, brought to the same scale. So q depends on the tokens drafted before.

The cache holds each entry's keys and values. With one layer they depend on the entry alone: `extend` overwrites those
built from own states by a projection, without attention. Embedding and head rows are the target's own; the head
covers a reduced vocabulary of V_d ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import ClassVar, cast

import torch.nn.functional as F
from torch import Tensor

from avref.drafters.base import Said, Step, TokenByToken
from avref.drafters.layers import DrafterConfig, DrafterModel, TrainedDrafter, rotary
from avref.layout import Layout, send
from avref.packed import attend


class EagleModel(DrafterModel):
    """The trained part: exactly what all families share, with a single layer. Raises ValueError for more."""

    def __init__(self, config: DrafterConfig) -> None:
        if config.num_layers != 1:
            raise ValueError(
                f"num_layers={config.num_layers}, but an eagle drafter has one layer, whose output it reads again; "
                "use num_layers=1"
            )
        super().__init__(config)

    def own(self, state: Tensor) -> Tensor:
        """The drafter's own state s [..., D] at the scale of the context vectors, to stand in for one."""
        return cast(Tensor, self.fuse_norm(state))


class EagleDrafter(TokenByToken, TrainedDrafter):
    """An `EagleModel` at work: one packed pass of R tokens per draft position."""

    method = "eagle"
    model_class: ClassVar[type[DrafterModel]] = EagleModel

    def enter(self, layout: Layout, tokens: Sequence[Sequence[int]], hidden: Tensor | None) -> None:
        nothing = self.newest.new_zeros(layout.num_rows, self.newest.shape[1])
        self._process(layout, tokens, hidden, nothing, [len(own) for own in tokens])

    def extend(
        self, layout: Layout, tokens: Sequence[Sequence[int]], hidden: Tensor | None, kept: Sequence[int]
    ) -> None:
        # rejected tokens are written too: they lie behind every later position until they are overwritten
        before = self.newest[layout.first_row : layout.first_row + layout.num_rows]
        self._process(layout, tokens, hidden, before, kept)

    def _process(
        self,
        layout: Layout,
        tokens: Sequence[Sequence[int]],
        hidden: Tensor | None,
        before: Tensor,  # [R, D] the state in front of each row's first token
        kept: Sequence[int],  # [R] final tokens of each row
    ) -> None:
        assert hidden is not None  # `hidden_layers` asks for the states
        ids = send(list(itertools.chain.from_iterable(tokens)), hidden.device)  # [T]
        context = self.model.context(hidden)  # [T, D]
        states = context.roll(1, dims=0).index_copy(0, layout.first, before)  # [T, D] one position earlier
        self.write(layout, self.embedding(ids), states)
        self.keep(layout, context, kept)

    def write(self, layout: Layout, embedded: Tensor, states: Tensor) -> None:
        """Keys and values of entries built from the target's states [T, D]."""
        (layer,), c = self.model.decoder_layers, self.model.config
        cos, sin = rotary(layout.position, c.head_dim, c.rope_theta)
        self.cache.update(0, layout, *layer.keys_values(self.model.joined(embedded, states), cos, sin))

    def start(self, lengths: Sequence[int], pending: Tensor, depth: int) -> Step:
        state = self.newest[: len(lengths)]  # [R, D]

        def step(k: int, token: Tensor) -> Said:
            nonlocal state
            layout = Layout([n + k for n in lengths], [1] * len(lengths), token.device)
            own = self.own(k, layout, self.embedding(token), state)  # [R, D]
            state, final = self.model.own(own), self.model.norm(own)
            return Said(F.linear(final, self.head).float(), self.model.stop_head(final).float())

        return step

    def own(self, k: int, layout: Layout, embedded: Tensor, state: Tensor) -> Tensor:
        """The own state [R, D] of draft position k, from the token there and the state in front of it [R, D] each."""
        (layer,), c = self.model.decoder_layers, self.model.config
        x = self.model.joined(embedded, state)
        cos, sin = rotary(layout.position, c.head_dim, c.rope_theta)
        keys, values = self.cache.update(0, layout, *layer.keys_values(x, cos, sin))
        return cast(Tensor, layer.finish(x, attend(layer.queries(x, cos, sin), keys, values, layout)))
