"""The vLLM command of a configuration: `vllm serve MODEL --speculative-config JSON`, and what differs there.

The keys `model`, `method`, `num_speculative_tokens`, `draft_sample_method` and `enable_adaptive_verification` are
vLLM's own (article, section "Using vLLM"). The other keys of `SpeculativeConfig` exist only here: they are left out of
the JSON and listed with what vLLM does in their place (vllm/v1/worker/gpu/spec_decode/adaptive_verification.py and
acceptance_estimator.py). `VLLM_DEFAULTS` makes this package do the same.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from avref import confidence, drafters
from avref.config import DEFAULT_THRESHOLDS, SpeculativeConfig, one_of, whole
from avref.drafters import weights
from avref.models import DEFAULT_TARGET

VLLM_KEYS = ("model", "method", "num_speculative_tokens", "draft_sample_method", "enable_adaptive_verification")
VLLM_METHODS = ("draft_model", "eagle", "mtp", "dflash", "dspark", "ngram")
VLLM_DEFAULTS: dict[str, Any] = {
    "budget_rule": "stale",
    "probe_interval": 0,
    "adaptive_drafting": False,
    "estimator": {"step": "newton"},
}
"""The four settings with which this package decides as vLLM does."""
VLLM_ESTIMATOR: dict[str, Any] = {
    "step": "newton",
    "slope": 0.5,
    "intercept": -0.2,
    "damping": 50.0,
    "ridge": 1e-3,
    "refit_interval": 100,
    "shared_slope": True,
}
"""vLLM's constants, under the names of `OnlineAcceptanceEstimator`; no key changes them there."""
VLLM_DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
HUB_TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
PLACEHOLDER = "<draft_model>"
_EXAMPLE = """'{"budget_rule": "stale"}'"""


@dataclass(frozen=True)
class Difference:
    """A key of ours: its value here, what vLLM does instead, and the value that brings that here (None: none does)."""

    key: str
    here: Any
    vllm: str
    like_vllm: Any = None


@dataclass(frozen=True)
class VllmArgs:
    """A vLLM command: `argv` as a program gets it, the JSON in it as a dictionary, and what it does not say.

    `str()` is the command for a POSIX shell, every value quoted.
    """

    argv: list[str]
    speculative_config: dict[str, Any] | None
    differences: list[Difference]
    notes: list[str]

    def __str__(self) -> str:
        first = " ".join(shlex.quote(word) for word in self.argv[:3])
        pairs = zip(self.argv[3::2], self.argv[4::2], strict=True)
        return " \\\n".join([first, *(f"  {name} {shlex.quote(value)}" for name, value in pairs)])

    def report(self) -> str:
        """The differences and notes, as text."""
        lines = ["not in the command, as vLLM has no such key:"] if self.differences else []
        for d in self.differences:
            back = f" [here: {d.key}={d.like_vllm!r}]" if d.like_vllm is not None else ""
            lines.append(f"  {d.key}={d.here!r}: {d.vllm}{back}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def vllm_args(
    config: Mapping[str, Any] | SpeculativeConfig | None,
    model: str | Path = DEFAULT_TARGET,
    *,
    max_num_seqs: int | None = None,
    max_model_len: int | None = None,
    dtype: str | None = None,
) -> VllmArgs:
    """The vLLM command for a target and a `speculative_config` as `LLM` takes it (None: plain decoding).

    max_num_seqs, max_model_len and dtype become vLLM's flags of the same meaning when given. A drafter that vLLM cannot
    load (shipped, trained here, or a loaded module) becomes the placeholder "<draft_model>", with a note. Raises
    ValueError for a configuration that `LLM` would refuse, a method that vLLM does not have, and a target without a
    name.
    """
    config = SpeculativeConfig.from_dict(config)
    if not isinstance(model, (str, Path)) or not str(model) or str(model).startswith("-"):
        raise ValueError(f"model is {model!r}; give the target's hub id or folder")
    for flag, number in (("max_num_seqs", max_num_seqs), ("max_model_len", max_model_len)):
        if number is not None:
            whole(flag, number, 1)
    if dtype is not None:
        one_of("dtype", dtype, VLLM_DTYPES)
    notes, differences, speculative = [], [], None
    name = _hub_name(model)
    if name != os.path.expanduser(model):
        notes.append(f"{DEFAULT_TARGET!r} here is a 4-bit copy of {HUB_TARGET}, whose full weights vLLM would load")
    argv = ["vllm", "serve", name]
    flags = {"--max-num-seqs": max_num_seqs, "--max-model-len": max_model_len, "--dtype": dtype}
    for flag, value in flags.items():
        argv += [flag, str(value)] if value is not None else []
    if config is not None:
        speculative, more = _speculative(config)
        argv += ["--speculative-config", json.dumps(speculative)]
        notes += more
        differences = list(_differences(config))
    return VllmArgs(argv, speculative, differences, notes)


def _hub_name(model: str | Path) -> str:
    """What vLLM finds the model by; a "~" is expanded here, as no shell does it inside quotes."""
    return HUB_TARGET if str(model) == DEFAULT_TARGET else os.path.expanduser(model)


def parse_settings(text: str) -> dict[str, Any]:
    """Keys of a `speculative_config` from JSON; ValueError for text that is no JSON object."""
    try:
        settings = json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise ValueError(f"settings is {text!r}, which is no JSON ({error}); give for instance " + _EXAMPLE) from None
    if not isinstance(settings, dict):
        raise ValueError(f"settings is {text!r}; give a JSON object such as " + _EXAMPLE)
    return settings


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"settings gives {name!r} twice; give each key once")
    return dict(pairs)


def _speculative(config: SpeculativeConfig) -> tuple[dict[str, Any], list[str]]:
    """vLLM's dictionary, and notes on it."""
    if config.method not in VLLM_METHODS:
        raise ValueError(
            f"method is {config.method!r}, which vLLM does not have (here the target's own first layers draft); "
            f"allowed are {', '.join(map(repr, VLLM_METHODS))}"
        )
    if config.enable_adaptive_verification:
        confidence.resolve(config, drafters.family(config.method))  # what a drafter of this family can offer
    drafter, notes = _drafter(config)
    values = {"model": drafter, **{key: getattr(config, key) for key in VLLM_KEYS[1:]}}
    if config.method == "ngram":  # one-hot drafts without logits
        left_out = {"model", "draft_sample_method", "enable_adaptive_verification"}
        notes.append("vLLM takes the lengths of a match from prompt_lookup_min and prompt_lookup_max (here 1 and 3)")
        if config.enable_adaptive_verification:
            notes.append(
                "vLLM verifies n-gram drafts at a fixed length: its estimates come from a confidence head, from draft "
                "logits or from its suffix decoding, so enable_adaptive_verification is left out"
            )
        values = {key: value for key, value in values.items() if key not in left_out}
    elif config.enable_adaptive_verification:
        notes += [
            "vLLM measures its cost table when it starts, at 8192 cached tokens per request; if yours are far from "
            "that, set VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN",
            "adaptive verification in vLLM needs the V2 model runner, an attention backend for varying query lengths "
            "and full CUDA graphs (no --enforce-eager), and excludes LoRA and pipeline parallelism",
        ]
    return {key: value for key, value in values.items() if value is not None}, notes


def _drafter(config: SpeculativeConfig) -> tuple[str | None, list[str]]:
    """What to give vLLM as draft model (None: no key), and a note where that is not what drafts here."""
    model = config.model
    if config.method == "ngram":
        return None, []
    if isinstance(model, (str, Path)) and not weights.is_drafter(model):
        return _hub_name(model), []
    if config.method == "mtp":
        return None, ["vLLM drafts with the mtp modules in the target's own checkpoint; modules trained here stay here"]
    what = (
        "the shipped drafter" if model is None else repr(str(model)) if isinstance(model, (str, Path)) else "a module"
    )
    return PLACEHOLDER, [
        f"{what} is not in a format that vLLM loads: replace {PLACEHOLDER} by a {config.method} checkpoint for "
        "this target"
    ]


def _differences(config: SpeculativeConfig) -> Iterator[Difference]:
    """What of ours is at work and has no key in vLLM."""
    if not config.enable_adaptive_verification or config.method == "ngram":
        return
    has_budget = config.confidence not in DEFAULT_THRESHOLDS
    if config.method == "dspark" and config.confidence != "head":
        yield Difference("confidence", config.confidence, "the checkpoint's confidence head, if it has one", "head")
    elif config.confidence not in ("auto", "estimator", "head"):
        yield Difference("confidence", config.confidence, "a confidence head if there is one, else the fit", "auto")
    if config.threshold is not None:
        yield Difference("threshold", config.threshold, "no stopping rule, a budget from the cost table")
    if config.feature != "logit_q_max":
        yield Difference("feature", config.feature, "always logit(max q)", "logit_q_max")
    if has_budget and config.budget_rule != "stale":
        yield Difference("budget_rule", config.budget_rule, "the best budget by the previous step's survivals", "stale")
    if has_budget and config.adaptive_drafting:
        yield Difference("adaptive_drafting", True, "every step drafts num_speculative_tokens", False)
    if config.confidence in ("auto", "estimator") and config.method != "dspark":  # there a head decides
        if config.probe_interval:
            yield Difference("probe_interval", config.probe_interval, "no probes", 0)
        yield from _estimator_differences(config.estimator)


def _estimator_differences(estimator: Mapping[str, Any]) -> Iterator[Difference]:
    here = {"step": "self_concordant", **estimator}
    for key, constant in VLLM_ESTIMATOR.items():
        value = here.get(key, constant)
        if isinstance(value, torch.Tensor):
            value = value.tolist()
        if value != constant:
            what = "the published Newton step" if key == "step" else f"the constant {constant!r}"
            yield Difference("estimator", {key: value}, what, {key: constant})
