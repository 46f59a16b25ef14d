"""Features: one number per drafted token, read from the draft logits, that says how sure the drafter was.

With q = softmax(logits / T) over the whole vocabulary (before any top-k or top-p) and x the drafted token:

    logit_q_max        log q_max - log(1 - q_max)      the default
    loglog_q_max       -log(-log q_max)
    log_q_max          log q_max
    q_max              q_max, to be used as it is, without a fit
    margin             log q_max - log q_second
    entropy            -H(q) = sum q log q             negated, so that larger means surer
    logit_q_sampled    log q_x - log(1 - q_x)          lossy: reads the drafted token
    loglog_q_sampled   -log(-log q_x)                  lossy: reads the drafted token

All of them grow with certainty, because the estimator keeps its slope at or above zero. The first six depend on the
drafted token's prefix only, so trimming by them leaves the emitted law untouched (design rule: whether x is verified
may depend on anything before x, never on x itself). The last two read x; they are here to be compared with, and for
showing what goes wrong.

Everything follows from ``rest``, the mass of all entries but one maximum in units of the maximum:

    rest = sum over i != argmax of exp((z_i - z_max) / T)      q_max = 1 / (1 + rest)      logit q_max = -log(rest)

Summing the rest directly keeps full precision where q_max is close to 1. The obvious form, sum of exponentials minus
1, has nothing between 15.9 and infinity in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from avref.sampling import GREEDY_BELOW

MAX_LOG_ODDS = 40.0
"""Features are clamped to +-40, as in vLLM: q_max of 1 - 4e-18 and of exactly 1 are the same to the estimator."""

_CACHED_ELEMENTS = 1 << 19
"""Float32 elements (2 MiB) worked on at a time on a CPU: few enough for its cache, enough rows for its threads."""

Temperature = float | Tensor


@dataclass(frozen=True)
class Feature:
    """A named feature, ``fn(logits [..., V], tokens [...], temperature) -> [...]`` in float32.

    ``lossless`` is true when the value does not depend on ``tokens``: such a feature may decide what is verified
    without changing the emitted law. A feature that is not lossless needs ``allow_lossy=True`` in ``LLM``.
    """

    name: str
    lossless: bool
    fn: Callable[[Tensor, Tensor | None, Temperature], Tensor]

    def __call__(self, logits: Tensor, tokens: Tensor | None = None, temperature: Temperature = 1.0) -> Tensor:
        return self.fn(logits, tokens, temperature)


def logit_q_max(logits: Tensor, temperature: Temperature = 1.0) -> Tensor:
    """Log-odds of the most likely token under softmax(logits / T): ``log(q_max / (1 - q_max))``, clamped to +-40.

    logits [..., V] of any floating dtype; computed and returned in float32 [...], right to 1e-3 up to the clamp.
    temperature is a number or a tensor that broadcasts to logits.shape[:-1] (one per request and K positions: [R, 1]);
    0 or less means greedy decoding, for which T is 1, as in vLLM. With tied maxima the value is at most 0. A row with
    NaN, +inf, or nothing but -inf gives NaN: finding out would cost a device synchronisation here, and the budget
    refuses NaN. Raises ValueError for logits that are not floating point. Source: the article's shipped feature.
    """
    return -_rest(logits, temperature).log_().clamp_(-MAX_LOG_ODDS, MAX_LOG_ODDS)


def loglog_q_max(logits: Tensor, temperature: Temperature = 1.0) -> Tensor:
    """``-log(-log q_max)``, ranked as the log-odds but flatter at small q_max; otherwise as `logit_q_max`."""
    return -_rest(logits, temperature).log1p_().log_().clamp_(-MAX_LOG_ODDS, MAX_LOG_ODDS)


def log_q_max(logits: Tensor, temperature: Temperature = 1.0) -> Tensor:
    """``log q_max``, between -log V and 0; otherwise as `logit_q_max`."""
    return -_rest(logits, temperature).log1p_()


def q_max(logits: Tensor, temperature: Temperature = 1.0) -> Tensor:
    """The probability of the most likely token, used as a confidence without any fit (EAGLE-2's score)."""
    return (1.0 + _rest(logits, temperature)).reciprocal_()


def margin(logits: Tensor, temperature: Temperature = 1.0) -> Tensor:
    """``log q_max - log q_second`` = (z_max - z_second) / T, clamped to 40; 0 for tied maxima."""
    _check(logits)
    if logits.shape[-1] < 2:
        raise ValueError(f"margin needs at least two vocabulary entries, got logits of shape {tuple(logits.shape)}")
    top = logits.detach().topk(2, dim=-1).values.float()  # [..., 2]
    gap = (top[..., 0] - top[..., 1]) / _positive(logits, temperature)  # [...]
    return gap.clamp_(max=MAX_LOG_ODDS)


def neg_entropy(logits: Tensor, temperature: Temperature = 1.0) -> Tensor:
    """``sum q log q`` = -H(q) in nats: 0 when one token has all the mass, -log V when none stands out."""
    out = logits.new_empty(logits.shape[:-1].numel(), dtype=torch.float32)
    for rows, shifted in _shifted(logits, temperature):
        shifted.clamp_(min=-200.0)  # an entry at -inf has no mass and adds nothing; 0 * -inf would be NaN
        weights = shifted.exp()
        total = weights.sum(-1)
        out[rows] = weights.mul_(shifted).sum(-1) / total - total.log()
    return out.reshape(logits.shape[:-1])


def logit_q_sampled(logits: Tensor, tokens: Tensor, temperature: Temperature = 1.0) -> Tensor:
    """Log-odds of the drafted token itself, clamped to +-40. Lossy: it reads the token whose fate it decides.

    tokens [...] int64, one id per row of logits; the rest is as in `logit_q_max`.
    """
    rest = _rest(logits, temperature)  # [...]
    gap = _gap_of(logits, tokens, temperature)  # [...] (z_x - z_max) / T <= 0
    mass = gap.exp()
    others = torch.where(mass == 1.0, rest, rest + 1.0 - mass)  # below the maximum, the maximum is among the others
    return (gap - others.log()).clamp_(-MAX_LOG_ODDS, MAX_LOG_ODDS)


def loglog_q_sampled(logits: Tensor, tokens: Tensor, temperature: Temperature = 1.0) -> Tensor:
    """``-log(-log q_x)`` of the drafted token (its Gumbel scale). Lossy, see `logit_q_sampled`."""
    surprise = _rest(logits, temperature).log1p_() - _gap_of(logits, tokens, temperature)  # [...] -log q_x >= 0
    return -surprise.log_().clamp_(-MAX_LOG_ODDS, MAX_LOG_ODDS)


def _check(logits: Tensor) -> None:
    if not logits.is_floating_point():
        raise ValueError(f"features need floating-point logits [..., V], got {logits.dtype}: call .float()")
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"features need logits [..., V] over a vocabulary, got shape {tuple(logits.shape)}")


def _positive(logits: Tensor, temperature: Temperature) -> Tensor:
    """The temperature of every row in float32 [...], with 1 where it means greedy."""
    given = torch.as_tensor(temperature, dtype=torch.float32, device=logits.device)
    try:
        return torch.where(given < GREEDY_BELOW, torch.ones_like(given), given).expand(logits.shape[:-1])
    except RuntimeError:
        raise ValueError(
            f"temperature of shape {tuple(given.shape)} does not broadcast to logits rows {tuple(logits.shape[:-1])}; "
            "for one temperature per request and K positions pass [R, 1]"
        ) from None


def _shifted(logits: Tensor, temperature: Temperature) -> Iterator[tuple[slice, Tensor]]:
    """Yield ``(rows, (z - z_max) / T)`` in float32 by blocks of rows; the block's memory is reused by the next one.

    Subtracting the maximum before dividing keeps the difference exact even where z / T is large.
    """
    _check(logits)
    flat = logits.detach().reshape(-1, logits.shape[-1])  # [N, V]
    num_rows, width = flat.shape
    scale = None
    if isinstance(temperature, Tensor) or not (temperature < GREEDY_BELOW or temperature == 1.0):
        scale = _positive(logits, temperature).reshape(-1, 1)  # [N, 1]
    block = max(1, _CACHED_ELEMENTS // width) if flat.device.type == "cpu" else max(1, num_rows)
    buffer = torch.empty(min(block, num_rows), width, dtype=torch.float32, device=flat.device)
    for start in range(0, num_rows, block):
        rows = slice(start, min(start + block, num_rows))
        shifted = buffer[: rows.stop - start]
        shifted.copy_(flat[rows])
        shifted.sub_(shifted.amax(-1, keepdim=True))
        yield rows, shifted if scale is None else shifted.div_(scale[rows])


def _rest(logits: Tensor, temperature: Temperature) -> Tensor:
    """The mass of every entry but one maximum, in units of that maximum, float32 [...].

    ``frac`` removes the entries that are exactly 1 (the maximum and its ties) without an argmax, which alone would
    cost more than all the rest; the ties, a whole number, are counted as what it removed and put back.
    """
    out = logits.new_empty(logits.shape[:-1].numel(), dtype=torch.float32)
    for rows, shifted in _shifted(logits, temperature):
        weights = shifted.exp_()  # [n, V], 1 at the maximum
        total = weights.sum(-1)
        below = weights.frac_().sum(-1)
        out[rows] = below + ((total - below).round_() - 1.0)
    return out.reshape(logits.shape[:-1])


def _gap_of(logits: Tensor, tokens: Tensor, temperature: Temperature) -> Tensor:
    """``(z_x - z_max) / T`` of the drafted tokens, float32 [...]."""
    if tokens.shape != logits.shape[:-1]:
        raise ValueError(
            f"this feature reads the drafted tokens: expected shape {tuple(logits.shape[:-1])}, one per row of the "
            f"logits, got {tuple(tokens.shape)}"
        )
    drawn = logits.detach().gather(-1, tokens.unsqueeze(-1)).squeeze(-1).float()
    return (drawn - logits.detach().amax(-1).float()) / _positive(logits, temperature)


def _without_token(name: str, fn: Callable[[Tensor, Temperature], Tensor]) -> Feature:
    return Feature(name, True, lambda logits, tokens, temperature: fn(logits, temperature))


def _with_token(name: str, fn: Callable[[Tensor, Tensor, Temperature], Tensor]) -> Feature:
    def checked(logits: Tensor, tokens: Tensor | None, temperature: Temperature) -> Tensor:
        if tokens is None:
            raise ValueError(f"feature {name!r} reads the drafted tokens: pass tokens {tuple(logits.shape[:-1])}")
        return fn(logits, tokens, temperature)

    return Feature(name, False, checked)


FEATURES: dict[str, Feature] = {
    feature.name: feature
    for feature in (
        _without_token("log_q_max", log_q_max),
        _without_token("margin", margin),
        _without_token("entropy", neg_entropy),
        _without_token("loglog_q_max", loglog_q_max),
        _without_token("logit_q_max", logit_q_max),
        _with_token("logit_q_sampled", logit_q_sampled),
        _with_token("loglog_q_sampled", loglog_q_sampled),
        _without_token("q_max", q_max),
    )
}
"""The eight features of the article's comparison, by the name that ``speculative_config`` and the notebooks use."""
