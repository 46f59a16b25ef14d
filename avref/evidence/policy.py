"""What a replayed policy drafts and verifies, and what it reads of a trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from avref.config import BUDGET_RULES, DEFAULT_THRESHOLDS, check_estimator_keys, one_of, real, whole
from avref.evidence import traces
from avref.evidence.trace_file import Array, Trace
from avref.features import FEATURES

CONFIDENCES = ("estimator", "head", "q_max", "oracle", "threshold", "stop_head")


@dataclass(frozen=True)
class Policy:
    """Made by `none`, `fixed`, `control` or `adaptive`.

    depth: positions drafted (None: K). verify: drafts verified of each request (None: adaptive, by the other settings,
    whose names and meanings are those of `SpeculativeConfig`). Beside its confidences there is "oracle": the overlap,
    which is the acceptance probability itself before the token is drawn. Raises ValueError for unknown names, and for a
    feature that reads the drawn token: a trace cannot tell what such a policy would have emitted.
    """

    depth: int | None = None
    verify: int | None = None
    confidence: str = "estimator"
    feature: str = "logit_q_max"
    budget_rule: str = "lookahead"
    probe_interval: int = 64
    estimator: Mapping[str, Any] = field(default_factory=dict)
    threshold: float | None = None
    adaptive_drafting: bool = True

    def __post_init__(self) -> None:
        one_of("confidence", self.confidence, CONFIDENCES)
        one_of("budget_rule", self.budget_rule, BUDGET_RULES)
        one_of("feature", self.feature, [f.name for f in FEATURES.values() if f.lossless])
        one_of("adaptive_drafting", self.adaptive_drafting, (True, False))
        whole("probe_interval", self.probe_interval, 0)
        check_estimator_keys(self.estimator)  # their values, once the trace says what K is
        for name in ("depth", "verify"):
            if (value := getattr(self, name)) is not None:
                whole(name, value, 0)
        if self.threshold is not None:
            real("threshold", self.threshold, 0.0, 1.0)
            one_of("confidence with a threshold", self.confidence, tuple(DEFAULT_THRESHOLDS))

    @classmethod
    def none(cls) -> Policy:
        """No speculation."""
        return cls(depth=0, verify=0)

    @classmethod
    def fixed(cls, k: int) -> Policy:
        """Draft and verify k tokens in every step."""
        return cls(depth=k, verify=k)

    @classmethod
    def control(cls) -> Policy:
        """Draft everything and verify nothing."""
        return cls(verify=0)

    @classmethod
    def adaptive(cls, **settings: Any) -> Policy:
        """Adaptive verification; settings as in `SpeculativeConfig`."""
        return cls(**settings)

    @property
    def decides(self) -> bool:
        """Whether what is verified depends on the drafts."""
        return self.verify is None

    @property
    def stops_below(self) -> float | None:
        """The value of a stopping rule, which knows no costs; None for other policies."""
        if not self.decides or self.confidence not in DEFAULT_THRESHOLDS:
            return None
        return DEFAULT_THRESHOLDS[self.confidence] if self.threshold is None else self.threshold

    @property
    def learns(self) -> bool:
        """Whether the online estimator is at work."""
        return self.decides and self.confidence == "estimator"


def scores(trace: Trace, policy: Policy) -> Array:
    """What the policy reads at every draft, float64 [N, K]: the estimator's feature, or else a confidence in [0, 1].

    Raises ValueError when the trace does not have it.
    """
    if policy.learns:
        return traces.features(trace, policy.feature)
    if policy.confidence == "oracle":
        return trace.overlap.astype(np.float64)
    if policy.confidence in ("q_max", "threshold"):
        return traces.features(trace, "q_max")
    name = "stop" if policy.confidence == "stop_head" else "head"
    stored = getattr(trace, name)
    if stored is None:
        raise ValueError(f"confidence={policy.confidence!r}, but the {trace.header['method']} drafter has none to read")
    return np.asarray(np.exp(-np.logaddexp(0.0, -stored.astype(np.float64))))
