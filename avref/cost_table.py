"""Cost table: how many milliseconds one decode step takes, by requests and packed tokens, measured before serving.

    step_ms(R, T) = draft_ms[R, K] + verify_ms[T]      or verify_ms[R, T] where reading the caches matters

``draft_ms`` is all that drafting adds to a step, its features included; ``verify_ms`` is the rest of the step, forward,
sampling, acceptance and bookkeeping, profiled at a stated context length. The table is fixed while serving: decisions
never read the clock, so a seed and a table give the same tokens. Curves become tables as in vLLM
(vllm/v1/worker/gpu/spec_decode/adaptive_verification.py): a running maximum, because a noisy dip would make more tokens
look cheaper than fewer; a staircase below the size up to which batches are padded; straight lines only above it, so
that nothing is blended across the cliff there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from avref.files import json_checksum, write_text

Floats = npt.NDArray[np.float64]

SCHEMA_VERSION = 1
MAX_EXTRAPOLATION = 4
"""How far past the largest measured size a table may reach, as a factor."""
VERIFY_FLOOR_MS = 1e-6
"""No verification is free: a ratio of tokens to milliseconds needs a positive denominator."""


class CostTable:
    """Milliseconds of a decode step, draft plus verification, for every batch shape up to the table's ends.

    draft_ms [R_max+1, K+1] by requests and depth drafted, or [R_max+1] by requests at the one depth profiled, >= 0.
    verify_ms [T_max+1] by packed tokens, or [R_max+1, T_max+1] by requests and tokens, > 0. Both float64; entries for
    0 requests or 0 tokens are never looked up. A row of a two-dimensional verify_ms may end in NaN: sizes out of reach
    of what was profiled. metadata describes the machine (device, dtype, context length, versions) and must fit into
    JSON. Raises ValueError for other shapes, for infinite or negative entries, and for lookups outside the table.
    """

    def __init__(
        self, draft_ms: npt.ArrayLike, verify_ms: npt.ArrayLike, *, metadata: Mapping[str, Any] | None = None
    ) -> None:
        self.draft_ms = _table(draft_ms, "draft_ms")
        self.verify_ms = _table(verify_ms, "verify_ms")
        self.metadata: dict[str, Any] = dict(metadata or {})
        if (self.draft_ms < 0).any() or not np.isfinite(self.draft_ms).all():
            raise ValueError("draft_ms must be finite and at least 0 everywhere: measure it again")
        if self.verify_ms.ndim == 2 and len(self.verify_ms) != len(self.draft_ms):
            raise ValueError(
                f"draft_ms has {len(self.draft_ms)} rows and verify_ms {len(self.verify_ms)}: both need one for every "
                "number of requests from 0 to the largest"
            )
        rows = np.atleast_2d(self.verify_ms)  # [1 or R_max+1, T_max+1]
        used = rows[1:, 1:] if self.verify_ms.ndim == 2 else rows[:, 1:]
        unknown = np.isnan(used)
        if (self.verify_ms.ndim == 1 and unknown.any()) or (unknown[:, :-1] & ~unknown[:, 1:]).any():
            raise ValueError("verify_ms may be NaN only at the end of a row of a table by requests and tokens")
        if np.isinf(rows).any() or (used <= 0).any():
            raise ValueError("verify_ms must be finite and above 0 everywhere: measure it again")
        self._limits = (~unknown).sum(axis=1)  # [1 or R_max] largest number of tokens known

    @property
    def max_requests(self) -> int:
        return len(self.draft_ms) - 1

    @property
    def max_tokens(self) -> int:
        return self.verify_ms.shape[-1] - 1

    def token_limit(self, num_requests: int) -> int:
        """The largest number of packed tokens that `verify` knows for so many requests."""
        self._check_requests(num_requests)
        return int(self._limits[num_requests - 1 if self.verify_ms.ndim == 2 else 0])

    def draft(self, num_requests: int, depth: int | None = None) -> float:
        """Milliseconds to draft ``depth`` tokens (default: the deepest profiled) for every request.

        A table by requests only was profiled at one depth, which it gives for every depth asked.
        """
        self._check_requests(num_requests)
        if self.draft_ms.ndim == 1:
            return float(self.draft_ms[num_requests])
        deepest = self.draft_ms.shape[1] - 1
        if depth is not None and not 0 <= depth <= deepest:
            raise ValueError(f"depth {depth} was not profiled: this cost table covers depths 0 to {deepest}")
        return float(self.draft_ms[num_requests, deepest if depth is None else depth])

    def verify(self, num_requests: int, num_tokens: npt.ArrayLike) -> Floats:
        """Milliseconds after drafting for each number of packed tokens (one or many), same shape as num_tokens."""
        tokens = np.asarray(num_tokens)
        limit = self.token_limit(num_requests)
        if tokens.size and not (1 <= tokens.min() and tokens.max() <= limit):
            raise ValueError(
                f"{tokens.min()} to {tokens.max()} tokens for {num_requests} requests were not profiled: this cost "
                f"table covers 1 to {limit} tokens there; profile again with a larger max_tokens"
            )
        row = self.verify_ms[num_requests] if self.verify_ms.ndim == 2 else self.verify_ms
        return np.asarray(row[tokens])

    def step_ms(self, num_requests: int, num_tokens: npt.ArrayLike, depth: int | None = None) -> Floats:
        """Milliseconds of the whole step, ``draft + verify``, for each number of packed tokens."""
        return np.asarray(self.draft(num_requests, depth) + self.verify(num_requests, num_tokens))

    def _check_requests(self, num_requests: int) -> None:
        if not 1 <= num_requests <= self.max_requests:
            raise ValueError(
                f"{num_requests} requests were not profiled: this cost table covers 1 to {self.max_requests}; profile "
                "again with a larger max_requests"
            )

    @classmethod
    def from_curves(
        cls,
        draft_points: Iterable[Sequence[float]],
        verify_points: Iterable[Sequence[float]],
        *,
        max_requests: int,
        max_tokens: int,
        padded_up_to: int = 0,
        metadata: Mapping[str, Any] | None = None,
    ) -> CostTable:
        """Fill a table from measured points.

        draft_points are (requests, ms) or (requests, depth, ms), verify_points (tokens, ms) or (requests, tokens, ms).
        Up to padded_up_to a size costs what the next measured size costs; above it, lines between the points above it.
        By requests and tokens, the numbers of requests in between are read off at equal tokens per request, where both
        neighbours were measured (at equal tokens where batches are padded or only one number was measured). Raises
        ValueError for a table that would reach more than 4 times past the largest measured size, for repeated sizes,
        and for negative or NaN times.
        """
        draft = _by_columns(draft_points, "draft_points")
        verify = _by_columns(verify_points, "verify_points")
        _check_reach("requests", max_requests, draft[:, 0].max())
        _check_reach("tokens", max_tokens, verify[:, -2].max())
        requests = np.arange(max_requests + 1.0)
        tokens = np.arange(max_tokens + 1.0)
        make_draft = _curve if draft.shape[1] == 2 else _draft_surface
        draft_ms = make_draft(draft, requests, padded_up_to)
        if verify.shape[1] == 2:
            verify_ms = _curve(verify, tokens, padded_up_to)
        else:
            verify_ms = _verify_surface(verify, max_requests, tokens, padded_up_to)
        return cls(draft_ms, np.maximum(verify_ms, VERIFY_FLOOR_MS), metadata=metadata)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table as JSON with a checksum, in one piece: a reader sees the old file or the new one.

        Raises ValueError for metadata that do not fit into JSON.
        """
        limits = [0, *self._limits] if self.verify_ms.ndim == 2 else self._limits
        rows = zip(np.atleast_2d(self.verify_ms), limits, strict=True)
        content = {
            "metadata": self.metadata,
            "draft_ms": self.draft_ms.tolist(),
            "verify_ms": [np.nan_to_num(row[: end + 1]).tolist() for row, end in rows],  # NaN is not JSON: cut there
            "by_requests": self.verify_ms.ndim == 2,
            "max_tokens": self.max_tokens,
        }
        try:
            content = json.loads(json.dumps(content, allow_nan=False))  # as it will be read: keys are text then
        except (TypeError, ValueError) as error:
            raise ValueError(f"the metadata of this cost table do not fit into JSON ({error}): {path}") from error
        document = {"schema_version": SCHEMA_VERSION, "sha256": json_checksum(content), "table": content}
        write_text(path, json.dumps(document))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostTable:
        """Read a table that `save` wrote; a truncated, altered or newer file is a ValueError that names it."""
        advice = "delete it and profile again"
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            version, content = document["schema_version"], document["table"]
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is not a complete cost table ({error!r}): {advice}") from None
        if version != SCHEMA_VERSION:
            raise ValueError(f"{path} has schema version {version}, this program reads {SCHEMA_VERSION}: {advice}")
        if document.get("sha256") != json_checksum(content):
            raise ValueError(f"{path} was altered after it was written, its checksum does not match: {advice}")
        try:
            rows, width = content["verify_ms"], content["max_tokens"] + 1
            if (longest := max(map(len, rows))) > width or (longest < width and not content["by_requests"]):
                raise ValueError(f"max_tokens is {content['max_tokens']}, its rows hold {longest - 1}")
            rows = [row + [np.nan] * (width - len(row)) for row in rows]
            return cls(content["draft_ms"], rows if content["by_requests"] else rows[0], metadata=content["metadata"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no cost table ({error}): {advice}") from error


def _table(values: npt.ArrayLike, name: str) -> Floats:
    table = np.array(values, dtype=np.float64)
    if table.ndim not in (1, 2) or min(table.shape) < 2:
        raise ValueError(f"{name} must have one or two dimensions of length 2 or more, got shape {table.shape}")
    table.setflags(write=False)
    return table


def _by_columns(points: Iterable[Sequence[float]], name: str) -> Floats:
    rows = [tuple(point) for point in points]
    if not rows or {len(row) for row in rows} not in ({2}, {3}):
        raise ValueError(f"{name} must hold measured points, all of two or all of three numbers, got {rows[:3]}")
    table = np.array(rows, dtype=np.float64)
    good = np.isfinite(table) & (table >= 0)
    if not good.all():
        raise ValueError(f"{name} must be finite and not negative, got {table[~good][0]}: measure again")
    if len(np.unique(table[:, :-1], axis=0)) != len(table):
        raise ValueError(f"{name} measures a size twice: pass one point, the median, for every size")
    return table


def _check_reach(what: str, wanted: int, measured: float) -> None:
    if not 1 <= wanted <= MAX_EXTRAPOLATION * measured:
        raise ValueError(
            f"a table for {wanted} {what} cannot be made from measurements up to {measured:.0f}: ask for 1 to "
            f"{MAX_EXTRAPOLATION * measured:.0f}, or measure larger sizes"
        )


def _curve(points: Floats, sizes: Floats, padded_up_to: float) -> Floats:
    """Milliseconds at ``sizes`` from points (size, ms): staircase up to the padded limit, lines above it."""
    points = points[points[:, 0].argsort()]
    at, ms = points[:, 0], np.maximum.accumulate(points[:, 1])
    next_up = np.minimum(np.searchsorted(at, sizes), len(at) - 1)
    above = at > padded_up_to
    # Between the limit and the first point above it the cost is that point's: no line is drawn across the cliff.
    values = np.interp(sizes, at[above], ms[above]) if above.any() else np.full(len(sizes), ms[-1])
    values = np.where((sizes <= padded_up_to) & (sizes <= at[-1]), ms[next_up], values)
    beyond = sizes > at[-1]
    if beyond.any():
        if len(at) == 1:
            raise ValueError(f"one size, {at[0]:.0f}, cannot be extended to {sizes[-1]:.0f}: measure a second one")
        slope = (ms[-1] - ms[-2]) / (at[-1] - at[-2])
        values[beyond] = ms[-1] + slope * (sizes[beyond] - at[-1])
    return values


def _draft_surface(points: Floats, requests: Floats, padded_up_to: float) -> Floats:
    """[R_max+1, K+1] from (requests, depth, ms): a curve over requests for each depth, lines between the depths."""
    depths = np.unique(points[:, 1])
    for depth in depths:
        _check_reach(f"requests at depth {depth:.0f}", len(requests) - 1, points[points[:, 1] == depth, 0].max())
    curves = [_curve(points[points[:, 1] == depth][:, ::2], requests, padded_up_to) for depth in depths]
    if depths[0] > 0:  # drafting nothing takes no time
        depths, curves = np.concatenate([[0.0], depths]), [np.zeros(len(requests)), *curves]
    stacked = np.maximum.accumulate(np.stack(curves, axis=1), axis=1)  # [R_max+1, depths measured]
    return np.stack([np.interp(np.arange(depths[-1] + 1), depths, row) for row in stacked])


def _verify_surface(points: Floats, max_requests: int, tokens: Floats, padded_up_to: float) -> Floats:
    """[R_max+1, T_max+1] from (requests, tokens, ms), NaN past 4 times the tokens per request that were measured."""
    measured = np.unique(points[:, 0])
    _check_reach("requests", max_requests, measured[-1])
    if measured[0] < 1:
        raise ValueError("verify_points by requests and tokens start at 1 request, got 0")
    curves = [points[points[:, 0] == row][:, 1:] for row in measured]
    longest = (points[:, 1] / points[:, 0]).max()  # tokens per request
    surface = np.full((max_requests + 1, len(tokens)), np.nan)
    surface[0] = VERIFY_FLOOR_MS  # never looked up
    for requests in range(1, max_requests + 1):
        at_equal_tokens = padded_up_to > 0 or len(measured) == 1
        scales = np.ones(len(measured)) if at_equal_tokens else measured / requests
        by_row = np.stack([_curve(c, tokens * s, padded_up_to) for c, s in zip(curves, scales, strict=True)])
        by_row = np.maximum.accumulate(by_row, axis=0)  # more requests never cost less
        reachable = tokens <= MAX_EXTRAPOLATION * longest * requests
        surface[requests, reachable] = _between_rows(measured, by_row, requests)[reachable]
    return surface


def _between_rows(measured: Floats, by_row: Floats, requests: int) -> Floats:
    """The line through the two measured numbers of requests around ``requests``, extended past the last one."""
    if len(measured) == 1 or requests <= measured[0]:
        return by_row[0]
    upper = int(np.clip(np.searchsorted(measured, requests), 1, len(measured) - 1))
    share = (requests - measured[upper - 1]) / (measured[upper] - measured[upper - 1])
    return by_row[upper - 1] + share * (by_row[upper] - by_row[upper - 1])
