"""Prompt lookup: which tokens it copies, what it learns from verdicts, and that decoding with it keeps the law.

The oracle for matches is a search of the whole text, token by token; counts are worked out by hand or from a log of
proposals and verdicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_lossless_end_to_end import ALPHA, NUCLEUS, SAMPLES, exact_law, p_value, trimmed

from avref.config import SamplingParams, SpeculativeConfig
from avref.cost_table import CostTable
from avref.drafters.base import DraftProposal
from avref.drafters.ngram import LONGEST, History, NGram
from avref.layout import Layout
from avref.llm import LLM


def drafter_on(*texts: Sequence[int], rows: int = 4, first_row: int = 0, max_length: int = 64) -> NGram:
    """A drafter whose rows hold these final tokens."""
    drafter = NGram(rows, max_length)
    enter(drafter, *texts, first_row=first_row)
    return drafter


def enter(drafter: NGram, *texts: Sequence[int], first_row: int = 0) -> None:
    layout = Layout([0] * len(texts), [len(t) for t in texts], first_row=first_row)
    drafter.enter(layout, [list(t) for t in texts], None)


def propose(drafter: NGram, pending: Sequence[int], depth: int = 4, **more: Any) -> DraftProposal:
    lengths = [len(drafter.history[r].tokens) for r in range(len(pending))]
    rows = len(pending)
    return drafter.propose(
        lengths, torch.tensor(pending), depth, torch.ones(rows), torch.rand(rows, depth), False, **more
    )


def verdict(drafter: NGram, pending: Sequence[int], drafts: Sequence[Sequence[int]], accepted: Sequence[int]) -> None:
    """The target has verified these drafts and accepted so many."""
    chunks = [[token, *row] for token, row in zip(pending, drafts, strict=True)]
    layout = Layout([len(drafter.history[r].tokens) for r in range(len(chunks))], [len(c) for c in chunks])
    drafter.extend(layout, chunks, None, [n + 1 for n in accepted])
    for r, n in enumerate(accepted):
        drafter.grade(r, num_accepted=n, num_verified=len(drafts[r]))


# Matches


def drafts_for(text: Sequence[int], pending: int, depth: int = 4) -> list[int]:
    proposal = propose(drafter_on(text), [pending], depth)
    assert proposal.num_drafted is not None
    n = proposal.num_drafted[0]
    assert (proposal.tokens[0, n:] == 0).all()
    return proposal.tokens[0, :n].tolist()


def test_the_longest_match_wins_over_a_more_recent_one() -> None:
    text = [1, 2, 3, 20, 21, 22, 23, 24, 9, 2, 3, 30, 8, 3, 40, 1, 2]
    assert drafts_for(text, 3) == [20, 21, 22, 23]  # "1 2 3", not the later "2 3" or "3"
    assert drafts_for(text[3:], 3) == [30, 8, 3, 40]  # "1 2 3" is gone: "2 3"
    assert drafts_for(text[10:], 3) == [40, 1, 2, 3]  # then "3" alone


def test_of_equal_matches_the_most_recent_wins() -> None:
    assert drafts_for([5, 6, 10, 11, 7, 5, 6, 12, 13, 7, 5], 6) == [12, 13, 7, 5]


def test_drafts_end_with_the_text() -> None:
    assert drafts_for([5, 6, 10, 7, 5], 6, 8) == [10, 7, 5, 6]  # the pending token is the last that can follow
    assert drafts_for([3, 3], 3, 8) == [3]


def test_no_match() -> None:
    proposal = propose(drafter_on([1, 2, 3], [4, 5, 4], [6]), [9, 5, 6])
    assert proposal.num_drafted == [0, 2, 1]
    assert proposal.tokens.tolist() == [[0] * 4, [4, 5, 0, 0], [6, 0, 0, 0]]
    assert proposal.confidence is not None
    assert ((proposal.confidence > 0) == torch.tensor([[0, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0]]).bool()).all()


def test_the_proposal_is_one_hot() -> None:
    proposal = propose(drafter_on([1, 2, 1]), [2])
    assert proposal.logits is None and proposal.q is None and proposal.vocab_ids is None
    assert proposal.draft_ids is proposal.tokens and proposal.tokens.dtype == torch.int64
    assert (proposal.q_drawn == 1).all() and proposal.q_drawn.dtype == torch.float32


def test_forced_text_and_stopping_change_nothing() -> None:
    drafter = drafter_on([1, 2, 3, 4, 1])
    free = propose(drafter, [2])
    forced = propose(drafter, [2], forced=torch.full((1, 4), 9), enough=lambda logits, stop: True)
    assert torch.equal(free.tokens, forced.tokens) and free.num_drafted == forced.num_drafted == [4]


def searched(text: Sequence[int], depth: int) -> list[int]:
    """The definition, by looking at every place of the text (its last token is the pending one)."""
    text, size = list(text), len(text)
    for n in range(min(LONGEST, size - 1), 0, -1):
        for start in range(size - n - 1, -1, -1):
            if text[start : start + n] == text[size - n :]:
                return text[start + n : start + n + depth]
    return []


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=40), st.integers(1, 8), st.integers(1, 5))
def test_equals_a_search_of_the_whole_text(text: list[int], depth: int, step: int) -> None:
    """Also when the text grows by several tokens at a time."""
    history, known = History(), 0
    while known < len(text) - 1:
        following = min(known + step, len(text) - 1)
        history.append(text[known:following])
        known = following
        n, drafts = history.lookup(text[known], depth)
        assert drafts == searched(text[: known + 1], depth)
        assert (n > 0) == bool(drafts)


# Rows


def test_rows_follow_accepted_tokens_only() -> None:
    drafter = drafter_on([1, 2, 3, 1], [5, 6, 5], [7, 7])
    proposal = propose(drafter, [2, 6, 7], 2)
    assert proposal.tokens.tolist() == [[3, 1], [5, 6], [7, 0]]
    verdict(drafter, [2, 6, 7], [[3, 1], [5, 6], []], [2, 0, 0])
    assert [h.tokens for h in drafter.history[:3]] == [[1, 2, 3, 1, 2, 3, 1], [5, 6, 5, 6], [7, 7, 7]]


def test_move_copies_and_enter_starts_anew() -> None:
    drafter = drafter_on([1, 2, 3, 1], [5, 6, 8, 5])
    drafter.move(1, 0)
    verdict(drafter, [6, 7], [[], []], [0, 0])  # from here on the two rows differ
    assert propose(drafter, [8, 6], 3).tokens.tolist() == [[5, 6, 8], [8, 5, 7]]
    enter(drafter, [6, 9, 6], first_row=1)
    assert propose(drafter, [8, 9], 3).tokens.tolist() == [[5, 6, 8], [6, 9, 0]]
    verdict(drafter, [8, 9], [[5], []], [1, 0])
    assert [h.tokens for h in drafter.history[:2]] == [[5, 6, 8, 5, 6, 8, 5], [6, 9, 6, 9]]


def test_clear_forgets_texts_but_not_counts() -> None:
    drafter = drafter_on([1, 2, 1])
    propose(drafter, [2], 2)
    verdict(drafter, [2], [[1, 2]], [1])
    drafter.clear()
    assert drafter.graded.sum() == 2 and not any(h.tokens or h.ends for h in drafter.history)


# Confidence


def test_prior_and_one_verdict() -> None:
    """Two of three admitted drafts accepted: two successes and a failure, one each at their positions."""
    drafter = drafter_on([1, 2, 3, 4, 5, 1])
    first = propose(drafter, [2], 4)  # a match of 2 tokens
    assert first.confidence is not None and first.confidence.tolist() == [[0.5] * 4]
    verdict(drafter, [2], [[3, 4, 5]], [2])
    assert drafter.graded[2, :5].tolist() == [1, 1, 1, 0, 0]
    assert drafter.accepted[2, :5].tolist() == [1, 1, 0, 0, 0]
    assert drafter.graded.sum() == 3 and drafter.accepted.sum() == 2  # nothing under another match length
    enter(drafter, [1, 2, 3, 4, 5, 1])
    again = propose(drafter, [2], 4)
    assert again.confidence is not None
    assert np.allclose(again.confidence[0], [2 / 3, 2 / 3, 1 / 3, 1 / 2])


def test_trimmed_drafts_are_never_counted() -> None:
    drafter = drafter_on([1, 2, 3, 4, 5, 1])
    for admitted, accepted in ((0, 0), (2, 2), (2, 0)):
        enter(drafter, [1, 2, 3, 4, 5, 1])
        drafts = propose(drafter, [2], 4).tokens[0, :admitted].tolist()
        verdict(drafter, [2], [drafts], [accepted])
    assert drafter.graded[2, :4].tolist() == [2, 1, 0, 0]
    assert drafter.accepted[2, :4].tolist() == [1, 1, 0, 0]


def test_padding_and_steps_without_a_proposal_are_never_counted() -> None:
    drafter = drafter_on([5, 6, 5], [1, 2, 3])
    proposal = propose(drafter, [6, 4], 4)
    assert proposal.num_drafted == [2, 0]
    verdict(drafter, [6, 4], proposal.tokens.tolist(), [4, 1])  # whoever verifies padding learns nothing from it
    assert drafter.graded.sum() == 2 and drafter.graded[2, :2].tolist() == [1, 1]
    verdict(drafter, [9, 9], [[], [8]], [0, 1])  # a proposal has one verdict: this is on nothing of its own
    verdict(drafter, [9, 9], [[8, 8], [8]], [1, 1])
    assert drafter.graded.sum() == 2


def test_verdicts_of_all_rows_are_pooled() -> None:
    drafter = drafter_on([1, 2, 3, 1], [4, 5, 6, 4], [7, 8, 7])
    drafts = propose(drafter, [2, 5, 9], 1).tokens.tolist()
    verdict(drafter, [2, 5, 9], [drafts[0], drafts[1], []], [1, 0, 0])
    enter(drafter, [1, 2, 3, 1], [7, 8, 9])
    confidence = propose(drafter, [2, 8], 1).confidence
    assert confidence is not None and confidence.tolist() == [[0.5], [0.5]]  # (1 + 1) / (2 + 2); no verdict yet


# Through the engine


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.sharpen(tiny.llama(), 1.5)


@pytest.fixture(scope="module")
def plain_greedy(target: Any) -> list[list[int]]:
    return [tiny.greedy(target, p, 30) for p in PROMPTS]


PROMPTS = [[3, 4, 5, 3, 4], [7], [9, 8, 7, 9, 8, 7, 9], [0, 0], list(range(20, 40))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


def make(target: Any, k: int = 5, **more: Any) -> LLM:
    config = {"method": "ngram", "num_speculative_tokens": k, **more}
    return LLM(target, config, max_num_seqs=3, max_model_len=64, cost_table=tiny.flat_costs())


def ids(outputs: Any) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in outputs]


@pytest.mark.parametrize("k", [1, 3, 8])
def test_greedy_equals_plain_decoding(k: int, target: Any, plain_greedy: list[list[int]]) -> None:
    llm = make(target, k)
    assert ids(llm.generate(PROMPTS, GREEDY)) == plain_greedy
    assert llm.stats.accepted_by_position[0] > 0


ADAPTIVE: dict[str, Any] = {"enable_adaptive_verification": True, "confidence": "auto", "probe_interval": 16}


@pytest.mark.parametrize("rule", ["lookahead", "stale", "early_stop"])
def test_greedy_equals_plain_decoding_with_adaptive_verification(
    rule: str, target: Any, plain_greedy: list[list[int]]
) -> None:
    llm = make(target, budget_rule=rule, **ADAPTIVE)
    assert ids(llm.generate(PROMPTS, GREEDY)) == plain_greedy
    stats = llm.stats
    assert 0 < stats.verified_by_position.sum() < stats.drafted_by_position.sum()


@pytest.mark.parametrize("more", [{}, ADAPTIVE], ids=["fixed", "adaptive"])
def test_steps_without_any_match_are_plain_ones(more: dict[str, Any]) -> None:
    """C74: no token of these texts comes twice, so no request ever has a draft."""
    counting = torch.full((40, 40), -30.0)
    counting[torch.arange(40), (torch.arange(40) + 1) % 40] = 30.0
    llm = make(tiny.bigram(counting), 4, **more)
    out = llm.generate([[0], [5], [10], [20]], SamplingParams(temperature=0.0, max_tokens=15, ignore_eos=True))
    assert ids(out) == [list(range(first + 1, first + 16)) for first in (0, 5, 10, 20)]
    assert llm.stats.tokens_per_request_step == 1 and llm.stats.num_tokens == 60
    assert llm.stats.drafted_by_position.sum() == 0


def test_counts_follow_the_engine(target: Any) -> None:
    """What the drafter has counted is what the engine counts, and a draft that does not exist is never verified."""
    llm = make(target, **ADAPTIVE, adaptive_drafting=False)
    real: list[int] = []
    made = llm.engine.drafter.propose  # type: ignore[union-attr]

    def logged(*args: Any, **kwargs: Any) -> DraftProposal:
        proposal = made(*args, **kwargs)
        real.extend(proposal.num_drafted or [])
        return proposal

    llm.engine.drafter.propose = logged  # type: ignore[union-attr,method-assign]
    llm.generate(PROMPTS, SamplingParams(max_tokens=40, ignore_eos=True))
    drafter, stats = llm.engine.drafter, llm.stats
    assert isinstance(drafter, NGram)
    assert stats.graded_by_position.sum() > 50
    assert drafter.graded.sum(0)[:5].tolist() == stats.graded_by_position.tolist()
    assert drafter.accepted.sum(0)[:5].tolist() == stats.accepted_by_position.tolist()
    limits = Counter(k for n in real for k in range(n))
    assert all(stats.drafted_by_position[k] <= limits[k] for k in range(5))


def test_nothing_behind_a_stop_token_enters_the_record() -> None:
    """The target goes round 3 4 5 6 7; a copy of the round is accepted whole, but the answer ends at 5."""
    circle = torch.full((8, 8), -30.0)
    circle[torch.arange(8), torch.tensor([0, 1, 2, 4, 5, 6, 7, 3])] = 30.0
    llm = make(tiny.bigram(circle), 6)
    out = llm.generate([[3, 4, 5, 6, 7, 3]], SamplingParams(max_tokens=20, stop_token_ids=(5,), temperature=0.0))
    drafter = llm.engine.drafter
    assert isinstance(drafter, NGram) and out[0].outputs[0].token_ids == [4, 5]
    assert llm.stats.graded_by_position.tolist() == [1, 0, 0, 0, 0, 0] == drafter.graded.sum(0)[:6].tolist()
    assert llm.stats.accepted_by_position.tolist() == drafter.accepted.sum(0)[:6].tolist() == [1, 0, 0, 0, 0, 0]


def test_text_that_repeats_is_accepted_more() -> None:
    """A target that counts in a circle repeats itself; one that wanders over its ids does not."""
    circle = torch.full((24, 24), -8.0)
    circle[torch.arange(24), (torch.arange(24) + 1) % 8] = 8.0
    rates = []
    for table in (circle, torch.zeros(24, 24)):
        llm = make(tiny.bigram(table), 4)
        llm.generate([[3, 1]] * 6, SamplingParams(max_tokens=48, ignore_eos=True, seed=1))
        rates.append(llm.stats.accepted_by_position.sum() / llm.stats.graded_by_position.sum())
    assert rates[0] > 0.95 and rates[1] < 0.2


def test_emitted_law() -> None:
    """The joint law of three tokens, two of them from decode steps, behind a prompt that repeats itself.

    Verified tokens are so cheap that a draft is trimmed only where the record says that it will hardly be accepted.
    """
    model = tiny.llama(1, vocab_size=8, num_hidden_layers=1, pad_token_id=None, eos_token_id=None)
    prompt = [3, 1, 4, 1, 3, 1, 4]
    config = {"method": "ngram", "num_speculative_tokens": 3, **ADAPTIVE, "adaptive_drafting": False}
    costs = CostTable.from_curves([(1, 0), (32, 0)], [(1, 1), (128, 1.64)], max_requests=32, max_tokens=128)
    llm = LLM(tiny.sharpen(model, 1.2), config, max_num_seqs=32, max_model_len=16, cost_table=costs)
    whole = SamplingParams(max_tokens=5)
    answers = ids(llm.generate([prompt] * (2 * SAMPLES), [whole, replace(whole, top_p=NUCLEUS)] * SAMPLES))
    stats = llm.stats
    assert stats.graded_by_position.sum() > 2 * SAMPLES
    assert 0.2 < stats.accepted_by_position.sum() / stats.graded_by_position.sum() < 0.8
    assert 0.1 < trimmed(llm) < 0.8
    assert p_value((answers[::2], exact_law(model, prompt, 1.0))) >= ALPHA
    assert p_value((answers[1::2], exact_law(model, prompt, NUCLEUS))) >= ALPHA


def test_a_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'some/model'.*takes no model"):
        SpeculativeConfig("ngram", model="some/model")
