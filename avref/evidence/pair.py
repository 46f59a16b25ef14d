"""A pair under study: one trace, cut into a half to fit on and a half to judge on, with verdicts and resamples."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, cast

import numpy as np

from avref.cost_table import CostTable
from avref.drafters import weights
from avref.estimator import OnlineAcceptanceEstimator
from avref.evidence import fits, simulate, traces
from avref.evidence.observed import Measured
from avref.evidence.policy import Policy
from avref.evidence.resampling import Floats, ScoreSums, resample
from avref.evidence.trace_file import Array, Trace

FEATURE = "logit_q_max"
RESAMPLES = 300


@dataclass(frozen=True, eq=False)
class Pair:
    """A trace under the name that the ledger calls its pair by; `first` and `second` are its halves (`fits.halves`)."""

    name: str
    trace: Trace

    @property
    def has_logits(self) -> bool:
        return self.trace.logit_q_max is not None

    @property
    def greedy(self) -> bool:
        """Drafted greedily, though it has logits."""
        return self.has_logits and self.trace.greedy

    @property
    def trained_depth(self) -> int | None:
        """Positions that a shipped drafter was trained on; None where that is not known."""
        header = self.trace.header
        path = weights.shipped(header["method"]) / "config.json"
        depth = json.loads(path.read_text()).get("depth") if header["drafter"] == "shipped" and path.is_file() else None
        return None if depth is None else int(depth)

    @cached_property
    def halves(self) -> tuple[Array, Array]:
        return fits.halves(self.trace)

    @property
    def first(self) -> Array:
        return self.halves[0]

    @property
    def second(self) -> Array:
        return self.halves[1]

    @cached_property
    def drafts(self) -> fits.Drafts:
        """All graded drafts, by one draw of the verdicts."""
        return fits.draw(self.trace, seed=0)

    @cached_property
    def train(self) -> fits.Drafts:
        return self.drafts.of(self.first)

    @cached_property
    def held(self) -> fits.Drafts:
        return self.drafts.of(self.second)

    @cached_property
    def weights(self) -> Floats:
        """Resamples of the held-out answers, [num + 1, A]; the other answers have weight 0."""
        return self.resampled(self.second)

    def drawn(self, answers: Array) -> list[int]:
        """What resamples draw: a number for each of some answers, the same for all answers to one prompt.

        Of a workload that has one prompt among them, single answers are drawn.
        """
        workload, prompt = self.trace.workload[answers], self.trace.prompt[answers]
        alone = {w for w in np.unique(workload) if len(np.unique(prompt[workload == w])) == 1}
        keys = [(w, p, a if w in alone else -1) for w, p, a in zip(workload, prompt, answers, strict=True)]
        number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        return [number[key] for key in keys]

    def resampled(self, answers: Array, num: int = RESAMPLES, seed: int = 0) -> Floats:
        """Resamples of some answers, [num + 1, A]: prompts are drawn, each with all its answers (see `drawn`)."""
        drawn = self.drawn(answers)
        weights = np.zeros((num + 1, len(self.trace.num_tokens)))
        weights[:, answers] = resample(len(set(drawn)), num, seed)[:, drawn]
        return weights

    def values(self, feature: str) -> Array:
        """A feature, or one of the heads ("head", as a probability), [N, K]."""
        if feature == "head":
            assert self.trace.head is not None
            return cast(Array, np.exp(-np.logaddexp(0.0, -self.trace.head.astype(np.float64))))
        return traces.features(self.trace, feature)

    @cache  # noqa: B019  (a pair lives as long as the study)
    def fitted(self, feature: str = FEATURE, shared_slope: bool = True) -> OnlineAcceptanceEstimator:
        """The estimator after the first half."""
        return fits.fit(self.values(feature), self.train, shared_slope=shared_slope)

    def confidence(self, source: str, drafts: fits.Drafts, **settings: Any) -> Floats:
        """What `source` says of each draft [M]: a feature fitted on the first half; "head" and "no fit" as they are."""
        if source in ("head", "no fit"):
            values = self.values("head" if source == "head" else "q_max")
            return cast(Floats, values[drafts.row, drafts.position])
        return fits.predict(self.fitted(source, **settings), self.values(source), drafts)

    def scores(self, source: str, positions: Array | None = None, **settings: Any) -> ScoreSums:
        """Sums for AUC, log-loss and ECE on the held-out drafts, at some positions (None: all)."""
        drafts = self.held if positions is None else self.held.where(np.isin(self.held.position, positions))
        return drafts.scores(self.confidence(source, drafts, **settings))

    def measure(self, table: CostTable, policy: Policy, requests: int, num_steps: int, **options: Any) -> Measured:
        """An arm on the held-out answers (or on some, `answers`), with what its estimator learned on the others."""
        start = simulate.warmed(policy, self.trace, self.fitted() if self.has_logits else None)
        own = {"answers": self.second, "warmup": self.first, "seed": requests, **options}
        return simulate.measure(self.trace, table, start, requests, num_steps=num_steps, **own)
