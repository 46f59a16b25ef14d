"""Budget and allocation by hand, and a simulation of whole policies. Rules against definitions: test_properties.py."""

import time

import numpy as np
import pytest
import torch

from avref.cost_table import CostTable
from avref.evidence.synthetic import acceptance_log_odds, simulate_rules
from avref.pruning import StaleSurvival, SurvivalProfile, allocate, choose_budget, survival

RULES = ("argmax", "early_stop", "lookahead")
STAIRCASE_C105 = [1, 1, 1.55, 1.6, 1.6, 2.6, 2.6, 2.6, 2.6]  # ms by tokens 0 to 8: batches padded to 1, 2, 4, 8
SURVIVAL_C105 = [0.5, 0.45, 0.42, 0.3, 0.2, 0.1, 0.05]


def table(verify_ms, num_requests: int = 1, draft_ms: float = 0.0) -> CostTable:
    return CostTable(np.full(num_requests + 1, draft_ms), np.asarray(verify_ms, dtype=float))


def test_survival_is_the_running_product():
    got = survival(torch.tensor([[0.9, 0.9, 0.9, 0.9], [1.0, 0.5, 0.0, 1.0]]))
    torch.testing.assert_close(got, torch.tensor([[0.9, 0.81, 0.729, 0.6561], [1.0, 0.5, 0.0, 0.0]]))
    assert (got[0] >= 0.7).sum() == 3  # C111: 4 if the confidences themselves were compared


def test_survival_never_rises_in_float32():
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(500, 64, generator=generator)
    near_one = 1 - uniform * 10.0 ** -torch.randint(3, 9, (500, 64), generator=generator)
    tiny = uniform * 1e-3
    for c in (near_one, tiny, torch.full((1, 64), 1 - 1e-8), torch.ones(2, 64), torch.zeros(2, 64)):
        S = survival(c.float())
        assert S.dtype == torch.float32 and (S.diff(dim=-1) <= 0).all() and S.max() <= 1 and S.min() >= 0


def test_survival_never_rises_where_a_parallel_product_does(monkeypatch):
    """A CPU multiplies in order; a GPU's parallel product may end one rounding higher than the one before."""
    risen = torch.tensor([[0.5, 0.5 + 1e-7, 0.2]])
    monkeypatch.setattr(torch.Tensor, "cumprod", lambda self, dim: risen)
    assert survival(torch.ones(1, 3)).tolist() == [[0.5, 0.5, float(risen[0, 2])]]


def test_the_cost_of_drafting_is_that_of_the_depth_drafted():
    """One position drafted: cheap, so the second token does not pay. As dear as the table's deepest, it would."""
    costs = CostTable(np.array([[0, 0, 0], [0, 0.0, 9.0]]), np.array([1.0, 1.0, 2.0, 3.0]))
    assert choose_budget(np.array([[0.8]]), costs, 1) == 0
    assert choose_budget(np.array([[0.8, 0.7]]), costs, 1) == 2


def test_staircase_of_c105():
    S, costs = np.array([SURVIVAL_C105]), table(STAIRCASE_C105)
    ratio = (1 + np.concatenate([[0], np.cumsum(SURVIVAL_C105)])) / STAIRCASE_C105[1:]
    np.testing.assert_allclose(ratio.round(3), [1, 0.968, 1.219, 1.481, 1.027, 1.104, 1.142, 1.162])
    assert choose_budget(S, costs, 1, "argmax") == 3
    assert choose_budget(S, costs, 1, "early_stop") == 0
    assert choose_budget(S, costs, 1, "lookahead", profile=SURVIVAL_C105) == 3
    assert choose_budget(S, costs, 1) == 0  # without a profile, nothing is known about the tail: early_stop


def test_argmax_reads_behind_the_slot_at_which_it_stops():
    """So on live survivals it is lossy; that the other rules do not is tested on many inputs (test_properties.py)."""
    costs = table(STAIRCASE_C105)
    assert choose_budget(np.array([SURVIVAL_C105]), costs, 1, "argmax") == 3
    assert choose_budget(np.array([[*SURVIVAL_C105[:1], *[0.0] * 6]]), costs, 1, "argmax") == 0


def test_ties_take_the_smallest_budget():
    S = np.ones((2, 4))
    proportional = table(np.arange(11.0), 2)  # with c = 1 every budget emits one token per millisecond
    for rule in RULES:
        assert choose_budget(S, proportional, 2, rule, np.ones(8)) == 0
    assert choose_budget(np.zeros((2, 4)), table(np.ones(11), 2), 2, "argmax") == 0
    assert choose_budget(S, table(np.ones(11), 2), 2, "argmax") == 8


def test_zero_budget_and_no_requests():
    for rule in RULES:
        assert choose_budget(np.array([[0.05]]), table([1, 1, 1.5]), 1, rule, [0.05]) == 0  # C103
        assert choose_budget(np.zeros((0, 7)), table([1, 1]), 0, rule) == 0
        assert choose_budget(np.ones((2, 3)), table(np.ones(9), 2), 2, rule, np.ones(6), capacities=[0, 0]) == 0
    assert allocate(torch.rand(1, 1), 0).tolist() == [0]
    assert allocate(torch.zeros(0, 7), 5).shape == (0,)


def test_the_cost_table_ends_the_search():
    S = np.ones((2, 4))
    assert choose_budget(S, table(np.ones(6), 2), 2, "argmax") == 3  # 5 tokens known: 2 requests and 3 drafts
    with pytest.raises(ValueError, match="not profiled"):
        choose_budget(np.ones((3, 4)), table(np.ones(20), 2), 3, "argmax")
    with pytest.raises(ValueError, match="not profiled"):
        choose_budget(np.ones((3, 4)), table(np.ones(3), 3), 3, "argmax")


def test_the_whole_step_is_in_the_denominator():
    """C113: drafting that costs more than it saves. A cost model of verification alone must not hide it, and a dearer
    draft pass, already spent, makes verifying more of it worth while."""
    S, verify = np.array([[0.9, 0.3, 0.2]]), [1, 1, 1.5, 2.0, 2.5]
    assert choose_budget(S, table(verify, draft_ms=0.0), 1, "argmax") == 1
    assert choose_budget(S, table(verify, draft_ms=6.0), 1, "argmax") == 3
    by_depth = CostTable([[0, 0, 0, 0], [0.0, 1.0, 2.0, 6.0]], verify)  # the depth drafted decides, not the deepest
    assert choose_budget(S, by_depth, 1, "argmax") == 3
    assert choose_budget(S[:, :1], by_depth, 1, "argmax") == 1


@pytest.mark.parametrize("bad", [np.nan, -0.1, 1.1, np.inf])
def test_values_that_are_no_probability_are_refused(bad):
    S = np.array([[0.5, bad, 0.1]])  # C109
    for rule in RULES:
        with pytest.raises(ValueError, match=r"\[0, 1\]"):
            choose_budget(S, table(np.ones(9)), 1, rule, np.ones(3))
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        allocate(torch.from_numpy(S), 2)
    assert choose_budget(S, table(np.ones(9)), 1, "argmax", capacities=[1]) == 1  # slots past capacity do not exist


def test_other_bad_input_names_what_was_seen():
    S, costs = np.array([[0.5, 0.4]]), table(np.ones(9), 4)
    with pytest.raises(ValueError, match="'greedy'"):
        choose_budget(S, costs, 1, "greedy")
    with pytest.raises(ValueError, match="1 rows for 2 requests"):
        choose_budget(S, costs, 2)
    with pytest.raises(ValueError, match="rises along a request"):
        choose_budget(S[:, ::-1], costs, 1)
    with pytest.raises(ValueError, match="capacities"):
        choose_budget(S, costs, 1, capacities=[3])
    with pytest.raises(ValueError, match="profile needs"):
        choose_budget(S, costs, 1, profile=[0.5])
    with pytest.raises(ValueError, match="descending"):
        choose_budget(S, costs, 1, profile=[0.4, 0.5])
    with pytest.raises(ValueError, match="-1"):
        allocate(torch.from_numpy(S), -1)
    with pytest.raises(ValueError, match="shape"):
        allocate(torch.ones(3), 1)


def test_allocation_ties_go_by_position_then_request():
    ones, zeros = torch.ones(2, 4), torch.zeros(2, 4)  # C110
    assert allocate(ones, 3).tolist() == [2, 1] and allocate(zeros, 3).tolist() == [2, 1]
    assert allocate(ones, 3, [1, 4]).tolist() == [1, 2]
    assert allocate(torch.tensor([[0.5, 0.5], [0.9, 0.5]]), 2).tolist() == [1, 1]


def test_a_budget_from_an_older_batch_is_clamped_to_the_live_one():
    admitted = allocate(torch.rand(2, 7).sort(descending=True).values, 40)  # C112
    assert admitted.tolist() == [7, 7]
    assert allocate(torch.full((2, 7), 0.3), 40, [3, 0]).tolist() == [3, 0]


def test_profile_follows_the_sorted_survivals_and_a_change_of_requests():
    rng = np.random.default_rng(6)
    profile = SurvivalProfile(rate=0.05)
    assert profile.predict(4) is None
    mean = None
    for _ in range(40):
        S = survival(torch.from_numpy(rng.beta(2, 1, (3, 4)))).numpy()
        best = np.sort(S.ravel())[::-1]
        mean = best if mean is None else 0.95 * mean + 0.05 * best
        profile.update(S)
    np.testing.assert_allclose(profile.predict(12), mean, atol=0.01)
    many = profile.predict(448)
    assert many.shape == (448,) and (np.diff(many) <= 0).all() and many[0] <= 1 and many[-1] >= 0
    np.testing.assert_allclose(many.mean(), mean.mean(), atol=0.02)
    assert profile.predict(0).shape == (0,)
    before = profile.predict(12)
    profile.update(np.ones((3, 4)), capacities=[0, 0, 0])
    np.testing.assert_array_equal(profile.predict(12), before)


def test_profile_leaves_out_slots_past_capacity():
    profile = SurvivalProfile()
    profile.update(np.array([[0.9, np.nan], [0.8, 0.7]]), capacities=[1, 2])
    np.testing.assert_allclose(profile.predict(3), [0.9, 0.8, 0.7], atol=1e-3)
    with pytest.raises(ValueError, match="rate"):
        SurvivalProfile(rate=0.0)


def test_stale_survivals_travel_with_their_request():
    stale = StaleSurvival(3)
    assert stale.gather(["a", "b"]).tolist() == [[1, 1, 1], [1, 1, 1]]  # new requests
    stale.record(["a", "b"], torch.tensor([[0.9, 0.5, 0.1], [0.8, 0.7, 0.6]]), torch.tensor([3, 1]))
    got = stale.gather(["b", "c", "a"], [3, 2, 3]).tolist()
    np.testing.assert_allclose(got[0], [0.8, 0.5, 0.1], atol=1e-7)  # b drafted one position: the mean of the others
    assert got[1] == [1, 1, 0]  # new, capped at 2 before drafting
    np.testing.assert_allclose(got[2], [0.9, 0.5, 0.1], atol=1e-7)


def test_stale_running_mean_never_rises_above_the_request_itself_and_moves_slowly():
    stale = StaleSurvival(2, rate=0.05)
    stale.record([1], [[0.9, 0.8]], [2])
    stale.record([1], [[0.3, 0.1]], [1])
    np.testing.assert_allclose(stale.gather([1]), [[0.3, 0.3]])  # the mean, .8, capped by position 1
    stale.record([1], [[0.9, 0.4]], [2])
    stale.record([1], [[0.9, 0.4]], [1])
    np.testing.assert_allclose(stale.gather([1]), [[0.9, 0.8 + 0.05 * (0.4 - 0.8)]])


def test_stale_forgets_finished_requests_and_position_never_drafted_counts_as_one():
    stale = StaleSurvival(2)
    stale.record([1, 2], [[0.5, 0.2], [0.4, 0.1]], [1, 1])
    np.testing.assert_allclose(stale.gather([1]), [[0.5, 0.5]])  # position 2 has no mean yet: 1, capped by position 1
    stale.record([2], [[0.4, 0.1]], [2])
    assert stale.gather([1]).tolist() == [[1.0, 1.0]]
    assert stale.gather([]).shape == (0, 2)
    with pytest.raises(ValueError, match="shape"):
        stale.record([1], [[0.5]], [1])
    with pytest.raises(ValueError, match="capacities"):
        stale.gather([1], [3])


# Whole policies, simulated: tokens per second against the best fixed K in hindsight, with true confidences, K = 7. The
# law of the drafts is in avref/evidence/synthetic.py.

B300_VERIFY = [  # tokens, ms: a published startup profile (DeepSeek-V4-Flash, four B300), first 128 tokens
    (1, 5.11), (2, 5.16), (4, 5.12), (8, 5.35), (16, 5.59), (24, 6.08), (32, 6.26), (40, 6.83), (48, 6.94), (56, 7.13),
    (64, 7.9), (72, 8.21), (80, 8.51), (88, 8.7), (96, 8.77), (104, 9.05), (112, 9.2), (120, 9.47), (128, 9.43),
]  # fmt: skip
B300_DRAFT = [(1, 0.88), (2, 0.92), (4, 1.0), (8, 1.07), (16, 1.32)]  # requests, ms
CPU_VERIFY = [(1, 22), (16, 29), (32, 38), (64, 56), (128, 90), (256, 155)]  # 135M parameters, bfloat16, two cores
CPU_DRAFT = [(1, 8), (16, 8)]


def simulate(costs: CostTable, num_requests: int, mean: float, steps: int) -> dict[str, float]:
    return simulate_rules(costs, acceptance_log_odds(num_requests, mean, num_steps=steps)).relative


@pytest.mark.parametrize(
    ("num_requests", "mean", "steps", "expected"),
    [
        (4, 0.45, 1500, (1.03, 1.05, 1.07, 1.07)),
        (4, 0.7, 1500, (0.98, 0.93, 1.03, 1.03)),
        (16, 0.45, 500, (1.21, 0.70, 1.23, 1.24)),
        (16, 0.7, 500, (1.06, 0.42, 1.09, 1.10)),
    ],
)
def test_simulated_policies_on_the_published_staircase(num_requests, mean, steps, expected):
    costs = CostTable.from_curves(
        B300_DRAFT, B300_VERIFY, max_requests=num_requests, max_tokens=8 * num_requests, padded_up_to=1024
    )
    np.testing.assert_allclose(list(simulate(costs, num_requests, mean, steps).values()), expected, atol=0.02)


@pytest.mark.parametrize(
    ("num_requests", "mean", "steps", "expected"),
    [
        (1, 0.45, 1200, (0.85, 1.06, 1.06, 1.06)),
        (1, 0.7, 1200, (0.88, 1.03, 1.03, 1.03)),
        (16, 0.45, 500, (1.21, 1.25, 1.25, 1.25)),
        (16, 0.7, 500, (1.22, 1.26, 1.26, 1.26)),
    ],
)
def test_simulated_policies_on_a_smooth_table(num_requests, mean, steps, expected):
    """Nothing to look ahead to: early_stop, lookahead and the lossy optimum agree."""
    costs = CostTable.from_curves(CPU_DRAFT, CPU_VERIFY, max_requests=num_requests, max_tokens=8 * num_requests)
    got = simulate(costs, num_requests, mean, steps)
    np.testing.assert_allclose(list(got.values())[1:], expected[1:], atol=0.02)
    np.testing.assert_allclose(got["stale"], expected[0], atol=0.03)
    assert got["lookahead"] >= 0.99 * got["retrospective"]


@pytest.mark.parametrize("num_requests", [1, 4])
def test_simulated_policies_on_powers_of_two(num_requests):
    """Cost 8 + the next power of two: early_stop ends at a step that the look-ahead crosses."""
    tokens = np.maximum(1, np.arange(8 * num_requests + 1))
    costs = table(8 + 2 ** np.ceil(np.log2(tokens)), num_requests)
    got = simulate(costs, num_requests, 0.7, 500)
    assert got["lookahead"] >= 0.98 * got["retrospective"] and got["lookahead"] > 1.1
    assert got["early_stop"] < 0.9 * got["lookahead"] and got["stale"] < got["lookahead"]


def test_budget_and_allocation_take_less_than_a_millisecond():
    rng = np.random.default_rng(7)
    S = survival(torch.from_numpy(rng.beta(4, 1, (64, 7))).float())
    profile = SurvivalProfile()
    profile.update(S)
    everything = table(np.full(513, 10.0), 64)  # the worst case: all 448 rows of the table of ratios are made
    assert choose_budget(S, everything, 64, profile=profile.predict(448)) == 448
    times = []
    for _ in range(50):
        start = time.perf_counter()
        allocate(S, choose_budget(S, everything, 64, profile=profile.predict(448)))
        profile.update(S)
        times.append(time.perf_counter() - start)
    assert min(times) < 1e-3
