"""Pass 2 of recording a trace: a drafter walks along answers that are there already, many at once.

In the order of a decode step: at offset t the drafter proposes K tokens behind token t, draft k + 1 given the recorded
tokens before it; the target processes token t, which gives the law of token t + 1; the drafter is told that one token
was kept. So target and drafter do what they do while serving, and the laws p are the model's own logits, whatever its
head does to them. A block drafted at offset t meets its laws one by one, depth k at offset t + k.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from avref import features, sampling
from avref.config import SamplingParams
from avref.drafters.base import DraftProposal
from avref.engine import MAX_PREFILL_TOKENS
from avref.evidence.journal import Journal
from avref.evidence.trace_file import COLUMNS, Array
from avref.layout import Layout

if TYPE_CHECKING:
    from avref.llm import LLM

BATCH = 32  # answers walked along at once
TINY = 1e-7  # smallest p(y) kept: y was drawn, so it was not 0, whatever rounding made of it


@dataclass
class Answer:
    """A sampled answer and the prompt it answers: `prompt` is the index in its workload's list."""

    workload: int
    prompt: int
    prompt_ids: list[int]
    ids: list[int]
    stopped: bool


def walk(
    llm: LLM, answers: list[Answer], params: SamplingParams, seed: int, use_tqdm: bool, journal: Journal
) -> dict[str, Array]:
    """The arrays of a trace (`trace_file`) for these answers and the LLM's drafter; batches in the journal are done."""
    counts = np.array([len(a.ids) for a in answers], dtype=np.int32)  # [A]
    first_row = np.cumsum(counts - 1) - (counts - 1)
    arrays: dict[str, Array] = {
        "workload": np.array([a.workload for a in answers], dtype=np.uint8),
        "prompt": np.array([a.prompt for a in answers], dtype=np.int32),
        "num_tokens": counts,
        "stopped": np.array([a.stopped for a in answers]),
        "token": np.array([t for a in answers for t in a.ids[1:]], dtype=np.int32),
    }
    own = set(arrays)  # of the answers, not of the walk
    depth, drafter = llm.engine.num_positions, llm.engine.drafter
    with tqdm(total=int((counts - 1).sum()), disable=not use_tqdm, unit="offset", dynamic_ncols=True) as bar:
        for number, which in enumerate(_batches(answers, min(BATCH, llm.engine.max_num_seqs))):
            rows = np.concatenate([first_row[i] + np.arange(counts[i] - 1) for i in which])
            key = f"batch {number}"
            if key in journal:
                for name, values in journal.records[key]["arrays"].items():
                    _array(arrays, name, depth)[rows] = values
                bar.update(len(rows))
            else:
                generator = torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**63)
                _Walk(llm, [answers[i] for i in which], first_row[which], params, arrays, generator).run(bar)
                made = {name: array[rows].tolist() for name, array in arrays.items() if name not in own}
                journal.append(key, {"arrays": made, "learned": _learned(drafter)})
            _learned(drafter, journal.records[key]["learned"])
    return arrays


def _array(arrays: dict[str, Array], name: str, depth: int) -> Array:
    """The array of that name, made at its first use: [N] or [N, K]."""
    if name not in arrays:
        shape = (len(arrays["token"]), depth)
        arrays[name] = np.zeros(shape[: len(COLUMNS[name].shape)], COLUMNS[name].dtype)
    return arrays[name]


def _learned(drafter: Any, record: Any = None) -> Any:
    """What a drafter that keeps a record (n-gram) has counted, set to `record` if that is given; else None."""
    if not hasattr(drafter, "graded"):
        return None
    if record is not None:
        drafter.graded[:], drafter.accepted[:] = record
    return [drafter.graded.tolist(), drafter.accepted.tolist()]


def _batches(answers: list[Answer], size: int) -> Iterator[list[int]]:
    """Answers by falling length, so that those that end first are the last rows; prompts of a batch fit one prefill."""
    batch: list[int] = []
    tokens = 0
    for i in sorted(range(len(answers)), key=lambda i: -len(answers[i].ids)):
        tokens += len(answers[i].prompt_ids)
        if batch and (len(batch) == size or tokens > MAX_PREFILL_TOKENS):
            yield batch
            batch, tokens = [], len(answers[i].prompt_ids)
        batch.append(i)
    yield batch


class _Walk:
    """One batch of answers, by falling length, from the first offset to the last; fills the trace's arrays."""

    def __init__(
        self,
        llm: LLM,
        batch: list[Answer],
        first_row: Array,
        params: SamplingParams,
        arrays: dict[str, Array],
        generator: torch.Generator,
    ) -> None:
        assert llm.config is not None and llm.engine.drafter is not None
        self.target, self.drafter, self.params = llm.engine.target, llm.engine.drafter, params
        self.first_row, self.arrays, self.generator = first_row, arrays, generator
        self.depth, self.greedy = llm.engine.num_positions, llm.config.draft_sample_method == "greedy"
        self.prompts = [a.prompt_ids for a in batch]
        self.lengths = [len(a.ids) for a in batch]
        longest = self.lengths[0]
        # behind its end an answer repeats its last token: `forced` must name some
        padded = [a.ids + a.ids[-1:] * (longest + self.depth - len(a.ids)) for a in batch]
        self.ids = torch.tensor(padded, device=llm.device)  # [R, longest + K]
        self.alive = [sum(n > t + 1 for n in self.lengths) for t in range(longest - 1)]  # rows at each offset
        self.draft_index = torch.full((llm.vocab_size,), -1, device=llm.device)  # [V], -1 where q is 0

    @torch.inference_mode()
    def run(self, bar: Any) -> None:
        self._enter()
        waiting: deque[tuple[int, DraftProposal]] = deque(maxlen=self.depth)  # blocks that still meet laws
        for t, rows in enumerate(self.alive):
            proposal = self._propose(t, rows)
            self._store_drafts(t, proposal)
            self._grade(t, proposal)
            waiting.append((t, proposal))
            layout = Layout(self._lengths(t, rows), [1] * rows, self.ids.device)
            logits, hidden = self.target.forward(self.ids[:rows, t], layout, None, self.drafter.hidden_layers)
            law = sampling.probs(logits, *self._settings(rows))  # [R, V], of token t + 1
            self._store("p_y", t, None, law.gather(1, self.ids[:rows, t + 1, None])[:, 0].clamp_min(TINY))
            self._store("target_entropy", t, None, torch.special.entr(law).sum(-1))
            ids = proposal.vocab_ids
            drafted = law[:, : _width(proposal)] if ids is None else law[:, ids]  # [R, V_d]
            for offset, block in waiting:
                self._store_law(offset, t - offset, block, law, drafted)
            self.drafter.extend(layout, self.ids[:rows, t, None].tolist(), hidden, [1] * rows)
            bar.update(rows)

    def _enter(self) -> None:
        layout = Layout([0] * len(self.prompts), [len(p) for p in self.prompts], self.ids.device)
        packed = torch.tensor(list(itertools.chain.from_iterable(self.prompts)), device=self.ids.device)
        _, hidden = self.target.forward(packed, layout, layout.last, self.drafter.hidden_layers)
        self.drafter.enter(layout, self.prompts, hidden)

    def _propose(self, t: int, rows: int) -> DraftProposal:
        uniforms = torch.rand(rows, self.depth, generator=self.generator).to(self.ids.device)
        temperature = self._settings(rows)[0]
        forced = self.ids[:rows, t + 1 : t + 1 + self.depth]
        lengths, pending = self._lengths(t, rows), self.ids[:rows, t]
        proposal = self.drafter.propose(lengths, pending, self.depth, temperature, uniforms, self.greedy, forced)
        ids, width = proposal.vocab_ids, _width(proposal)
        columns = torch.arange(width, device=self.ids.device)
        self.draft_index[columns if ids is None else ids] = columns
        return proposal

    def _store_drafts(self, t: int, proposal: DraftProposal) -> None:
        """What needs no law: the features, and what the drafter says of its drafts."""
        rows, temperature = len(proposal.tokens), self._settings(len(proposal.tokens))[0][:, None]
        self._store("num_drafted", t, None, torch.tensor(proposal.num_drafted or [self.depth] * rows))
        if proposal.logits is not None:
            for name in ("logit_q_max", "margin", "entropy", "logit_q_sampled"):
                values = features.FEATURES[name].fn(proposal.logits, proposal.draft_ids, temperature)
                self._store(name, t, slice(None), values)
        if proposal.confidence is not None:
            self._store("head", t, slice(None), proposal.confidence.double().logit().clamp(-40, 40))
        if proposal.stop is not None:
            self._store("stop", t, slice(None), proposal.stop.clamp(-40, 40))

    def _grade(self, t: int, proposal: DraftProposal) -> None:
        """Tell a drafter that keeps a record (n-gram) the verdict on its whole block, which is one-hot."""
        grade = getattr(self.drafter, "grade", None)
        if grade is not None:
            hits = proposal.tokens == self.ids[: len(proposal.tokens), t + 1 : t + 1 + self.depth]  # [R, K]
            for row, accepted in enumerate(hits.long().cumprod(-1).sum(-1).tolist()):
                known = min(self.depth, self.lengths[row] - 1 - t)
                grade(row, num_accepted=min(accepted, known), num_verified=known)

    def _store_law(self, offset: int, k: int, block: DraftProposal, law: Tensor, drafted: Tensor) -> None:
        """What depth k of a block needs the law of its place for: law [R, V], the same on the draft ids [R, V_d]."""
        rows = len(law)
        x, y = block.tokens[:rows, k], self.ids[:rows, offset + k + 1]
        p_x = law.gather(1, x[:, None])[:, 0]
        if block.q is None:
            q_y, overlap = (x == y).float(), p_x
        else:
            q, column = block.q[:rows, k], self.draft_index[y]  # [R, V_d], [R]
            q_y = q.gather(1, column.clamp_min(0)[:, None])[:, 0] * (column >= 0)
            overlap = torch.minimum(drafted, q).sum(-1)
        drafts = torch.tensor(block.num_drafted or [self.depth] * len(block.tokens), device=law.device)[:rows] > k
        for name, values in (("q_y", q_y), ("p_x", p_x), ("overlap", overlap)):
            self._store(name, offset, k, (values * drafts).clamp(0, 1))

    def _store(self, name: str, t: int, depth: int | slice | None, values: Tensor) -> None:
        """Write values [R] or [R, K] of offset t; depth None for an array without positions."""
        rows = self.first_row[: len(values)] + t
        _array(self.arrays, name, self.depth)[rows if depth is None else (rows, depth)] = values.double().cpu().numpy()

    def _lengths(self, t: int, rows: int) -> list[int]:
        return [len(prompt) + t for prompt in self.prompts[:rows]]

    def _settings(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """(temperature, top_k, top_p), [R] each."""
        p, device = self.params, self.ids.device
        return (
            torch.full((rows,), float(p.temperature), device=device),
            torch.full((rows,), p.top_k, device=device),
            torch.full((rows,), float(p.top_p), device=device),
        )


def _width(proposal: DraftProposal) -> int:
    """V_d, the size of the draft vocabulary; 0 for a drafter without one."""
    return 0 if proposal.logits is None else proposal.logits.shape[-1]
