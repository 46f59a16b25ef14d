"""Where confidence comes from: c_k, the probability that draft k is accepted if it is reached.

    estimator   sigmoid(slope f_k + intercept_k), fitted online, f a feature of the draft logits (the article's method)
    head        what the drafter itself says: dspark's trained head, or an n-gram drafter's record of past verdicts
    q_max       the largest draft probability as it stands, no fit (EAGLE-2, arXiv 2406.16858)
    threshold   q_max again, but no budget: verify up to the first position where it falls under a value (after
                Draft & Verify, arXiv 2309.08168, where the value is tuned while decoding; here it is fixed)
    stop_head   sigmoid of a trained stop head; verify while c_1 ... c_k stays at or above a value, that is while
                P(some rejection) is at most one minus it (after SpecDec++, arXiv 2405.19715)

The first three feed survival, budget and allocation. The last two are stopping rules: they know no costs and judge each
request by itself. All of them read what q_k is made from (logits, hidden state, tokens before x_k), never x_k, so
whether x_k is verified is settled by q_1 .. q_k and the emitted law stays the target's (design: losslessness). A rule
that has seen x_k, like a threshold on the drawn token's own probability, may stop after k only, with x_k verified.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from avref.config import DEFAULT_THRESHOLDS, ESTIMATOR_KEYS, SpeculativeConfig
from avref.drafters.base import Drafter, DraftProposal
from avref.estimator import OnlineAcceptanceEstimator
from avref.features import FEATURES, q_max
from avref.pruning import survival

# what each source reads of a drafter: a class attribute, its default where a drafter does not say, and its name
_READS = {
    "estimator": ("has_logits", True, "draft logits"),
    "head": ("has_confidence", False, "a confidence of the drafter's own"),
    "q_max": ("has_logits", True, "draft logits"),
    "threshold": ("has_logits", True, "draft logits"),
    "stop_head": ("has_stop_head", False, "a stop head"),
}


def resolve(config: SpeculativeConfig, drafter: Drafter | None) -> str:
    """The source that `config.confidence` names for this drafter.

    "auto" is the estimator, or the drafter's own confidence where it has no logits to fit on (n-grams). Raises
    ValueError when the drafter lacks what the source reads, or a key that the source never reads was set.
    """

    def offers(source: str) -> bool:
        attribute, default, _ = _READS[source]
        return bool(getattr(drafter, attribute, default))

    source = config.confidence
    if source == "auto":
        source = "estimator" if offers("estimator") else "head"
    if not offers(source):
        possible = ", ".join(repr(name) for name in _READS if offers(name))
        raise ValueError(
            f"confidence={source!r} reads {_READS[source][2]}, and method {config.method!r} has none; choose 'auto' or "
            f"one of {possible}"
        )
    if source != "estimator":
        config.refuse_unread(ESTIMATOR_KEYS, f"confidence={source!r} for method {config.method!r}")
    if config.probe_interval and not _learns(source, drafter):  # 0 asks for what happens anyway
        config.refuse_unread(("probe_interval",), f"confidence={source!r}, which learns from no verdict")
    return source


def _learns(source: str, drafter: Drafter | None) -> bool:
    """Whether verdicts sharpen this confidence: the estimator's, and an n-gram drafter's record."""
    return source == "estimator" or not getattr(drafter, "has_logits", True)


class Confidence:
    """One of the sources above, ready to read proposals.

    `threshold` is the value of the two stopping rules (None: their default, .4 and .7) and None for the others.
    `learns` is true where verdicts sharpen the confidence, so that probes are worth their price.
    """

    def __init__(
        self, config: SpeculativeConfig, drafter: Drafter | None, estimator: OnlineAcceptanceEstimator | None = None
    ) -> None:
        self.source = resolve(config, drafter)
        self.num_positions = config.num_speculative_tokens
        self.feature, self.estimator = FEATURES[config.feature], estimator
        self.threshold = DEFAULT_THRESHOLDS.get(self.source) if config.threshold is None else config.threshold
        self.learns = _learns(self.source, drafter)

    @property
    def stops(self) -> bool:
        """Whether this is a stopping rule, without budget and cost table."""
        return self.threshold is not None

    def read(self, proposal: DraftProposal, temperature: Tensor, first: int = 0) -> tuple[Tensor | None, Tensor]:
        """(features [R, K] for the estimator to observe, or None; confidence [R, K]); 0 where nothing is drafted.

        temperature [R], 0 for greedy requests. The proposal holds the positions from `first` on.
        """
        width = proposal.tokens.shape[1]
        padded = lambda x: F.pad(x, (first, self.num_positions - first - width))  # noqa: E731  # [R, K]
        if self.source == "estimator":
            assert self.estimator is not None and proposal.logits is not None
            features = padded(self.feature.fn(proposal.logits, proposal.draft_ids, temperature[:, None]))
            return features, padded(self.estimator.predict(features)[:, first : first + width])
        if self.source == "stop_head":
            assert proposal.stop is not None
            return None, padded(proposal.stop.float().sigmoid())
        if self.source == "head":
            assert proposal.confidence is not None
            return None, padded(proposal.confidence)
        assert proposal.logits is not None
        return None, padded(q_max(proposal.logits, temperature[:, None]))

    def stop(self, confidence: Tensor) -> Tensor:
        """Drafts that the stopping rule verifies [R]: those before the first that falls under the threshold."""
        assert self.threshold is not None
        score = survival(confidence) if self.source == "stop_head" else confidence  # [R, K]
        return (score >= self.threshold).cumprod(-1).sum(-1)
