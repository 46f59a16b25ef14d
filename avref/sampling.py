"""Target distributions, and the accept / reject / bonus step that keeps the target's law.

A draft x ~ q is accepted with probability min(1, p(x) / q(x)): when u q(x) < p(x) for a uniform u in [0, 1). The first
rejected draft is replaced by a token from the residual max(0, p - q) / sum max(0, p - q). When every verified draft is
accepted, one more token (the bonus) comes from p itself. A draft that was not verified is not a rejection: the token at
its place is such a bonus (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, theorem 1).

p is the target's softmax after temperature, top-k and top-p, in float32. Nothing here knows a model or a random
generator: uniforms come in as tensors, so equal inputs give equal tokens.

`verify` reads up to R (K + 1) rows of a vocabulary of 50,000 ids or more in every decode step, so it truncates only
the R rows that it draws from. With top-p alone the kept mass Z lies in [top_p, 1], and the truncated p(x) is the
untruncated one over Z, or 0 outside the nucleus: these bounds decide nearly every draft from one softmax.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5  # a temperature below this means greedy: p is one-hot at the first largest logit
# A nucleus counts as complete when its mass reaches top_p to within float32 rounding. Without this slack
# [.5, .3, .1, .1] at top_p = .8 keeps two tokens or three, depending on how the logits of .5 and .3 were rounded.
ROUNDING = 1e-6
_CPU_PASS, _DEVICE_PASS = 2**18, 2**26  # elements worked on at a time; 1 MB of float32 stays in a CPU's cache
_SHIFT = 20  # without these, the bits of a float32 are its exponent and the first 3 of its fraction
_NUM_BUCKETS = (0x3F800000 >> _SHIFT) + 1  # the bits of 1.0, the largest probability


class Verdict(NamedTuple):
    """What one verification emits: the accepted drafts, then one token drawn by the target, then -1."""

    tokens: Tensor  # [R, K+1] int64; request r emits its first num_accepted[r] + 1
    num_accepted: Tensor  # [R] int64


class _Settings(NamedTuple):
    """Per request, and what the host knows of all of them: it decides what to launch without asking the device."""

    temperature: Tensor  # [N]
    top_k: Tensor  # [N]
    top_p: Tensor  # [N]
    all_greedy: bool
    some_greedy: bool
    some_cut_k: bool
    some_cut_p: bool
    undivided: bool  # every temperature is 1, or greedy

    def at(self, rows: Tensor | slice) -> "_Settings":
        """Some of the rows; what was known of all stays true as "may be" and "all"."""
        return self._replace(temperature=self.temperature[rows], top_k=self.top_k[rows], top_p=self.top_p[rows])

    def greedy(self) -> Tensor:
        return self.temperature < GREEDY_BELOW

    def cut_by_k(self, vocab_size: int) -> Tensor:
        return (self.top_k > 0) & (self.top_k < vocab_size)

    def mass_limit(self) -> Tensor:
        """The mass at which a nucleus is complete; 2, never reached, where top-p is off."""
        return torch.where(self.top_p < 1, self.top_p * (1 - ROUNDING), 2.0)


def probs(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The distribution that the target samples from.

    softmax(logits / temperature), then the `top_k` most probable tokens (0 keeps all), then, renormalised, the nucleus:
    the tokens before which, in descending order, less than `top_p` of the mass lies (1 keeps all). The most probable
    token always stays; ties go to the lower id. A temperature below 1e-5 gives a one-hot row.

    logits [N, V] of any float type; temperature [N], top_k [N] int, top_p [N]. Returns [N, V] float32; rows sum to 1.
    Raises ValueError for settings out of range and for rows with NaN, +inf, or nothing but -inf.
    Source: the order temperature, top-k, top-p is vLLM's (vllm/v1/sample/ops/topk_topp_sampler.py).
    """
    settings = _checked(logits, len(logits), temperature, top_k, top_p)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)  # [N, V]
    for rows in _passes(len(logits), logits):
        out[rows] = _probs(logits[rows], settings.at(rows))
    return out


def sample(p: Tensor, u: Tensor) -> Tensor:
    """The inverse of the cumulative distribution: the first index whose cumulative mass exceeds u times the total.

    p [N, V] non-negative weights, normalised or not; u [N] in [0, 1) (1 itself counts as the number below it). Returns
    [N] int64. An index with p = 0 is never returned, whatever u and the rounding. Raises ValueError when a row has no
    positive finite mass (NaN, all zero), u is out of range, or p is in half precision, which would change the law.
    """
    if p.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"weights must be float32 or float64, got {p.dtype}: take the softmax in float32, then draw")
    if p.ndim != 2 or u.shape != p.shape[:1]:
        raise ValueError(f"p needs shape [N, V] and u [N], one uniform per row; got {tuple(p.shape)}, {tuple(u.shape)}")
    # Two levels, so that only about 2 sqrt(V) entries of a row are summed one after the other, in float64.
    num_rows, vocab_size = p.shape
    width = max(1, round(vocab_size**0.5))
    blocks = torch.nn.functional.pad(p, (0, -vocab_size % width)).view(num_rows, -1, width)  # [N, M, W]
    mass = blocks.sum(-1).double()  # [N, M]
    total = mass.sum(-1)  # [N]
    _refuse(
        (~((u >= 0) & (u <= 1)), "a uniform outside [0, 1)", "draw uniforms with torch.rand"),
        (~((total > 0) & total.isfinite()), "all weights zero, or NaN, or infinite", "check p, q and the logits"),
    )
    block, level = _first_above(mass, u.double() * total)  # [N], [N]
    inside = blocks[torch.arange(num_rows, device=p.device), block].double()  # [N, W]
    return block * width + _first_above(inside, level)[0]


def residual(p: Tensor, q: Tensor) -> Tensor:
    """The law of the token that replaces a rejected draft: max(0, p - q), normalised.

    p, q [N, V]; returns [N, V]. Where p - q is positive nowhere (p equals q up to rounding, so that the rejection was a
    rounding accident) the answer is p. Raises ValueError for NaN. Source: Leviathan et al. 2023, section 2.3.
    """
    if p.shape != q.shape:
        raise ValueError(f"p and q need one shape [N, V], got {tuple(p.shape)} and {tuple(q.shape)}")
    excess = (p - q).clamp_(min=0)  # [N, V]
    total = excess.sum(-1, keepdim=True)  # [N, 1]
    finite, positive = torch.stack([total.isfinite().all(), (total > 0).all()]).tolist()
    if not finite:
        _refuse((~total.isfinite().squeeze(1), "NaN or inf in p - q", "check the draft distribution and the logits"))
    return excess.div_(total) if positive else torch.where(total > 0, excess / total, p)


def verify(
    logits: Tensor,
    num_verified: Tensor,
    tokens: Tensor,
    q: Tensor | None,
    q_drawn: Tensor | None,
    u_accept: Tensor,
    u_final: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    vocab_ids: Tensor | None = None,
) -> Verdict:
    """Accepts a prefix of every request's verified drafts and adds one token, so that what is emitted follows p.

    Draft k of request r is accepted when u_accept q(x) < p(x), strictly: p(x) = 0 is refused at u = 0 too. The token
    after the accepted ones is drawn with u_final: from the residual after a rejection, otherwise from p.

    logits [T, V] packed: request r owns num_verified[r] + 1 adjacent rows; row j is the target's after j of its drafts.
    num_verified [R], 0 to K; tokens [R, K] drafted target ids, read up to num_verified (beyond it anything may stand).
    q [R, K, Vd] float32: the very distribution that the drafts were drawn from; q_drawn [R, K] float32: q at the draft.
    q None means one-hot at the draft, q_drawn is not read then. vocab_ids [Vd]: the target's ids of the drafter's; None
    means 0 .. Vd-1. u_accept [R, K] and u_final [R]: independent uniforms in [0, 1). temperature, top_k, top_p [R].

    Rows of logits behind a request's first rejection are not read, and of q only the one at the rejection. Raises
    ValueError for wrong shapes and types, ids outside the vocabulary, settings out of range, a q_drawn that is no
    probability, and non-finite rows among those read.
    """
    num_requests, num_drafts = tokens.shape
    tokens = tokens.long()
    settings = _checked(logits, num_requests, temperature, top_k, top_p)
    deepest = _check_counts(logits, num_verified, tokens)
    _check_q(logits, tokens, q, q_drawn, vocab_ids)
    if u_accept.shape != tokens.shape or u_final.shape != (num_requests,):
        raise ValueError(
            f"u_accept needs shape {tuple(tokens.shape)}, got {tuple(u_accept.shape)}; u_final ({num_requests},)"
        )
    verified = torch.arange(num_drafts, device=tokens.device) < num_verified[:, None]  # [R, K]
    at_draft = u_accept.new_ones(()) if q is None or q_drawn is None else q_drawn  # [R, K]
    outside = (verified & ((tokens < 0) | (tokens >= logits.shape[1]))).any(-1)
    _refuse(
        (
            outside,
            f"a draft outside the target's {logits.shape[1]} ids",
            "mask the drafter's tail before it samples",
        ),
        (~((u_accept >= 0) & (u_accept <= 1)).all(-1), "a uniform outside [0, 1)", "draw uniforms with torch.rand"),
        (
            (verified & ~((at_draft >= 0) & (at_draft < 1.001))).any(-1),
            "a q_drawn outside [0, 1] or NaN",
            "take the float32 softmax that the draft was drawn from, at the draft",
        ),
    )
    first_row = (num_verified + 1).cumsum(0) - (num_verified + 1)  # [R]
    threshold = u_accept * at_draft  # [R, K]
    accepted = torch.zeros(num_requests, dtype=torch.int64, device=logits.device)  # [R]
    everyone = torch.arange(num_requests, device=logits.device)
    alive = everyone[num_verified > 0]
    for k in range(deepest):
        if len(alive) == 0:
            break
        for r in [alive[rows] for rows in _passes(len(alive), logits)]:
            row_logits = logits.index_select(0, first_row[r] + k)  # [n, V]
            accepted[r] += _accepts(row_logits, tokens[r, k], threshold[r, k], settings.at(r))
        alive = alive[(accepted[alive] > k) & (num_verified[alive] > k + 1)]  # no rejection so far, and more to judge

    drafts = tokens.masked_fill(torch.arange(num_drafts, device=tokens.device) >= accepted[:, None], -1)
    emitted = torch.nn.functional.pad(drafts, (0, 1), value=-1)  # [R, K+1]
    for r in [everyone[rows] for rows in _passes(num_requests, logits)]:
        law = _probs(logits.index_select(0, first_row[r] + accepted[r]), settings.at(r))  # [n, V]
        rejected = (accepted[r] < num_verified[r]).nonzero().squeeze(1)
        if len(rejected):
            s = r[rejected]
            wide = _wide_q(q, tokens, vocab_ids, s, accepted[s], law.shape[1])  # [m, V]
            law.index_copy_(0, rejected, residual(law.index_select(0, rejected), wide))
        emitted[r, accepted[r]] = sample(law, u_final[r])
    return Verdict(emitted, accepted)


def _accepts(logits: Tensor, x: Tensor, threshold: Tensor, settings: _Settings) -> Tensor:
    """threshold < p(x) for each row [n], truncating only the rows where bounds on the kept mass leave it open."""
    if settings.all_greedy:
        return (argmax(logits) == x) & (threshold < 1)
    p = _softmax(logits, settings)  # [n, V]
    p_x = p.gather(1, x[:, None]).squeeze(1)  # [n]
    limit = settings.mass_limit()
    unbounded = settings.cut_by_k(logits.shape[1]) | settings.greedy()  # the kept mass may be anything
    possible = (threshold * limit.clamp(max=1) < p_x) | unbounded & (p_x > 0)

    # Where u q(x) < p(x) holds untruncated, truncation only raises p(x): what is left to see is x in the nucleus.
    likely = (threshold < p_x) & ~unbounded
    accepted = likely & (1 - p_x < limit)
    look = (likely & ~accepted).nonzero().squeeze(1)
    if len(look):
        rows, own = p.index_select(0, look), p_x[look]
        # All that is at least as probable, less x itself: with ties an upper bound of the mass before x.
        at_least = torch.ge(rows, own[:, None], out=torch.empty_like(rows)).mul_(rows).sum(-1)
        accepted[look] = at_least - own < limit[look]

    undecided = (possible & ~accepted).nonzero().squeeze(1)
    if len(undecided):
        exact = _probs(logits.index_select(0, undecided), settings.at(undecided))  # [m, V]
        accepted[undecided] = threshold[undecided] < exact.gather(1, x[undecided, None]).squeeze(1)
    return accepted


def _probs(logits: Tensor, settings: _Settings) -> Tensor:
    greedy = settings.greedy()
    if settings.all_greedy:
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(1, argmax(logits)[:, None], 1.0)
    p = _softmax(logits, settings)  # [n, V]
    if settings.some_greedy:
        rows = greedy.nonzero().squeeze(1)
        p[rows] = torch.zeros_like(p[rows]).scatter_(1, argmax(logits[rows])[:, None], 1.0)
    by_k = settings.cut_by_k(p.shape[1])
    by_p = (settings.top_p < 1) & ~by_k
    for cut, chosen, some in ((_cut_k, by_k, settings.some_cut_k), (_cut_p, by_p, settings.some_cut_p)):
        if not some:
            continue
        rows = (chosen & ~greedy).nonzero().squeeze(1)
        if len(rows):
            kept = cut(p.index_select(0, rows), settings.at(rows))  # [m, V]
            p.index_copy_(0, rows, kept.div_(kept.sum(-1, keepdim=True)))
    return p


def _cut_p(p: Tensor, settings: _Settings) -> Tensor:
    """p [n, V] with 0 outside the nucleus: after the tokens of higher p, or of equal p and lower id, that reach top_p.

    Sorting a whole vocabulary takes 20 times as long as what is done here: add up the mass by the leading bits of p
    (positive floats are ordered like the integers with the same bits) and sort only where the limit is crossed.
    """
    limit = settings.mass_limit() * p.sum(-1, dtype=torch.float64)
    limit = limit.clamp(min=0.5 / p.shape[1])  # any limit below the best token's mass, at least 1 / V, keeps just that
    bucket = p.view(torch.int32) >> _SHIFT  # [n, V]
    by_bucket = torch.zeros(len(p), _NUM_BUCKETS, dtype=torch.float64, device=p.device)
    up_to = by_bucket.scatter_add_(1, bucket.long(), p.double()).cumsum(-1)  # [n, buckets], ascending p
    total = up_to[:, -1]
    crossed = torch.searchsorted(up_to, (total - limit)[:, None], right=True)  # [n, 1]; all buckets above it stay
    above = total - up_to.gather(1, crossed).squeeze(1)  # [n]
    crossed = crossed.int()
    out = torch.ge(p, (crossed << _SHIFT).view(torch.float32), out=torch.empty_like(p)).mul_(p)

    row, token = (bucket == crossed).nonzero(as_tuple=True)  # [m], [m], in the order of rows, then ids
    order = p[row, token].sort(descending=True, stable=True).indices
    order = order[row[order].sort(stable=True).indices]  # by row, then descending p, then id
    row, token = row[order], token[order]
    own = p[row, token]
    before = own.cumsum(0, dtype=torch.float64) - own
    dropped = above[row] + before - before[torch.searchsorted(row, row)] >= limit[row]
    out[row, token] = own.masked_fill_(dropped, 0)
    return out


def _cut_k(p: Tensor, settings: _Settings) -> Tensor:
    """p [n, V] with 0 outside the top_k most probable tokens, and then outside the nucleus of those."""
    k = settings.top_k[:, None]
    best = p.topk(int(k.max())).values.double()  # [n, k], descending
    best.masked_fill_(torch.arange(best.shape[1], device=p.device) >= k, 0)
    in_nucleus = best.cumsum(-1) - best < settings.mass_limit()[:, None] * best.sum(-1, keepdim=True)
    count = (in_nucleus & (best > 0)).sum(-1, keepdim=True).clamp(min=1)  # [n, 1] tokens that stay
    last = best.gather(1, count - 1)
    equals = count - (best > last).sum(-1, keepdim=True)  # of the tokens as probable as the last, so many stay
    last = last.float()
    out = torch.ge(p, last, out=torch.empty_like(p)).mul_(p)
    equal = p == last
    return out.masked_fill_(equal & (equal.cumsum(-1) > equals), 0)


def _wide_q(q: Tensor | None, tokens: Tensor, ids: Tensor | None, r: Tensor, k: Tensor, vocab_size: int) -> Tensor:
    """q of draft k of request r, over the target's whole vocabulary. r, k [n]; returns [n, V]."""
    wide = torch.zeros(len(r), vocab_size, dtype=torch.float32, device=tokens.device)
    if q is None:
        return wide.scatter_(1, tokens[r, k, None], 1.0)
    if ids is None:
        wide[:, : q.shape[-1]] = q[r, k]
        return wide
    return wide.index_copy_(1, ids, q[r, k])


def _softmax(logits: Tensor, settings: _Settings) -> Tensor:
    """float32 before dividing, as half precision overflows at small temperatures; greedy rows are not divided."""
    divisor = settings.temperature.float().masked_fill(settings.greedy(), 1.0)
    z = logits.float() if settings.undivided else logits.float() / divisor[:, None]
    p = z.softmax(-1)
    _refuse_logits(p[:, 0].isnan())  # one NaN or +inf, or nothing but -inf, turns the whole softmax to NaN
    return p


def argmax(logits: Tensor) -> Tensor:
    best = logits.float().argmax(-1)  # [n], the first of equals
    _refuse_logits(~logits.gather(1, best[:, None]).squeeze(1).isfinite())
    return best


def _first_above(weights: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    """First index of positive weight whose cumulative weight exceeds `level` [N], and how far `level` reaches in."""
    # Entries of weight 0 are taken out by name: a parallel scan need not repeat the previous sum exactly there.
    cumulative = weights.cumsum(-1).masked_fill_(weights <= 0, 0)  # [N, M]
    highest = cumulative.amax(-1)
    level = torch.minimum(level, torch.nextafter(highest, torch.zeros_like(highest)))  # rounding may reach the end
    index = (cumulative > level[:, None]).int().argmax(-1, keepdim=True)  # [N, 1]
    before = cumulative.gather(1, index) - weights.gather(1, index)
    return index.squeeze(1), (level - before.squeeze(1)).clamp_(min=0)


def _passes(num_rows: int, logits: Tensor) -> Iterator[slice]:
    elements = _CPU_PASS if logits.device.type == "cpu" else _DEVICE_PASS
    step = max(1, elements // max(logits.shape[1], _NUM_BUCKETS))
    return (slice(i, min(i + step, num_rows)) for i in range(0, num_rows, step))


def _refuse_logits(bad: Tensor) -> None:
    _refuse((bad, "NaN logits (or +inf, or nothing but -inf)", "check the model's weights, dtype and masks"))


def _refuse(*checks: tuple[Tensor, str, str]) -> None:
    """(bad [N], what, remedy) each. One wait on the device for all: an id outside the vocabulary would be worse."""
    if not bool(torch.stack([bad.any() for bad, _, _ in checks]).any()):
        return
    for bad, what, remedy in checks:
        if bool(bad.any()):
            raise ValueError(f"{what} in row {int(bad.int().argmax())} ({int(bad.sum())} of {len(bad)} rows): {remedy}")


def _checked(logits: Tensor, n: int, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> _Settings:
    """The settings with what the host may know of them, in one wait on the device."""
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ValueError(f"logits must be floating-point [rows, vocabulary], got {logits.dtype} {tuple(logits.shape)}")
    settings = _Settings(temperature, top_k, top_p, False, False, False, False, False)
    values = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    wrong_shape = [name for name, value in values.items() if value.shape != (n,)]
    greedy = settings.greedy()
    *fine, all_greedy, some_greedy, some_k, some_p, undivided = torch.stack(
        [
            (temperature >= 0).all(),
            (top_k >= 0).all(),
            ((top_p >= 0) & (top_p <= 1)).all(),
            greedy.all(),
            greedy.any(),
            settings.cut_by_k(logits.shape[1]).any(),
            (top_p < 1).any(),
            (greedy | (temperature == 1)).all(),
        ]
    ).tolist()
    for (name, value), ok in zip(values.items(), fine, strict=True):
        if name in wrong_shape or not ok:
            allowed = "in [0, 1]" if name == "top_p" else "at least 0"
            raise ValueError(f"{name} needs {n} entries {allowed}, one per request, got {value.tolist()}")
    return _Settings(temperature, top_k, top_p, all_greedy, some_greedy, some_k, some_p, undivided)


def _check_counts(logits: Tensor, num_verified: Tensor, tokens: Tensor) -> int:
    """The most drafts that any request had verified."""
    (num_rows, _), (num_requests, num_drafts) = logits.shape, tokens.shape
    counts = num_verified.tolist()
    fits = num_verified.shape == (num_requests,)
    if not fits or any(not 0 <= n <= num_drafts for n in counts):
        raise ValueError(f"num_verified needs {num_requests} entries in [0, {num_drafts}], got {counts}")
    if num_rows != sum(counts) + num_requests:
        raise ValueError(f"got {num_rows} rows of logits for num_verified {counts}: pack one more each")
    return max(counts, default=0)


def _check_q(logits: Tensor, tokens: Tensor, q: Tensor | None, q_drawn: Tensor | None, ids: Tensor | None) -> None:
    vocab_size, (num_requests, num_drafts) = logits.shape[1], tokens.shape
    if q is None:
        return
    if q_drawn is None or q.dtype != torch.float32 or q_drawn.dtype != torch.float32:
        kinds = f"{q.dtype} and {None if q_drawn is None else q_drawn.dtype}"
        raise ValueError(
            f"q and q_drawn must be one float32 distribution, got {kinds}: take a float32 softmax, then draw"
        )
    if q_drawn.shape != tokens.shape:
        raise ValueError(f"q_drawn must be [{num_requests}, {num_drafts}], got {tuple(q_drawn.shape)}")
    if q.shape[:2] != tokens.shape or q.shape[2] > vocab_size or (ids is not None and len(ids) != q.shape[2]):
        allowed = f"[{num_requests}, {num_drafts}, up to {vocab_size}], with one entry of vocab_ids per column"
        raise ValueError(f"q must be {allowed}, got {tuple(q.shape)}: mask and renormalise a wider drafter")
