"""What the bench runs: the arms, the cells of its four blocks, the order of the runs, and about how long they take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from avref.arms import WARMUP_INTERVAL, WARMUP_REFITS, rotate, speculative

BLOCKS = ("concurrency", "workloads", "drafters", "outside")
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
DRAFTERS_AT, OUTSIDE_AT = 8, (1, 16, 64)  # requests running at once, at most the largest concurrency asked for
CONFIDENCES = ("estimator", "head", "q_max", "threshold", "stop_head")
TUNED: Mapping[str, Sequence[float]] = {"threshold": (0.2, 0.4, 0.6, 0.8), "stop_head": (0.3, 0.5, 0.7, 0.9)}
MIX, TUNING = "mix", "tuning"
TOP_P = {"top-p 0.95": 0.95, "top-p 1": 1.0}

# The estimate of the time: tokens per second at 1 and 64 requests and of prefill, on two CPU cores with the default
# target. It is only a start; the runs that have ended correct it.
RATE_1, RATE_64, PREFILL_RATE, PROMPT_TOKENS, PROFILE_S_PER_REQUEST = 45.0, 300.0, 1500.0, 60, 0.7


@dataclass(frozen=True)
class Arm:
    """One way of decoding: a `speculative_config` (None: plain decoding), under a name that is its own.

    `trims_all` drafts and verifies nothing (what drafting costs); `tune` are the values of `threshold` to choose from,
    each tried by an arm whose `trial_of` names this one; `theirs` ("generate", "assisted") is Hugging Face's decoding.
    """

    name: str
    config: Mapping[str, Any] | None = field(default=None, compare=False)
    trims_all: bool = False
    tune: tuple[float, ...] = ()
    theirs: str = ""
    trial_of: str = ""

    @property
    def owner(self) -> str:
        """The name of the arm that this one is, or is tried out for."""
        return self.trial_of or self.name

    @property
    def method(self) -> str | None:
        return self.config["method"] if self.config else None

    @property
    def confidence(self) -> str | None:
        """Where an adaptive arm's confidence comes from; None for the others."""
        config = self.config or {}
        return config.get("confidence", "auto") if config.get("enable_adaptive_verification") else None

    @property
    def learns(self) -> bool:
        """Whether the arm is warmed up: it has a budget, and with it running means, if no estimator."""
        return self.confidence is not None and self.confidence not in TUNED

    def at(self, threshold: float) -> Arm:
        """The arm with one value of its threshold, as it is tried out."""
        config = {**(self.config or {}), "threshold": threshold}
        return Arm(f"{self.name} at {threshold:g}", config, trial_of=self.name)


@dataclass(frozen=True)
class Cell:
    """Arms that are compared with one another: one block, one case (prompts or sampling), one concurrency."""

    block: str
    case: str
    concurrency: int
    arms: Sequence[Arm]
    repeats: int


@dataclass(frozen=True)
class Unit:
    """One run of one arm: what is measured, written down and never done again."""

    block: str
    case: str
    concurrency: int
    arm: Arm
    repeat: int

    @property
    def key(self) -> str:
        return f"{self.block} | {self.case} | {self.concurrency} | {self.arm.name} | {self.repeat}"

    @property
    def race(self) -> str:
        """What the units that run together have in common; beside Hugging Face each runs by itself."""
        alone = f" | {self.arm.name}" if self.block == "outside" else ""
        return f"{self.block} | {self.case} | {self.concurrency} | repeat {self.repeat}{alone}"

    @property
    def count(self) -> int:
        """Requests of the run: beside Hugging Face all at once, else more, which enter when others leave.

        At least 8 more, or luck decides: with a few hundred drafts the share accepted is known to .04 or so.
        """
        if self.block == "outside":
            return max(6, self.concurrency)
        return self.concurrency + max(8, self.concurrency // 2)

    def seconds(self, max_tokens: int) -> float:
        """The first guess at its time."""
        rate = RATE_1 * (RATE_64 / RATE_1) ** (math.log2(self.concurrency) / 6)
        answers = self.count // self.concurrency * self.concurrency  # then the batch is no longer full
        slower = 2.5 if self.arm.theirs else 1.0
        return slower * answers * max_tokens / rate + self.count * PROMPT_TOKENS / PREFILL_RATE


@dataclass(frozen=True)
class Plan:
    """The bench's arms by block; `drafters` maps each method to its drafter (None: the shipped one, or none needed)."""

    method: str
    drafters: Mapping[str, Any]
    depths: Mapping[str, int]
    workloads: Sequence[str]
    concurrency: Sequence[int] = CONCURRENCY
    repeats: int = 3
    blocks: Sequence[str] = BLOCKS

    @property
    def most(self) -> int:
        return max(self.concurrency)

    def loads(self, block: str) -> list[int]:
        """The concurrencies of a block: its arms are built for the largest, and warmed up at each."""
        return sorted({cell.concurrency for cell in self.cells(block)})

    def cells(self, block: str) -> list[Cell]:
        """The cells of a block in the order in which they are first run."""
        if block == "concurrency":
            return [Cell(block, MIX, c, self._policies(), self.repeats) for c in self.concurrency]
        if block == "workloads":
            return [Cell(block, name, self.most, self._off_on(), self.repeats) for name in self.workloads]
        if block == "outside":
            return self._outside()
        at, chosen = min(DRAFTERS_AT, self.most), self._drafters()
        trials = [arm.at(value) for arm in chosen for value in arm.tune]
        return [Cell(block, TUNING, at, trials, 1), Cell(block, MIX, at, chosen, self.repeats)]

    def units(self, block: str) -> list[Unit]:
        """All runs of a block: repeat by repeat, cell by cell, the arms of a cell in turn; trial runs come first."""
        cells = self.cells(block)
        order = [cells] if block != "drafters" else [[cell] for cell in cells]
        return [
            Unit(block, cell.case, cell.concurrency, arm, repeat)
            for group in order
            for repeat in range(max(cell.repeats for cell in group))
            for cell in group
            if cell.arms
            for arm in rotate(cell.arms, repeat)
        ]

    def seconds(self, done: Iterable[str], max_tokens: int) -> float:
        """The first guess at the time of all runs but those `done`, with profiling and warming up."""
        finished, total = set(done), 0.0
        for block in self.blocks:
            left = [u for u in self.units(block) if u.key not in finished]
            total += sum(u.seconds(max_tokens) for u in left) + self._preparation({u.arm for u in left})
        return total

    def _preparation(self, arms: Iterable[Arm]) -> float:
        learning = {a for a in arms if a.learns}
        at = DRAFTERS_AT if any(" " in a.name for a in learning) else self.most
        warm = WARMUP_REFITS * WARMUP_INTERVAL * 0.075  # seconds a step at eight requests
        return len(learning) * warm + len({a.method for a in learning}) * (5 + PROFILE_S_PER_REQUEST * at)

    # ---- the arms ----
    def _fixed(self, method: str, num: int, prefix: str = "") -> Arm:
        return Arm(f"{prefix}fixed-{num}", speculative(method, self.drafters[method], num, adaptive=False))

    def _adaptive(self, method: str, name: str, **more: Any) -> Arm:
        config = speculative(method, self.drafters[method], self.depths[method], adaptive=True, **more)
        return Arm(name, config, tune=tuple(TUNED.get(more.get("confidence", ""), ())))

    def _policies(self) -> list[Arm]:
        """No speculation, every fixed length, drafting for nothing, and adaptive verification with both draftings."""
        depth = self.depths[self.method]
        fixed = [self._fixed(self.method, k) for k in range(1, depth + 1)]
        control = Arm("always-trim", fixed[-1].config, trims_all=True)
        adaptive = self._adaptive(self.method, f"adaptive-{depth}")
        full = self._adaptive(self.method, f"adaptive-{depth}-full-draft", adaptive_drafting=False)
        return [Arm("none"), *fixed, control, full, adaptive]

    def _off_on(self) -> list[Arm]:
        depth = self.depths[self.method]
        return [Arm("none"), self._fixed(self.method, depth), self._adaptive(self.method, f"adaptive-{depth}")]

    def _drafters(self) -> list[Arm]:
        arms = [Arm("none")]
        for method in self.drafters:
            arms.append(self._fixed(method, self.depths[method], f"{method} "))
            arms += [self._adaptive(method, f"{method} {c}", confidence=c) for c in CONFIDENCES]
        return arms

    def _outside(self) -> list[Cell]:
        cells = []
        for c in sorted({min(c, self.most) for c in OUTSIDE_AT}):
            for case in TOP_P if c > 1 else list(TOP_P)[:1]:
                arms = [Arm("none"), Arm("hf-generate", theirs="generate")]
                if c == 1 and "draft_model" in self.drafters:
                    ours = self._fixed("draft_model", self.depths["draft_model"], "draft_model ")
                    arms += [ours, Arm("hf-assisted", ours.config, theirs="assisted")]
                cells.append(Cell("outside", case, c, arms, self.repeats))
        return cells
