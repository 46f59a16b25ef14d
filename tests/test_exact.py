"""Losslessness by enumeration: which rules emit the target's law, and which do not."""

import dataclasses
from collections import defaultdict
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from avref import exact, policies, pruning
from avref.budget import Budget
from avref.cost_table import CostTable
from avref.decision import Decision
from avref.depth import DraftDepth
from avref.exact import (
    Experiment,
    Request,
    Seen,
    budget_policy,
    costs,
    depth_worth,
    drafting_to,
    feature_confidence,
    first_token,
    fixed_budget,
    joint_law,
    leak,
    safe_drafting,
    stop_policy,
    target_law,
    threshold_policy,
    total_variation,
)
from avref.features import FEATURES

LOSSLESS = [name for name, feature in FEATURES.items() if feature.lossless]
LOSSY = [name for name, feature in FEATURES.items() if not feature.lossless]
SAFE_RULES = ["lookahead", "early_stop", "stale"]
EXACT = 1e-12


def toy(seed: int, vocab_size: int, confidence: exact.Confidence) -> Request:
    """A target and a drafter that depend on the whole prefix, the drafter being a distorted target."""

    @cache
    def p(tokens: exact.Tokens) -> tuple[float, ...]:
        return tuple(np.random.default_rng((seed, 1, *tokens)).dirichlet(2 * np.ones(vocab_size)))

    @cache
    def q(tokens: exact.Tokens) -> tuple[float, ...]:
        noise = np.random.default_rng((seed, 2, *tokens)).uniform(0.2, 1, size=vocab_size)
        mixed = (np.array(p(tokens)) + 0.05) * noise
        return tuple(mixed / mixed.sum())

    return Request(p, q, confidence)


STAIRCASES = [(1.0, 1.6, 1.65, 1.7), (1.0, 1.75, 1.75, 2.3), (1.0, 1.6, 2.2, 2.25), (1.0, 1.5, 1.9, 2.0)]


def staircase(seed: int, num_sizes: int) -> CostTable:
    """Costs that stay flat over several sizes and then jump, as a padded batch does."""
    steps = STAIRCASES[seed % len(STAIRCASES)]
    if num_sizes <= len(steps):
        return costs(*steps[:num_sizes])
    rng = np.random.default_rng((seed, 3))
    return costs(*(2 + np.cumsum(rng.choice([0.0, 0.1, 0.7, 1.1], size=num_sizes))))


def wide(feature: str, vocab_size: int) -> exact.Confidence:
    """Coefficients under which this feature's confidences range from .3 (flat q) to .97 (q_max = .9)."""
    f = FEATURES[feature].fn
    flat, sharp = torch.full((vocab_size,), 1 / vocab_size), torch.full((vocab_size,), 0.1 / (vocab_size - 1))
    sharp[0] = 0.9
    low, high = (float(f(q.log(), torch.tensor(0), 1.0)) for q in (flat, sharp))
    slope = (3.5 + 0.85) / (high - low)
    return feature_confidence(feature, slope=slope, intercepts=[-0.85 - slope * low, -0.65 - slope * low])


def experiment(seed: int, feature: str, num_requests: int, vocab_size: int, num_drafts: int, num_steps: int = 2):
    """A random experiment without its policy."""
    requests = [toy(10 * seed + r, vocab_size, wide(feature, vocab_size)) for r in range(num_requests)]
    return Experiment(requests, num_drafts, fixed_budget(0), num_steps, profile_rate=0.5)


def watched(policy: exact.Policy) -> tuple[exact.Policy, set[tuple[int, ...]]]:
    """The policy, and the set of decisions it will have taken: a rule that never varies proves nothing."""
    decisions: set[tuple[int, ...]] = set()

    def watching(seen: Seen):
        admitted = tuple(policy(seen))
        decisions.add(admitted)
        return admitted

    return watching, decisions


# The four counterexamples


def test_footnote():
    e = exact.footnote()
    assert first_token(joint_law(e)) == pytest.approx([0.4, 0.6], abs=EXACT)
    assert first_token(target_law(e)) == pytest.approx([0.5, 0.5], abs=EXACT)


def test_dspark_appendix():
    e = exact.dspark_appendix()
    assert first_token(joint_law(e)) == pytest.approx([0.85, 0.15], abs=EXACT)
    assert first_token(target_law(e)) == pytest.approx([0.7, 0.3], abs=EXACT)


def test_staircase_lookahead():
    assert first_token(joint_law(exact.staircase_lookahead())) == pytest.approx([0.85, 0.15], abs=EXACT)


def test_aggregate_early_stop():
    e = exact.aggregate_early_stop()
    law = joint_law(e)
    assert first_token(law, 1) == pytest.approx([0.55, 0.45], abs=EXACT)
    assert first_token(target_law(e), 1) == pytest.approx([0.7, 0.3], abs=EXACT)
    assert first_token(law, 0) == pytest.approx([0.5, 0.5], abs=EXACT)


@pytest.mark.parametrize("rule", SAFE_RULES)
@pytest.mark.parametrize("name", ["dspark_appendix", "staircase_lookahead", "aggregate_early_stop"])
def test_safe_rules_repair_the_counterexamples(name, rule):
    """Same distributions, confidences and costs; only the policy changes."""
    e = getattr(exact, name)()
    table = {
        "dspark_appendix": costs(1 / 1, 1 / 0.5, 1 / 0.45),
        "staircase_lookahead": costs(1, 2, 2),
        "aggregate_early_stop": costs(1, 1.1, 1.2, 1.3, 1.4, 1.9, 2.4, 2.9),
    }[name]
    for policy in (budget_policy(table, rule), safe_drafting(table, rule)):
        assert leak(dataclasses.replace(e, policy=policy)) < EXACT


# Lossless features under safe rules: two consecutive steps, so that old survivals and profiles count


@pytest.mark.parametrize("rule", SAFE_RULES)
@pytest.mark.parametrize("feature", LOSSLESS)
def test_two_requests_are_exact(feature, rule):
    varied = 0
    for seed in range(2):
        policy, decisions = watched(budget_policy(staircase(seed, 6), rule))
        assert leak(dataclasses.replace(experiment(seed, feature, 2, 2, 2), policy=policy)) < EXACT
        varied += len(decisions) > 1
    assert varied > 0


@pytest.mark.parametrize("rule", SAFE_RULES)
@pytest.mark.parametrize("vocab_size, num_drafts", [(2, 3), (3, 2), (3, 3)])
def test_one_request_is_exact(vocab_size, num_drafts, rule):
    varied = 0
    for seed in (2,) if vocab_size**num_drafts > 9 else range(4):
        policy, decisions = watched(budget_policy(staircase(seed, num_drafts + 1), rule))
        e = experiment(seed, LOSSLESS[seed % len(LOSSLESS)], 1, vocab_size, num_drafts)
        assert leak(dataclasses.replace(e, policy=policy)) < EXACT
        varied += len(decisions) > 1
    assert varied > 0


@pytest.mark.parametrize("rule", ["early_stop", "stale"])
def test_three_drafts_of_two_requests_are_exact(rule):
    for seed in range(3):
        e = experiment(seed, "logit_q_max", 2, 2, 3, num_steps=1)
        assert leak(dataclasses.replace(e, policy=budget_policy(staircase(seed, 8), rule))) < EXACT


@pytest.mark.parametrize("feature", LOSSLESS)
def test_thresholds_are_exact_on_lossless_features(feature):
    for at_least in (0.6, 0.75, 0.9):
        policy, decisions = watched(threshold_policy(at_least))
        assert leak(dataclasses.replace(experiment(2, feature, 2, 2, 2), policy=policy)) < EXACT
        assert len(decisions) > 1


@pytest.mark.parametrize("rule", SAFE_RULES)
def test_safe_drafting_changes_no_allocation(rule, monkeypatch):
    """200 random steps; it does stop early in some of them (undrafted survivals are shown as 0)."""
    rng = np.random.default_rng(4)
    stopped_early = []

    def allocate(live, budget, capacities, real=policies.allocate):
        stopped_early.append(bool((live[:, -1] == 0).all()))
        return real(live, budget, capacities)

    monkeypatch.setattr(policies, "allocate", allocate)
    for seed in range(200):
        num_requests, num_drafts = rng.integers(1, 4), rng.integers(2, 5)
        live = np.minimum.accumulate(rng.choice([0.05, 0.3, 0.6, 0.9, 1.0], (num_requests, num_drafts)), axis=1)
        previous = np.minimum.accumulate(rng.random((num_requests, num_drafts)), axis=1)
        profile = np.sort(rng.random(live.size))[::-1] if seed % 4 else None
        seen = Seen(live, live, previous, profile)
        table = staircase(seed, num_requests * (num_drafts + 1))
        assert list(safe_drafting(table, rule)(seen)) == list(budget_policy(table, rule)(seen))
    assert stopped_early.count(True) > 10


@pytest.mark.parametrize("rule", SAFE_RULES)
def test_safe_drafting_is_exact(rule):
    for seed in range(2):
        e = experiment(seed, "logit_q_max", 2, 2, 2)
        assert leak(dataclasses.replace(e, policy=safe_drafting(staircase(seed, 6), rule))) < EXACT


# Where confidence comes from, and how drafts are made: every source under every policy that may use it


def largest(k, before, q, x):
    """q_max without a fit."""
    return max(q)


@cache
def state(k, before, q):
    """A number that depends on everything that makes q_k."""
    return float(np.random.default_rng((7, k, *before, int(1e6 * q[0]))).uniform(0.2, 1))


def head(k, before, q, x):
    return state(k, before, tuple(q))


def leaking_head(k, before, q, x):
    """The same head, one position late: it reads the state behind x_k."""
    return head(k, (*before, x), q, x)


def source(confidence, seed: int = 0, **changes) -> Experiment:
    """Two requests, two drafts, two steps; `changes` are fields of the requests."""
    requests = [dataclasses.replace(toy(10 * seed + r, 2, confidence), **changes) for r in range(2)]
    return Experiment(requests, 2, fixed_budget(0), 2, profile_rate=0.5)


def block_drafter(tokens: exact.Tokens) -> tuple[float, ...]:
    """q of a parallel drafter: where the block starts, how many masks follow."""
    return tuple(np.random.default_rng((4, *(t + 1 for t in tokens))).dirichlet(2 * np.ones(2)))


STOPPING = {"threshold": threshold_policy(0.72), "stop_head": stop_policy(0.55)}
PARALLEL = [{}, {"parallel": True, "drafter": block_drafter}]
CONVEX = costs(1.0, 1.1, 1.5, 1.95, 2.5, 3.2)
POLICIES = {**STOPPING, **{rule: budget_policy(CONVEX, rule) for rule in SAFE_RULES}}


@pytest.mark.parametrize("drafts", PARALLEL, ids=["token by token", "parallel"])
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("confidence", [largest, head])
def test_sources_are_exact(confidence, name, drafts):
    """q_max and head; q that depends on drafted tokens (eagle, mtp, dspark) and q that does not (dflash)."""
    policy, decisions = watched(POLICIES[name])
    assert leak(dataclasses.replace(source(confidence, **drafts), policy=policy)) < EXACT
    assert len(decisions) > 1


def test_a_parallel_drafter_reads_no_draft():
    seen = set()

    def drafter(tokens):
        seen.add(tokens)
        return (0.5, 0.5)

    joint_law(dataclasses.replace(source(head, parallel=True, drafter=drafter), num_steps=1))
    assert seen == {(), (exact.MASK,)}


@pytest.mark.parametrize("name", STOPPING)
def test_a_head_that_reads_the_drawn_token_leaks(name):
    """It may stop the drafts after x_k, which stays verified, and no earlier."""
    assert leak(dataclasses.replace(source(leaking_head), policy=STOPPING[name])) > 1e-2


@pytest.mark.parametrize("rule", ["lookahead", "early_stop"])
def test_a_head_that_reads_the_drawn_token_leaks_through_budgets(rule):
    assert leak(dataclasses.replace(source(leaking_head), policy=budget_policy(CONVEX, rule))) > 1e-3


@pytest.mark.parametrize("confidence", [leaking_head, feature_confidence("logit_q_sampled", intercepts=[0.8])])
def test_a_rule_that_has_seen_the_token_may_stop_after_it(confidence):
    for at_least in (0.6, 0.75):
        policy, decisions = watched(threshold_policy(at_least, stop_after=True))
        assert leak(dataclasses.replace(source(confidence), policy=policy)) < EXACT
        assert len(decisions) > 1
    assert leak(dataclasses.replace(source(confidence), policy=threshold_policy(0.75))) > 1e-3


# Drafts that run out: an n-gram's text ends, which the tokens before the block settle; or an end that x_k itself brings


def text_ends(tokens):
    """None after an even number of tokens (the request is at 0, or has emitted 2), one draft after 1 or 3."""
    return len(tokens) % 2 == 0


def draft_ends(tokens):
    """Nothing behind token 0."""
    return tokens[-1:] == (0,)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("ends", [text_ends, draft_ends])
def test_drafts_that_run_out_are_exact(ends, name):
    """An empty slot counts as survival 0, and never changes how many slots there are."""
    e = source(head)
    requests = [dataclasses.replace(e.requests[0], ends=ends), e.requests[1]]
    policy, decisions = watched(POLICIES[name])
    assert leak(dataclasses.replace(e, requests=requests, policy=policy)) < EXACT
    assert len(decisions) > 1


def test_copied_drafts_are_exact():
    """One-hot q, as prompt lookup has it: the draft is the last token again."""
    copy = lambda tokens: (0.0, 1.0) if tokens[-1:] == (1,) else (1.0, 0.0)  # noqa: E731
    for name in POLICIES:
        assert leak(dataclasses.replace(source(head, drafter=copy, ends=text_ends), policy=POLICIES[name])) < EXACT


def test_a_budget_that_counts_the_drafts_found_leaks():
    """Half of the slots that are there: how many there are tells which token x_1 is."""
    half = lambda seen: pruning.allocate(seen.survival, sum(seen.drafted) // 2, seen.drafted).tolist()  # noqa: E731
    assert leak(dataclasses.replace(source(head, ends=draft_ends), policy=half)) > 1e-3
    assert leak(dataclasses.replace(source(head), policy=half)) < EXACT


# How deep to draft


def depths(read_from):
    """`drafting_to` the depth that this survival table recommends, and the depths it will have chosen after a step."""
    table = CostTable(np.tile([0.0, 0.3, 0.4], (7, 1)), costs(*(1 + 0.3 * np.arange(6))).verify_ms)
    chosen = set()

    def depth(seen):
        d = depth_worth(table, getattr(seen, read_from))
        if seen.profile is not None:
            chosen.add(d)
        return d

    return drafting_to(depth, budget_policy(table)), chosen


def test_a_depth_from_the_step_before_is_exact():
    """Two steps; what the first one's survivals are worth says how deep the second drafts, from 0 to 2."""
    ever, varied = set(), 0
    for seed in range(4):
        policy, chosen = depths("previous")
        assert leak(dataclasses.replace(source(head, seed), policy=policy)) < EXACT
        varied += len(chosen) > 1
        ever |= chosen
    assert varied > 1 and ever == {0, 1, 2}


def test_a_depth_from_live_survivals_leaks():
    policy, _ = depths("survival")
    assert leak(dataclasses.replace(source(head), policy=policy)) > 5e-3


# The engine's own decisions: drafted position by position, with the memory of steps that ended early


class Given:
    """A confidence that is what the drafts bring along."""

    stops = False

    def __init__(self, num_positions):
        self.num_positions = num_positions

    def read(self, proposal, temperature, first):
        confidence = torch.zeros(len(proposal.given), self.num_positions, dtype=torch.float64)
        confidence[:, first] = proposal.given
        return None, confidence


def engine_like(table, rule, adaptive_depth=False):
    """A policy that runs `Decision` over the past steps and this one; and how many positions each step drafted of how
    many that it might have.

    A step knows of the others what the engine would: `Budget` and `DraftDepth` as `Decision` left them.
    """
    ends = set()

    def policy(seen):
        num_requests, num_positions = seen.survival.shape
        memory, worth = Budget(rule, num_positions), DraftDepth(num_positions, rate=0.5, warmup=1)
        memory.profiles = defaultdict(lambda: pruning.SurvivalProfile(rate=0.5))
        for n, live in enumerate((*map(np.array, seen.past), seen.survival)):
            depth = worth.choose(n, num_requests, num_positions, table) if adaptive_depth else num_positions
            if depth == 0:
                admitted = [0] * num_requests
                continue
            capacities, ids = torch.full((num_requests,), depth), range(num_requests)
            may_end = not (adaptive_depth and worth.in_full)
            step = Decision(
                Given(num_positions), memory, worth, table, capacities, ids, torch.ones(num_requests), may_end
            )
            confidence = live / np.c_[np.ones(num_requests), np.where(live > 0, live, 1.0)[:, :-1]]
            for k in range(depth):
                column = SimpleNamespace(tokens=torch.zeros(num_requests, 1), given=torch.tensor(confidence[:, k]))
                if step.enough(column):
                    break
            admitted = step.admit([step.num_read] * num_requests)
            if live is seen.survival:
                ends.add((step.num_read, depth))
        return admitted

    return policy, ends


@pytest.mark.parametrize("rule", SAFE_RULES)
def test_ending_the_block_is_exact(rule):
    """One request: what lies behind the slot refused is never drafted."""
    ever = set()
    for feature in LOSSLESS:
        policy, ends = engine_like(costs(1.0, 1.5, 2.2, 3.0), rule)
        assert leak(dataclasses.replace(experiment(1, feature, 1, 2, 3), policy=policy)) < EXACT
        ever |= ends
    assert len(ever) > 1


@pytest.mark.parametrize("rule", ["lookahead", "stale"])
def test_ending_the_block_is_exact_for_two_requests(rule):
    """The other request's drafts have a say, and what the step before taught: its profile, survivals, and depths."""
    by_depth = CostTable(np.tile([0.0, 0.1, 0.2], (7, 1)), costs(1.0, 1.25, 1.6, 2.05, 2.6, 3.3).verify_ms)
    policy, ends = engine_like(by_depth, rule, adaptive_depth=True)
    assert leak(dataclasses.replace(source(head, 2), policy=policy)) < EXACT
    assert len(ends) > 1


def test_two_requests_may_end_in_the_block():
    policy, ends = engine_like(costs(1.0, 1.25, 1.6, 2.05, 2.6, 3.3), "stale")
    assert leak(dataclasses.replace(experiment(1, "logit_q_max", 2, 2, 2), policy=policy)) < EXACT
    assert ends == {(1, 2), (2, 2)}


@pytest.mark.parametrize("bound", ["max", "mean"])
def test_every_request_has_a_bound(bound, monkeypatch):
    """The mean of the bounds instead: request 1's second survival tells its first token, and decides its fate."""

    def settled(survival, drafted, last_read, capacities, real=pruning.settled):
        best = np.sort(survival[:, :drafted], axis=None)[::-1]
        if bound == "mean":
            return last_read < len(best) and best[last_read] >= survival[:, drafted - 1].mean()
        return real(survival, drafted, last_read, capacities)

    monkeypatch.setattr("avref.budget.settled", settled)
    policy, ends = engine_like(costs(1.0, 1.0, 1.05, 1.1, 1.15, 9.0, 9.0, 9.0), "stale")
    e = dataclasses.replace(exact.aggregate_early_stop(), policy=policy)
    assert first_token(joint_law(e), 1) == pytest.approx([0.55, 0.45] if bound == "mean" else [0.7, 0.3], abs=EXACT)
    assert (leak(e) < EXACT) == (bound == "max")
    assert ends == ({(2, 3), (3, 3)} if bound == "mean" else {(3, 3)})


# What leaks


@pytest.mark.parametrize("rule", SAFE_RULES)
@pytest.mark.parametrize("feature", LOSSY)
def test_drawn_token_features_leak(feature, rule):
    """With one request an old budget says all, so it takes two for a live score to leak through the ranking."""
    worst = max(
        leak(dataclasses.replace(experiment(s, feature, 2, 2, 2), policy=budget_policy(costs(1, *ms), rule)))
        for s, ms in enumerate([(2, 2.7, 3.1, 4.2, 4.3), (2, 2, 3.3, 3.3, 5.0)])
    )
    assert worst > 1e-3
    if rule == "stale":
        e = experiment(0, feature, 1, 2, 3)
        assert leak(dataclasses.replace(e, policy=budget_policy(staircase(0, 4), rule))) < EXACT


@pytest.mark.parametrize("feature", LOSSY)
def test_thresholds_on_drawn_token_features_leak(feature):
    assert leak(dataclasses.replace(experiment(1, feature, 1, 2, 2), policy=threshold_policy(0.6))) > 1e-3


@pytest.mark.parametrize("num_requests", [1, 2])
def test_retrospective_leaks(num_requests):
    worst = max(
        leak(
            dataclasses.replace(
                experiment(seed, "logit_q_max", num_requests, 2, 3, num_steps=1),
                policy=budget_policy(staircase(seed, 4 * num_requests), "retrospective"),
            )
        )
        for seed in range(4)
    )
    assert worst > 1e-3


def test_live_bucket_jumps_leak_on_staircases_only():
    """Without a flat part, growth by buckets is early_stop."""
    smooth = costs(1.0, 1.3, 1.7, 2.2)
    e = experiment(3, "logit_q_max", 1, 2, 3)
    assert leak(dataclasses.replace(e, policy=exact.bucket_jump(smooth))) < EXACT
    worst = max(
        leak(dataclasses.replace(experiment(s, "logit_q_max", 1, 2, 3), policy=exact.bucket_jump(staircase(1, 4))))
        for s in range(4)
    )
    assert worst > 1e-3


# The enumeration itself


def test_fixed_depths_are_exact_and_laws_sum_to_one():
    for budget in (0, 1, 3, 6):
        e = dataclasses.replace(experiment(5, "logit_q_max", 2, 2, 3, num_steps=1), policy=fixed_budget(budget))
        law = joint_law(e)
        assert sum(law.values()) == pytest.approx(1, abs=EXACT)
        assert total_variation(law, target_law(e)) < EXACT


def test_target_law_is_the_product_along_the_tokens():
    e = experiment(6, "logit_q_max", 2, 3, 2)
    law = target_law(e)
    assert len(law) == 27**2
    for tokens in (((0, 1, 2), (2, 2, 0)), ((1, 1, 1), (0, 0, 0))):
        expected = np.prod([r.target(t[:i])[t[i]] for r, t in zip(e.requests, tokens, strict=True) for i in range(3)])
        assert law[tokens] == pytest.approx(expected, rel=1e-12)


def test_total_variation():
    a, b = {((0,),): 0.5, ((1,),): 0.5}, {((0,),): 0.2, ((2,),): 0.8}
    assert total_variation(a, b) == pytest.approx(0.8)
    assert total_variation(a, a) == 0


def resample_from_p(request, before, draft):
    """Mutant: after a rejection the token comes from p instead of the residual."""
    blocks, reached = [], 1.0
    for k, x in enumerate(draft):
        p, q = request.target(before + draft[:k]), request.drafter(before + draft[:k])
        accepted = min(1.0, p[x] / q[x])
        blocks += [((*draft[:k], y), reached * (1 - accepted) * p[y]) for y in range(len(p))]
        reached *= accepted
    return blocks + [((*draft, y), reached * chance) for y, chance in enumerate(request.target(before + draft))]


def trimmed_counted_as_rejected(request, before, draft, verified=exact._verified):
    """Mutant: the token behind the last admitted draft comes from the residual."""
    p, q = (np.array(d(before + draft)) for d in (request.target, request.drafter))
    rest = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum()
    full = [(block, chance) for block, chance in verified(request, before, draft) if len(block) <= len(draft)]
    reached = 1 - sum(chance for _, chance in full)
    return full + [((*draft, y), reached * float(chance)) for y, chance in enumerate(rest)]


@pytest.mark.parametrize("mutant", [resample_from_p, trimmed_counted_as_rejected])
def test_mutants_of_the_verification_leak(mutant, monkeypatch):
    e = dataclasses.replace(experiment(7, "logit_q_max", 1, 3, 2), policy=fixed_budget(1))
    assert leak(e) < EXACT
    monkeypatch.setattr(exact, "_verified", mutant)
    assert leak(e) > 1e-2


def test_bad_input_is_named():
    e = experiment(8, "logit_q_max", 1, 2, 2)
    with pytest.raises(ValueError, match=r"counts from 0 to 2, got \[3\]"):
        joint_law(dataclasses.replace(e, policy=lambda seen: [3]))
    broken = dataclasses.replace(e.requests[0], target=lambda tokens: (0.5, 0.6))
    with pytest.raises(ValueError, match="sum to 1"):
        target_law(dataclasses.replace(e, requests=[broken]))
    with pytest.raises(ValueError, match="unknown budget rule"):
        joint_law(dataclasses.replace(e, policy=budget_policy(costs(1, 2, 3), "greedy")))


@pytest.mark.parametrize("rule", ["early_stop", "lookahead"])
def test_requests_that_draw_alike_leak_and_independent_ones_do_not(rule):
    """Why `LLM` replaces a seed that is given twice: every outcome of the example in test_llm, with its probability.

    B drafts token 0 or 1 by its own number; A's second survival is .9 or 0 by A's. p = (.7, .3), q = (.5, .5).
    """
    table = CostTable([0.0] * 3, [1.0, 1.0, 1.0, 1.0, 1.0, 1.5, 1.5])  # 2, 3 and 4 tokens cost the same, 5 do not
    emits_0 = {}
    for a, b in ((0, 0), (0, 1), (1, 0), (1, 1)):  # what A and B draw
        live = np.array([[0.95, 0.9 if a == 0 else 0.0], [0.8, 0.0]])
        verified = pruning.allocate(live, pruning.choose_budget(live, table, 2, rule))[1] > 0
        emits_0[a, b] = 0.7 if not verified else 1.0 if b == 0 else 0.4  # token 1 is refused at .4: then 0
    assert sum(emits_0.values()) / 4 == pytest.approx(0.7, abs=1e-12)
    assert (emits_0[0, 0] + emits_0[1, 1]) / 2 == pytest.approx(0.55, abs=1e-12)  # copies
