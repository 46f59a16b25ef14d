"""Distilling `dspark`: dflash's network on many blocks at once, then the tail on the recorded tokens.

The backbone is shaped by the drafts' loss alone. The confidence head, like the stop head, reads detached states; its
label is the acceptance probability 1 - TV (`blocks.loss_and_overlap`).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import Tensor

from avref.drafters.dspark import DSparkConfig, DSparkModel
from avref.train.blocks import Batch, Drafts, Settings, shape_of, start_from_target
from avref.train.dflash import block_states


def start(target: Any, settings: Settings, vocab_ids: Tensor) -> DSparkModel:
    """A drafter that starts from the target's last layers; its tail starts without effect."""
    model = DSparkModel(DSparkConfig(**asdict(shape_of(target, settings, len(vocab_ids)))))
    model.vocab_ids.copy_(vocab_ids)
    start_from_target(model, target)
    return model


def forward(model: DSparkModel, embedding: Any, head: Tensor, batch: Batch, depth: int) -> Drafts:
    """Logits of every slot given the recorded token before it, and what the two heads say of them."""
    states = block_states(model, embedding, batch, depth)  # [B, M, depth, D]
    markov = model.markov(embedding(batch.tokens(depth)))  # [B, M, depth, r]
    logits = states @ head.T
    logits += model.bias(markov)
    fixed = states.detach()
    return Drafts(logits, model.stop_head(fixed), model.confidence(fixed, markov.detach()))
