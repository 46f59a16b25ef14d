"""How deep to draft: bookkeeping against brute force, the two ends (never, always), exploring, and the emitted law."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import pytest
import test_dspark
import test_eagle_mtp
import test_lossless_end_to_end as lossless
import tiny
import torch

from avref import engine, profiling
from avref.config import SamplingParams
from avref.cost_table import CostTable
from avref.depth import EXACT, EXPLORE_EVERY, EXPLORE_IDLE, EXPLORE_SHARE, DraftDepth, draft_ms
from avref.llm import LLM
from avref.pruning import choose_budget

GREEDY = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
COUNTING = {t: (t + 1) % 8 for t in range(8)}


def step(rng: np.random.Generator, num_requests: int, depth: int) -> tuple[Any, Any]:
    """Random survivals [R, D] and capacities [R]."""
    survival = np.minimum.accumulate(rng.random((num_requests, depth)) ** 0.5, axis=1)
    return survival, rng.integers(0, depth + 1, size=num_requests)


def table(rng: np.random.Generator, max_requests: int, depth: int, by_requests: bool, max_tokens: int) -> CostTable:
    """A staircase with steps of random height, and drafting that gets dearer by depth."""
    verify = 1 + rng.choice([0.0, 0.0, 0.3, 0.9], size=(max_requests + 1, max_tokens + 1)).cumsum(axis=1)
    draft = rng.random((max_requests + 1, depth + 1)).cumsum(axis=1)
    return CostTable(draft, verify if by_requests else verify[0])


# Against brute force


@pytest.mark.parametrize("seed", range(20))
def test_one_step_by_brute_force(seed: int) -> None:
    """B_d is what choose_budget finds in the survivals cut at d; deeper positions are not touched."""
    rng = np.random.default_rng(seed)
    num_requests, num_positions = int(rng.integers(1, 6)), int(rng.integers(1, 6))
    depth = int(rng.integers(1, num_positions + 1))
    survival, capacities = step(rng, num_requests, depth)
    room = num_requests * (depth + 1) - (2 if seed % 4 == 0 else 0)  # sometimes not all slots fit into the table
    costs = table(rng, 6, num_positions, seed % 2 == 0, max(room, num_requests))
    got = DraftDepth(num_positions)
    got.learn(survival, capacities, costs)
    worth = got.worth(num_requests)
    for d in range(num_positions + 1):
        tokens, budget = 1.0, 0
        if 1 <= d <= depth:
            cut = np.minimum(capacities, d)
            budget = choose_budget(survival[:, :d], costs, num_requests, "argmax", capacities=cut)
            slots = [survival[r, k] for r in range(num_requests) for k in range(cut[r])]
            tokens = 1.0 + sum(sorted(slots, reverse=True)[:budget]) / num_requests
        assert worth.tokens[d] == pytest.approx(tokens)
        assert worth.verified[d] == pytest.approx(budget / num_requests)
    assert worth.seen.tolist() == [0] + [int(d <= depth) for d in range(1, num_positions + 1)]


def test_means_are_even_at_first_and_then_running() -> None:
    rng = np.random.default_rng(1)
    costs, steps = table(rng, 4, 3, False, 20), [step(rng, 4, 3) for _ in range(30)]
    all_of_them, alone = DraftDepth(3), []
    for s in steps:
        all_of_them.learn(*s, costs)
        single = DraftDepth(3)
        single.learn(*s, costs)
        alone.append(single.worth(4).tokens)
    mean = np.mean(alone[:10], axis=0)
    for tokens in alone[10:]:
        mean = mean + 0.1 * (tokens - mean)
    assert all_of_them.worth(4).tokens == pytest.approx(mean)


@pytest.mark.parametrize("seed", range(20))
def test_choice_by_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_requests, deepest = int(rng.integers(1, 6)), int(rng.integers(1, 6))
    costs = table(rng, 6, 5, seed % 2 == 0, 30)
    depth = DraftDepth(5, warmup=1)
    for _ in range(3):
        depth.learn(*step(rng, num_requests, 5), costs)
    rates = []
    for d in range(deepest + 1):
        packed = num_requests * (1 + depth.worth(num_requests).verified[d])
        verify = np.interp(packed, np.arange(1, 31), costs.verify(num_requests, np.arange(1, 31)))
        draft = costs.draft(num_requests, d) if d else 0.0
        rates.append(num_requests * depth.worth(num_requests).tokens[d] / (draft + verify))
    first = next(d for d, rate in enumerate(rates) if rate >= (1 - EXACT) * max(rates))
    assert depth.choose(0, num_requests, deepest, costs) == first


def test_drafting_nothing_costs_nothing() -> None:
    """A table by requests alone was measured at one depth; no drafts are free in it all the same."""
    assert draft_ms(CostTable(np.array([0, 3.0]), np.ones(9)), 1, 2).tolist() == [0, 3, 3]


def test_steps_drafted_in_full_whatever_was_learned() -> None:
    cheap, dear, dearer = (CostTable(np.full(3, ms), np.ones(11)) for ms in (0.3, 1.0, 3.0))

    def in_full(survivals: list[float], costs: CostTable) -> list[int]:
        depth = DraftDepth(4)
        for n in range(8):
            assert depth.choose(n, 2, 4, costs) == 4
            depth.learn(np.tile(survivals, (2, 1)), np.full(2, 4), costs)
        return [n for n in range(256) if depth.choose(n, 2, 4, costs) == 4 and depth.in_full]

    useless, one = [0.0] * 4, [0.9, 0.0, 0.0, 0.0]
    assert in_full(one, cheap) == list(range(15, 256, 16))  # .3 / 16 is below 2 %
    assert in_full(useless, cheap) == in_full(useless, dear) == [63, 127, 191, 255]  # while not drafting is best
    assert in_full(useless, dearer) == [191]  # 3 / 192, the first multiple of 64 that is
    assert (EXPLORE_EVERY, EXPLORE_IDLE, EXPLORE_SHARE) == (16, 64, 0.02)
    assert DraftDepth(4).choose(0, 2, 0, dear) == 0


def test_another_load_neither_spoils_nor_hides_what_was_learned() -> None:
    """Drafts that pay at 2 requests and not at 32: going to and fro, each load goes on with its own choice at once."""
    costs = CostTable(np.ones(65), np.r_[1.0, np.linspace(100, 101, 8), np.linspace(110, 3000, 512)])
    depth, useful = DraftDepth(3, warmup=4), np.tile([0.6, 0.36, 0.2], (64, 1))
    for _ in range(2):
        for num_requests in (2, 32):
            for n in range(6):
                chosen = depth.choose(n, num_requests, 3, costs)
                depth.learn(useful[:num_requests, :chosen], np.full(num_requests, chosen), costs)
    assert [depth.choose(0, r, 3, costs) for r in (2, 32, 2)] == [3, 0, 3]
    assert depth.worth(17) is depth.worth(32) is not depth.worth(33) and depth.worth(1) is not depth.worth(2)
    assert depth.worth(2).seen.tolist() == [0, 12, 12, 12] and depth.worth(32).seen.tolist() == [0, 4, 4, 4]


# In the engine


def cycle(successor: dict[int, int]) -> Any:
    """A bigram model that goes from t to successor[t] almost surely."""
    logits = torch.zeros(8, 8)
    for t, after in successor.items():
        logits[t, after] = 30.0
    return tiny.bigram(logits)


def make(target: Any, drafter: Any, costs: CostTable, **settings: Any) -> LLM:
    config = {"method": "draft_model", "model": drafter, "num_speculative_tokens": 4, **settings}
    config["enable_adaptive_verification"] = True
    return LLM(target, config, max_num_seqs=2, max_model_len=256, cost_table=costs)


def by_step(llm: LLM) -> list[int]:
    """The depths that are going to be drafted, step by step."""
    depths: list[int] = []
    draft = llm.engine._draft

    def watch(*args: Any) -> Any:
        proposal = draft(*args)
        depths.append(0 if proposal is None else proposal.tokens.shape[1])
        return proposal

    llm.engine._draft = watch  # type: ignore[method-assign,assignment]
    return depths


def test_a_useless_drafter_is_left_alone() -> None:
    """Always wrong, and drafting costs: after the first verdicts it drafts for 2 % of the time, and then probes.

    A probe every tenth step would cost a tenth of a full draft's 1.2 beside a plain step's 1.1.
    """
    target, wrong = cycle(COUNTING), cycle({t: (t + 2) % 8 for t in range(8)})
    costs = CostTable(np.outer(np.ones(3), 0.3 * np.arange(5)), 1 + 0.05 * np.arange(11))
    llm = make(target, wrong, costs, probe_interval=10, estimator={"refit_interval": 8, "slope": 0.1})
    depths, admit, verified = by_step(llm), llm.engine._admit, []

    def watch(*given: Any) -> list[int]:
        verified.append(list(admitted := admit(*given)))
        return admitted

    llm.engine._admit = watch  # type: ignore[method-assign]
    out = llm.generate([[5], [1]], SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True))
    assert [o.outputs[0].token_ids[:5] for o in out] == [[6, 7, 0, 1, 2], [2, 3, 4, 5, 6]]
    settled = range(80, 145)
    full = [n for n in settled if n % 60 == 59]  # the first multiple of 10 for which 1.2 / 1.1 is at most 2 %
    assert [n for n in settled if depths[n]] == full
    assert {depths[n] for n in full} == {4}
    assert all(max(verified[n]) == 4 for n in full)  # a look that taught nothing about a position would starve it
    assert llm.stats.drafted_by_position[0] == 2 * sum(d > 0 for d in depths)
    assert llm.estimator is not None and llm.estimator.intercepts.isfinite().all() and llm.estimator.slope.isfinite()


def test_a_free_drafter_that_is_right_is_used_in_full() -> None:
    target = cycle(COUNTING)
    llm = make(target, target, CostTable(np.zeros(3), np.r_[1.0, 1 + 1e-3 * np.arange(10)]))
    depths = by_step(llm)
    llm.generate([[5], [1]], GREEDY)
    assert set(depths[:-1]) == {4}
    assert llm.stats.num_steps == 20  # 99 tokens after the first, five a step


def test_most_drafts_accepted_and_still_a_loss() -> None:
    """C113: .83 accepted, 6849 ms saved by 2243 ms of drafting, but 11763 ms of verification that nobody counted."""
    plain, drafting, verifying = 1.0, 2243 / 6849, 11763 / 6849  # in units of what an accepted draft saves

    def depth_for(draft_cost: float, verify_cost: float) -> int:
        costs = CostTable(np.array([[0.0, 0.0], [0.0, draft_cost]]), np.array([plain, plain, plain + verify_cost]))
        depth = DraftDepth(1, warmup=1)
        for _ in range(3):
            depth.learn(np.array([[0.83]]), np.array([1]), costs)
        return depth.choose(0, 1, 1, costs)

    assert depth_for(drafting, verifying) == 0
    assert depth_for(drafting, 0.0) == 1


def test_the_depth_in_between() -> None:
    """Sure and right behind token 0 to 3, unsure and wrong behind 4 to 7: the deeper drafts seldom pay."""
    target = cycle(COUNTING)
    drafter = cycle({t: t + 1 for t in range(3)})
    costs = CostTable(np.outer(np.ones(3), np.r_[0.0, 0.05 * np.arange(4) + 0.1]), 1 + 0.02 * np.arange(11))
    llm = make(target, drafter, costs, estimator={"refit_interval": 10})
    depths = by_step(llm)
    llm.generate([[5], [1], [2], [3]], GREEDY)
    assert 0 < np.mean(depths[20:]) < 4
    assert any(0 < d < 4 for d in depths[20:])
    assert llm.estimator is not None and llm.estimator.intercepts.isfinite().all() and llm.estimator.num_ignored == 0


@pytest.mark.parametrize("rule", ["lookahead", "stale", "early_stop"])
def test_probe_steps_and_fixed_settings(rule: str) -> None:
    """Switched off, or without adaptive verification: every step drafts all it can."""
    target, wrong = cycle(COUNTING), cycle({t: (t + 2) % 8 for t in range(8)})
    costs = CostTable(np.outer(np.ones(3), np.arange(5.0)), 1 + np.arange(11.0))
    for settings in ({"adaptive_drafting": False, "budget_rule": rule}, {"confidence": "threshold"}):
        llm = make(target, wrong, costs, **settings)
        depths = by_step(llm)
        llm.generate([[5]], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
        assert min(depths[:-4]) >= (4 if "budget_rule" in settings else 1)


# What a drafter is not shown while nothing is drafted


def trained(method: str, target: Any) -> Any:
    if method == "dflash":
        return tiny.dflash(target, 4)
    if method == "dspark":
        return test_dspark.trained(target, torch.arange(tiny.VOCAB))
    return test_eagle_mtp.model_of(method, target, torch.arange(tiny.VOCAB))


@pytest.mark.parametrize("method", ["dflash", "dspark", "eagle", "mtp"])
def test_a_drafter_that_catches_up_drafts_as_if_shown_every_step(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most steps draft nothing; requests of different lengths enter and leave meanwhile."""
    target = tiny.sharpen(tiny.llama(num_hidden_layers=2), 1.5).requires_grad_(False)
    monkeypatch.setattr(DraftDepth, "choose", lambda self, step, r, deepest, costs: min(deepest, 3 * (step % 7 == 6)))
    found: dict[int, Any] = {}
    for most in (0, 3, 32):
        monkeypatch.setattr(engine, "MOST_OWED", most)
        llm = make(target, trained(method, target), tiny.flat_costs(), method=method, probe_interval=0)
        shown, proposed = [0], []
        extend, propose = llm.engine.drafter.extend, llm.engine.drafter.propose

        def counted(*given: Any, extend: Any = extend, shown: Any = shown) -> None:
            shown[0] += 1
            extend(*given)

        def kept(*given: Any, propose: Any = propose, proposed: Any = proposed, **more: Any) -> Any:
            proposal = propose(*given, **more)
            proposed.append(proposal.logits.clone())
            return proposal

        monkeypatch.setattr(llm.engine.drafter, "extend", counted)
        monkeypatch.setattr(llm.engine.drafter, "propose", kept)
        lengths = (5, 30, 11, 24, 17, 40, 9)
        params = [SamplingParams(max_tokens=n, seed=n, ignore_eos=True) for n in lengths]
        out = llm.generate([[3 + n % 5, 4, n] for n in lengths], params)
        assert not any(r.owed for r in llm.engine.running)
        found[most] = [o.outputs[0].token_ids for o in out], proposed, shown[0], llm.stats.num_steps
    assert found[0][0] == found[3][0] == found[32][0] and len(found[0][1]) > 5
    for most in (3, 32):
        for a, b in zip(found[0][1], found[most][1], strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert found[32][2] < found[3][2] < found[0][2] <= found[0][3] + len(lengths)


# The emitted law, with depths that vary


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.sharpen(tiny.llama(vocab_size=8, num_hidden_layers=1, pad_token_id=None, eos_token_id=None), 1.2)


@pytest.mark.parametrize(
    ("method", "rule"), [("dflash", "lookahead"), *(("draft_model", rule) for rule in lossless.SAFE_RULES)]
)
def test_emitted_law(method: str, rule: str, target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hardest case: the last step's survivals decide on the depth, and every little change of them does."""
    drafter = tiny.near(target, 0.12) if method == "draft_model" else tiny.dflash(target, 4, vocab_ids=[0, 1, 2, 4, 7])
    chosen: list[int] = []

    def erratic(self: DraftDepth, step: int, num_requests: int, deepest: int, cost_table: CostTable) -> int:
        self.rate, worth = 1.0, self.worth(num_requests)
        chosen.append((int(1e6 * worth.tokens.sum()) + step) % (deepest + 1) if worth.seen[deepest] else deepest)
        return chosen[-1]

    monkeypatch.setattr(DraftDepth, "choose", erratic)
    llm, whole, nucleus = lossless.run(target, method, drafter, budget_rule=rule)
    assert (np.bincount(chosen) > 0.1 * len(chosen)).all() and max(chosen) == 3
    assert 0.1 < lossless.trimmed(llm) < 0.8
    for answers, top_p in ((whole, 1.0), (nucleus, lossless.NUCLEUS)):
        assert lossless.p_value((answers, lossless.exact_law(target, lossless.PROMPT, top_p))) >= lossless.ALPHA


def test_emitted_law_of_the_real_choice(target: Any) -> None:
    """Few requests and dear drafts, so that the choice moves between no drafting and all of it."""
    config = {
        "method": "draft_model",
        "model": tiny.near(target, 0.12),
        "num_speculative_tokens": 3,
        "enable_adaptive_verification": True,
        "estimator": {"slope": 2.0, "intercept": 1.0, "refit_interval": 30},
    }
    costs = CostTable(np.outer(np.ones(4), [0.0, 0.1, 0.25, 0.5]), 1 + 0.18 * np.arange(13))
    llm = LLM(target, config, max_num_seqs=3, max_model_len=16, cost_table=costs)
    assert llm.engine.depth is not None
    llm.engine.depth.rate = 0.5
    depths = by_step(llm)
    out = llm.generate([lossless.PROMPT] * 600, SamplingParams(max_tokens=4))
    shares = np.bincount(depths, minlength=4) / len(depths)
    assert (shares > 0.02).sum() >= 3, shares
    answers = [o.outputs[0].token_ids for o in out]
    assert lossless.p_value((answers, lossless.exact_law(target, lossless.PROMPT, 1.0))) >= lossless.ALPHA


# Ending the block: nothing but the drafting changes


def deep(llm: LLM) -> None:
    """Plan for the full depth in every step, and let the block end."""
    assert llm.engine.depth is not None
    llm.engine.depth.choose = lambda step, num_requests, deepest, cost_table: deepest  # type: ignore[method-assign]
    llm.engine.depth.in_full = False


@pytest.mark.parametrize("num_requests", [1, 3])
def test_ending_the_block_changes_nothing_but_the_drafting(num_requests: int, target: Any) -> None:
    """early_stop remembers nothing, so the same seeds give the same tokens with and without it."""
    costs = CostTable(np.outer(np.ones(4), 0.1 * np.arange(6)), 1 + 0.18 * np.arange(20))
    told: list[Any] = []
    drafted: list[int] = []
    for ends in (True, False):
        config = {"method": "draft_model", "model": tiny.near(target, 0.12), "num_speculative_tokens": 5}
        config |= {"enable_adaptive_verification": True, "budget_rule": "early_stop", "probe_interval": 9}
        llm = LLM(target, config, max_num_seqs=num_requests, max_model_len=64, cost_table=costs)
        deep(llm)
        llm.engine.depth.in_full = not ends  # type: ignore[union-attr]
        out = llm.generate([lossless.PROMPT] * 6, [SamplingParams(max_tokens=25, seed=i) for i in range(6)])
        stats = llm.stats
        told.append(([o.outputs[0].token_ids for o in out], stats.verified_by_position.tolist(), stats.num_steps))
        drafted.append(stats.drafted_by_position.sum())
    assert told[0] == told[1]
    assert drafted[0] < (0.8 if num_requests == 1 else 1.0) * drafted[1]


@pytest.mark.parametrize("rule", ["lookahead", "stale"])
def test_emitted_law_when_blocks_end(rule: str, target: Any) -> None:
    config = {
        "method": "draft_model",
        "model": tiny.near(target, 0.12),
        "num_speculative_tokens": 3,
        "enable_adaptive_verification": True,
        "budget_rule": rule,
        "estimator": {"slope": 2.0, "intercept": 1.0, "refit_interval": 30},
    }
    costs = CostTable(np.zeros((3, 4)), 1 + 0.25 * np.arange(13))
    llm = LLM(target, config, max_num_seqs=2, max_model_len=16, cost_table=costs)
    deep(llm)
    depths = by_step(llm)
    out = llm.generate([lossless.PROMPT] * 400, SamplingParams(max_tokens=5))
    assert (np.bincount(depths, minlength=4)[1:] > 0.02 * len(depths)).all()
    answers = [o.outputs[0].token_ids for o in out]
    assert lossless.p_value((answers, lossless.exact_law(target, lossless.PROMPT, 1.0))) >= lossless.ALPHA


# What it costs


def test_profiles_measure_drafting_by_depth() -> None:
    """A draft model's drafts come one after the other: more of them take longer."""
    target = tiny.llama()
    llm = make(target, tiny.near(target, 0.3), CostTable(np.ones(3), np.ones(11)))
    measured = profiling.profile(llm, context=16, repeats=3)
    assert {p[:2] for p in measured.metadata["draft_points"]} == {(r, d) for r in (1, 2) for d in (1, 2, 4)}
    assert measured.draft_ms.shape == (3, 5)
    assert measured.draft(2, 0) == 0 < measured.draft(2, 1) < measured.draft(2, 4)
    assert llm.engine.fixed_depth is None


def test_bookkeeping_takes_less_than_three_tenths_of_a_millisecond() -> None:
    rng = np.random.default_rng(0)
    depth, costs = DraftDepth(7), CostTable(np.ones((65, 8)), np.r_[1.0, np.linspace(22, 340, 512)])
    survival, capacities = np.minimum.accumulate(rng.random((64, 7)), axis=1), np.full(64, 7)
    best = np.inf
    for n in range(200):
        began = time.perf_counter()
        depth.learn(survival, capacities, costs)
        depth.choose(n, 64, 7, costs)
        best = min(best, time.perf_counter() - began)
    assert best < (1e-3 if sys.gettrace() else 0.3e-3)  # coverage traces every line
