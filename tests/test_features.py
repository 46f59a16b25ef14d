"""Features against float64, at the edges (C98), and against one softmax for speed."""

import time

import numpy as np
import pytest
import torch

from avref.features import FEATURES, logit_q_max

V = 49_152


def oracle(name: str, logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> np.ndarray:
    """The feature in float64 from the definition, with log-sum-exp over every entry but the one in question."""
    z = logits.double() / (temperature if temperature > 0 else 1.0)
    log_q = z - z.logsumexp(-1, keepdim=True)
    top = log_q.argmax(-1, keepdim=True)
    at = tokens.unsqueeze(-1) if name.endswith("sampled") else top
    log_q_at = log_q.gather(-1, at).squeeze(-1)
    log_others = log_q.scatter(-1, at, -torch.inf).logsumexp(-1)
    value = {
        "log_q_max": log_q_at,
        "q_max": log_q_at.exp(),
        "margin": (log_q_at - log_q.scatter(-1, top, -torch.inf).amax(-1)),
        "entropy": (log_q.exp() * log_q.clamp(min=-1e6)).sum(-1),
        "logit": log_q_at - log_others,
        # log q from the others: log(1 - exp(log_others)), exact where q is close to 1
        "loglog": -torch.log(-torch.where(log_others < -0.7, torch.log1p(-log_others.exp()), log_q_at)),
    }[name if name in ("log_q_max", "q_max", "margin", "entropy") else name.split("_")[0]]
    return value.clamp(-40, 40).numpy()


def rows_with_gaps(gaps: list[float], dtype: torch.dtype, temperature: float = 1.0) -> torch.Tensor:
    """Gaussian rows whose top token leads so that logit(q_max) is about the gap at this temperature, then rounded."""
    logits = torch.randn(len(gaps), V, generator=torch.Generator().manual_seed(0)) * 3
    lead = logits.logsumexp(-1) + torch.tensor(gaps)
    logits[torch.arange(len(gaps)), torch.arange(len(gaps)) * 977 % V] = lead
    return (logits * temperature).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_logit_q_max_is_right_to_a_thousandth_up_to_the_clamp(dtype, temperature):
    logits = rows_with_gaps([-3.0, 0.0, 5.0, 12.0, 15.0, 17.0, 20.0, 27.0, 31.0, 35.0, 38.0, 39.8], dtype, temperature)
    expected = oracle("logit_q_max", logits, logits.argmax(-1), temperature)
    assert (np.abs(expected) < 39.95).sum() >= 9  # the range below the clamp is really covered
    np.testing.assert_allclose(logit_q_max(logits, temperature).numpy(), expected, atol=1e-3, rtol=0)


def test_large_offsets_and_small_temperatures_keep_the_precision():
    logits = rows_with_gaps([2.0, 10.0, 30.0], torch.float32) * 0.01 + 500.0
    np.testing.assert_allclose(logit_q_max(logits, 0.01), oracle("logit_q_max", logits, None, 0.01), atol=1e-3)


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_feature_matches_float64(name, dtype):
    logits = rows_with_gaps([-9.0, -2.0, 0.0, 3.0, 9.0, 25.0], dtype).reshape(2, 3, V)
    tokens = torch.stack([logits[0].argmax(-1), torch.tensor([5, 6, 7])])
    for temperature in (1.0, 0.5):
        got = FEATURES[name](logits, tokens, temperature)
        assert got.dtype == torch.float32 and got.shape == (2, 3)
        np.testing.assert_allclose(got, oracle(name, logits, tokens, temperature), atol=1e-3)


def test_lossless_features_never_read_the_token_and_the_lossy_ones_do():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    first, second = torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.int64)
    assert [f.name for f in FEATURES.values() if not f.lossless] == ["logit_q_sampled", "loglog_q_sampled"]
    for name, feature in FEATURES.items():
        assert feature.name == name
        same = torch.equal(feature(logits, first), feature(logits, second))
        assert same == feature.lossless
        if not feature.lossless:
            with pytest.raises(ValueError, match="reads the drafted tokens"):
                feature(logits, None)


def test_features_grow_with_certainty():
    logits = torch.zeros(20, 8)
    logits[:, 0] = torch.linspace(0, 9, 20)
    for feature in FEATURES.values():
        values = feature(logits, torch.zeros(20, dtype=torch.int64))
        assert (values.diff() > 0).all(), feature.name


@pytest.mark.parametrize("name", FEATURES)
def test_one_hot_and_minus_infinity_are_finite(name):
    inf = torch.inf
    logits = torch.tensor([[0.0, -inf, -inf], [-inf, 100.0, 0.0], [1.0, 1.0, -inf]])
    values = FEATURES[name](logits, torch.tensor([1, 0, 2]))
    assert torch.isfinite(values).all() and (values.abs() <= 40).all()


def test_one_hot_reaches_the_clamp_and_ties_stay_at_or_below_zero():
    inf = torch.inf
    assert logit_q_max(torch.tensor([0.0, -inf, -inf])) == 40.0
    assert logit_q_max(torch.tensor([100.0, 0.0])) == 40.0
    assert logit_q_max(torch.tensor([2.0, 2.0, -inf])) == 0.0
    torch.testing.assert_close(logit_q_max(torch.zeros(5, V)), torch.full((5,), -np.log(V - 1.0)).float())
    nearly = torch.tensor([[1.0, 1.0 - 2**-24, 1.0, 0.0]])
    np.testing.assert_allclose(logit_q_max(nearly), oracle("logit_q_max", nearly, None, 1.0), atol=1e-6)


def test_temperature_zero_or_less_is_one_and_tensors_broadcast():
    logits = torch.randn(3, 4, 100, generator=torch.Generator().manual_seed(2))
    plain = logit_q_max(logits)
    assert torch.equal(logit_q_max(logits, 0.0), plain) and torch.equal(logit_q_max(logits, -1.0), plain)
    mixed = logit_q_max(logits, torch.tensor([0.0, 1.0, 0.5]).unsqueeze(1))
    assert torch.equal(mixed[:2], plain[:2]) and torch.equal(mixed[2], logit_q_max(logits[2], 0.5))
    for name, feature in FEATURES.items():
        tokens = logits.argmin(-1)
        both = feature(logits, tokens, torch.tensor([[0.0], [2.0], [0.5]]))
        for row, temperature in enumerate((1.0, 2.0, 0.5)):
            torch.testing.assert_close(both[row], feature(logits[row], tokens[row], temperature), msg=name)


def test_nan_reaches_the_caller_in_its_own_row_only():
    logits = torch.zeros(3, 10)
    logits[1, 4] = torch.nan
    logits[2] = -torch.inf
    assert torch.isnan(logit_q_max(logits)).tolist() == [False, True, True]


def test_tiny_vocabularies_empty_batches_and_bad_input():
    assert logit_q_max(torch.zeros(2, 1)).tolist() == [40.0, 40.0]
    assert logit_q_max(torch.zeros(0, 3, 10)).shape == (0, 3)
    with pytest.raises(ValueError, match="int64"):
        logit_q_max(torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="at least two"):
        FEATURES["margin"](torch.zeros(2, 1))
    with pytest.raises(ValueError, match="does not broadcast"):
        logit_q_max(torch.zeros(2, 3, 10), torch.ones(2))
    with pytest.raises(ValueError, match=r"\(2,\)"):
        FEATURES["logit_q_sampled"](torch.zeros(2, 3, 10), torch.zeros(2, dtype=torch.int64))


def test_the_input_is_left_alone():
    logits = torch.randn(3, 100, requires_grad=True)
    before = logits.detach().clone()
    for feature in FEATURES.values():
        assert not feature(logits, torch.zeros(3, dtype=torch.int64), 0.7).requires_grad
    assert torch.equal(logits, before)


def test_the_feature_pass_costs_at_most_half_more_than_one_softmax():
    logits = torch.randn(256, V, generator=torch.Generator().manual_seed(3)) * 3

    def fastest(fn) -> float:
        times = []
        for _ in range(7):
            start = time.perf_counter()
            fn()
            times.append(time.perf_counter() - start)
        return min(times)

    softmax = fastest(lambda: logits.softmax(-1))
    assert fastest(lambda: logit_q_max(logits)) <= 1.5 * softmax
    assert fastest(lambda: logit_q_max(logits, 0.7)) <= 1.5 * softmax
    assert fastest(lambda: logit_q_max(logits.bfloat16())) <= 1.5 * softmax + 0.02  # the conversion itself is timed too


@pytest.mark.parametrize("given", [1e-6, torch.tensor(1e-6), torch.tensor([[1e-6], [9e-6]])])
def test_a_temperature_that_sampling_takes_for_greedy_is_greedy_here_too(given):
    z = torch.randn(2, 3, 100)
    torch.testing.assert_close(logit_q_max(z, given), logit_q_max(z, 0.0))
