"""The settings a user gives: `SamplingParams` per request, and one `SpeculativeConfig`.

The keys of `SpeculativeConfig` are those of vLLM's `--speculative-config`, and a few of our own.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import nn

from avref.models import choose_device

METHODS = ("draft_model", "eagle", "mtp", "dflash", "dspark", "layer_skip", "ngram")
DRAFT_SAMPLE_METHODS = ("probabilistic", "greedy")
BUDGET_RULES = ("lookahead", "stale", "early_stop", "retrospective")
CONFIDENCES = ("auto", "estimator", "head", "q_max", "threshold", "stop_head")
DEFAULT_THRESHOLDS = {"threshold": 0.4, "stop_head": 0.7}
"""Of the two stopping rules: q_max of a draft (transformers' `assistant_confidence_threshold` is .4 too), and the
probability that nothing is rejected."""
ESTIMATOR_KEYS = ("estimator", "feature")  # only the estimator reads these


def one_of(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed are {', '.join(map(repr, allowed))}")


def whole(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise ValueError unless `value` is an integer from `low` to `high` (None: any above)."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise ValueError(
            f"{name} is {value!r}; it must be a whole number from {low}"
            + (f" to {high}" if high is not None else " on")
        )


def real(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    """Raise ValueError unless `value` is a number from `low` to `high`, which NaN is not."""
    inside = (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and low <= value <= high
        and not (open_low and value == low)
    )
    if not inside:  # NaN compares false, so it lands here too
        raise ValueError(f"{name} is {value!r}; it must be a number in {'(' if open_low else '['}{low:g}, {high:g}]")


def check_estimator_keys(settings: Any) -> None:
    """Raise ValueError unless this is a dictionary of keyword arguments that `OnlineAcceptanceEstimator` has."""
    from avref.estimator import OnlineAcceptanceEstimator

    if not isinstance(settings, Mapping):
        raise ValueError(f"estimator is {settings!r}; give a dictionary of its keyword arguments")
    for key in settings:
        one_of("an estimator key", key, [*inspect.signature(OnlineAcceptanceEstimator).parameters][1:])


def check_estimator(settings: Any, num_positions: int) -> None:
    """Raise ValueError, which names the key, for keyword arguments that `OnlineAcceptanceEstimator` refuses."""
    from avref.estimator import OnlineAcceptanceEstimator

    check_estimator_keys(settings)
    choose_device(settings.get("device"))
    OnlineAcceptanceEstimator(num_positions, **{**settings, "device": "cpu"})


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled; names and meanings are vLLM's.

    What vLLM has beyond these (`n`, `stop` strings, `min_p`, penalties, `logprobs`, streaming) is not here.
    temperature 0 is greedy; top_k 0 (or -1) and top_p 1 switch their filters off (top-k first, then top-p on what is
    left); `seed` makes a request repeatable (None: from the LLM's seed and the request's number; only its last 32 bits
    count; under adaptive verification the calls of a new LLM are, not one call again, see `LLM.generate`); generation
    ends at EOS (unless `ignore_eos`), at one of `stop_token_ids`, or after `max_tokens`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 128
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        real("temperature", self.temperature, 0.0, 100.0)
        real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        whole("top_k", self.top_k, -1, 2**31 - 1)
        object.__setattr__(self, "top_k", max(0, self.top_k))
        one_of("ignore_eos", self.ignore_eos, (True, False))
        whole("max_tokens", self.max_tokens, 1)
        if self.seed is not None:
            whole("seed", self.seed, 0, 2**63 - 1)
        if not isinstance(self.stop_token_ids, Collection) or isinstance(self.stop_token_ids, (str, bytes)):
            raise ValueError(f"stop_token_ids is {self.stop_token_ids!r}; give a list of token ids, empty for none")
        for token in self.stop_token_ids:
            whole("a stop token id", token, 0)


@dataclass(frozen=True)
class SpeculativeConfig:
    """How tokens are drafted and how many of them are verified.

    vLLM's keys: `method`, `model` (None: the drafter shipped for the default target), `num_speculative_tokens` (K),
    `draft_sample_method` ("probabilistic": x ~ q; "greedy": the most likely token, one-hot q),
    `enable_adaptive_verification`. Ours:

    - `confidence`: where c comes from (`avref.confidence`). auto is the estimator, or an n-gram drafter's own record;
      estimator, head and q_max feed a budget; threshold and stop_head are stopping rules without one, and `threshold`
      is their value (None: .4 and .7);
    - `feature` (a name in `features.FEATURES`) and `estimator` (keyword arguments of `OnlineAcceptanceEstimator`);
    - `budget_rule`: lookahead looks ahead with what past steps taught, stale is vLLM's, early_stop DSpark's;
      retrospective leaks and is for teaching;
    - `probe_interval`: every so many steps one request is verified at full depth, where verdicts teach the confidence
      anything (more seldom while not drafting is best and drafting is dear); 0 is off;
    - `adaptive_drafting`: choose before every step how deep to draft, 0 included (`avref.depth`); of no effect where
      there is no budget;
    - `allow_lossy`: accept settings that bias the output.

    Raises ValueError for unknown values, for lossy ones, and for keys that the chosen confidence does not read.
    """

    method: str
    model: Any = None
    num_speculative_tokens: int = 7
    draft_sample_method: str = "probabilistic"
    enable_adaptive_verification: bool = False
    confidence: str = "auto"
    threshold: float | None = None
    feature: str = "logit_q_max"
    budget_rule: str = "lookahead"
    probe_interval: int = 64
    adaptive_drafting: bool = True
    estimator: Mapping[str, Any] = field(default_factory=dict)
    allow_lossy: bool = False

    def __post_init__(self) -> None:
        from avref.features import FEATURES

        one_of("method", self.method, METHODS)
        one_of("draft_sample_method", self.draft_sample_method, DRAFT_SAMPLE_METHODS)
        one_of("confidence", self.confidence, CONFIDENCES)
        one_of("feature", self.feature, tuple(FEATURES))
        one_of("budget_rule", self.budget_rule, BUDGET_RULES)
        for flag in ("enable_adaptive_verification", "adaptive_drafting", "allow_lossy"):
            one_of(flag, getattr(self, flag), (True, False))
        whole("num_speculative_tokens", self.num_speculative_tokens, 1, 64)
        whole("probe_interval", self.probe_interval, 0)
        check_estimator(self.estimator, self.num_speculative_tokens)
        self._check_model()
        self._check_confidence()
        lossy = [f"feature={self.feature!r}"] if not FEATURES[self.feature].lossless else []
        lossy += ["budget_rule='retrospective'"] if self.budget_rule == "retrospective" else []
        if lossy and not self.allow_lossy:
            raise ValueError(
                f"{' and '.join(lossy)} would bias the output: the decision to verify a draft would depend on the "
                "drawn token. Choose another, or pass allow_lossy=True for an experiment"
            )

    def _check_model(self) -> None:
        model, kinds = self.model, (str, Path, nn.Module)
        if self.method == "ngram" and model is not None:
            raise ValueError(
                f"speculative_config['model'] is {model!r}; method 'ngram' drafts from the request's own text "
                "and takes no model: leave it out"
            )
        if self.method == "layer_skip" or model is None:  # layer_skip: a number, which the target bounds
            return
        if not isinstance(model, kinds) or (isinstance(model, str) and not model.strip()):
            raise ValueError(
                f"speculative_config['model'] is {model!r}; give a folder, a hub id or a loaded drafter, or leave it "
                "out for the one that is shipped"
            )

    def _check_confidence(self) -> None:
        if not self.enable_adaptive_verification:
            decide = ("confidence", "threshold", "feature", "budget_rule", "probe_interval", "estimator")
            self.refuse_unread(decide, "a fixed K; set enable_adaptive_verification=True, or")
            return
        if self.confidence not in DEFAULT_THRESHOLDS:
            self.refuse_unread(("threshold",), f"confidence={self.confidence!r}")
        else:
            self.refuse_unread(("budget_rule",), f"confidence={self.confidence!r}, which has no budget,")
        if self.threshold is not None:
            real("threshold", self.threshold, 0.0, 1.0)
        if self.confidence not in ("auto", "estimator"):
            self.refuse_unread(ESTIMATOR_KEYS, f"confidence={self.confidence!r}")

    def refuse_unread(self, keys: Sequence[str], reader: str) -> None:
        """Raise ValueError when one of `keys` was changed, as `reader` does not read it."""
        for key in keys:
            default = getattr(SpeculativeConfig, key, {})  # `estimator`, whose default is made anew, has none there
            if getattr(self, key) != default:
                raise ValueError(f"{key}={getattr(self, key)!r} is not read by {reader}; leave it out")

    @classmethod
    def from_dict(cls, config: Mapping[str, Any] | SpeculativeConfig | None) -> SpeculativeConfig | None:
        """Check and convert a dictionary as vLLM's `--speculative-config` takes it.

        None stays None (plain decoding), and a `SpeculativeConfig` is returned as it is.
        """
        if config is None or isinstance(config, cls):
            return config
        if not isinstance(config, Mapping):
            raise ValueError(f"speculative_config is {type(config).__name__}; give a dictionary or None")
        known = [f.name for f in fields(cls)]
        for key in config:
            one_of("a speculative_config key", key, known)
        if "method" not in config:
            raise ValueError(f"speculative_config needs a 'method': one of {', '.join(METHODS)}")
        return cls(**config)
