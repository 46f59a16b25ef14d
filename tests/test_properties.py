"""Invariants that hold for every input, searched by hypothesis: budget, allocation, packing, sampling, estimator, cost.

The name of a test states its invariant. Inputs are as odd as the signatures allow: cost tables that fall again, ties,
probabilities of exactly 0 and 1, features that are infinite or NaN, requests without drafts. The examples are the same
in every run.
"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from avref.cost_table import CostTable
from avref.estimator import MAX_LOG_ODDS, STEP_RULES, OnlineAcceptanceEstimator
from avref.layout import Layout
from avref.packed import KVCache, attend
from avref.pruning import StaleSurvival, SurvivalProfile, allocate, choose_budget, survival
from avref.sampling import probs, residual, sample, verify

settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=100)
fixed = settings.get_profile("fixed")

RULES = ("argmax", "early_stop", "lookahead")
PROBABILITY = st.one_of(st.sampled_from([0.0, 1.0, 0.5, 1 - 2**-24, 1e-30]), st.floats(0, 1))
UNIFORM = st.one_of(st.sampled_from([0.0, float(np.nextafter(np.float32(1), np.float32(0)))]), st.floats(0, 0.99))


def row_of(elements, *shape):
    return arrays(np.float64, shape, elements=elements)


# --- pruning: budget and allocation -----------------------------------------------------------------------------------


@st.composite
def steps(draw, max_requests=3, max_depth=4):
    """One step's survivals [R, K], capacities [R], a cost table of any shape, rising or not, and a profile."""
    num_requests, depth = draw(st.integers(1, max_requests)), draw(st.integers(1, max_depth))
    S = survival(torch.from_numpy(draw(row_of(PROBABILITY, num_requests, depth)))).numpy()
    capacities = draw(st.lists(st.integers(0, depth), min_size=num_requests, max_size=num_requests))
    most = num_requests * (depth + 1)
    ms = st.one_of(st.sampled_from([1.0, 2.0, 4.0]), st.floats(0.05, 20))
    verify_ms = draw(row_of(ms, most + 1))
    if draw(st.booleans()):
        verify_ms = np.maximum.accumulate(verify_ms)
    costs = CostTable(np.full(num_requests + 1, draw(st.sampled_from([0.0, 0.3, 5.0]))), verify_ms)
    profile = np.sort(draw(row_of(PROBABILITY, num_requests * depth)))[::-1]
    return S, capacities, costs, profile


def slots(S, capacities):
    """The live slots in the order of admission: survival, then position, then request."""
    live = [(r, k) for r, limit in enumerate(capacities) for k in range(limit)]
    return sorted(live, key=lambda slot: (-S[slot], slot[1], slot[0]))


def ratios(S, capacities, costs):
    """Tokens per millisecond by budget, one sum after the other."""
    tokens, found = float(len(S)), []
    for budget, slot in enumerate([None, *slots(S, capacities)]):
        tokens += 0.0 if slot is None else S[slot]
        found.append((tokens, float(costs.step_ms(len(S), len(S) + budget, S.shape[1]))))
    return found


@fixed
@given(c=row_of(st.one_of(PROBABILITY, st.just(np.nan)), 3, 6), single=st.booleans())
def test_survival_never_rises_stays_below_every_confidence_and_keeps_nan(c, single):
    c = torch.from_numpy(c).to(torch.float32 if single else torch.float64)
    S = survival(c)
    for row, got in zip(c, S, strict=True):
        known = int(row.isnan().int().cumsum(0).eq(0).sum())  # positions before the first NaN
        assert S.dtype == c.dtype and got[known:].isnan().all()
        torch.testing.assert_close(got[:known], row[:known].cumprod(0), rtol=1e-6, atol=1e-38)
        assert (got[:known].diff() <= 0).all() and (got[:known] <= row[:known]).all()


@fixed
@given(steps())
def test_argmax_is_the_smallest_of_the_best_prefix_closed_choices(step):
    S, capacities, costs, _ = step
    num_requests, depth = S.shape
    scored = []
    for lengths in itertools.product(*(range(limit + 1) for limit in capacities)):
        tokens = num_requests + sum(S[r, :n].sum() for r, n in enumerate(lengths))
        ms = float(costs.step_ms(num_requests, num_requests + sum(lengths), depth))
        scored.append((tokens / ms, sum(lengths)))
    best = max(scored)[0]
    budget = choose_budget(S, costs, num_requests, "argmax", capacities=capacities)
    assert budget == min(n for ratio, n in scored if ratio >= best * (1 - 1e-9))


def grown(rule, S, capacities, costs, profile):
    """The budget of early_stop and lookahead as the design states them, every minimum and every sum written out."""
    by_budget, ranked = ratios(S, capacities, costs), [S[slot] for slot in slots(S, capacities)]

    def improves(budget):
        (tokens, ms), s, mean = by_budget[budget], ranked[budget], profile[budget]
        if rule == "early_stop":
            return (tokens + s) / by_budget[budget + 1][1] > tokens / ms * (1 + 1e-9)
        predicted = [min(s, m * min(s / mean, 4.0)) if mean > 0 else 0.0 for m in profile[budget + 1 : len(ranked)]]
        ends = zip(itertools.accumulate([s, *predicted]), by_budget[budget + 1 :], strict=True)
        return any((tokens + tail) / end_ms > tokens / ms * (1 + 1e-9) for tail, (_, end_ms) in ends)

    return next((n for n in range(len(ranked)) if not improves(n)), len(ranked))


@fixed
@given(steps())
def test_early_stop_and_lookahead_grow_slot_by_slot_until_no_end_improves(step):
    S, capacities, costs, profile = step
    for rule in ("early_stop", "lookahead"):
        budget = choose_budget(S, costs, len(S), rule, profile, capacities)
        assert budget == grown(rule, S, capacities, costs, profile), rule


@fixed
@given(steps())
def test_lookahead_never_stops_where_the_next_draft_pays_by_itself(step):
    """However rare such a draft was: what may be read is not discounted by what past steps were like."""
    S, capacities, costs, profile = step
    early_stop, lookahead = (
        choose_budget(S, costs, len(S), rule, profile, capacities) for rule in ("early_stop", "lookahead")
    )
    assert lookahead >= early_stop


def test_early_stop_and_lookahead_on_random_staircases():
    """Steps of these heights leave a rule in the middle of one, where it must not look back at the end of the last."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        shape = num_requests, depth = int(rng.integers(1, 5)), int(rng.integers(2, 7))
        S = np.sort(rng.random(shape) ** 2, axis=1)[:, ::-1]
        profile = np.sort(rng.random(S.size) ** 2)[::-1]
        costs = CostTable(np.zeros(5), 1 + rng.choice([0.0, 0.0, 0.3, 0.9], size=31).cumsum())
        for rule in ("early_stop", "lookahead"):
            expected = grown(rule, S, [depth] * num_requests, costs, profile)
            assert choose_budget(S, costs, num_requests, rule, profile) == expected


@pytest.mark.parametrize("slope", [0.002, 0.02, 0.05])
def test_lookahead_grows_slot_by_slot_across_the_blocks_that_it_works_in(slope):
    rng = np.random.default_rng(4)
    S, past = (survival(torch.from_numpy(rng.beta(3, 0.7, (40, 5)))).numpy() for _ in range(2))
    costs = CostTable(np.zeros(41), 20 + slope * 16 * np.ceil(np.arange(241) / 16))
    profile = np.sort(past.ravel())[::-1]
    expected = grown("lookahead", S, [5] * 40, costs, profile)
    assert expected > 64 and choose_budget(S, costs, 40, "lookahead", profile) == expected


@fixed
@given(steps(), st.integers(1, 20), st.randoms(use_true_random=False))
def test_budgets_fit_slots_and_table_whatever_the_order_of_requests(step, known, random):
    S, capacities, costs, profile = step
    short = CostTable(costs.draft_ms, costs.verify_ms[: max(len(S), known) + 1])
    order = random.sample(range(len(S)), len(S))
    for rule in RULES:
        budget = choose_budget(S, short, len(S), rule, profile, capacities)
        assert 0 <= budget <= min(sum(capacities), short.token_limit(len(S)) - len(S))
        assert choose_budget(S[order], short, len(S), rule, profile, [capacities[r] for r in order]) == budget


@fixed
@given(steps(), st.floats(0, 1))
def test_growing_rules_read_no_survival_behind_the_slot_at_which_they_stop(step, factor):
    """What lies behind it depends on tokens whose fate is being decided: reading it would change the emitted law."""
    S, capacities, costs, profile = step
    for rule in ("early_stop", "lookahead"):
        budget = choose_budget(S, costs, len(S), rule, profile, capacities)
        last_read = [S[slot] for slot in slots(S, capacities)][: budget + 1][-1:] or [0.0]
        changed = np.where(S < last_read[0], S * factor, S)
        assert choose_budget(changed, costs, len(S), rule, profile, capacities) == budget


@fixed
@given(steps(), st.integers(0, 15))
def test_allocation_is_the_best_slots_with_ties_by_position_then_request_and_grows_one_by_one(step, budget):
    S, capacities, _, _ = step
    for amount in (budget, budget + 1):
        admitted = allocate(torch.from_numpy(S), amount, capacities)
        winners = slots(S, capacities)[:amount]
        assert admitted.tolist() == [sum(r == row for r, _ in winners) for row in range(len(S))]
        assert all(k < admitted[r] for r, k in winners)  # a prefix of every request


@fixed
@given(st.lists(steps(), min_size=1, max_size=4), st.integers(0, 12))
def test_what_past_steps_predict_is_always_a_falling_row_of_probabilities(past, num_slots):
    """For the profile of ranks and for old survivals, whichever requests and positions were seen."""
    profile, stale = SurvivalProfile(rate=0.3), StaleSurvival(4, rate=0.3)
    for S, capacities, _, _ in past:
        profile.update(S, capacities)
        stale.record(range(len(S)), np.pad(S, ((0, 0), (0, 4 - S.shape[1]))), capacities)
    old = stale.gather([2, 0, "new"], [4, 3, 2]).numpy()
    predicted = profile.predict(num_slots)
    for row in [*old, *([] if predicted is None else [predicted])]:
        assert ((row >= 0) & (row <= 1)).all() and (np.diff(row) <= 0).all()
    assert old[1, 3] == 0 and old[2].tolist() == [1, 1, 0, 0]
    assert (predicted is None) == (not any(sum(capacities) for _, capacities, _, _ in past))
    np.testing.assert_array_equal(stale.gather([0, 2]), stale.gather([2, 0])[[1, 0]])


# --- cost table -------------------------------------------------------------------------------------------------------


@fixed
@given(
    points=st.dictionaries(st.integers(1, 60), st.floats(0, 20), min_size=2, max_size=6),
    requests=st.lists(st.integers(1, 6), min_size=1, max_size=2, unique=True),
    padded=st.sampled_from([0, 20, 500]),
    reach=st.floats(0.5, 4),
)
def test_tables_from_noisy_curves_are_positive_and_never_fall_by_tokens_or_by_requests(points, requests, padded, reach):
    largest = max(1, int(reach * max(points)))
    curve = CostTable.from_curves(
        [(1, 1.0), (3, 0.5)], list(points.items()), max_requests=8, max_tokens=largest, padded_up_to=padded
    ).verify(1, np.arange(1, largest + 1))
    assert (curve > 0).all() and (np.diff(curve) >= 0).all()
    assert all(curve[size - 1] >= ms for size, ms in points.items() if size <= largest)

    surface = [(r, size, ms * r) for r in requests for size, ms in points.items()]
    table = CostTable.from_curves(
        [(1, 1, 1.0), (3, 1, 0.5), (1, 3, 0.2), (3, 3, 4.0)],
        surface,
        max_requests=max(requests),
        max_tokens=largest,
        padded_up_to=padded,
    )
    rows = [table.verify(r, np.arange(1, table.token_limit(r) + 1)) for r in range(1, max(requests) + 1)]
    for less, more in itertools.pairwise(rows):
        assert (more[: len(less)] >= less - 1e-9).all() or padded == 0  # without padding, at equal tokens per request
    for r, row in enumerate(rows, start=1):
        assert (row > 0).all() and (np.diff(row) >= -1e-9).all()
        np.testing.assert_array_equal(table.step_ms(r, np.arange(1, len(row) + 1), 2), table.draft(r, 2) + row)
        assert table.draft(r, 1) <= table.draft(r, 2) <= table.draft(r, 3)
        with pytest.raises(ValueError, match="not profiled"):
            table.verify(r, len(row) + 1)


# --- packing ----------------------------------------------------------------------------------------------------------

ROWS = st.one_of(  # start and count of each; the second kind is wide for a few long chunks
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1, 1, 1, 1, 1, 2, 19])), min_size=5, max_size=12),
)


@fixed
@given(ROWS, st.integers(1, 3))
def test_layout_gives_every_token_its_own_row_position_and_past(rows, group):
    starts, counts = map(list, zip(*rows, strict=True))
    layout = Layout(starts, counts)
    tokens = [(r, i) for r, count in enumerate(counts) for i in range(count)]
    assert list(zip(layout.row.tolist(), layout.within.tolist(), strict=True)) == tokens
    assert layout.position.tolist() == [starts[r] + i for r, i in tokens]
    assert [tokens[i] for i in layout.first] == [(r, 0) for r in range(len(rows))]
    assert [tokens[i] for i in layout.last] == [(r, count - 1) for r, count in enumerate(counts)]
    assert (layout.num_rows, layout.num_tokens) == (len(rows), len(tokens))
    assert layout.context == max(map(sum, rows))
    x = torch.arange(1.0, 2 * len(tokens) + 1).view(-1, 2)
    assert sorted(n for block in layout.blocks for n in block.tokens.tolist()) == list(range(len(tokens)))
    for block in layout.blocks:
        padded, own = block.pad(x), block.tokens.tolist()
        assert padded.shape == (len(block.rows), block.width, 2)
        assert torch.equal(block.unpad(padded), x[block.tokens]) and padded.count_nonzero() == 2 * len(own)
        assert block.context == 1 + max(layout.position[block.tokens])
        for window in (None, 1, 3):
            mask = block.mask(group, window, torch.float32)
            assert mask.shape == (len(block.rows), 1, group * block.width, block.context)
            seen = mask.view(len(block.rows), group, block.width, block.context) == 0
            for n, row, query in zip(own, block.row, block.within, strict=True):
                r, i = tokens[n]
                assert block.rows[row] == r and torch.equal(padded[row, query], x[n])
                last = starts[r] + i
                visible = [key <= last and (window is None or key > last - window) for key in range(block.context)]
                assert seen[row, :, query].tolist() == [visible] * group


COUNT = st.one_of(st.integers(1, 3), st.sampled_from([90, 270]))
ROUND = st.tuples(COUNT, st.lists(st.tuples(COUNT, st.integers(0, 60)), min_size=4, max_size=4), st.integers(0, 4))


@fixed
@given(st.lists(ROUND, min_size=1, max_size=6))
def test_cache_holds_what_lists_would_hold_through_growth_rollback_and_moves(rounds):
    """A row enters behind the others, all get tokens, some are rolled back, and the last row takes another's place."""
    cache, held, names = KVCache(4, 2000), [], itertools.count(1)

    def write(counts, first_row):
        rows = held[first_row:]
        layout = Layout([len(row) for row in rows], counts, first_row=first_row)
        new = torch.tensor([float(next(names)) for _ in range(layout.num_tokens)])
        keys, values = cache.update(0, layout, new.view(-1, 1, 1), -new.view(-1, 1, 1))
        for row, more, key, value in zip(rows, new.split(counts), keys, values, strict=True):
            row += more.tolist()
            assert key[: len(row)].flatten().tolist() == row == (-value[: len(row)]).flatten().tolist()

    for entering, amounts, leaving in rounds:
        if len(held) < 4:
            held.append([])
            write([entering], len(held) - 1)
        write([count for count, _ in amounts[: len(held)]], 0)
        for row, (_, rejected) in zip(held, amounts, strict=False):
            del row[max(1, len(row) - rejected) :]
        if leaving < len(held) - 1:
            cache.move(len(held) - 1, leaving)
            held[leaving] = held.pop()


@fixed
@given(ROWS, st.sampled_from([1, 2]), st.sampled_from([None, 2]), st.sampled_from([None, 1.5]), st.integers(0, 99))
def test_attention_is_each_rows_own_softmax_over_its_own_past_only(rows, group, window, softcap, seed):
    """Stale keys behind a row, and all of its neighbours' keys, are large and must not be seen."""
    g = torch.Generator().manual_seed(seed)
    starts, counts = map(list, zip(*rows, strict=True))
    layout = Layout(starts, counts)
    kv_heads, size = 2, 3
    query = torch.randn(layout.num_tokens, group * kv_heads, size, generator=g)
    keys, values = torch.randn(2, len(rows), layout.context, kv_heads, size, generator=g)
    for r, (start, count) in enumerate(rows):
        keys[r, start + count :], values[r, start + count :] = 30.0, 1e4
    got = attend(query, keys, values, layout, 0.7, window, softcap)
    for n, (r, position) in enumerate(zip(layout.row.tolist(), layout.position.tolist(), strict=True)):
        past = slice(0 if window is None else max(0, position + 1 - window), position + 1)
        for head in range(group * kv_heads):
            scores = 0.7 * keys[r, past, head // group].double() @ query[n, head].double()
            scores = scores if softcap is None else softcap * (scores / softcap).tanh()
            expected = scores.softmax(0) @ values[r, past, head // group].double()
            torch.testing.assert_close(got[n, head].double(), expected, rtol=1e-4, atol=1e-4)


# --- sampling ---------------------------------------------------------------------------------------------------------

LOGITS = st.one_of(st.sampled_from([-np.inf, 0.0, 1.0, 2.0]), st.floats(-30, 30, width=32))
SETTINGS = st.tuples(
    st.sampled_from([0.0, 1e-6, 1e-3, 0.5, 1.0, 3.0]),
    st.integers(0, 9),
    st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1)),
)


@st.composite
def logit_rows(draw, num_rows, vocab_size):
    rows = draw(row_of(LOGITS, num_rows, vocab_size))
    rows[np.isneginf(rows).all(axis=1), 0] = 0.0  # nothing but -inf is refused
    return torch.from_numpy(rows).float()


@fixed
@given(st.integers(1, 8).flatmap(lambda size: logit_rows(1, size)), SETTINGS)
def test_truncation_keeps_the_most_probable_tokens_and_no_more_than_are_needed(logits, setting):
    """What stays is never less probable than what goes, reaches top_p, would not without its last, and is at most k."""
    temperature, top_k, top_p = setting
    p = probs(logits, *(torch.tensor([value]) for value in setting))[0].double()
    kept = p > 0
    assert p.sum() == pytest.approx(1, abs=1e-6) and p.dtype == torch.float64 and kept[logits[0].argmax()]
    if temperature < 1e-5:
        assert kept.sum() == 1
        return
    full = (logits[0].double() / np.float32(temperature)).softmax(0)
    torch.testing.assert_close(p[kept] / p.max(), full[kept] / full.max(), rtol=1e-5, atol=1e-9)
    assert full[kept].min() >= full[~kept].max() * (1 - 1e-6) if (~kept).any() else True
    order = full.argsort(descending=True, stable=True)
    eligible = order[: top_k or None]
    mass = full[eligible] / full[eligible].sum()
    before = mass.cumsum(0) - mass
    assert kept.sum() <= len(eligible)
    if top_p < 1:
        assert mass[: kept.sum()].sum() >= top_p - 1e-5 and (before[kept.sum() - 1] <= top_p + 1e-5)
    else:
        assert kept.sum() >= (mass > 1e-30).sum()


@fixed
@given(row_of(PROBABILITY, 1, 7), UNIFORM, UNIFORM)
def test_sample_inverts_the_cumulative_law_rises_with_u_and_never_picks_zero(weights, u, other):
    weights = torch.from_numpy(weights)
    if weights.sum() == 0:
        weights[0, 3] = 1e-30
    low, high = (int(sample(weights, torch.tensor([x]))) for x in sorted((u, other)))
    cdf, total = weights[0].cumsum(0), float(weights.sum())
    assert low <= high and weights[0, low] > 0 and weights[0, high] > 0
    assert cdf[low] - weights[0, low] <= min(u, other) * total * (1 + 1e-6) + 1e-38
    assert min(u, other) * total * (1 - 1e-6) <= cdf[low] + 1e-38


@fixed
@given(row_of(PROBABILITY, 2, 6))
def test_accepting_and_the_residual_together_emit_exactly_p(weights):
    """min(p, q) + (1 - sum min(p, q)) residual = p, token by token."""
    p, q = (torch.from_numpy(w + (w.sum() == 0)) for w in weights)
    p, q = p / p.sum(), q / q.sum()
    rest = residual(p[None], q[None])[0]
    assert (rest >= 0).all() and rest.sum() == pytest.approx(1)
    overlap = torch.minimum(p, q)
    torch.testing.assert_close(overlap + (1 - overlap.sum()) * rest, p, rtol=0, atol=1e-12)
    assert (rest[p <= q] == 0).all() or overlap.sum() > 1 - 1e-9  # p itself, when nothing is left


@st.composite
def verifications(draw):
    """A packed batch for `verify`: mixed settings, drafts cut anywhere, one-hot or full q, all ties allowed."""
    num_requests, num_drafts, size = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(2, 6))
    verified = torch.tensor(draw(st.lists(st.integers(0, num_drafts), min_size=num_requests, max_size=num_requests)))
    chosen = torch.from_numpy(draw(arrays(np.int64, (num_requests, num_drafts), elements=st.integers(0, size - 1))))
    q = q_drawn = None
    if draw(st.booleans()):
        q = torch.from_numpy(draw(row_of(st.floats(0.01, 1), num_requests, num_drafts, size))).float()
        q = q / q.sum(-1, keepdim=True)
        q_drawn = q.gather(-1, chosen[..., None]).squeeze(-1)
    each = [draw(SETTINGS) for _ in range(num_requests)]
    return {
        "logits": draw(logit_rows(int(verified.sum()) + num_requests, size)),
        "num_verified": verified,
        "tokens": chosen,
        "q": q,
        "q_drawn": q_drawn,
        "u_accept": torch.from_numpy(draw(row_of(UNIFORM, num_requests, num_drafts))).float(),
        "u_final": torch.from_numpy(draw(row_of(UNIFORM, num_requests))).float(),
        **{
            name: torch.tensor(column)
            for name, column in zip(("temperature", "top_k", "top_p"), zip(*each, strict=True), strict=True)
        },
    }


def only(batch, r):
    """Request r of the batch, alone."""
    first = int((batch["num_verified"][:r] + 1).sum())
    rows = slice(first, first + int(batch["num_verified"][r]) + 1)
    rest = {name: None if value is None else value[r : r + 1] for name, value in batch.items()}
    return {**rest, "logits": batch["logits"][rows]}


@fixed
@given(verifications(), st.floats(0, 1))
def test_a_verdict_is_a_prefix_then_a_token_that_the_target_can_emit_and_company_changes_nothing(batch, factor):
    verdict = verify(**batch)
    fewer = verify(**{**batch, "u_accept": batch["u_accept"] * factor}).num_accepted
    assert (fewer >= verdict.num_accepted).all()  # a smaller uniform never rejects more
    for r, count in enumerate(verdict.num_accepted.tolist()):
        alone = only(batch, r)
        assert torch.equal(verify(**alone).tokens[0], verdict.tokens[r])
        emitted = verdict.tokens[r].tolist()
        assert 0 <= count <= batch["num_verified"][r] and emitted[count + 1 :] == [-1] * (len(emitted) - count - 1)
        assert emitted[:count] == batch["tokens"][r, :count].tolist()
        rows = len(alone["logits"])
        p = probs(alone["logits"], *(alone[name].expand(rows) for name in ("temperature", "top_k", "top_p")))
        for j, token in enumerate(emitted[: count + 1]):
            assert p[j, token] > 0
        if count < batch["num_verified"][r] and batch["q"] is None and p[count].max() < 1:
            assert emitted[count] != batch["tokens"][r, count]  # a rejected one-hot draft has no residual mass


# --- estimator --------------------------------------------------------------------------------------------------------

FEATURE = st.one_of(st.sampled_from([0.0, np.inf, -np.inf, np.nan, 40.0]), st.floats(-60, 60))


@st.composite
def traffic(draw, elements=FEATURE, max_rows=8):
    """Settings of an estimator and the verdicts of one round: features [R, K], accepted and verified [R]."""
    num_positions, rows = draw(st.integers(1, 4)), draw(st.integers(0, max_rows))
    shared = draw(st.booleans())
    arguments = {
        "num_positions": num_positions,
        "step": draw(st.sampled_from(STEP_RULES)),
        "shared_slope": shared,
        "damping": draw(st.sampled_from([0.0, 50.0])),
        "slope": draw(st.floats(0, 3)),
        "intercept": draw(st.lists(st.floats(-20, 20), min_size=num_positions, max_size=num_positions)),
    }
    f = torch.from_numpy(draw(row_of(elements, rows, num_positions)))
    verified = torch.from_numpy(draw(arrays(np.int64, rows, elements=st.integers(0, num_positions))))
    accepted = torch.from_numpy(draw(arrays(np.int64, rows, elements=st.integers(0, num_positions))))
    return arguments, f, torch.minimum(accepted, verified), verified


def labels(f, accepted, verified):
    """Which drafts are graded, and how: bool [R, K] and 0 or 1 [R, K]."""
    k = torch.arange(f.shape[1])
    graded = (k <= accepted[:, None]) & (k < verified[:, None])
    return graded, (k < accepted[:, None]).double()


def same_round(a, b):
    for name in ("sums", "feature_min", "feature_max", "num_ignored"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=1e-9, atol=1e-9)


@fixed
@given(traffic())
def test_predictions_rise_with_the_feature_clamp_at_forty_and_keep_nan_in_its_place(round_):
    arguments, f, _, _ = round_
    est = OnlineAcceptanceEstimator(**arguments)
    c = est.predict(f)
    assert c.dtype == torch.float32 and torch.equal(c.isnan(), f.isnan())
    known = c[~f.isnan()]
    assert ((known >= 0) & (known <= 1)).all()
    assert torch.equal(c.nan_to_num(2), est.predict(f.clamp(-MAX_LOG_ODDS, MAX_LOG_ODDS)).nan_to_num(2))
    higher = est.predict(f + 1)
    assert (higher >= c)[~f.isnan()].all()


@settings(fixed, max_examples=200)
@given(st.lists(traffic(), min_size=1, max_size=1), st.integers(1, 6))
def test_refits_stay_finite_with_a_slope_of_zero_or_more_and_touch_graded_positions_only(rounds, repeats):
    arguments, f, accepted, verified = rounds[0]
    est = OnlineAcceptanceEstimator(**arguments)
    graded, _ = labels(f, accepted, verified)
    usable = (graded & ~f.isnan()).any(0)
    for _ in range(repeats):
        est.observe(f, accepted, verified)
        before = est.intercepts
        est.refit()
        assert est.slope.isfinite().all() and (est.slope >= 0).all() and est.intercepts.isfinite().all()
        assert torch.equal(est.intercepts[~usable], before[~usable])
        assert not est.sums.any() and est.num_steps == 0
    assert est.num_ignored == repeats * (graded & f.isnan()).sum()


@settings(fixed, max_examples=200)
@given(traffic(elements=st.one_of(st.sampled_from([0.0, 40.0, -40.0]), st.floats(-40, 40)), max_rows=40))
def test_self_concordant_never_raises_the_loss_of_the_round(round_):
    arguments, f, accepted, verified = round_
    est = OnlineAcceptanceEstimator(**{**arguments, "step": "self_concordant"})
    graded, y = labels(f, accepted, verified)

    def loss():
        z = est.slope * f + est.intercepts
        return float((torch.logaddexp(z, torch.zeros_like(z)) - y * z)[graded].sum())

    before = loss()
    est.observe(f, accepted, verified)
    est.refit()
    assert loss() <= before * (1 + 1e-9) + 1e-9


@fixed
@given(traffic(), FEATURE)
def test_a_draft_that_was_not_graded_is_never_read(round_, noise):
    """Behind the first rejection and beyond what was verified there is no label, whatever the feature says."""
    arguments, f, accepted, verified = round_
    est, other = (OnlineAcceptanceEstimator(**arguments) for _ in range(2))
    graded, y = labels(f, accepted, verified)
    est.observe(f, accepted, verified)
    other.observe(torch.where(graded, f, noise), accepted, verified)
    assert torch.equal(est.sums, other.sums)
    usable = graded & ~f.isnan()
    x = torch.where(usable, f.clamp(-MAX_LOG_ODDS, MAX_LOG_ODDS), 0.0)
    r = torch.where(usable, y - torch.sigmoid(est.slope * x + est.intercepts), 0.0)
    w = torch.where(usable, (y - r) * (1 - y + r), 0.0)
    expected = [w * x * x, w * x, w, r * x, r, usable.double()]
    torch.testing.assert_close(est.sums, torch.stack([term.sum(0) for term in expected]), rtol=1e-9, atol=1e-9)
    for k in usable.any(0).nonzero().flatten():
        assert (est.feature_min[k], est.feature_max[k]) == (x[usable[:, k], k].min(), x[usable[:, k], k].max())


@fixed
@given(traffic(), st.integers(0, 8), st.randoms(use_true_random=False))
def test_a_round_is_the_same_in_any_order_and_split_over_any_replicas(round_, cut, random):
    arguments, f, accepted, verified = round_
    whole, left, right = (OnlineAcceptanceEstimator(**arguments) for _ in range(3))
    whole.observe(f, accepted, verified)
    order = random.sample(range(len(f)), len(f))
    for est, rows in ((left, order[:cut]), (right, order[cut:])):
        est.observe(f[rows], accepted[rows], verified[rows])
    right.merge(left)
    same_round(right, whole)
