"""Distilling drafters: one data pipeline and one loop, and a module for every family."""

from __future__ import annotations

import importlib
from typing import cast

from avref.train.blocks import Family

FAMILIES = ("draft_model", "eagle", "mtp", "dflash", "dspark")


def family(method: str) -> Family:
    """The training module of a method; ValueError for one that is not trained."""
    if method not in FAMILIES:
        raise ValueError(f"no training is written for method {method!r}; allowed are {', '.join(map(repr, FAMILIES))}")
    return cast(Family, importlib.import_module(f"avref.train.{method}"))
