"""Traces: the target's own answers, and what a drafter would have drafted at every offset of them.

`record` makes one, `save` and `load` keep it (`trace_file` says what is in it), and the functions here read it. What
makes a trace enough to replay any policy: speculative decoding draws x from q, accepts it with probability
min(1, p(x) / q(x)), and emits a y that follows p. Given that y, it came from an accepted draft with probability

    q(y) min(1, p(y) / q(y)) / p(y) = min(1, q(y) / p(y)),

so verdicts can be drawn for text that is already there (Leviathan et al. 2023, section 2.3, read backwards). Where a
draft is rejected or not verified, y is the residual's or the target's own token.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from avref.evidence.recording import record as record
from avref.evidence.trace_file import Array, Trace
from avref.evidence.trace_file import load as load
from avref.evidence.trace_file import save as save
from avref.evidence.trace_file import shipped as shipped
from avref.features import FEATURES, MAX_LOG_ODDS


def features(trace: Trace, name: str = "logit_q_max") -> Array:
    """A feature of `avref.features.FEATURES` at every draft, float64 [N, K].

    Raises ValueError for an unknown name, and for a drafter without logits (n-gram).
    """
    if name not in FEATURES:
        raise ValueError(f"feature is {name!r}; allowed are {', '.join(map(repr, FEATURES))}")
    own = name if name in ("margin", "entropy") else "logit_q_max"
    source = "logit_q_sampled" if name.endswith("q_sampled") else own
    stored = getattr(trace, source)
    if stored is None:
        raise ValueError(f"the {trace.header['method']} drafter of this trace has no logits, so no feature {name!r}")
    values = stored.astype(np.float64)
    if name == source:
        return cast(Array, values)
    surprise = np.logaddexp(0.0, -values)  # -log q
    if name.startswith("loglog"):
        return cast(Array, np.clip(-np.log(surprise), -MAX_LOG_ODDS, MAX_LOG_ODDS))
    return cast(Array, -surprise if name == "log_q_max" else np.exp(-surprise))


def accept_probability(trace: Trace) -> Array:
    """Probability that the recorded token came from an accepted draft, ``min(1, q(y) / p(y))`` [N, K].

    Given that the drafts before it in the block were accepted; NaN past the end of an answer.
    """
    place = np.arange(len(trace))[:, None] + np.arange(trace.num_positions)  # [N, K], row of each place
    p_y = trace.p_y.astype(np.float64)[np.minimum(place, len(trace) - 1)]
    return np.where(trace.known, np.minimum(1.0, trace.q_y / p_y), np.nan)


def draft_accept_probability(trace: Trace) -> Array:
    """Probability that the drawn draft x is accepted, ``min(1, p(x) / q(x))`` [N, K]; its mean over x is `overlap`.

    Given that the drafts before it are the recorded tokens; NaN past the end of an answer.
    """
    q_x = 1.0 if trace.greedy else np.exp(-np.logaddexp(0.0, -features(trace, "logit_q_sampled")))
    return np.where(trace.known, np.minimum(1.0, trace.p_x.astype(np.float64) / q_x), np.nan)


def reach(trace: Trace) -> Array:
    """Probability that every draft before depth k was accepted, [N, K]: the product of `accept_probability` so far.

    The weight of a row at depth k in any mean "given an accepted prefix"; NaN past the end.
    """
    before = np.cumprod(accept_probability(trace)[:, :-1], axis=1)
    return np.where(trace.known, np.concatenate([np.ones((len(trace), 1)), before], axis=1), np.nan)


def verdicts(trace: Trace, seed: int = 0) -> tuple[Array, Array]:
    """One draw of what verifying every block in full would have taught: (accepted, graded), bool [N, K] each.

    Depth k is graded with probability `reach`; its label is the fate of the drawn draft x, so it goes with the features
    of the drawn token as well as with the others. Rows are offsets, not decode steps: each is a block of its own.
    """
    generator = np.random.default_rng(seed)
    known, shape = trace.known, trace.known.shape
    kept = generator.random(shape) < np.where(known, accept_probability(trace), 0.0)
    graded = known & np.concatenate([np.ones((len(trace), 1), bool), np.cumprod(kept[:, :-1], axis=1) > 0], axis=1)
    accepted = graded & (generator.random(shape) < np.where(known, draft_accept_probability(trace), 0.0))
    return accepted, graded


def overlap_by_position(trace: Trace, workload: str | None = None) -> tuple[Array, Array]:
    """(overlap [K], weight [K]): acceptance rate at each position given an accepted prefix, and the rows behind it.

    The mean of sum(min(p, q)) over offsets, weighted by `reach`. For one workload, or for all.
    """
    part = trace if workload is None else trace.take(trace.answers_of(workload))
    weight = np.where(part.known, reach(part), 0.0)
    total = weight.sum(0)
    return (part.overlap * weight).sum(0) / np.maximum(total, 1e-9), total
