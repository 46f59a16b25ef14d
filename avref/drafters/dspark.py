"""Semi-autoregressive drafter (DSpark, arXiv 2607.05147): one parallel pass, then a cheap tail from token to token.

The backbone is dflash's: all K slot states come from one pass that sees no drafted token. The tail then draws the
tokens one after the other, and each draft's logits depend on the token before it through a bias of low rank r:

    logits_k = norm(state_k) H^T + (A e(x_{k-1})) W^T

with H [V_d, D] the target's head rows, e the target's (normalised) embedding, A [r, D], W [V_d, r], and x_0 the pending
token. A confidence head reads state_k and A e(x_{k-1}), never x_k, so that verification may follow it:

    c_k = sigmoid(MLP([state_k; A e(x_{k-1})]))

The paper's head is linear; here it has one hidden layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from avref.drafters.base import Said, Step, TokenByToken
from avref.drafters.dflash import DFlashDrafter, DFlashModel
from avref.drafters.layers import DrafterConfig, StopHead


@dataclass
class DSparkConfig(DrafterConfig):
    """Shape of a dspark drafter; `markov_rank` is r, the rank of the bias from the previous token."""

    markov_rank: int = 40


class DSparkModel(DFlashModel):
    """A dflash backbone, the bias from the previous token (0 until it is trained) and a confidence head."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.markov_in = nn.Linear(config.hidden_size, config.markov_rank, bias=False)  # A
        self.markov_out = nn.Linear(config.markov_rank, config.vocab_size, bias=False)  # W
        nn.init.zeros_(self.markov_out.weight)
        self.confidence_head = StopHead(config.hidden_size + config.markov_rank)

    def markov(self, embedding: Tensor) -> Tensor:
        """What the tail keeps of the previous token, A e(x_{k-1}): [..., D] -> [..., r]."""
        return cast(Tensor, self.markov_in(self.embedding_norm(embedding)))

    def bias(self, markov: Tensor) -> Tensor:
        """Logits that the previous token adds: [..., r] -> [..., V_d]."""
        return cast(Tensor, self.markov_out(markov))

    def confidence(self, states: Tensor, markov: Tensor) -> Tensor:
        """Log-odds that a draft is accepted, from what its q is made of: [..., D] and [..., r] -> [...]."""
        return cast(Tensor, self.confidence_head(torch.cat([states, markov], dim=-1)))


class DSparkDrafter(TokenByToken, DFlashDrafter):
    """A `DSparkModel` at work; its context cache is dflash's."""

    method = "dspark"
    config_class = DSparkConfig
    model_class: ClassVar[type[DFlashModel]] = DSparkModel
    has_confidence = True

    def start(self, lengths: Sequence[int], pending: Tensor, depth: int) -> Step:
        states = self.states(lengths, pending, depth)  # [R depth, D]
        heads = F.linear(states, self.head).float(), self.model.stop_head(states).float()
        states, logits, stop = (x.unflatten(0, (-1, depth)) for x in (states, *heads))  # [R, depth, ...]

        def step(k: int, token: Tensor) -> Said:
            markov = self.model.markov(self.embedding(token))  # [R, r]
            confidence = self.model.confidence(states[:, k], markov).float().sigmoid()
            return Said(logits[:, k] + self.model.bias(markov), stop[:, k], confidence)

        return step
