"""Sampling: against a dense float64 implementation, against the target's law, and against known mistakes (mutants)."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from avref import sampling
from avref.drafters import base
from avref.sampling import probs, residual, sample, verify

BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))


def settings(n: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    return torch.full((n,), temperature), torch.full((n,), top_k), torch.full((n,), top_p)


def probs_of(logits: object, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    rows = torch.as_tensor(logits)[None]
    return probs(rows, *settings(1, temperature, top_k, top_p))[0]


# The oracle: one row after the other, whole sorts, float64.


def reference_probs(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> tuple[np.ndarray, float]:
    """The distribution of one row, and how far (relatively) the nearest decision about the nucleus was from a tie."""
    if temperature < 1e-5:
        return np.eye(len(logits))[np.argmax(logits)], 1.0
    # float32 quotients are the input of both implementations; tokens with equal float32 probabilities are ties
    z = (logits.astype(np.float32) / np.float32(temperature)).astype(np.float64)
    p = np.exp(z - z.max())
    p /= p.sum()
    order = np.lexsort((np.arange(len(p)), -z))
    if 0 < top_k < len(p):
        p[order[top_k:]] = 0
        p /= p.sum()
    margin = 1.0
    if top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        limit = float(np.float32(top_p)) * (1 - 1e-6)
        margin = float(np.abs(before[1:] / limit - 1).min()) if limit > 0 and len(p) > 1 else 1.0
        dropped = before >= limit
        dropped[0] = False
        p[order[dropped]] = 0
        p /= p.sum()
    return p, margin


def reference_sample(p: np.ndarray, u: float) -> tuple[int, float]:
    cdf = np.cumsum(p)
    level = min(u * cdf[-1], np.nextafter(cdf[-1], 0))
    near_tie = float(np.abs(cdf[:-1] - level).min(initial=1.0)) if 0 < u < BELOW_ONE else 1.0
    return int(np.argmax((cdf > level) & (p > 0))), near_tie


def reference_verify(case: dict) -> tuple[list[list[int]], list[int], list[float]]:
    """Emitted tokens and accepted counts, and per request the distance of its nearest decision from a tie."""
    logits = case["logits"].float().numpy()
    vocab_size = logits.shape[1]
    row = 0
    emitted, accepted, margins = [], [], []
    for r, verified in enumerate(case["num_verified"].tolist()):
        s = (float(case["temperature"][r]), int(case["top_k"][r]), float(case["top_p"][r]))
        out: list[int] = []
        margin = 1.0
        for k in range(verified + 1):
            p, near = reference_probs(logits[row + k], *s)
            margin = min(margin, near)
            if k == verified:
                token, near = reference_sample(p, float(case["u_final"][r]))
                out, margin = [*out, token], min(margin, near)
                break
            x = int(case["tokens"][r, k])
            q = np.zeros(vocab_size)
            if case["q"] is None:
                q[x] = 1.0
            else:
                ids = case["vocab_ids"]
                q[np.arange(case["q"].shape[-1]) if ids is None else ids.numpy()] = case["q"][r, k].numpy()
            ratio = float(case["u_accept"][r, k]) * q[x]
            margin = min(margin, abs(ratio - p[x]) / max(p[x], 1e-12) if p[x] > 0 else 1.0)
            if ratio < p[x]:
                out.append(x)
                continue
            rest = np.maximum(p - q, 0)
            margin = min(margin, rest.sum())
            token, near = reference_sample(rest / rest.sum() if rest.sum() > 0 else p, float(case["u_final"][r]))
            out, margin = [*out, token], min(margin, near)
            break
        row += verified + 1
        emitted.append(out)
        accepted.append(len(out) - 1)
        margins.append(margin)
    return emitted, accepted, margins


def random_case(seed: int) -> dict:
    g = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    num_requests, num_drafts = int(rng.integers(1, 6)), int(rng.integers(1, 5))
    vocab_size = int(rng.choice([2, 5, 40, 300, 3000]))
    num_verified = torch.randint(0, num_drafts + 1, (num_requests,), generator=g)
    num_rows = int(num_verified.sum()) + num_requests
    logits = torch.randn(num_rows, vocab_size, generator=g) * float(rng.choice([0.5, 2, 6]))
    style = rng.integers(4)
    if style == 0:
        logits = logits.round()  # ties everywhere
    elif style == 1:
        logits = logits.bfloat16()
    elif style == 2:
        logits[:, rng.integers(vocab_size)] = -torch.inf
        logits[:, 0] = 0.5
    reduced = rng.random() < 0.5 and vocab_size > 2
    width = int(rng.integers(2, vocab_size)) if reduced else vocab_size
    vocab_ids = torch.randperm(vocab_size, generator=g)[:width] if reduced and rng.random() < 0.7 else None
    first = (num_verified + 1).cumsum(0) - (num_verified + 1)
    rows = (first[:, None] + torch.arange(num_drafts)).clamp(max=num_rows - 1)
    near = logits.float().nan_to_num(neginf=-20.0)[rows]  # [R, K, V]
    near = near[..., :width] if vocab_ids is None else near[..., vocab_ids]
    q: Tensor | None = (near + torch.randn(near.shape, generator=g)).softmax(-1)  # [R, K, Vd]
    drawn = sample(q.view(-1, width), torch.rand(num_requests * num_drafts, generator=g)).view(num_requests, num_drafts)
    q_drawn: Tensor | None = q.gather(-1, drawn[..., None]).squeeze(-1)
    if rng.random() < 0.25:
        q = q_drawn = None
    tokens = drawn if vocab_ids is None else vocab_ids[drawn]
    tokens = tokens.masked_fill(torch.arange(num_drafts) >= num_verified[:, None], -7)  # never to be read
    u_accept, u_final = torch.rand(num_requests, num_drafts, generator=g), torch.rand(num_requests, generator=g)
    if rng.random() < 0.2:
        u_accept.fill_(float(rng.choice([0.0, BELOW_ONE])))
        u_final.fill_(float(rng.choice([0.0, BELOW_ONE])))
    pick = lambda *values: torch.as_tensor(rng.choice(values, num_requests))  # noqa: E731
    return {
        "logits": logits,
        "num_verified": num_verified,
        "tokens": tokens,
        "q": q,
        "q_drawn": q_drawn,
        "u_accept": u_accept,
        "u_final": u_final,
        "temperature": pick(0.0, 0.3, 1.0, 1.0, 2.0).float(),
        "top_k": pick(0, 0, 1, 3, 50, vocab_size),
        "top_p": pick(1.0, 0.95, 0.95, 0.5, 1e-4, 0.0).float(),
        "vocab_ids": vocab_ids,
    }


def test_verify_equals_the_dense_reference():
    """600 random batches: the shortcuts never change a decision, apart from float32 near-ties."""
    compared = skipped = 0
    for seed in range(600):
        case = random_case(seed)
        verdict = verify(**case)
        emitted, accepted, margins = reference_verify(case)
        for r, margin in enumerate(margins):
            if margin < 3e-6:
                skipped += 1
                continue
            compared += 1
            count = int(verdict.num_accepted[r])
            assert count == accepted[r], (seed, r)
            assert verdict.tokens[r, : count + 1].tolist() == emitted[r], (seed, r)
            assert (verdict.tokens[r, count + 1 :] == -1).all()
    assert compared > 1500 and skipped < 0.02 * compared


def test_probs_equal_the_reference():
    g = torch.Generator().manual_seed(0)
    for vocab_size, scale in ((7, 1.0), (300, 3.0), (5000, 0.01), (5000, 2.0), (49152, 3.0)):
        for temperature, top_k, top_p in ((1.0, 0, 0.95), (0.5, 0, 0.3), (1.0, 5, 1.0), (1.3, 40, 0.9), (1.0, 0, 1.0)):
            logits = torch.randn(vocab_size, generator=g) * scale
            expected, margin = reference_probs(logits.numpy(), temperature, top_k, top_p)
            if margin > 1e-8:
                got = probs_of(logits, temperature, top_k, top_p)
                assert ((got > 0).numpy() == (expected > 0)).mean() > 1 - 1.5 / vocab_size  # equal in float32 only
                np.testing.assert_allclose(got, expected, atol=2e-6)


def test_probs_in_passes_equal_rows_alone():
    """A batch is worked on in passes and groups; a row's result does not depend on its company."""
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(24, 30000, generator=g) * 3
    temperature = torch.tensor([0.0, 1.0, 0.7]).repeat(8)
    top_k = torch.tensor([0, 0, 0, 20]).repeat(6)
    top_p = torch.tensor([1.0, 0.9]).repeat(12)
    together = probs(logits, temperature, top_k, top_p)
    for i in range(24):
        torch.testing.assert_close(together[i], probs_of(logits[i], temperature[i], top_k[i], top_p[i]), rtol=0, atol=0)


# sample, residual


def test_sample_inverts_the_cumulative_distribution():
    g = torch.Generator().manual_seed(2)
    for vocab_size in (1, 2, 3, 10, 257, 5000):
        p = torch.rand(300, vocab_size, generator=g)
        p = p.masked_fill(torch.rand(p.shape, generator=g) < 0.4, 0)
        p[:, 0] += 1e-3
        u = torch.rand(300, generator=g)
        u[:20], u[20:40] = 0.0, BELOW_ONE
        picked = sample(p, u)
        for i in range(300):
            expected, margin = reference_sample(p[i].double().numpy(), float(u[i]))
            assert picked[i] == expected or margin < 1e-5 * float(p[i].sum())
            assert p[i, picked[i]] > 0


@pytest.mark.parametrize("u", [0.0, BELOW_ONE, 1.0, 0.5])
def test_sample_never_picks_probability_zero(u):
    """C7: also where zeros stand at both ends, and where everything hangs on one entry of any size."""
    for vocab_size in (2, 9, 10, 1000):
        for place in range(0, vocab_size, max(1, vocab_size // 9)):
            for size in (1e-38, 1e-7, 1.0):
                p = torch.zeros(1, vocab_size)
                p[0, place] = size
                assert sample(p, torch.tensor([u])).item() == place


@pytest.mark.parametrize("bad", [torch.nan, 0.0, torch.inf])
def test_sample_refuses_broken_weights(bad):
    p = torch.tensor([[0.5, 0.5], [bad, 0.0]])
    with pytest.raises(ValueError, match="in row 1"):
        sample(p, torch.tensor([0.3, 0.3]))


@pytest.mark.parametrize("u", [-0.1, 1.5, torch.nan])
def test_sample_refuses_uniforms_out_of_range(u):
    with pytest.raises(ValueError, match="uniform"):
        sample(torch.ones(1, 2), torch.tensor([u]))


def test_residual_is_normalised_not_softmaxed():
    """C10 (a softmax gives [.427, .286, .286]) and C18 (p = q: fall back to p; NaN: an error)."""
    p, q = torch.tensor([[0.6, 0.3, 0.1]]), torch.tensor([[0.2, 0.3, 0.5]])
    torch.testing.assert_close(residual(p, q), torch.tensor([[1.0, 0.0, 0.0]]))
    torch.testing.assert_close(residual(p, p), p)
    both = residual(torch.cat([p, p]), torch.cat([q, p]))
    torch.testing.assert_close(both, torch.tensor([[1.0, 0.0, 0.0], [0.6, 0.3, 0.1]]))
    with pytest.raises(ValueError, match="NaN"):
        residual(torch.tensor([[0.5, torch.nan]]), torch.tensor([[0.5, 0.5]]))


# Sampling parameters


def test_top_p_reached_exactly():
    """C29: [.5, .3, .1, .1] at .8 keeps 2, however the logits were rounded; 0 keeps the argmax."""
    p = torch.tensor([0.5, 0.3, 0.1, 0.1])
    for shift in torch.linspace(-20, 20, 101):
        assert (probs_of(p.log() + shift, top_p=0.8) > 0).tolist() == [True, True, False, False]
        assert (probs_of(p.log() + shift, top_p=0.9) > 0).tolist() == [True, True, True, False]
    assert probs_of(p.log(), top_p=0.0).tolist() == [1, 0, 0, 0]
    assert (probs_of(torch.zeros(100), top_p=0.5) > 0).tolist() == [True] * 50 + [False] * 50  # ties by id


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("top_p", [1e-3, 1e-4, 1e-7])
def test_tiny_top_p_keeps_one_token(dtype, top_p):
    """C28"""
    logits = torch.randn(4096, generator=torch.Generator().manual_seed(3)).to(dtype)
    p = probs_of(logits, top_p=top_p)
    assert (p > 0).sum() == 1 and p.argmax() == logits.float().argmax()


def test_top_k_before_top_p_and_ties_by_id():
    p = torch.tensor([0.4, 0.3, 0.2, 0.1])
    torch.testing.assert_close(probs_of(p.log(), top_k=2, top_p=0.5), torch.tensor([1.0, 0, 0, 0]))  # .4/.7 reaches .5
    torch.testing.assert_close(probs_of(p.log(), top_k=2, top_p=0.58), torch.tensor([4 / 7, 3 / 7, 0, 0]))
    torch.testing.assert_close(probs_of([1.0, 2, 2, 2], top_k=2), torch.tensor([0, 0.5, 0.5, 0]))
    assert (probs_of([2.0, 1, 2, 2, 1], top_k=4) > 0).tolist() == [True, True, True, True, False]
    torch.testing.assert_close(probs_of(p.log(), top_k=9), p)


def test_greedy_and_cold_temperatures():
    """C24 (half precision overflows when divided first) and C35 (the first of equal logits, on every path)."""
    cold = probs_of(torch.tensor([20, 19.9, -50], dtype=torch.float16), temperature=1e-4)
    assert cold.tolist() == [1, 0, 0]
    assert probs_of(torch.tensor([20, 19.9, -50], dtype=torch.float16), temperature=1e-6).tolist() == [1, 0, 0]
    for n in (3, 70000):
        logits = torch.zeros(n)
        logits[[n // 3, n - 1]] = 2.0
        assert probs_of(logits, temperature=0.0).argmax() == n // 3
        assert probs_of(logits, top_p=0.01).argmax() == n // 3
        assert probs_of(logits, top_k=1).argmax() == n // 3
        for draft in (n // 3, n - 1):
            v = run(logits.repeat(2, 1), [draft], temperature=0.0)
            assert v.tokens[0].tolist() == ([draft, n // 3] if draft == n // 3 else [n // 3, -1])


@pytest.mark.parametrize(
    "changed", [{"temperature": -1.0}, {"temperature": torch.nan}, {"top_k": -1}, {"top_p": 1.5}, {"top_p": -0.1}]
)
def test_settings_out_of_range_are_refused(changed):
    with pytest.raises(ValueError, match=next(iter(changed))):
        probs_of([1.0, 2.0], **changed)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("row", [[torch.nan] * 3, [1, torch.nan, 0], [-torch.inf] * 3, [0, torch.inf, 1]])
def test_rows_that_are_not_finite_raise(row, temperature, top_p):
    """C26: an error, never an id; at the draft's row and at the bonus row."""
    fine = torch.tensor([0.0, 9.0, 0.0])
    bad = torch.tensor(row, dtype=torch.float32)
    for pair in ([bad, fine], [fine, bad]):
        with pytest.raises(ValueError, match="NaN logits"):
            run(torch.stack(pair), [1], temperature=temperature, top_p=top_p, u=0.0)
    with pytest.raises(ValueError, match="row 1"):
        probs(torch.stack([fine, bad]), *settings(2, temperature, 0, top_p))


# Verification


def run(logits: Tensor, tokens: list[int], q: Tensor | None = None, u: float = 0.5, **params: float):
    """One request, all drafts verified."""
    drafts = torch.tensor([tokens])
    q_drawn = None if q is None else q[None].gather(-1, drafts[..., None]).squeeze(-1)
    draft = torch.tensor([len(tokens)]), drafts, None if q is None else q[None], q_drawn
    return verify(logits, *draft, torch.full(drafts.shape, u), torch.tensor([u]), *settings(1, **params))


def test_probability_zero_is_refused_at_u_zero():
    """C7: p(x) = 0 after top-k, u exactly 0."""
    logits = torch.tensor([[3.0, 2.0, 1.0], [0.0, 0.0, 0.0]])
    for q in (None, torch.tensor([[0.2, 0.2, 0.6]])):
        for params in ({"top_k": 2}, {"top_p": 0.6}, {"temperature": 0.0}):
            verdict = run(logits, [2], q, u=0.0, **params)
            assert verdict.num_accepted.item() == 0 and verdict.tokens[0, 0] in (0, 1)
        masked = logits.clone()
        masked[0, 2] = -torch.inf  # nothing is truncated: the target itself leaves the draft no probability
        assert run(masked, [2], q, u=0.0).num_accepted.item() == 0


def test_uniforms_at_both_ends():
    """C8: p / q = 1e-6; u = 0 accepts (p > 0), the largest u below 1 rejects; nothing is inf or NaN."""
    logits = torch.tensor([[1.0, 1e-6], [0.5, 0.5]]).log()
    q = torch.tensor([[1e-9, 1.0]])
    assert run(logits, [1], q, u=0.0).tokens.tolist() == [[1, 0]]
    assert run(logits, [1], q, u=BELOW_ONE).tokens.tolist() == [[0, -1]]


def test_equal_distributions_fall_back_to_p():
    """C18: p = q and rejected by rounding; forced here with q a little too large at the drafted token only."""
    p = torch.tensor([[0.25, 0.75]])
    verdict = verify(
        torch.cat([p, p]).log(), torch.tensor([1]), torch.tensor([[0]]), probs(p.log(), *settings(1))[None],
        torch.tensor([[0.2501]]), torch.tensor([[BELOW_ONE]]), torch.tensor([0.9]), *settings(1)
    )  # fmt: skip
    assert verdict.tokens.tolist() == [[1, -1]]


def test_mixed_temperatures():
    """C23: T = [0, 1, 0] in one batch."""
    logits = torch.tensor([[0.0, 3.0], [5.0, 0.0]]).repeat(3, 1)
    t = torch.tensor([0.0, 1.0, 0.0])
    verdict = verify(
        logits, torch.ones(3, dtype=torch.long), torch.tensor([[1], [1], [0]]), None, None,
        torch.full((3, 1), 0.5), torch.full((3,), 0.5), t, torch.zeros(3), torch.ones(3)
    )  # fmt: skip
    assert verdict.tokens.tolist() == [[1, 0], [1, 0], [1, -1]]
    assert verdict.num_accepted.tolist() == [1, 1, 0]


def test_empty_batch_and_zero_budget():
    """C74, C103: no request, no draft verified, K = 0."""
    none = verify(torch.zeros(0, 5), torch.zeros(0, dtype=torch.long), torch.zeros(0, 3, dtype=torch.long), None, None,
                  torch.zeros(0, 3), torch.zeros(0), *settings(0))  # fmt: skip
    assert none.tokens.shape == (0, 4) and none.num_accepted.shape == (0,)
    logits = torch.eye(2, 5) * 50
    for k in (0, 3):
        v = verify(logits, torch.zeros(2, dtype=torch.long), torch.full((2, k), -1), None, None, torch.zeros(2, k),
                   torch.full((2,), 0.5), *settings(2))  # fmt: skip
        assert v.tokens.tolist() == [[0] + [-1] * k, [1] + [-1] * k]


def test_bad_input_of_verify_is_named():
    logits, one = torch.zeros(2, 4), torch.tensor([1])
    u, f, s = torch.zeros(1, 1), torch.zeros(1), settings(1)
    q, qd = torch.full((1, 1, 4), 0.25), torch.full((1, 1), 0.25)
    with pytest.raises(ValueError, match="3 rows"):
        verify(torch.zeros(3, 4), one, torch.tensor([[0]]), None, None, u, f, *s)
    with pytest.raises(ValueError, match=r"num_verified needs 1 entries in \[0, 1\], got \[2\]"):
        verify(torch.zeros(3, 4), one + 1, torch.tensor([[0]]), None, None, u, f, *s)
    for outside in (4, -1):  # C78: a drafter that is wider than the target has to mask its tail itself
        with pytest.raises(ValueError, match="4 ids"):
            verify(logits, one, torch.tensor([[outside]]), None, None, u, f, *s)
    with pytest.raises(ValueError, match="up to 4"):
        verify(logits, one, torch.tensor([[0]]), torch.full((1, 1, 6), 1 / 6), qd, u, f, *s)
    with pytest.raises(ValueError, match="float32"):  # C16
        verify(logits, one, torch.tensor([[0]]), q.bfloat16(), qd, u, f, *s)
    with pytest.raises(ValueError, match="float32"):
        sample(q[0].bfloat16(), f)
    with pytest.raises(ValueError, match="uniform"):
        verify(logits, one, torch.tensor([[0]]), q, qd, u - 0.1, f, *s)
    with pytest.raises(ValueError, match="u_accept"):
        verify(logits, one, torch.tensor([[0]]), q, qd, u[0], f, *s)
    with pytest.raises(ValueError, match="temperature needs 1 entries"):
        verify(logits, one, torch.tensor([[0]]), q, qd, u, f, *settings(2))


def test_rows_behind_a_rejection_are_not_read():
    logits = torch.tensor([[9.0, 0.0], [torch.nan, 0.0], [torch.nan, 0.0]])
    assert run(logits, [1, 1], None, temperature=0.0).tokens.tolist() == [[0, -1, -1]]


# The emitted law. A toy target and a toy drafter over V tokens, both depending on the previous token.


def softmax_table(seed: int, vocab_size: int, scale: float, shift: float = 0.0) -> Tensor:
    """Logits [V + 1, V], by previous token; the last row is for the start."""
    return torch.randn(vocab_size + 1, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale + shift


def draw_drafts(q_table: Tensor, n: int, num_drafts: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.zeros(n, num_drafts, dtype=torch.long)
    previous = torch.full((n,), len(q_table) - 1)
    rows = []
    for k in range(num_drafts):
        rows.append(q_table[previous])
        previous = tokens[:, k] = sample(rows[-1], torch.rand(n, generator=g))
    return tokens, torch.stack(rows, 1)


def joint_counts(
    step, target: Tensor, params: dict, q_table: Tensor, q_claimed: Tensor, n: int, trimmed: bool
) -> Tensor:
    """Counts of the first two emitted tokens; a request that emitted one token goes on with the target alone."""
    g = torch.Generator().manual_seed(5)
    vocab_size, num_drafts = target.shape[1], 2
    tokens, _ = draw_drafts(q_table, n, num_drafts, g)
    previous = torch.cat([torch.full((n, 1), vocab_size), tokens], 1)  # [n, K+1]
    # How many drafts are verified depends on what precedes each of them only, as in the engine.
    confident = q_table.amax(-1)[previous[:, :num_drafts]] > q_table.amax(-1).median()
    num_verified = confident.int().cumprod(1).sum(1) if trimmed else torch.full((n,), num_drafts)
    q = q_claimed[previous[:, :num_drafts]]  # [n, K, V]
    owned = torch.arange(num_drafts + 1) <= num_verified[:, None]
    logits = target[previous][owned]  # [T, V]
    u_accept, u_final, last = (torch.rand(n, m, generator=g) for m in (num_drafts, 1, 1))
    q_drawn = q.gather(-1, tokens[..., None]).squeeze(-1)
    sampling_settings = settings(n, **params)
    verdict = step(logits, num_verified, tokens, q, q_drawn, u_accept, u_final[:, 0], *sampling_settings)
    first, second = verdict.tokens[:, 0], verdict.tokens[:, 1]
    continued = sample(probs(target[first], *sampling_settings), last[:, 0])
    second = torch.where(second < 0, continued, second)
    return torch.bincount(first * vocab_size + second, minlength=vocab_size**2)


def p_value(counts: Tensor, target: Tensor, params: dict) -> float:
    p = probs(target, *settings(len(target), **params)).double()  # [V+1, V]
    expected = (p[-1][:, None] * p[:-1]).flatten() * counts.sum()
    if (counts[expected == 0] > 0).any():
        return 0.0  # a token that the target never emits
    seen = expected > 0
    statistic = ((counts[seen] - expected[seen]) ** 2 / expected[seen]).sum()
    return float(chi2.sf(float(statistic), int(seen.sum()) - 1))


def trimmed_counted_as_rejected(logits, num_verified, tokens, q, q_drawn, u_accept, u_final, *params):
    """Mutant: the token at a trimmed place is drawn from the residual, as if the draft there had been rejected."""
    verdict = verify(logits, num_verified, tokens, q, q_drawn, u_accept, u_final, *params)
    last_row = (num_verified + 1).cumsum(0) - 1
    hit = (verdict.num_accepted == num_verified) & (num_verified < tokens.shape[1])
    r, k = hit.nonzero().squeeze(1), num_verified[hit]
    p = probs(logits[last_row[r]], *(x[r] for x in params))
    verdict.tokens[r, k] = sample(residual(p, q[r, k]), u_final[r])
    return verdict


def claimed(q_logits: Tensor, dtype: torch.dtype) -> Tensor:
    return q_logits.to(dtype).softmax(-1).float()


@pytest.mark.parametrize("params", [{}, {"top_p": 0.8}, {"top_k": 3}, {"temperature": 0.7, "top_p": 0.9, "top_k": 4}])
@pytest.mark.parametrize("mutant", ["none", "resample_from_p", "trimmed_as_rejected", "other_dtype"])
def test_the_law_and_its_mutants(mutant, params, monkeypatch):
    """The same chi-square test passes for the real step and fails for each known mistake (C3, C13, C16)."""
    vocab_size, n = 5, 25000
    target = softmax_table(10, vocab_size, 1.0)
    q_logits = softmax_table(11, vocab_size, 0.7, shift=200.0)  # bfloat16 numbers are 1 apart there
    step = verify
    if mutant == "resample_from_p":
        monkeypatch.setattr(sampling, "residual", lambda p, q: p)
    if mutant == "trimmed_as_rejected":
        step = trimmed_counted_as_rejected
    q_claimed = claimed(q_logits, torch.bfloat16 if mutant == "other_dtype" else torch.float32)
    counts = joint_counts(step, target, params, claimed(q_logits, torch.float32), q_claimed, n, trimmed=True)
    value = p_value(counts, target, params)
    assert value > 1e-3 if mutant == "none" else value < 1e-6


def test_the_law_at_full_depth():
    target = softmax_table(20, 6, 1.5)
    q_table = softmax_table(21, 6, 1.0).softmax(-1)
    for params in ({}, {"top_p": 0.7}):
        counts = joint_counts(verify, target, params, q_table, q_table, 25000, trimmed=False)
        assert p_value(counts, target, params) > 1e-3


def emitted_law(p: list[float], tokens: Tensor, q: Tensor | None, vocab_ids: Tensor | None = None, **params: float):
    """Frequencies of the first token over many requests with one draft each, and the share of accepted drafts."""
    n = len(tokens)
    g = torch.Generator().manual_seed(6)
    logits = torch.tensor(p).log().repeat(2 * n, 1)
    drawn = tokens if vocab_ids is None else (vocab_ids == tokens[:, None]).int().argmax(1)
    q_all = None if q is None else q.expand(n, 1, -1).contiguous()
    q_drawn = None if q is None else q[drawn][:, None]
    v = verify(logits, torch.ones(n, dtype=torch.long), tokens[:, None], q_all, q_drawn, torch.rand(n, 1, generator=g),
               torch.rand(n, generator=g), *settings(n, **params), vocab_ids=vocab_ids)  # fmt: skip
    return torch.bincount(v.tokens[:, 0], minlength=len(p)) / n, float(v.num_accepted.float().mean())


N = 100_000  # standard error .0016 at most


def test_greedy_draft_has_a_one_hot_q():
    """C1: the drafter's argmax tested against its soft q gives [.75, .25]; against a one-hot q [.6, .4]."""
    law, accepted = emitted_law([0.6, 0.4], torch.zeros(N, dtype=torch.long), None)
    torch.testing.assert_close(law, torch.tensor([0.6, 0.4]), atol=0.005, rtol=0)
    assert accepted == pytest.approx(0.6, abs=0.005)
    buggy, _ = emitted_law([0.6, 0.4], torch.zeros(N, dtype=torch.long), torch.tensor([0.8, 0.2]))
    torch.testing.assert_close(buggy, torch.tensor([0.75, 0.25]), atol=0.005, rtol=0)


def test_ties_of_drafts_fall_to_the_first_id():
    """C35: [1, 2, 2] is 1 for a drafter too, by greedy drafting and at temperature 0, whatever the uniform says."""
    logits, cold, u = torch.tensor([[1.0, 2.0, 2.0]] * 3), torch.zeros(3), torch.tensor([0.0, 0.5, 0.999])
    assert base.draw(logits, torch.ones(3), u, greedy=True)[0].tolist() == [1, 1, 1]
    ids, q, drawn = base.draw(logits, cold, u, greedy=False)
    assert ids.tolist() == [1, 1, 1] and q.tolist() == [[0.0, 1.0, 0.0]] * 3 and drawn.tolist() == [1.0] * 3


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("offset", [0.0, 200.0])
def test_a_draft_is_drawn_from_the_very_q_that_judges_it(temperature: float, offset: float):
    """C2, C16: one float32 softmax of the drafter for draw, ratio and residual, where bfloat16 is coarse."""
    z = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log() + offset
    rows, u = 20_000, (torch.arange(20_000) + 0.5) / 20_000
    expected = (z / temperature).softmax(-1).float()
    ids, q, drawn = base.draw(z.float().expand(rows, -1), torch.full((rows,), temperature), u, greedy=False)
    assert q is not None and q.dtype == torch.float32
    torch.testing.assert_close(q, expected.expand(rows, -1), atol=2e-5, rtol=0)
    torch.testing.assert_close(torch.bincount(ids, minlength=3) / rows, q[0], atol=1e-4, rtol=0)
    assert torch.equal(drawn, q[torch.arange(rows), ids])


def test_a_greedy_draft_comes_without_a_soft_q():
    """C1: its q is one-hot at the argmax, so the soft one cannot judge it."""
    ids, q, drawn = base.draw(torch.tensor([[0.8, 0.2]]).log(), torch.ones(1), torch.tensor([0.9]), greedy=True)
    assert ids.tolist() == [0] and q is None and drawn.tolist() == [1.0]


@pytest.mark.parametrize("wrong", [float("nan"), -0.3, 7.0])
def test_a_q_at_the_draft_that_is_no_probability_is_refused(wrong: float):
    """C18: NaN would be rejected without a word, a negative q accepted for ever."""
    one = torch.ones(1)

    def judge(num_verified: int) -> Any:
        counts, tokens = torch.tensor([num_verified]), torch.tensor([[1]])
        q, own = torch.full((1, 1, 2), 0.5), torch.tensor([[wrong]])
        logits = torch.tensor([[0.2, 0.8]]).log().expand(num_verified + 1, -1)
        return verify(logits, counts, tokens, q, own, 0.1 * one[None], 0.1 * one, one, torch.zeros(1).long(), one)

    with pytest.raises(ValueError, match="q_drawn outside"):
        judge(1)
    assert judge(0).num_accepted.tolist() == [0]  # what was trimmed is not read


def draw(q: Tensor) -> Tensor:
    return sample(q.expand(N, -1), torch.rand(N, generator=torch.Generator().manual_seed(7)))


def test_q_is_what_the_token_was_drawn_from():
    """C2: top_k = 2 on both sides; q after top-k gives [.625, .375], the raw softmax [.464, .536]."""
    p, raw = [0.5, 0.3, 0.15, 0.05], torch.tensor([0.3, 0.4, 0.2, 0.1])
    q = probs_of(raw.log(), top_k=2)
    law, _ = emitted_law(p, draw(q), q, top_k=2)
    torch.testing.assert_close(law, torch.tensor([0.625, 0.375, 0, 0]), atol=0.005, rtol=0)
    buggy, _ = emitted_law(p, draw(q), raw, top_k=2)
    assert (buggy - law).abs().sum() / 2 > 0.1


def test_parameters_on_one_side_only():
    """C3: the target is truncated, the drafter is not: the law is the truncated target's."""
    logits = torch.tensor([2, 1.5, 1, 0.5])
    target = probs_of(logits, temperature=0.3, top_p=0.9)
    q = logits.softmax(-1)
    law, _ = emitted_law(logits.softmax(-1).tolist(), draw(q), q, temperature=0.3, top_p=0.9)
    torch.testing.assert_close(law, target, atol=0.005, rtol=0)
    assert (law[target == 0] == 0).all()


def test_acceptance_is_the_overlap():
    """C5: sum(min(p, q)) = .90; matching against a sample of the target would accept sum(p q) = .47."""
    p, q = [0.6, 0.2, 0.1, 0.1], torch.tensor([0.7, 0.2, 0.05, 0.05])
    law, accepted = emitted_law(p, draw(q), q)
    assert accepted == pytest.approx(0.9, abs=0.005)
    torch.testing.assert_close(law, torch.tensor(p), atol=0.005, rtol=0)


def test_residual_after_rejection():
    """C13: resampling from p would give [.72, .28]."""
    q = torch.tensor([0.8, 0.2])
    law, _ = emitted_law([0.6, 0.4], draw(q), q)
    torch.testing.assert_close(law, torch.tensor([0.6, 0.4]), atol=0.005, rtol=0)


@pytest.mark.parametrize("ids", [None, [4, 1, 3]])
def test_target_wider_than_the_drafter(ids):
    """C77: ids outside the drafter's vocabulary come from the target and the residual alone; the law is p."""
    p, q = [0.1, 0.3, 0.2, 0.15, 0.25], torch.tensor([0.2, 0.5, 0.3])
    vocab_ids = None if ids is None else torch.tensor(ids)
    tokens = draw(q) if vocab_ids is None else vocab_ids[draw(q)]
    law, accepted = emitted_law(p, tokens, q, vocab_ids)
    torch.testing.assert_close(law, torch.tensor(p), atol=0.005, rtol=0)
    columns = torch.arange(3) if vocab_ids is None else vocab_ids
    assert accepted == pytest.approx(float(torch.minimum(torch.tensor(p)[columns], q).sum()), abs=0.005)


def test_every_row_has_a_uniform_of_its_own():
    """One uniform for all rows would tie what they draw."""
    p = torch.full((6, 2), 0.5)
    for u in (torch.rand(1), torch.tensor(0.7), torch.rand(6, 1)):
        with pytest.raises(ValueError, match="one uniform per row"):
            sample(p, u)
    with pytest.raises(ValueError, match="one uniform per row"):
        sample(p[0], torch.rand(2))
    with pytest.raises(ValueError, match="p and q need one shape"):
        residual(p, p[0])
