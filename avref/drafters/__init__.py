"""Drafters, one file per family; `load` builds the one a speculative configuration names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from avref.config import SpeculativeConfig
from avref.drafters.base import Drafter, DraftProposal

if TYPE_CHECKING:
    from avref.llm import LLM

__all__ = ["DraftProposal", "Drafter", "load"]


def load(config: SpeculativeConfig, llm: LLM, max_rows: int) -> Drafter:
    """The drafter of `config.method` for this target, with cache rows for `max_rows` requests."""
    if config.method == "dflash":
        from avref.drafters.dflash import DFlashDrafter

        return DFlashDrafter.load(config, llm, max_rows)
    from avref.drafters.draft_model import DraftModel

    return DraftModel.load(config, llm, max_rows)
