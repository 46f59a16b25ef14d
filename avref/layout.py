"""Where the packed tokens of a forward belong: which request, which position, and the rectangles attention works on.

Linear layers see T tokens in a row. Attention needs requests side by side, so queries are padded to rectangles: to the
longest chunk, or, where a few long chunks would make all others wide, to a narrow rectangle over all rows and a second
one over what the long chunks have left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]

LONG_CHUNK = 128  # longer than any of a decode step
CALL_COST, COPY_COST = 32, 12
"""What a second rectangle costs, and each of its rows, beyond their queries: counted in queries, on 2 CPU cores."""


def send(values: Any, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of Python numbers on a device, without waiting for what the device still has to do."""
    return torch.tensor(values, dtype=dtype, device="cpu").to(device, non_blocking=True)


class Layout:
    """Which request and which position each packed token belongs to.

    `starts[r]` is the position of row r's first new token (its cached length), `counts[r] >= 1` the number of its new
    tokens; the R rows are consecutive cache rows from `first_row` on. T = sum(counts). `blocks` are one or two
    rectangles that together hold every token once.
    """

    def __init__(
        self, starts: Sequence[int], counts: Sequence[int], device: torch.device | str = "cpu", first_row: int = 0
    ) -> None:
        start, count = np.asarray(starts, dtype=np.int64), np.asarray(counts, dtype=np.int64)  # [R], [R]
        if len(count) == 0 or count.min() < 1:
            raise ValueError(f"every row needs at least one token, got counts {count.tolist()}")
        ends = np.cumsum(count)
        row = np.repeat(np.arange(len(count)), count)  # [T]
        within = np.arange(ends[-1]) - np.repeat(ends - count, count)  # [T]
        self.num_rows, self.num_tokens, self.first_row = len(count), int(ends[-1]), first_row
        self.context = int((start + count).max())
        longest = int(count.max())
        # On a GPU one call is faster than two, but in a prefill one long prompt must not pad all others to its length.
        split = torch.device(device).type == "cpu" or longest > LONG_CHUNK
        narrow = _narrow(count) if split else longest
        spans = [(0, narrow), (narrow, longest - narrow)][: 1 + (narrow < longest)]  # (first query, number of queries)
        rectangles = [_rectangle(start, count, row, within, *span) for span in spans]
        parts = [row, within, start[row] + within, ends - 1, ends - count, *(x for r in rectangles for x in r)]
        sent = torch.from_numpy(np.concatenate(parts)).to(device, non_blocking=True)  # one transfer for all of them
        self.row, self.within, self.position, self.last, self.first, *rest = sent.split([len(x) for x in parts])
        # row, within, position [T]; last, first [R] packed index of each row's last and first token
        self.blocks = []
        for i, (first, width) in enumerate(spans):
            context = int((start + np.minimum(count, first + width))[rectangles[i][0]].max())
            self.blocks.append(Block(self, rest[5 * i : 5 * i + 5], width, context))

    @property
    def windows(self) -> set[int | None]:
        """Sliding windows (None: no window) of the attention layers that have read this layout."""
        return {window for block in self.blocks for _, window, _ in block.masks}


class Block:
    """A rectangle of `width` queries in each of n rows, for one attention call.

    index: `rows` [n] are rows of the layout; `tokens` [m] the packed indices of those it holds, each at (`row`,
    `within`) [m]; `starts` [n] the positions of its first queries. No key at or behind `context` is seen.
    """

    def __init__(self, layout: Layout, index: Sequence[Tensor], width: int, context: int) -> None:
        self.rows, self.tokens, self.row, self.within, self.starts = index
        self.width, self.context = width, context
        self.every_row = len(self.rows) == layout.num_rows
        self.every_token = len(self.tokens) == layout.num_tokens
        self.full = len(self.tokens) == len(self.rows) * width  # no padding
        self.masks: dict[tuple[Any, ...], Tensor] = {}

    def mask(self, group: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive causal mask [n, 1, group * width, context]: query i of row r sees keys up to starts[r] + i."""
        key = (group, window, dtype)
        if key not in self.masks:
            query = self.starts[:, None, None] + torch.arange(self.width, device=self.starts.device)[:, None]
            keys = torch.arange(self.context, device=query.device)
            visible = keys <= query  # [n, width, context]; a padded query sees at least key 0
            if window is not None:
                visible &= keys > query - window
            mask = torch.zeros(visible.shape, dtype=dtype, device=query.device).masked_fill_(~visible, float("-inf"))
            self.masks[key] = mask[:, None].repeat(1, 1, group, 1)
        return self.masks[key]

    def keys(self, x: Tensor) -> Tensor:
        """[R, context of the layout, ...] -> its rows and keys [n, context, ...]; a view where it has every row."""
        x = x[:, : self.context]
        return x if self.every_row else x[self.rows]

    def pad(self, x: Tensor) -> Tensor:
        """Its tokens of x [T, ...] -> [n, width, ...]; a view when it holds all of them without padding."""
        x = x if self.every_token else x[self.tokens]
        if self.full:
            return x.view(len(self.rows), self.width, *x.shape[1:])
        padded = x.new_zeros(len(self.rows), self.width, *x.shape[1:])
        padded[self.row, self.within] = x
        return padded

    def unpad(self, x: Tensor) -> Tensor:
        """[n, width, ...] -> [m, ...], in the order of `tokens`."""
        return x.flatten(0, 1) if self.full else x[self.row, self.within]


def _narrow(count: Ints) -> int:
    """Width of the first rectangle: the longest chunk, or less where a second one pays.

    One rectangle has R * max(count) queries. Two have R * width, and for each of the n longer rows max(count) - width
    more, whose keys and values must be copied: worth it if that saves more than a call and a query in every row.
    """
    widths = np.unique(count)  # [W]
    longer = (count[:, None] > widths).sum(axis=0)  # [W] n
    saved = (len(count) - longer) * (widths[-1] - widths) - COPY_COST * longer
    return int(widths[saved.argmax()] if saved.max() > CALL_COST + len(count) else widths[-1])


def _rectangle(start: Ints, count: Ints, row: Ints, within: Ints, first: int, width: int) -> tuple[Ints, ...]:
    """The index of the `Block` of queries first .. first + width - 1, in the rows that have such."""
    rows = (count > first).nonzero()[0]
    tokens = ((within >= first) & (within < first + width)).nonzero()[0]
    return rows, tokens, np.searchsorted(rows, row[tokens]), within[tokens] - first, start[rows] + first
