"""Drafters, one file per family; `load` builds the one a speculative configuration names."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from avref.config import SpeculativeConfig
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


def load(config: SpeculativeConfig, llm: LLM, max_rows: int) -> Drafter:
    """The drafter of `config.method` for this target, with cache rows for `max_rows` requests."""
    module, name = CLASSES[config.method].split(":")
    return cast(Drafter, getattr(importlib.import_module(module), name).load(config, llm, max_rows))
