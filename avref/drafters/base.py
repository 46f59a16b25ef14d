"""What every drafter gives the engine, and what the engine gives every drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from avref import sampling
from avref.layout import Layout


@dataclass
class DraftProposal:
    """K drafted tokens for each of R requests.

    q is the distribution that the tokens were really drawn from, over the drafter's own vocabulary of V_d ids;
    `vocab_ids` [V_d] gives their ids in the target's vocabulary (None: the same ids). q None means one-hot. `logits`
    are what features read, before the temperature; None for a drafter that has none (prompt lookup).

    What a drafter says of its own drafts: `confidence` is a conditional acceptance probability from a part of its own
    (dspark's head, an n-gram's record), `stop` the log-odds of its stop head. Neither may depend on the token it judges
    or on later ones. `num_drafted` says how many drafts each request really got (None: K for all).
    """

    tokens: Tensor  # [R, K] target ids
    draft_ids: Tensor  # [R, K] the same tokens as indices into V_d
    logits: Tensor | None  # [R, K, V_d]
    q: Tensor | None  # [R, K, V_d] float32
    q_drawn: Tensor  # [R, K] float32, q of the drawn token
    vocab_ids: Tensor | None = None
    confidence: Tensor | None = None  # [R, K] in [0, 1]
    stop: Tensor | None = None  # [R, K] log-odds
    num_drafted: list[int] | None = None  # [R]

    def found(self, capacity: Sequence[int]) -> list[int]:
        """Drafts that each request got: its capacity, or fewer where the drafter had less to offer."""
        depth = self.tokens.shape[1]
        offered = [depth] * len(capacity) if self.num_drafted is None else self.num_drafted
        return [min(c, n, depth) for c, n in zip(capacity, offered, strict=True)]


Enough = Callable[[DraftProposal], bool]
"""The position just drafted, as a proposal of its own with K = 1 -> no later draft is wanted."""


class Drafter(Protocol):
    """What the engine asks of a drafter.

    Cache rows are the engine's: running request r owns row r. `hidden_layers` names the target's hidden states that
    `enter` and `extend` want. A class says what its proposals hold by attributes of these names, read when a
    `confidence` is chosen: `has_logits` (True where absent), `has_confidence` and `has_stop_head` (False where absent).
    """

    hidden_layers: tuple[int, ...]
    max_length: int  # longest sequence, in tokens, that it can draft for

    def enter(self, layout: Layout, tokens: Sequence[Sequence[int]], hidden: Tensor | None) -> None:
        """New requests have entered.

        The target has processed their prompts `tokens`; `hidden` [T, n D] are its states there.
        """

    def extend(
        self, layout: Layout, tokens: Sequence[Sequence[int]], hidden: Tensor | None, kept: Sequence[int]
    ) -> None:
        """The target has processed each running request's chunk, or several chunks of one token in a row.

        The first `kept[r]` tokens of chunk r are final (none where it owed nothing), the rest were rejected.
        """

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
        """Draft `depth` tokens behind `pending` [R], each request's newest token.

        Request r's newest token sits at position lengths[r]; uniforms [R, depth] in [0, 1) decide the draws. With
        `forced` [R, depth] (target ids) draft k + 1 is conditioned on these tokens instead of those drawn: q is then
        what the drafter says on a given text, for traces and evaluation; the tokens returned are still the drawn ones.
        A drafter that works token by token asks `enough` after every position and ends the block, for all requests,
        when it says so; the proposal then holds fewer than `depth` positions. Parallel drafters ignore it.
        """

    def clear(self) -> None:
        """Forget all requests (after an error): no key or value may stay behind."""

    def move(self, source: int, target: int) -> None:
        """Copy a request's state from row `source` to row `target`."""


class Said(NamedTuple):
    """What a drafter says at one position, before the token there is drawn."""

    logits: Tensor  # [R, V_d] float32
    stop: Tensor | None = None  # [R] log-odds of its stop head
    confidence: Tensor | None = None  # [R] its own, in [0, 1]


Step = Callable[[int, Tensor], Said]
"""(k, the tokens in front of position k [R], target ids) -> what the drafter says there; called with k = 0, 1, ..."""


class TokenByToken:
    """`propose` for drafters that read the token before when they draft the next: they only write `start`."""

    vocab_ids: Any = None  # [V_d] target ids of the draft vocabulary; None: the target's own

    def start(self, lengths: Sequence[int], pending: Tensor, depth: int) -> Step:
        """Begin a block of at most `depth` positions; what one position takes is what is returned."""
        raise NotImplementedError

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
        step, before = self.start(lengths, pending, depth), pending
        columns: list[dict[str, Any]] = []
        for k in range(depth):
            said = step(k, before)
            ids, q, q_drawn = draw(said.logits, temperature, uniforms[:, k], greedy)
            tokens = ids if self.vocab_ids is None else self.vocab_ids[ids]
            columns.append({"tokens": tokens, "draft_ids": ids, "q": q, "q_drawn": q_drawn, **said._asdict()})
            if enough is not None and enough(self._stacked(columns[-1:])):
                break
            before = tokens if forced is None else forced[:, k]
        return self._stacked(columns)

    def _stacked(self, columns: Sequence[dict[str, Any]]) -> DraftProposal:
        """Positions [R, ...] side by side; what is None at one is None at all."""
        names = [name for name, value in columns[0].items() if value is not None]
        block: dict[str, Any] = {"q": None, **{n: torch.stack([c[n] for c in columns], dim=1) for n in names}}
        return DraftProposal(vocab_ids=self.vocab_ids, **block)


def draw(logits: Tensor, temperature: Tensor, uniforms: Tensor, greedy: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Draw one token per row of logits [N, V_d] -> (ids [N], q [N, V_d], q of the drawn token [N]).

    q is the temperature-only softmax (temperature 0: one-hot at the argmax), one float32 tensor for drawing, for the
    acceptance ratio and for the residual. With `greedy` every row is one-hot at its argmax, and q is None.
    """
    if greedy:
        ids = sampling.argmax(logits)  # refuses NaN, as the draw below does
        return ids, None, torch.ones_like(uniforms)
    q = sampling.probs(
        logits, temperature, torch.zeros_like(temperature, dtype=torch.long), torch.ones_like(temperature)
    )
    ids = sampling.sample(q, uniforms)
    return ids, q, q.gather(-1, ids[:, None]).squeeze(-1)
