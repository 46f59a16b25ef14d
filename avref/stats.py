"""What a run counts and where its time goes: `Stats`, and the `Stopwatch` that fills in the milliseconds."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass
class Stats:
    """Counts and milliseconds since they were last reset.

    Positions: drafted, verified (admitted), graded (reached by the acceptance test), accepted.
    """

    drafted_by_position: np.ndarray
    verified_by_position: np.ndarray
    graded_by_position: np.ndarray
    accepted_by_position: np.ndarray
    num_steps: int = 0  # decode steps = target decode forwards
    num_request_steps: int = 0  # running requests, summed over decode steps
    num_requests: int = 0  # requests prefilled; each emits its first token there
    num_tokens: int = 0  # emitted, first tokens included
    num_refits: int = 0
    prefill_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    sample_ms: float = 0.0
    other_ms: float = 0.0
    wall_s: float = 0.0

    @classmethod
    def zeros(cls, num_positions: int) -> Stats:
        """All counts zero, for `num_positions` draft positions."""
        drafted, verified, graded, accepted = (np.zeros(num_positions, dtype=np.int64) for _ in range(4))
        return cls(drafted, verified, graded, accepted)

    @property
    def tokens_per_forward(self) -> float:
        """Tokens emitted per target decode forward, over all running requests."""
        return (self.num_tokens - self.num_requests) / max(self.num_steps, 1)

    @property
    def tokens_per_request_step(self) -> float:
        """Mean acceptance length: tokens emitted per request and decode step.

        The residual or bonus token is included, so this is 1 without speculation, and before the first step.
        """
        emitted = self.num_tokens - self.num_requests
        return emitted / self.num_request_steps if self.num_request_steps else 1.0


MOST_EVENTS = 10_000  # pairs of CUDA events that wait to be read


class Stopwatch:
    """Milliseconds between laps, added up by name.

    On a CPU they come from the host clock, on a GPU from CUDA events (no synchronisation until `read`, which comes by
    itself every `MOST_EVENTS` laps: a long run must not hold them all).
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        self.totals = dict.fromkeys(("prefill", "draft", "verify", "sample", "other"), 0.0)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._last = self._now()

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def reset(self) -> None:
        """Forget all laps, those of a run that was broken off too."""
        self.totals = dict.fromkeys(self.totals, 0.0)
        self._events.clear()
        self.start()

    def start(self) -> None:
        self._last = self._now()

    def lap(self, name: str) -> None:
        now = self._now()
        if self.cuda:
            self._events.append((name, self._last, now))
            if len(self._events) >= MOST_EVENTS:
                self.read()
        else:
            self.totals[name] += (now - self._last) * 1e3
        self._last = now

    def read(self) -> dict[str, float]:
        if self._events:
            torch.cuda.synchronize(self.device)
            for name, start, end in self._events:
                self.totals[name] += start.elapsed_time(end)
            self._events.clear()
        return dict(self.totals)
