"""Claims on throughput, by replay: what the engine itself does on a user's machine is the bench's to say.

Every claim is answered under two tables: the one measured on two CPU cores, which ends at 32 requests, and the
published B300 profile at 64. A pair's drafter pays what its family would (`tables.drafting`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from avref.cost_table import CostTable
from avref.evidence import hardware, observed, simulate, tables
from avref.evidence.claims import CONFIRMED, FAILED, Row, absent, judged
from avref.evidence.observed import Measured
from avref.evidence.pair import Pair
from avref.evidence.policy import Policy
from avref.evidence.resampling import Estimate, Floats, estimate, ratio
from avref.evidence.trace_file import Array

SETTINGS: Mapping[str, Sequence[int]] = {"measured": (1, 4, 16, 32), "b300": (1, 4, 16, 64)}
FRONTIER = 5 / 7  # of the concurrencies, as in the article
TIE = 0.03
CLEAR = 1.01  # less than this is no difference: off the frontier is what another beats by more, in both
STEPS = {1: 500, 4: 360, 16: 200, 32: 100, 64: 80}  # by requests: few requests finish few answers in a step
ADAPTIVE, FULL, HEAD, ORACLE, PLAIN = "adaptive", "adaptive, always drafts K", "head", "oracle", "none"


@dataclass(frozen=True, eq=False)
class Sweep:
    """One pair under one table: every arm at every number of requests, and every workload at the highest load."""

    pair: Pair
    table_name: str
    table: CostTable
    arms: Mapping[int, Mapping[str, Measured]]
    workloads: Mapping[str, Mapping[str, Measured]]
    ways: tuple[Mapping[str, Measured], Mapping[str, Measured]]  # drafted one by one, in one pass; at the highest load

    @property
    def top(self) -> int:
        return max(self.arms)

    @property
    def fixed(self) -> list[str]:
        return [f"fixed-{k}" for k in range(1, self.pair.trace.num_positions + 1)]

    def speed(self, requests: int, arm: str) -> Floats:
        """Tokens per second on every resample of the held-out answers, [num + 1]."""
        return self.arms[requests][arm].resampled(self.pair.weights)

    def over(self, requests: int, arm: str, other: str) -> Floats:
        return self.arms[requests][arm].over(self.arms[requests][other], self.pair.weights)

    def best(self, requests: int, names: Sequence[str]) -> str:
        return max(names, key=lambda name: self.speed(requests, name)[0])


def policies(pair: Pair) -> dict[str, Policy]:
    own = simulate.own_confidence(pair.trace)
    made = {PLAIN: Policy.none(), **{f"fixed-{k}": Policy.fixed(k) for k in range(1, pair.trace.num_positions + 1)}}
    if own:
        made[FULL] = Policy.adaptive(confidence=own, adaptive_drafting=False)
        made[ADAPTIVE] = Policy.adaptive(confidence=own)
    if own == "estimator" and pair.trace.head is not None:
        made[HEAD] = Policy.adaptive(confidence="head", adaptive_drafting=False)
    return made


def sweep(pair: Pair, name: str, *, requests: Sequence[int] = (), effort: float = 1.0) -> Sweep:
    """Measure a pair under a table; effort scales the number of decode steps."""
    levels = tuple(requests) or SETTINGS[name]
    table = tables.named(name, pair.trace, max(levels))
    learned = pair.fitted() if pair.has_logits else None

    def run(policy: Policy, at: int, answers: Array, costs: CostTable = table, **more: Any) -> Measured:
        steps = max(24, int(effort * STEPS.get(at, 80)))
        start = simulate.warmed(policy, pair.trace, learned)
        return observed.measure(
            pair.trace, costs, start, at, answers, warmup=pair.first, num_steps=steps, seed=at, **more
        )

    own, top = policies(pair), max(levels)

    arms: dict[int, dict[str, Measured]] = {r: {} for r in levels}
    for r, (arm, policy) in itertools.product(levels, own.items()):
        arms[r][arm] = run(policy, r, pair.second)
    arms[top][ORACLE] = run(Policy.adaptive(confidence="oracle", adaptive_drafting=False), top, pair.second)
    workloads = {}
    for workload in pair.trace.header["workloads"]:
        answers = np.intersect1d(pair.trace.answers_of(workload), pair.second)
        if len(answers):
            names = [n for n in (f"fixed-{pair.trace.num_positions}", FULL) if n in own]
            workloads[workload] = {n: run(own[n], top, answers) for n in names}
    ways: tuple[Mapping[str, Measured], Mapping[str, Measured]] = {}, {}
    if FULL in own and pair.trace.header["method"] != "ngram":
        ways = _both_ways(pair, name, top, lambda policy, costs: run(policy, top, pair.second, costs))
    return Sweep(pair, name, table, arms, workloads, ways)


def _both_ways(
    pair: Pair, name: str, top: int, run: Callable[[Policy, CostTable], Measured]
) -> tuple[Mapping[str, Measured], Mapping[str, Measured]]:
    """Fixed K and adaptive verification if the drafts took a pass each, and if they took one pass together."""
    k, own = pair.trace.num_positions, policies(pair)
    one_by_one, in_one_pass = (tables.drafting(_profiled(name, top), method, k) for method in ("eagle", "dflash"))
    arms = (f"fixed-{k}", FULL)
    return {n: run(own[n], one_by_one) for n in arms}, {n: run(own[n], in_one_pass) for n in arms}


def _profiled(name: str, top: int) -> CostTable:
    return hardware.measured() if name == "measured" else hardware.published_b300(max_requests=top)


# ---- claims ----
TOO_FEW = "too few decode steps for answers to end"


def _known(found: Mapping[int, Floats]) -> dict[int, Floats]:
    """The numbers of requests at which both arms finished some answer."""
    return {r: values for r, values in found.items() if np.isfinite(values[0])}


def _label(s: Sweep, at: int | None = None) -> str:
    machine = {"measured": "2 cores", "b300": "B300"}.get(s.table_name, s.table_name)
    return f"{s.pair.name}, {machine}" + (f", {at} requests" if at else "")


def rows(s: Sweep) -> dict[str, Row]:
    """Every claim's row for one pair under one table."""
    if FULL not in s.arms[s.top]:
        why = "the drafter has neither logits nor a record of its own, so nothing to decide by"
        return {f.__name__: absent(_label(s), why) for f in _CLAIMS}
    return {f.__name__: f(s) for f in _CLAIMS}


def position_1(s: Sweep) -> Row:
    trimmed = s.arms[s.top][FULL].trimmed  # [A, K]
    if not trimmed.sum():
        return absent(_label(s, s.top), "nothing was trimmed")
    share = estimate(ratio(trimmed[:, 0], trimmed.sum(axis=1), s.pair.weights))
    total = trimmed.sum(axis=0) / trimmed.sum()
    ours = "first trimmed at positions 1, 2, ...: " + " ".join(f"{x:.2f}" for x in total)
    return judged(_label(s, s.top), ours, share, below=1 / s.pair.trace.num_positions, details={"by_position": total})


def beats_fixed(s: Sweep) -> Row:
    fixed = s.fixed[-1]
    gains = {w: estimate(arms[FULL].over(arms[fixed], s.pair.weights)) for w, arms in s.workloads.items()}
    least = min(gains.values(), key=lambda e: e.low)
    ours = ", ".join(f"{w} {e.text(2)}" for w, e in gains.items())
    return judged(_label(s, s.top), ours, least, above=1.0, details=gains)


def gains_with_load(s: Sweep) -> Row:
    gains = _known({r: s.over(r, FULL, s.fixed[-1]) for r in s.arms})
    if len(gains) < 2:
        return absent(_label(s), TOO_FEW)
    ours = ", ".join(f"{r}: {estimate(g).text(2)}" for r, g in gains.items())
    return judged(_label(s), "over fixed K at " + ours, estimate(gains[max(gains)] - gains[min(gains)]), above=0.0)


def tie(s: Sweep) -> Row:
    if HEAD not in s.arms[s.top]:
        return absent(_label(s), "this drafter has no confidence head")
    found = {r: estimate(g) for r, g in _known({r: s.over(r, FULL, HEAD) for r in s.arms}).items()}
    if not found:
        return absent(_label(s), TOO_FEW)
    furthest = max(found.values(), key=lambda e: abs(e.value - 1))
    ours = ", ".join(f"{r}: {e.text(2)}" for r, e in found.items())
    return judged(_label(s), ours, furthest, above=1 - TIE, below=1 + TIE)


def pareto(s: Sweep) -> Row:
    """A point is on the frontier when no fixed length at any concurrency has both more tokens/s and more per user."""
    both = {(r, a): (s.speed(r, a), s.speed(r, a) / r) for r in s.arms for a in (PLAIN, FULL, ADAPTIVE, *s.fixed)}
    share, where, lengths = {}, {}, (PLAIN, *s.fixed)
    for arm in (FULL, ADAPTIVE):
        on = [
            ~np.any(
                [
                    (y > CLEAR * both[r, arm][0]) & (u > CLEAR * both[r, arm][1])
                    for (_, a), (y, u) in both.items()
                    if a in lengths
                ],
                0,
            )
            for r in s.arms
        ]
        share[arm], where[arm] = np.mean(on, axis=0), [r for r, here in zip(s.arms, on, strict=True) if here[0]]
    ours = "; ".join(f"{arm}: at {len(where[arm])} of {len(s.arms)} ({where[arm]})" for arm in share)
    value = estimate(share[FULL])
    verdict = CONFIRMED if value.value >= FRONTIER else FAILED
    return Row(_label(s), ours, verdict, "", value, {"with adaptive drafting": estimate(share[ADAPTIVE])})


def smaller_fixed(s: Sweep) -> Row:
    if len(s.fixed) < 2:
        return absent(_label(s), "K is 1")
    found = {r: s.best(r, s.fixed[:-1]) for r in s.arms}
    gains = {r: estimate(g) for r, g in _known({r: s.over(r, n, FULL) for r, n in found.items()}).items()}
    if not gains:
        return absent(_label(s), TOO_FEW)
    most = max(gains, key=lambda r: gains[r].low)
    ours = ", ".join(f"{r}: {found[r]} {e.text(2)}" for r, e in gains.items())
    row = judged(_label(s), ours, gains[most], above=CLEAR)
    return row if row.verdict == CONFIRMED else Row(row.pair, ours, FAILED, "at none of these", gains[most])


def token_by_token(s: Sweep) -> Row:
    if not s.ways[0]:
        return absent(_label(s, s.top), "an n-gram's drafts cost nothing either way")
    one_by_one, in_one_pass = (way[FULL].over(way[s.fixed[-1]], s.pair.weights) for way in s.ways)
    ours = f"{estimate(one_by_one).text(2)} drafted one by one, {estimate(in_one_pass).text(2)} in one pass"
    return judged(_label(s, s.top), ours, estimate(one_by_one - in_one_pass), below=0.0)


def oracle(s: Sweep) -> Row:
    value = estimate(s.over(s.top, FULL, ORACLE))
    return judged(_label(s, s.top), value.text(), value, above=0.95)


def never_slower(s: Sweep) -> Row:
    return _least(s, {r: (PLAIN, s.over(r, ADAPTIVE, PLAIN)) for r in s.arms})


def hindsight(s: Sweep) -> Row:
    best = {r: s.best(r, [PLAIN, *s.fixed]) for r in s.arms}
    return _least(s, {r: (name, s.over(r, ADAPTIVE, name)) for r, name in best.items()})


def _least(s: Sweep, found: Mapping[int, tuple[str, Floats]]) -> Row:
    known = {r: (found[r][0], estimate(g)) for r, g in _known({r: g for r, (_, g) in found.items()}).items()}
    if not known:
        return absent(_label(s), TOO_FEW)
    least = min(known.values(), key=lambda item: item[1].low)[1]
    ours = ", ".join(f"{r}: {e.text(2)} of {name}" for r, (name, e) in known.items())
    return judged(_label(s), ours, least, above=0.97)


_CLAIMS = (
    position_1,
    beats_fixed,
    gains_with_load,
    tie,
    pareto,
    smaller_fixed,
    token_by_token,
    oracle,
    never_slower,
    hindsight,
)


def figures(s: Sweep) -> dict[str, Any]:
    """What the figures draw: tokens/s over no speculation by arm and requests, and the gain of each workload."""
    gain = {w: estimate(a[FULL].over(a[s.fixed[-1]], s.pair.weights)) for w, a in s.workloads.items() if FULL in a}
    over: dict[str, dict[int, Estimate]] = {}
    for r in s.arms:
        for arm in s.arms[r]:
            over.setdefault(arm, {})[r] = estimate(s.over(r, arm, PLAIN))
    return {"pair": s.pair.name, "table": s.table_name, "over_none": over, "workloads": gain}
