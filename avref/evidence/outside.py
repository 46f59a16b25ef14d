"""The baselines that are not ours: Hugging Face `generate`, plain and assisted, on the same loaded models."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from avref.arms import Run
from avref.packed import plain_attention
from avref.stats import Stats


@torch.inference_mode()
def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    top_p: float,
    seed: int,
    together: int,
    assistant: Any = None,
    num_assistant_tokens: int = 0,
) -> Run:
    """`model.generate` at temperature 1 on batches of `together` prompts, each with exactly `max_tokens` new tokens.

    With an `assistant` it is Hugging Face's assisted generation, `num_assistant_tokens` drafts in every step, which
    takes one prompt at a time. The time is that of all calls, prefill included. The global random state is left as it
    was.
    """
    batches = [prompts[i : i + together] for i in range(0, len(prompts), together)]
    settings: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": top_p}
    settings |= {"min_new_tokens": max_tokens, "max_new_tokens": max_tokens, "pad_token_id": 0}
    stats = Stats.zeros(0)
    own_assistant = assistant is not None and assistant is not model
    with (
        plain_attention(model),
        plain_attention(assistant) if own_assistant else nullcontext(),
        _constant(assistant, num_assistant_tokens),
        _full_vocabulary(assistant, model),
        torch.random.fork_rng(),
    ):
        torch.manual_seed(seed)
        began = time.perf_counter()
        for batch in batches:
            longest = max(map(len, batch))
            ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in batch], device=model.device)
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch], device=model.device)
            out = model.generate(ids, attention_mask=mask, assistant_model=assistant, **settings)
            stats.num_tokens += out[:, longest:].numel()
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        stats.wall_s = time.perf_counter() - began
    stats.num_requests = len(prompts)
    return Run(stats, with_prefill=True)


class _FullHead(nn.Module):
    """A reduced head's logits at the target's ids, minus infinity at all others."""

    def __init__(self, head: Any, ids: Tensor, size: int) -> None:
        super().__init__()
        self.head, self.ids, self.size = head, ids, size

    def forward(self, states: Tensor) -> Tensor:
        logits = self.head(states)  # [..., V_d]
        full = logits.new_full((*logits.shape[:-1], self.size), -torch.inf)
        return full.index_copy_(-1, self.ids, logits)


@contextmanager
def _full_vocabulary(assistant: Any, model: Any) -> Iterator[None]:
    """Inside, an assistant with a reduced draft vocabulary speaks the model's: Hugging Face asks for one vocabulary."""
    ids = getattr(assistant, "draft_vocab_ids", None)
    if ids is None:
        yield
        return
    head, config = assistant.get_output_embeddings(), assistant.config
    before, size = config.vocab_size, model.config.get_text_config().vocab_size
    try:
        assistant.set_output_embeddings(_FullHead(head, ids, size))
        config.vocab_size = size
        yield
    finally:
        assistant.set_output_embeddings(head)
        config.vocab_size = before


@contextmanager
def _constant(assistant: Any, num: int) -> Iterator[None]:
    """Inside, the assistant drafts `num` tokens in every step: no schedule, and no stop where it is unsure."""
    if assistant is None:
        yield
        return
    config = assistant.generation_config
    wanted = {
        "num_assistant_tokens": num,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    before = {name: getattr(config, name, None) for name in wanted}
    try:
        for name, value in wanted.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
