"""A smaller causal LM with the same tokenizer drafts token by token (Leviathan et al. 2023; Chen et al. 2023).

Its forwards are batched and packed like the target's. The draft cache follows the target's: tokens that the target
kept stay, the rest is overwritten. After a full acceptance the last draft was never fed to the drafter, so it waits in
`backlog` and enters together with the next pending token; a step that drafts nothing just makes the backlog longer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from avref import models
from avref.config import SpeculativeConfig
from avref.drafters.base import DraftProposal, Enough, draw
from avref.packed import Layout, PackedModel, check_parity

if TYPE_CHECKING:
    from avref.llm import LLM


class DraftModel:
    """Drafts x_1 .. x_K with K forwards of a causal LM; every forward serves all running requests."""

    hidden_layers: tuple[int, ...] = ()
    max_depth = 64

    def __init__(self, model: Any, max_rows: int, max_length: int, target_vocabulary: int) -> None:
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or max_length
        self.max_length = min(max_length, limit)
        self.model = PackedModel(model, max_rows, self.max_length)
        self.vocabulary = min(target_vocabulary, model.get_output_embeddings().weight.shape[0])
        self.last_id = model.get_input_embeddings().weight.shape[0] - 1
        self.cached = [0] * max_rows  # tokens of each row in the draft cache
        self.backlog: list[list[int]] = [[] for _ in range(max_rows)]  # final tokens that are not
        self.fed = [0] * max_rows  # tokens of the last proposal in the cache, the pending one included

    @classmethod
    def load(cls, config: SpeculativeConfig, llm: LLM, max_rows: int) -> DraftModel:
        if config.model is None:
            raise ValueError(
                "method 'draft_model' needs speculative_config['model']: "
                "a local folder or a hub id of a smaller model with the target's tokenizer"
            )
        model = config.model
        if isinstance(model, torch.nn.Module):
            model = model.eval()
        else:
            if llm.tokenizer is not None:
                models.check_same_tokenizer(llm.tokenizer, models.load_tokenizer(model))
            model = models.load_model(model, llm.device, llm.dtype)
        check_parity(model)
        return cls(model, max_rows, llm.max_model_len, llm.vocab_size)

    def enter(self, layout: Layout, tokens: Sequence[Sequence[int]], hidden: Tensor | None) -> None:
        chunks = [ids[: self.max_length] for ids in tokens]
        layout = Layout([0] * len(chunks), [len(c) for c in chunks], self.model.device, layout.first_row)
        self.model.forward(self._packed(chunks), layout, layout.last)
        for row, chunk in enumerate(chunks, start=layout.first_row):
            self.cached[row], self.backlog[row], self.fed[row] = len(chunk), [], 0

    def extend(
        self, layout: Layout, tokens: Sequence[Sequence[int]], hidden: Tensor | None, kept: Sequence[int]
    ) -> None:
        for row, (ids, n) in enumerate(zip(tokens, kept, strict=True)):
            in_cache = min(n, self.fed[row])
            self.cached[row] += in_cache
            self.backlog[row] += ids[in_cache:n]
            self.fed[row] = 0

    def clear(self) -> None:
        self.model.cache.clear()

    def move(self, source: int, target: int) -> None:
        self.model.cache.move(source, target)
        self.cached[target], self.fed[target] = self.cached[source], self.fed[source]
        self.backlog[target] = list(self.backlog[source])

    def propose(
        self,
        lengths: Sequence[int],
        pending: Tensor,
        depth: int,
        temperature: Tensor,
        uniforms: Tensor,
        greedy: bool,
        forced: Tensor | None = None,
        enough: Enough | None = None,
    ) -> DraftProposal:
        rows, last = len(lengths), self.max_length - 1
        # a request at the drafter's last position gets no drafts; its row computes something harmless
        alive = [n < last for n in lengths]
        chunks = [[*self.backlog[r], t] if alive[r] else [t] for r, t in enumerate(pending.tolist())]
        starts = [self.cached[r] if alive[r] else last for r in range(rows)]
        ids: list[Tensor] = []
        logits: list[Tensor] = []
        qs: list[Tensor | None] = []
        drawn: list[Tensor] = []
        for k in range(depth):
            if k == 0:
                packed = self._packed(chunks)
            else:
                packed = ids[-1] if forced is None else forced[:, k - 1].clamp(max=self.last_id)
            layout = Layout(starts, [len(c) for c in chunks] if k == 0 else [1] * rows, self.model.device)
            out, _ = self.model.forward(packed, layout, layout.last)  # [R, V_d]
            out = out[:, : self.vocabulary].float()
            token, q, q_drawn = draw(out, temperature, uniforms[:, k], greedy)
            ids.append(token)
            logits.append(out)
            qs.append(q)
            drawn.append(q_drawn)
            starts = [min(n + 1 + k, last) for n in lengths]
            if enough is not None and enough(out, None):
                break
        for r in range(rows):
            if alive[r]:
                self.cached[r] += len(self.backlog[r])
                self.backlog[r], self.fed[r] = [], len(ids)
        tokens = torch.stack(ids, dim=1)  # [R, depth], fewer when `enough` ended it
        q_all = None if greedy else torch.stack([q for q in qs if q is not None], dim=1)
        return DraftProposal(tokens, tokens, torch.stack(logits, dim=1), q_all, torch.stack(drawn, dim=1))

    def _packed(self, chunks: Sequence[Sequence[int]]) -> Tensor:
        ids = torch.tensor(list(itertools.chain.from_iterable(chunks)), device=self.model.device)
        return ids.clamp_(max=self.last_id)  # an id beyond a narrower table reads as its last one: only drafts suffer
