"""A trace and its file: one compressed .npz that numpy alone can read, and that is checked when it is read.

A trace holds A answers sampled from the target, and at each of their N offsets one block of K drafts. Row (answer,
offset t) stands behind token t of the answer, the pending one; its depth k (from 0) is the draft for token t + k + 1,
made as if the recorded tokens before that place had been drafted and accepted. Rows lie answer by answer, one for every
token but the last. At each place y is the recorded token, drawn from the target's p, and x the draft, drawn from q.

    [A]     workload, prompt        which prompt was answered, by position in the header's `workloads` and in its list
            num_tokens, stopped     length of the answer; whether it ended at a stop token (else at the length limit)
    [N]     token, p_y              the token y at depth 0, and p(y) after temperature, top-k and top-p
            target_entropy          entropy of that p, nats
            num_drafted             drafts made, K unless the drafter found fewer
    [N, K]  q_y                     q(y), 0 where the drafter cannot draft y
            overlap                 sum of min(p, q) over the vocabulary: the acceptance probability before x is drawn
            p_x                     p(x)
            logit_q_max, margin, entropy, logit_q_sampled     the features of these names; the others follow from them
            head, stop              log-odds that the drafter's own confidence or stop head gives, where it has one

p(y) at depth k of row i is `p_y[i + k]`. Nothing is known of y, nor p_x and overlap, past the end of an answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from avref.config import DRAFT_SAMPLE_METHODS, METHODS, one_of, real, whole
from avref.files import replacing

SCHEMA_VERSION = 1
SHIPPED = Path(__file__).parent.parent / "data" / "traces"
Array = npt.NDArray[Any]


class Column(NamedTuple):
    """What an array must look like: its shape in A, N, K, its type, its range, and whether it may be missing."""

    shape: str
    dtype: type
    low: float
    high: float
    optional: bool = False


COLUMNS = {
    "workload": Column("A", np.uint8, 0, 255),
    "prompt": Column("A", np.int32, 0, 2**31),
    "num_tokens": Column("A", np.int32, 2, 2**31),
    "stopped": Column("A", np.bool_, 0, 1),
    "token": Column("N", np.int32, 0, 2**31),
    "p_y": Column("N", np.float16, 2.0**-24, 1),  # the smallest above 0: p(y) is a divisor
    "target_entropy": Column("N", np.float16, 0, 20),
    "num_drafted": Column("N", np.uint8, 0, 255),
    **dict.fromkeys(("q_y", "overlap", "p_x"), Column("NK", np.float16, 0, 1)),
    **dict.fromkeys(("logit_q_max", "logit_q_sampled"), Column("NK", np.float16, -40, 40, optional=True)),
    "margin": Column("NK", np.float16, 0, 40, optional=True),
    "entropy": Column("NK", np.float16, -20, 0, optional=True),
    **dict.fromkeys(("head", "stop"), Column("NK", np.float16, -40, 40, optional=True)),
}
HEADER = {
    "schema_version": int,
    "target": str,
    "method": str,
    "drafter": str,
    "draft_sample_method": str,
    "parallel": bool,
    "num_speculative_tokens": int,
    "dtype": str,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "max_tokens": int,
    "seed": int,
    "workloads": list,
}


@dataclass(frozen=True, eq=False)
class Trace:
    """Answers of a target and what a drafter would have drafted at every offset of them; the module lists the arrays.

    Raises ValueError for a header or an array that does not fit the others. `header["parallel"]` says that no draft
    reads another draft, so that a row stands for the block whatever is accepted of it.
    """

    header: Mapping[str, Any]
    workload: Array
    prompt: Array
    num_tokens: Array
    stopped: Array
    token: Array
    p_y: Array
    target_entropy: Array
    num_drafted: Array
    q_y: Array
    overlap: Array
    p_x: Array
    logit_q_max: Array | None = None
    margin: Array | None = None
    entropy: Array | None = None
    logit_q_sampled: Array | None = None
    head: Array | None = None
    stop: Array | None = None

    def __post_init__(self) -> None:
        _check(self)

    def __len__(self) -> int:
        """N, the number of offsets."""
        return len(self.token)

    @property
    def num_positions(self) -> int:
        """K."""
        return int(self.header["num_speculative_tokens"])

    @property
    def greedy(self) -> bool:
        """Whether q is one-hot: greedy drafting, greedy requests, or prompt lookup."""
        one_hot = self.header["draft_sample_method"] == "greedy" or self.header["temperature"] < 1e-5
        return one_hot or self.logit_q_max is None

    @cached_property
    def first_row(self) -> Array:
        """Row of each answer's offset 0, [A]."""
        return np.cumsum(self.num_tokens - 1) - (self.num_tokens - 1)

    @cached_property
    def answer(self) -> Array:
        """Which answer each row belongs to, [N]."""
        return np.repeat(np.arange(len(self.num_tokens)), self.num_tokens - 1)

    @cached_property
    def offset(self) -> Array:
        """t of each row, [N]."""
        return np.arange(len(self)) - self.first_row[self.answer]

    @cached_property
    def tokens_left(self) -> Array:
        """Recorded tokens behind the pending one, [N]: at least 1."""
        return self.num_tokens[self.answer] - 1 - self.offset

    @cached_property
    def known(self) -> Array:
        """Where there is a y, bool [N, K]: depth k lies before the end of the answer."""
        return np.arange(self.num_positions) < self.tokens_left[:, None]

    def answers_of(self, workload: str) -> Array:
        """Indices of the answers to one workload's prompts; ValueError for a workload that was not recorded."""
        names = self.header["workloads"]
        if workload not in names:
            raise ValueError(f"workload {workload!r} is not in this trace; it holds {', '.join(map(repr, names))}")
        return np.flatnonzero(self.workload == names.index(workload))

    def take(self, answers: npt.ArrayLike) -> Self:
        """The trace of some answers, in the order given; an answer may come twice (resampling, halves, workloads)."""
        chosen = self.indices(answers)
        counts = self.num_tokens[chosen].astype(np.int64) - 1
        rows = np.arange(counts.sum()) + np.repeat(self.first_row[chosen] - (counts.cumsum() - counts), counts)
        picked = {name: a[chosen if COLUMNS[name].shape == "A" else rows] for name, a in self.arrays().items()}
        return type(self)(self.header, **picked)

    def indices(self, answers: npt.ArrayLike) -> Array:
        """Indices of answers as an array; ValueError when one is none, or when there are none."""
        chosen, last = np.asarray(answers), len(self.num_tokens) - 1
        integers = chosen.ndim == 1 and chosen.size > 0 and np.issubdtype(chosen.dtype, np.integer)
        if not integers or chosen.min() < 0 or chosen.max() > last:
            raise ValueError(f"answers is {answers!r}; give at least one index from 0 to {last}, whole numbers")
        return chosen.astype(np.int64)

    def arrays(self) -> dict[str, Array]:
        """The arrays that are there, by name."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: value for name, value in values if name in COLUMNS and value is not None}


def _check(trace: Trace) -> None:
    h = trace.header
    if h.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"its schema version is {h.get('schema_version')!r}, this avref reads {SCHEMA_VERSION}")
    for name, kind in HEADER.items():
        allowed = (int, float) if kind is float else kind
        if not isinstance(h.get(name), allowed) or (kind is not bool and isinstance(h[name], bool)):
            raise ValueError(f"its header has {name!r} = {h.get(name)!r}, which is no {kind.__name__}")
    real("temperature", h["temperature"], 0.0, 100.0)
    real("top_p", h["top_p"], 0.0, 1.0, open_low=True)
    whole("max_tokens", h["max_tokens"], 2)
    whole("num_speculative_tokens", h["num_speculative_tokens"], 1, 64)
    one_of("method", h["method"], METHODS)
    one_of("draft_sample_method", h["draft_sample_method"], DRAFT_SAMPLE_METHODS)
    names = h["workloads"]
    if not names or not all(isinstance(n, str) for n in names) or len(set(names)) < len(names):
        raise ValueError(f"its header names the workloads {names!r}; they must be different texts")
    missing = [name for name, column in COLUMNS.items() if getattr(trace, name) is None and not column.optional]
    if missing:
        raise ValueError(f"it lacks the arrays {', '.join(missing)}")
    sizes = {"A": trace.num_tokens.size, "N": trace.token.size, "K": h["num_speculative_tokens"]}
    for name, array in trace.arrays().items():
        column = COLUMNS[name]
        shape = tuple(sizes[letter] for letter in column.shape)
        if array.dtype != column.dtype or array.shape != shape:
            raise ValueError(
                f"its array {name!r} is {array.dtype} {array.shape}, expected {np.dtype(column.dtype)} {shape}"
            )
        bad = ~((array >= column.low) & (array <= column.high))  # NaN compares false
        if bad.any():
            raise ValueError(f"its array {name!r} holds {array[bad][0]}, outside {column.low:g} to {column.high:g}")
    if not sizes["A"] or int((trace.num_tokens - 1).sum()) != sizes["N"]:
        raise ValueError(f"its answers have {int((trace.num_tokens - 1).sum())} offsets, but {sizes['N']} are there")
    if trace.workload.max() >= len(h["workloads"]) or trace.num_drafted.max() > sizes["K"]:
        raise ValueError("its arrays name a workload that the header does not have, or more drafts than K")


def save(trace: Trace, path: str | Path) -> Path:
    """Write a trace; the file appears whole or not at all."""
    arrays: dict[str, Any] = {"header": np.array(json.dumps(dict(trace.header))), **trace.arrays()}
    with replacing(path) as part, part.open("wb") as file:
        np.savez_compressed(file, **arrays)
    return Path(path)


def shipped() -> list[str]:
    """Names of the traces that come with the package, such as "dflash"."""
    return sorted(p.name.removesuffix("-smollm2.npz") for p in SHIPPED.glob("*-smollm2.npz"))


def load(source: str | Path) -> Trace:
    """The trace in a file, or a shipped one by its name ("dflash").

    Raises ValueError, naming the file, what is wrong and the remedy, for one that is missing, damaged, truncated or of
    another version.
    """
    path = Path(source)
    if isinstance(source, str) and not source.endswith(".npz"):
        path = SHIPPED / f"{source}-smollm2.npz"
        if not path.is_file():
            names = ", ".join(map(repr, shipped())) or "none"
            raise ValueError(f"no trace {source!r} is shipped ({names} are); give a name or the path of an .npz file")
    remedy = "record it again: python -m avref trace"
    if not path.is_file():
        raise ValueError(f"no trace at {str(path)!r}; {remedy} --output {path.name}")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        header = json.loads(str(arrays.pop("header")))
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        columns: dict[str, Any] = {name: arrays.get(name) for name in COLUMNS}
        return Trace(header, **columns)
    except Exception as error:  # a damaged archive fails in zipfile, zlib, numpy or json, each in its own way
        what = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"the trace {str(path)!r} cannot be read: {what}; {remedy}") from error
