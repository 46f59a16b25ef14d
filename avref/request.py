"""One prompt on its way through the engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from avref.config import SamplingParams
from avref.layout import send


@dataclass(eq=False)
class Request:
    """One prompt on its way: its tokens so far, how it is sampled, and why it ended (`stop` or `length`)."""

    request_id: int
    prompt_ids: list[int]
    params: SamplingParams
    max_length: int
    stop_ids: frozenset[int]
    generator: torch.Generator
    output_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    # newest tokens, with the target's states there [n D], that the drafter has not been shown yet
    owed: list[tuple[int, Tensor]] = field(default_factory=list)

    @property
    def num_cached(self) -> int:
        """Tokens whose keys and values are in the cache: all but the pending one."""
        return len(self.prompt_ids) + len(self.output_ids) - 1

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        emitted = len(self.output_ids)
        return min(self.params.max_tokens - emitted, self.max_length - len(self.prompt_ids) - emitted)

    def emit(self, tokens: Iterable[int]) -> int:
        """Append tokens up to the first stop token or the length limit; return how many were taken."""
        taken = 0
        for token in tokens:
            self.output_ids.append(token)
            taken += 1
            if token in self.stop_ids:
                self.finish_reason = "stop"
            elif self.remaining == 0:
                self.finish_reason = "length"
            if self.finish_reason:
                break
        return taken


def sampling_tensors(requests: Sequence[Request], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(temperature, top_k, top_p), [R] each."""
    params = [r.params for r in requests]
    return (
        send([p.temperature for p in params], device, torch.float32),
        send([p.top_k for p in params], device),
        send([p.top_p for p in params], device, torch.float32),
    )


def fresh_uniforms(requests: Sequence[Request], width: int, device: torch.device) -> Tensor:
    """Uniforms in [0, 1) [R, width], one call of each request's own generator; float32 whatever torch's default is."""
    own = [torch.rand(width, generator=r.generator, dtype=torch.float32, device="cpu") for r in requests]
    return torch.stack(own).to(device, non_blocking=True)
