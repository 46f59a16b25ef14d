"""The ledger: what the article says, with its number and where it stands, beside ours on every pair, and the verdict.

A row's verdict is read off its interval, which comes from resampling requests: "confirmed" when all of it lies where
the claim says, "not confirmed" otherwise, with the reason; "not measurable here" where a pair lacks what it takes. A
claim is confirmed when every pair on which it can be measured confirms it. Claims that fail stay in the ledger.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from avref.evidence.resampling import Estimate, summary

CONFIRMED, FAILED, UNMEASURED = "confirmed", "not confirmed", "not measurable here"


@dataclass(frozen=True)
class Row:
    """One pair's answer to a claim. `value` is the number that decides; `details` go to the JSON file only."""

    pair: str
    ours: str
    verdict: str
    why: str = ""
    value: Estimate | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """A statement of the article (`data/claims.toml`). `decided_by`: what our number is, and where it must lie."""

    key: str
    statement: str
    article: str
    place: str
    decided_by: str
    ours: bool = False  # not the article's: a goal of this project


def absent(pair: str, why: str) -> Row:
    """The row of a pair on which a claim cannot be measured."""
    return Row(pair, "", UNMEASURED, why)


def judged(
    pair: str,
    ours: str,
    value: Estimate,
    *,
    above: float = float("-inf"),
    below: float = float("inf"),
    details: Mapping[str, Any] | None = None,
) -> Row:
    """A row whose verdict follows from its interval: confirmed when all of it lies between `above` and `below`."""
    if above < value.low and value.high < below:
        return Row(pair, ours, CONFIRMED, "", value, details or {})
    if value.low != value.low:
        return Row(pair, ours, UNMEASURED, "too few drafts for an interval", value, details or {})
    outside = value.high <= above or value.low >= below
    return Row(pair, ours, FAILED, "clearly not" if outside else "within the noise", value, details or {})


_TEXTS = tomllib.loads((files("avref") / "data" / "claims.toml").read_text(encoding="utf-8"))
CLAIMS = tuple(Claim(**texts) for texts in _TEXTS["claim"])


def verdict(rows: Sequence[Row]) -> str:
    """A claim's verdict over its pairs, with how many of them confirm it."""
    counted = [r for r in rows if r.verdict != UNMEASURED]
    if not counted:
        return UNMEASURED
    good = sum(r.verdict == CONFIRMED for r in counted)
    name = CONFIRMED if good == len(counted) else FAILED
    return f"{name} ({good} of {len(counted)})" if len(counted) > 1 else name


def ledger(rows: Mapping[str, Sequence[Row]]) -> list[dict[str, Any]]:
    """Every claim with its rows, as JSON holds it. Raises ValueError for rows of a claim that is not listed."""
    unknown = set(rows) - {c.key for c in CLAIMS}
    if unknown:
        raise ValueError(f"rows for claims that the ledger does not hold: {sorted(unknown)}")
    return [
        {**vars(c), "verdict": verdict(rows.get(c.key, ())), "rows": [summary(vars(r)) for r in rows.get(c.key, ())]}
        for c in CLAIMS
    ]
