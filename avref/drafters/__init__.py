"""Drafters, one file per family; `load` builds the one a speculative configuration names."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, cast

from avref.config import SpeculativeConfig
from avref.drafters import weights
from avref.drafters.base import Drafter, DraftProposal

if TYPE_CHECKING:
    from avref.llm import LLM

__all__ = ["DraftProposal", "Drafter", "load"]


CLASSES = {
    "draft_model": "avref.drafters.draft_model:DraftModel",
    "eagle": "avref.drafters.eagle:EagleDrafter",
    "mtp": "avref.drafters.mtp:MTPDrafter",
    "dflash": "avref.drafters.dflash:DFlashDrafter",
    "dspark": "avref.drafters.dspark:DSparkDrafter",
    "layer_skip": "avref.drafters.layer_skip:LayerSkip",
    "ngram": "avref.drafters.ngram:NGram",
}


def family(method: str) -> Any:
    """The class whose `load` makes a method's drafter."""
    module, name = CLASSES[method].split(":")
    return getattr(importlib.import_module(module), name)


def check_shipped(config: SpeculativeConfig, target: str) -> None:
    """Raise ValueError where no drafter is named, and none is shipped for this target."""
    if config.model is None and config.method not in ("layer_skip", "ngram"):
        weights.check_shipped(config.method, target)


def load(config: SpeculativeConfig, llm: LLM, max_rows: int) -> Drafter:
    """The drafter of `config.method` for this target, with cache rows for `max_rows` requests."""
    return cast(Drafter, family(config.method).load(config, llm, max_rows))
