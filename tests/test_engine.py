"""The engine on tiny models: greedy and seeded decoding, endings inside a block, counting, learning, odd batches.

Oracles: `model.generate` of plain Hugging Face, a request run on its own, and a drafter that is the target itself,
whose drafts must all be accepted. Laws are tested in test_lossless_end_to_end.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from test_lossless_end_to_end import ALPHA, exact_law, p_value
from torch import Tensor

from avref.config import SamplingParams
from avref.cost_table import CostTable
from avref.engine import Engine
from avref.llm import LLM, RequestOutput

SAFE_RULES = ("lookahead", "stale", "early_stop")
PROMPTS = [[3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 3], [11, 12], [0, 0], list(range(20, 40)), [13, 41, 2, 6]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.sharpen(tiny.llama(), 1.5)


@pytest.fixture(scope="module")
def drafters(target: Any) -> dict[str, Any]:
    """Right about half the time, each with a mixture of full, partial and empty acceptance."""
    return {"draft_model": tiny.near(target, 0.1), "dflash": tiny.dflash(target, vocab_ids=range(tiny.VOCAB - 5))}


@pytest.fixture(scope="module")
def plain_greedy(target: Any) -> list[list[int]]:
    return [tiny.greedy(target, p, 20) for p in PROMPTS]


def make(target: Any, method: str | None = None, drafter: Any = None, k: int = 5, **settings: Any) -> LLM:
    """An LLM with tiny sizes; unknown keywords go to the speculative configuration."""
    sizes = {name: settings.pop(name) for name in ("max_num_seqs", "max_model_len", "seed") if name in settings}
    table = settings.pop("cost_table", None) or tiny.flat_costs()
    config = None
    if method is not None:
        config = {"method": method, "model": drafter, "num_speculative_tokens": k, **settings}
    return LLM(target, config, **{"max_num_seqs": 3, "max_model_len": 128, "cost_table": table, **sizes})


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in outputs]


def reasons(outputs: Sequence[RequestOutput]) -> list[str]:
    return [o.outputs[0].finish_reason for o in outputs]


def verify_everything(llm: LLM) -> LLM:
    llm.engine.override = lambda capacity: capacity
    return llm


def adaptive(llm_or_rule: str, **more: Any) -> dict[str, Any]:
    return {"enable_adaptive_verification": True, "budget_rule": llm_or_rule, **more}


def dear_drafts(max_requests: int = 16) -> CostTable:
    """Every verified draft costs ten plain steps: the budget is 0 (C103)."""
    return CostTable(np.zeros(max_requests + 1), np.r_[1.0, 1.0 + 10.0 * np.arange(400)])


# Greedy decoding equals plain Hugging Face


def test_plain_decoding(target: Any, plain_greedy: list[list[int]]) -> None:
    llm = make(target)
    assert tokens(llm.generate(PROMPTS, GREEDY)) == plain_greedy
    assert llm.stats.tokens_per_request_step == 1
    assert llm.stats.draft_ms < 0.01 * 1e3 * llm.stats.wall_s


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("method", ["draft_model", "dflash"])
def test_fixed_speculation(
    method: str, k: int, target: Any, drafters: dict[str, Any], plain_greedy: list[list[int]]
) -> None:
    llm = make(target, method, drafters[method], k)
    assert tokens(llm.generate(PROMPTS, GREEDY)) == plain_greedy
    stats = llm.stats
    assert 0 < stats.accepted_by_position.sum() < stats.graded_by_position.sum()  # some accepted, some rejected
    assert (stats.verified_by_position == stats.drafted_by_position).all()


@pytest.mark.parametrize("draft_sample_method", ["probabilistic", "greedy"])
@pytest.mark.parametrize("rule", SAFE_RULES)
@pytest.mark.parametrize("method", ["draft_model", "dflash"])
def test_adaptive_verification(
    method: str,
    rule: str,
    draft_sample_method: str,
    target: Any,
    drafters: dict[str, Any],
    plain_greedy: list[list[int]],
) -> None:
    settings = adaptive(rule, draft_sample_method=draft_sample_method, estimator={"refit_interval": 7})
    llm = make(target, method, drafters[method], **settings)
    assert tokens(llm.generate(PROMPTS, GREEDY)) == plain_greedy
    stats = llm.stats
    assert 0 < stats.verified_by_position.sum() < stats.drafted_by_position.sum()  # some trimmed, some verified


@pytest.mark.parametrize("family", [tiny.gpt2, tiny.qwen2, tiny.mistral, tiny.gemma2, tiny.gemma3])
def test_other_families(family: Callable[..., Any]) -> None:
    """Adaptive verification with a drafter of the same family; Mistral's and Gemma's windows hold 8 tokens (C59)."""
    model = family()
    llm = make(model, "draft_model", tiny.near(model, 0.05), **adaptive("lookahead"))
    assert tokens(llm.generate(PROMPTS, GREEDY)) == [tiny.greedy(model, p, 20) for p in PROMPTS]
    assert llm.stats.accepted_by_position.sum() > 0


def test_eos_ends_as_in_plain_generate(target: Any, drafters: dict[str, Any], plain_greedy: list[list[int]]) -> None:
    """Declare the tokens of one answer to be EOS in turn; every request must stop where Hugging Face stops."""
    llm, prompts = make(target, "draft_model", drafters["draft_model"]), PROMPTS[:4]
    for eos in list(dict.fromkeys(plain_greedy[0]))[:4]:
        llm.eos_ids = frozenset({eos})
        got = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=20))
        assert tokens(got) == [tiny.greedy(target, p, 20, eos) for p in prompts]
        assert reasons(got) == ["stop" if o.outputs[0].token_ids[-1] == eos else "length" for o in got]


# A drafter that is the target itself


@pytest.mark.parametrize("k", range(1, 9))
def test_own_drafts_are_all_accepted_over_200_tokens(k: int) -> None:
    """C51, C53, C54: a hole or a lag in the draft cache would show as a rejection sooner or later."""
    model = tiny.gpt2(n_layer=1)
    llm = make(model, "draft_model", model, k, max_model_len=256)
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    outputs = llm.generate([[3, 4, 5], [9]], params)
    stats = llm.stats
    assert [len(t) for t in tokens(outputs)] == [200, 200]
    assert (stats.accepted_by_position == stats.drafted_by_position).all()
    assert stats.num_steps == -(-199 // (k + 1))  # the first token comes from the prefill


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_own_drafts_are_accepted_when_rows_move(temperature: float, target: Any) -> None:
    """Requests of many lengths: the last row keeps moving, with the draft that its cache does not hold yet."""
    llm = make(target, "draft_model", target, 4)
    params = [SamplingParams(temperature=temperature, max_tokens=9 + 7 * i, ignore_eos=True) for i in range(7)]
    llm.generate(PROMPTS, params)
    assert llm.stats.accepted_by_position.sum() >= 0.999 * llm.stats.drafted_by_position.sum() > 100


@pytest.mark.parametrize("way", ["nothing drafted", "nothing verified"])
def test_steps_without_drafts_leave_no_hole(
    way: str, target: Any, plain_greedy: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C62: with the schedule 3, 0, 0, 3, ... everything verified is still accepted."""
    llm = verify_everything(make(target, "draft_model", target, 3))
    engine, capacity = llm.engine, Engine._capacity
    open_step = lambda: engine.step_count % 4 in (0, 3)  # noqa: E731
    if way == "nothing drafted":
        monkeypatch.setattr(Engine, "_capacity", lambda self, r: capacity(self, r) if open_step() else 0)
    else:
        engine.override = lambda c: c if open_step() else 0
    assert tokens(llm.generate(PROMPTS, GREEDY)) == plain_greedy
    stats = llm.stats
    assert 0 < stats.verified_by_position.sum() == stats.accepted_by_position.sum()


# Seeds


SAMPLING = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=12, seed=11, ignore_eos=True)


@pytest.mark.parametrize("params", [SAMPLING, GREEDY], ids=["sampling", "greedy"])
@pytest.mark.parametrize("method", [None, "draft_model", "dflash"])
def test_alone_and_in_company_the_same_tokens(
    method: str | None, params: SamplingParams, target: Any, drafters: dict[str, Any]
) -> None:
    """C66, C72: at fixed K a request's tokens do not depend on who runs beside it, or where."""
    llm = make(target, method, drafters.get(str(method)), max_num_seqs=4)
    prompts = PROMPTS[:5]
    together = tokens(llm.generate(prompts, params))
    backwards = tokens(llm.generate(prompts[::-1], params))[::-1]
    alone = [tokens(llm.generate([p], params))[0] for p in prompts]
    assert together == alone == backwards


@pytest.mark.parametrize("method", ["draft_model", "dflash"])
def test_one_request_less_does_not_move_the_others(method: str, target: Any, drafters: dict[str, Any]) -> None:
    """C72, C75: lengths 2, 4, .., 16 drain the batch row by row, some in the middle of a block."""
    llm = make(target, method, drafters[method], max_num_seqs=8)
    params = [
        SamplingParams(temperature=i % 2 * 1.0, max_tokens=2 * i + 2, seed=i, ignore_eos=True) for i in range(8)
    ]  # C23: greedy and sampled requests in one batch
    prompts = [PROMPTS[i % 7] for i in range(8)]
    together = tokens(llm.generate(prompts, params))
    assert [len(t) for t in together] == list(range(2, 17, 2))
    assert together == [tokens(llm.generate([p], s))[0] for p, s in zip(prompts, params, strict=True)]
    long = tokens(make(target).generate(prompts[::2], GREEDY))
    assert [t[:n] for t, n in zip(long, (2, 6, 10, 14), strict=True)] == together[::2]


@pytest.mark.parametrize("rule", SAFE_RULES)
@pytest.mark.parametrize("method", ["draft_model", "dflash"])
def test_a_batch_that_drains_is_planned_to_its_last_request(
    method: str, rule: str, target: Any, drafters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C75: eight requests that end one after the other; depth and budget are chosen down to the last one."""
    llm = make(target, method, drafters[method], max_num_seqs=8, **adaptive(rule))
    running: list[int] = []
    decode = llm.engine.decode

    def watch() -> None:
        running.append(len(llm.engine.running))
        decode()

    monkeypatch.setattr(llm.engine, "decode", watch)
    params = [SamplingParams(temperature=0.0, max_tokens=8 * i + 2, ignore_eos=True) for i in range(8)]
    out = tokens(llm.generate([PROMPTS[i % 7] for i in range(8)], params))
    assert out == [tiny.greedy(target, PROMPTS[i % 7], 8 * i + 2) for i in range(8)]
    assert running[0] == 8 and running[-1] == 1
    assert 0 < llm.stats.verified_by_position.sum()


@pytest.mark.parametrize("more", [{}, adaptive("lookahead")], ids=["fixed", "adaptive"])
def test_rows_that_accept_all_beside_rows_that_accept_nothing(more: dict[str, Any]) -> None:
    """C66: in rows of even number every draft is right, in the others none; nobody gets a neighbour's tokens."""
    target, drafter = sure_and_wrong()
    prompts = [[1], [5], [2], [6], [3], [7], [1, 2], [5, 6]]
    params = SamplingParams(temperature=0.0, max_tokens=17, ignore_eos=True)
    llm = make(target, "draft_model", drafter, 4, max_num_seqs=8, **more)
    out = tokens(llm.generate(prompts, params))
    assert out == [tiny.greedy(target, p, 17) for p in prompts]
    alone = make(target, "draft_model", drafter, 4)
    rates = []
    for prompt, answer in zip(prompts, out, strict=True):
        assert tokens(alone.generate([prompt], params)) == [answer]
        rates.append(alone.stats.accepted_by_position.sum() / alone.stats.graded_by_position.sum())
    assert rates == [1.0, 0.0] * 4


@pytest.mark.parametrize("rule", SAFE_RULES)
def test_a_seed_repeats_an_adaptive_run(rule: str, target: Any, drafters: dict[str, Any]) -> None:
    """Decisions read past verdicts and the cost table, never the clock."""

    def run(seed: int) -> tuple[list[list[int]], list[int]]:
        llm = make(
            target, "draft_model", drafters["draft_model"], **adaptive(rule, estimator={"refit_interval": 4}), seed=seed
        )
        out = tokens(llm.generate(PROMPTS[:5], SamplingParams(max_tokens=12, ignore_eos=True)))
        return out, llm.stats.verified_by_position.tolist()

    assert run(5) == run(5)
    assert run(5)[0] != run(6)[0]


def test_requests_without_a_seed_differ_from_call_to_call(target: Any) -> None:
    llm = make(target)
    params = SamplingParams(max_tokens=15, ignore_eos=True)
    first, second = tokens(llm.generate([[3, 4]] * 3, params)), tokens(llm.generate([[3, 4]] * 3, params))
    assert len({tuple(t) for t in first + second}) == 6
    seeded = SamplingParams(max_tokens=15, ignore_eos=True, seed=4)
    assert tokens(llm.generate([[3, 4]], seeded)) == tokens(llm.generate([[3, 4]], seeded))


# Endings inside a block


def cycle(successor: dict[int, int], size: int = 8, sharpness: float = 30.0) -> Any:
    """A bigram model that goes from t to successor[t] almost surely; uniform after tokens without a successor."""
    table = torch.zeros(size, size)
    for t, after in successor.items():
        table[t, after] = sharpness
    return tiny.bigram(table)


def sure_and_wrong() -> tuple[Any, Any]:
    """On tokens 1 to 3 the drafter is sure and right, on 5 to 7 unsure and never right."""
    drafter = cycle({1: 2, 2: 3, 3: 1})
    with torch.no_grad():
        drafter.lm_head.weight[5:, :] = -20.0
    return cycle({1: 2, 2: 3, 3: 1, 5: 6, 6: 7, 7: 5}), drafter


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("n", range(1, 9))
def test_stop_at_each_position_of_a_block(n: int, temperature: float) -> None:
    """C41, C43, C44, C49: the answer ends with the stop token, without a bonus, and nothing behind it is counted."""
    counting = cycle({t: (t + 1) % 20 for t in range(20)}, size=20)
    settings = adaptive("lookahead", estimator={"refit_interval": 10_000})
    llm = verify_everything(make(counting, "draft_model", counting, 5, **settings))
    for max_tokens in (12, n):  # a stop that falls on the length limit is a stop
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, stop_token_ids=(4 + n,))
        out = llm.generate([[3, 4]], params)
        assert tokens(out) == [list(range(5, 5 + n))]
        assert reasons(out) == ["stop"]
        stats = llm.stats
        assert stats.num_tokens == n
        after_prefill = n - 1 if max_tokens == 12 else n - 2  # at the length limit the last token is no draft
        blocks = [] if after_prefill < 1 else [min(after_prefill, 5)] if n <= 7 else [5, after_prefill - 6]
        assert stats.graded_by_position.tolist() == [sum(b > k for b in blocks) for k in range(5)]
        assert (stats.accepted_by_position == stats.graded_by_position).all()


def test_the_estimator_sees_what_the_counters_show(target: Any) -> None:
    """C49: drafts behind a stop are verified, but neither graded in `stats` nor learned from."""
    settings = adaptive("lookahead", estimator={"refit_interval": 10_000})
    llm = verify_everything(make(target, "draft_model", target, 5, **settings))  # nothing is ever rejected
    llm.eos_ids = frozenset(range(0, 50, 4))
    answers = tokens(llm.generate(PROMPTS * 3, SamplingParams(max_tokens=20)))
    stats, estimator = llm.stats, llm.estimator
    assert estimator is not None
    assert estimator.sums[-1].tolist() == stats.graded_by_position.tolist()
    assert stats.accepted_by_position.tolist() == stats.graded_by_position.tolist()
    decoded = sum(len(a) - 1 for a in answers)  # prefill emits the first token of each
    bonus = decoded - stats.accepted_by_position.sum()  # one a step, but for an answer that ends with a draft
    assert stats.num_request_steps - len(answers) <= bonus <= stats.num_request_steps
    assert stats.graded_by_position.sum() < stats.verified_by_position.sum()
    after_stop = sum(t % 4 == 0 for o in tokens(llm.generate(PROMPTS, SamplingParams(max_tokens=20))) for t in o[:-1])
    assert after_stop == 0


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_the_cap_inside_a_block_is_exact(max_tokens: int, target: Any, plain_greedy: list[list[int]]) -> None:
    """C46, C48: exactly max_tokens come out, and no draft is made that could not be emitted."""
    llm = make(target, "draft_model", target, 4)
    out = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
    assert tokens(out) == [t[:max_tokens] for t in plain_greedy]
    assert set(reasons(out)) == {"length"}
    expected, left = [], max_tokens - 1  # what one request drafts: at most one less than it may still emit
    while left > 0:
        expected.append(min(4, left - 1))
        left -= expected[-1] + 1
    drafted = [len(PROMPTS) * sum(n > k for n in expected) for k in range(4)]
    assert llm.stats.drafted_by_position.tolist() == drafted


@pytest.mark.parametrize("method", ["draft_model", "dflash"])
def test_max_model_len_reached(method: str, target: Any, drafters: dict[str, Any], plain_greedy: Any) -> None:
    for drafter in (drafters[method], target) if method == "draft_model" else (drafters[method],):
        llm = make(target, method, drafter, max_model_len=22)
        out = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        assert tokens(out) == [t[: 22 - len(p)] for p, t in zip(PROMPTS, plain_greedy, strict=True)]
        assert set(reasons(out)) == {"length"}
        if drafter is target:
            assert (llm.stats.accepted_by_position == llm.stats.drafted_by_position).all()


@pytest.mark.parametrize("method", ["draft_model", "dflash"])
def test_one_request_one_draft_one_prompt_token(
    method: str, target: Any, drafters: dict[str, Any], plain_greedy: list[list[int]]
) -> None:
    llm = make(target, method, drafters[method], k=1, max_num_seqs=1, **adaptive("lookahead"))
    assert tokens(llm.generate([[7]], GREEDY)) == [plain_greedy[1]]


def test_all_drafts_rejected() -> None:
    """The drafter is sure of the wrong token, always: one token a step, and they are the target's."""
    target, wrong = cycle({t: (t + 1) % 8 for t in range(8)}), cycle({t: (t + 2) % 8 for t in range(8)})
    for temperature in (0.0, 1.0):
        llm = make(target, "draft_model", wrong, 3)
        out = llm.generate([[5], [1, 2]], SamplingParams(temperature=temperature, max_tokens=9))
        assert tokens(out) == [
            [6, 7, 0, 1, 2, 3, 4, 5, 6],
            [3, 4, 5, 6, 7, 0, 1, 2, 3],
        ]  # token id 0 is an ordinary one
        assert llm.stats.num_steps == 8
        assert llm.stats.accepted_by_position.sum() == 0
        assert llm.stats.graded_by_position[0] > 0 == llm.stats.graded_by_position[1:].sum()


@pytest.mark.parametrize("rule", SAFE_RULES)
@pytest.mark.parametrize("method", ["draft_model", "dflash"])
def test_budget_of_zero(method: str, rule: str, target: Any, drafters: dict[str, Any], plain_greedy: Any) -> None:
    """C74, C103: drafts that are not worth their price; the step emits the target's own token."""
    settings = adaptive(rule, probe_interval=0)
    llm = make(target, method, drafters[method], 3, cost_table=dear_drafts(), **settings)
    assert tokens(llm.generate(PROMPTS[:4], GREEDY)) == plain_greedy[:4]
    assert llm.stats.verified_by_position.sum() == 0 < llm.stats.drafted_by_position.sum()
    assert llm.stats.tokens_per_request_step == 1


# Drafters that cannot see everything


@pytest.mark.parametrize("family", [tiny.gpt2, tiny.llama])
@pytest.mark.parametrize("settings", [{}, adaptive("lookahead")], ids=["fixed", "adaptive"])
def test_a_drafter_with_fewer_positions_stops_drafting(family: Callable[..., Any], settings: dict[str, Any]) -> None:
    """C63: 32 positions against 64. Beyond them plain decoding goes on, beside requests that still draft."""
    long, short = ("n_positions",) * 2 if family is tiny.gpt2 else ("max_position_embeddings",) * 2
    target, drafter = family(**{long: 64}), family(**{short: 32})
    prompts = [list(range(30)), [3], list(range(5, 36)), list(range(5, 37)), list(range(2, 45)), [4, 5]]
    llm = make(target, "draft_model", drafter, 4, max_model_len=64, **settings)
    out = llm.generate(prompts, GREEDY)
    assert tokens(out) == [tiny.greedy(target, p, 20) for p in prompts]
    alone = make(target, "draft_model", drafter, 4, max_model_len=64)
    alone.generate([prompts[0]], GREEDY)
    # the pending token sits at position 30, one draft fits at 31; after that there is no room
    assert alone.stats.drafted_by_position.tolist() == [1, 0, 0, 0]
    alone.generate([prompts[4]], GREEDY)
    assert alone.stats.drafted_by_position.sum() == 0


def test_own_drafts_stay_accepted_up_to_the_last_position() -> None:
    target = tiny.gpt2(n_positions=64, n_layer=1)
    drafter = tiny.gpt2(n_positions=64, n_layer=1)
    with torch.no_grad():
        drafter.transformer.wpe.weight.data = drafter.transformer.wpe.weight[:32].clone()
    drafter.config.n_positions = 32
    llm = make(target, "draft_model", drafter, 4, max_model_len=64)
    llm.generate([[3], list(range(25)), [8, 9, 10]], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    assert (llm.stats.accepted_by_position == llm.stats.drafted_by_position).all()


@pytest.mark.parametrize(("ours", "theirs"), [(192, 128), (128, 192)])
@pytest.mark.parametrize("settings", [{}, adaptive("lookahead")], ids=["fixed", "adaptive"])
def test_vocabulary_widths_that_differ(ours: int, theirs: int, settings: dict[str, Any]) -> None:
    """C77, C78: a narrower drafter never sees the target's last ids, a wider one never drafts beyond them."""
    target, drafter = tiny.llama(vocab_size=ours), tiny.llama(seed=3, vocab_size=theirs)
    prompts = [[3, 4], [ours - 1, 5], [7, ours - 2, 9]]
    llm = make(target, "draft_model", drafter, 4, **settings)
    assert tokens(llm.generate(prompts, GREEDY)) == [tiny.greedy(target, p, 20) for p in prompts]
    sampled = tokens(llm.generate(prompts * 2, SamplingParams(max_tokens=15, ignore_eos=True)))
    ids = {t for row in sampled for t in row}
    assert max(ids) < ours
    assert ours < theirs or max(ids) >= theirs


def test_half_the_mass_of_a_wider_drafter_on_ids_that_the_target_lacks() -> None:
    """C78: the tail is masked before drawing and q renormalised, and what is emitted follows p."""
    table = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.15, 0.25]] * 5))
    wide = torch.full((8, 8), -30.0)
    wide[:, :5] = torch.log(torch.tensor([0.2, 0.05, 0.05, 0.1, 0.1]))
    wide[:, 6] = np.log(0.5)
    target, drafter = tiny.bigram(table), tiny.bigram(wide)
    llm = make(target, "draft_model", drafter, 3, max_num_seqs=16)
    inner, proposals = llm.engine.drafter, []
    assert inner is not None
    propose = inner.propose

    def watch(*args: Any, **kwargs: Any) -> Any:
        proposals.append(propose(*args, **kwargs))
        return proposals[-1]

    inner.propose = watch  # type: ignore[method-assign]
    answers = tokens(llm.generate([[3]] * 1000, SamplingParams(max_tokens=4, ignore_eos=True)))
    for proposal in proposals:
        assert proposal.q.shape[-1] == 5 and int(proposal.tokens.max()) < 5
        torch.testing.assert_close(proposal.q, torch.tensor([0.4, 0.1, 0.1, 0.2, 0.2]).expand_as(proposal.q))
    assert 0.3 < llm.stats.accepted_by_position.sum() / llm.stats.graded_by_position.sum() < 0.9
    assert p_value((answers, exact_law(target, [3], 1.0))) >= ALPHA


# Counting


@pytest.fixture(scope="module", params=[*SAFE_RULES, "fixed", "none"])
def mixed_run(request: pytest.FixtureRequest, target: Any, drafters: dict[str, Any]) -> LLM:
    """Mixed lengths, temperatures and ends."""
    settings = {} if request.param in ("fixed", "none") else adaptive(request.param, probe_interval=5)
    method = None if request.param == "none" else "draft_model"
    llm = make(target, method, drafters["draft_model"] if method else None, 4, **settings)
    params = [SamplingParams(temperature=i % 3 / 2, max_tokens=1 + 3 * i) for i in range(7)]
    outputs = llm.generate(PROMPTS, params)
    assert llm.stats.num_tokens == sum(map(len, tokens(outputs)))
    return llm


def test_counts_are_nested(mixed_run: LLM) -> None:
    s = mixed_run.stats
    chain = (s.accepted_by_position, s.graded_by_position, s.verified_by_position, s.drafted_by_position)
    for fewer, more in itertools.pairwise(chain):
        assert (fewer <= more).all()
    for counts in chain:
        assert (np.diff(counts) <= 0).all()  # prefixes: no position without the one before it


def test_times_add_up(mixed_run: LLM) -> None:
    s = mixed_run.stats
    parts = (s.prefill_ms, s.draft_ms, s.verify_ms, s.sample_ms, s.other_ms)
    assert min(parts) >= 0 and sum(parts) == pytest.approx(1e3 * s.wall_s, rel=0.2)


def test_tokens_per_request_step_is_one_plus_accepted(target: Any, drafters: dict[str, Any]) -> None:
    """Every request and step emits its accepted drafts and one more token, when nothing stops early."""
    llm = make(target, "draft_model", drafters["draft_model"], 4, **adaptive("lookahead"))
    llm.generate(PROMPTS, SamplingParams(max_tokens=15, ignore_eos=True))
    s = llm.stats
    assert s.num_tokens == 15 * len(PROMPTS)
    assert s.num_requests == len(PROMPTS)
    assert s.tokens_per_request_step == pytest.approx(1 + s.accepted_by_position.sum() / s.num_request_steps)
    assert s.tokens_per_forward == pytest.approx((s.num_tokens - s.num_requests) / s.num_steps)


def test_features_and_verdicts_belong_to_the_same_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """C102: on tokens 1 to 3 the drafter is sure and right, on 5 to 7 unsure and wrong; rows move as requests leave."""
    target, drafter = sure_and_wrong()
    llm = verify_everything(make(target, "draft_model", drafter, 3, max_num_seqs=5, **adaptive("lookahead")))
    seen: list[tuple[Tensor, Tensor]] = []
    estimator = llm.estimator
    assert estimator is not None
    observe = estimator.observe

    def watch(f: Tensor, accepted: Tensor, verified: Tensor) -> None:
        graded = verified > 0
        seen.append((f[graded, 0], accepted[graded] > 0))
        observe(f, accepted, verified)

    monkeypatch.setattr(estimator, "observe", watch)
    params = [SamplingParams(max_tokens=3 + 4 * (i % 4), seed=i) for i in range(12)]
    llm.generate([[1 + i % 3 + 4 * (i % 2)] for i in range(12)], params)
    features, labels = (torch.cat(x) for x in zip(*seen, strict=True))
    assert labels.any() and not labels.all()
    assert ((features > 5) == labels).all()


# Learning


def test_probes_reach_positions_that_are_never_worth_it(target: Any, drafters: dict[str, Any]) -> None:
    def verified(probe_interval: int) -> tuple[list[int], list[float], int]:
        settings = adaptive("lookahead", probe_interval=probe_interval, estimator={"refit_interval": 10_000})
        llm = make(target, "draft_model", drafters["draft_model"], 4, cost_table=dear_drafts(), **settings)
        llm.generate(PROMPTS, SamplingParams(max_tokens=16, ignore_eos=True))
        assert llm.estimator is not None
        return llm.stats.verified_by_position.tolist(), llm.estimator.sums[-1].tolist(), llm.stats.num_steps

    counts, labels, steps = verified(5)
    assert 0 < counts[0] <= steps // 5 + 1
    assert counts[3] > 0 and labels[0] == counts[0]
    assert verified(0)[:2] == ([0] * 4, [0.0] * 4)


def test_probes_take_turns(target: Any, drafters: dict[str, Any]) -> None:
    """The probed request is chosen by the step counter, never by its drafts."""
    llm = make(
        target,
        "draft_model",
        drafters["draft_model"],
        4,
        cost_table=dear_drafts(),
        **adaptive("lookahead", probe_interval=2),
    )
    probed: list[list[int]] = []
    admit = llm.engine._admit
    llm.engine._admit = lambda *args: (answer := admit(*args), probed.append(list(answer)))[0]  # type: ignore
    llm.generate([[3, 4]] * 3, SamplingParams(max_tokens=20, ignore_eos=True))
    full = [row for step in probed[:12] for row, n in enumerate(step) if n]
    assert full == [0, 1, 2, 0, 1, 2]


def test_refits_happen_every_interval_and_survive_the_call(target: Any, drafters: dict[str, Any]) -> None:
    settings = adaptive("lookahead", estimator={"refit_interval": 6})
    llm = make(target, "draft_model", drafters["draft_model"], 4, **settings)
    estimator = llm.estimator
    assert estimator is not None
    steps = 0
    for _ in range(3):
        before = steps // 6
        llm.generate(PROMPTS[:4], SamplingParams(max_tokens=20, ignore_eos=True))
        steps += llm.stats.num_steps
        assert llm.stats.num_refits == steps // 6 - before
        assert llm.estimator is estimator
    assert estimator.num_refits == steps // 6
    assert float(estimator.slope) != 0.5


# Trouble


@pytest.fixture
def failing(target: Any, drafters: dict[str, Any], request: pytest.FixtureRequest) -> Iterator[LLM]:
    method, error = request.param
    llm = make(target, method, drafters[method], **adaptive("lookahead"))
    forward, calls = llm.engine.target.forward, 0

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise error("in the middle")
        return forward(*args, **kwargs)

    llm.engine.target.forward = fail  # type: ignore[method-assign]
    yield llm


@pytest.mark.parametrize(
    "failing",
    [("draft_model", RuntimeError), ("dflash", RuntimeError), ("draft_model", KeyboardInterrupt)],
    indirect=True,
)
def test_after_an_error_the_next_call_is_clean(failing: LLM, plain_greedy: list[list[int]]) -> None:
    with pytest.raises((RuntimeError, KeyboardInterrupt), match="in the middle"):
        failing.generate(PROMPTS, GREEDY)
    assert not failing.engine.running and not failing.engine.waiting
    assert tokens(failing.generate(PROMPTS[::-1], GREEDY)) == plain_greedy[::-1]
    assert failing.stats.num_tokens == 20 * len(PROMPTS)


def test_no_prompts_no_work(target: Any, drafters: dict[str, Any]) -> None:
    llm = make(target, "draft_model", drafters["draft_model"], **adaptive("lookahead"))
    assert llm.generate([]) == []
    assert llm.stats.num_steps == 0
    assert llm.stats.tokens_per_request_step == 1


def test_prompts_longer_than_one_prefill_forward(
    target: Any, drafters: dict[str, Any], plain_greedy: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entering requests are split over several prefill forwards, each behind the rows already there."""
    monkeypatch.setattr("avref.engine.MAX_PREFILL_TOKENS", 8)
    for method in ("draft_model", "dflash"):
        llm = make(target, method, drafters[method], max_num_seqs=7)
        assert tokens(llm.generate(PROMPTS, GREEDY)) == plain_greedy
