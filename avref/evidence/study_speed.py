"""Claims on throughput, by replay: what the engine itself does on a user's machine is the bench's to say.

Every claim is answered under two tables: the one measured on two CPU cores, which ends at 32 requests, and the
published B300 profile at 64. A pair's drafter pays what its family would (`tables.drafting`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from avref.cost_table import CostTable
from avref.evidence import hardware, simulate, tables
from avref.evidence.claims import CONFIRMED, FAILED, Row, absent, judged
from avref.evidence.observed import Measured
from avref.evidence.pair import Pair
from avref.evidence.policy import Policy
from avref.evidence.resampling import Floats, estimate, ratio

SETTINGS: Mapping[str, Sequence[int]] = {"measured": (1, 4, 16, 32), "b300": (1, 4, 16, 64)}
FRONTIER = 5 / 7  # of the concurrencies, as in the article
TIE = 0.03
CLEAR = 1.01  # less than this is no difference: off the frontier is what another beats by more, in both
STEPS = {1: 500, 4: 360, 16: 200, 32: 100, 64: 80}  # by requests: few requests finish few answers in a step
ADAPTIVE, PLAIN = "adaptive", "none"
FULL, HEAD, ORACLE = (f"{name}, always drafts K" for name in (ADAPTIVE, "head", "oracle"))


@dataclass(frozen=True, eq=False)
class Sweep:
    """One pair under one table: every arm at every number of requests, and every workload at the highest load."""

    pair: Pair
    table_name: str
    table: CostTable
    arms: Mapping[int, Mapping[str, Measured]]
    workloads: Mapping[str, Mapping[str, Measured]]
    ways: Sequence[Mapping[str, Measured]]  # if drafted one by one, and in one pass; at the highest load

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
    known, k = simulate.arms(pair.trace), pair.trace.num_positions
    made = {name: policy for name, policy in known.items() if name == PLAIN or name.startswith("fixed-")}
    adaptive = {FULL: f"adaptive-{k}-full-draft", ADAPTIVE: f"adaptive-{k}"}
    made |= {name: known[arm] for name, arm in adaptive.items() if arm in known}
    return made | ({HEAD: replace(known["head"], adaptive_drafting=False)} if "head" in known else {})


def sweep(pair: Pair, name: str, *, requests: Sequence[int] = (), effort: float = 1.0) -> Sweep:
    """Measure a pair under a table; effort scales the number of decode steps."""
    levels = tuple(requests) or SETTINGS[name]
    own, top, k, method = policies(pair), max(levels), pair.trace.num_positions, pair.trace.header["method"]
    table = tables.named(name, pair.trace, top)
    both = [n for n in (f"fixed-{k}", FULL) if n in own]

    def run(policy: Policy, at: int = top, costs: CostTable = table, **options: Any) -> Measured:
        return pair.measure(costs, policy, at, max(24, int(effort * STEPS.get(at, 80))), **options)

    arms = {r: {arm: run(policy, r) for arm, policy in own.items()} for r in levels}
    arms[top][ORACLE] = run(Policy.adaptive(confidence="oracle", adaptive_drafting=False))
    held = {w: np.intersect1d(pair.trace.answers_of(w), pair.second) for w in pair.trace.header["workloads"]}
    workloads = {w: {n: run(own[n], answers=answers) for n in both} for w, answers in held.items() if len(answers)}
    ways = []
    if FULL in own and method != "ngram":
        profiled = hardware.measured() if name == "measured" else hardware.published_b300(max_requests=top)
        for costs in (tables.drafting(profiled, family, k) for family in ("eagle", "dflash")):
            ways.append({n: run(own[n], costs=costs) for n in both})
    return Sweep(pair, name, table, arms, workloads, ways)


# ---- claims ----
TOO_FEW = "too few decode steps for answers to end"


def _gains(s: Sweep, arm: str | Mapping[int, str], other: str | Mapping[int, str]) -> dict[int, Floats]:
    """One arm over another (or those named for each load), at every load at which both finished some answer."""
    pairs = {r: [a if isinstance(a, str) else a[r] for a in (arm, other)] for r in s.arms}
    found = {r: s.over(r, *names) for r, names in pairs.items()}
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
    gains = _gains(s, FULL, s.fixed[-1])
    if len(gains) < 2:
        return absent(_label(s), TOO_FEW)
    ours = ", ".join(f"{r}: {estimate(g).text(2)}" for r, g in gains.items())
    return judged(_label(s), "over fixed K at " + ours, estimate(gains[max(gains)] - gains[min(gains)]), above=0.0)


def tie(s: Sweep) -> Row:
    if HEAD not in s.arms[s.top]:
        return absent(_label(s), "this drafter has no confidence head")
    found = {r: estimate(g) for r, g in _gains(s, FULL, HEAD).items()}
    if not found:
        return absent(_label(s), TOO_FEW)
    furthest = max(found.values(), key=lambda e: max(1 - e.low, e.high - 1))
    ours = ", ".join(f"{r}: {e.text(2)}" for r, e in found.items())
    return judged(_label(s), ours, furthest, above=1 - TIE, below=1 + TIE)


def pareto(s: Sweep) -> Row:
    """A point is on the frontier when no fixed length at any concurrency has both more tokens/s and more per user."""
    share, where = {}, {}
    fixed = [(s.speed(q, name), q) for q in s.arms for name in (PLAIN, *s.fixed)]
    for arm in (FULL, ADAPTIVE):
        clear = {r: CLEAR * s.speed(r, arm) for r in s.arms}
        beaten = [np.any([(y > own) & (y / q > own / r) for y, q in fixed], axis=0) for r, own in clear.items()]
        share[arm] = np.mean(np.logical_not(beaten), axis=0)
        where[arm] = [r for r, here in zip(s.arms, beaten, strict=True) if not here[0]]
    ours = "; ".join(f"{arm}: at {len(where[arm])} of {len(s.arms)} ({where[arm]})" for arm in share)
    details = {"with adaptive drafting": estimate(share[ADAPTIVE])}
    return judged(_label(s), ours, estimate(share[FULL]), above=FRONTIER - 1e-9, details=details)


def smaller_fixed(s: Sweep) -> Row:
    if len(s.fixed) < 2:
        return absent(_label(s), "K is 1")
    found = {r: s.best(r, s.fixed[:-1]) for r in s.arms}
    gains = {r: estimate(g) for r, g in _gains(s, found, FULL).items()}
    if not gains:
        return absent(_label(s), TOO_FEW)
    most = max(gains, key=lambda r: gains[r].low)
    ours = ", ".join(f"{r}: {found[r]} {e.text(2)}" for r, e in gains.items())
    row = judged(_label(s), ours, gains[most], above=CLEAR)
    return row if row.verdict == CONFIRMED else replace(row, verdict=FAILED, why="at none of these")


def token_by_token(s: Sweep) -> Row:
    if not s.ways:
        return absent(_label(s, s.top), "an n-gram's drafts cost nothing either way")
    one_by_one, in_one_pass = (way[FULL].over(way[s.fixed[-1]], s.pair.weights) for way in s.ways)
    ours = f"{estimate(one_by_one).text(2)} drafted one by one, {estimate(in_one_pass).text(2)} in one pass"
    return judged(_label(s, s.top), ours, estimate(one_by_one - in_one_pass), below=0.0)


def oracle(s: Sweep) -> Row:
    value = estimate(s.over(s.top, FULL, ORACLE))
    return judged(_label(s, s.top), value.text(), value, above=0.95)


def never_slower(s: Sweep) -> Row:
    return _least(s, dict.fromkeys(s.arms, PLAIN))


def hindsight(s: Sweep) -> Row:
    return _least(s, {r: s.best(r, [PLAIN, *s.fixed]) for r in s.arms})


def _least(s: Sweep, others: Mapping[int, str]) -> Row:
    found = {r: estimate(g) for r, g in _gains(s, ADAPTIVE, others).items()}
    if not found:
        return absent(_label(s), TOO_FEW)
    ours = ", ".join(f"{r}: {e.text(2)} of {others[r]}" for r, e in found.items())
    return judged(_label(s), ours, min(found.values(), key=lambda e: e.low), above=0.97)


_CLAIMS = [position_1, beats_fixed, gains_with_load, tie, pareto]
_CLAIMS += [smaller_fixed, token_by_token, oracle, never_slower, hindsight]


def figures(s: Sweep) -> dict[str, Any]:
    """What the figures draw: tokens/s over no speculation by arm and requests, and the gain of each workload."""
    gain = {w: estimate(a[FULL].over(a[s.fixed[-1]], s.pair.weights)) for w, a in s.workloads.items() if FULL in a}
    over = {
        arm: {r: estimate(s.over(r, arm, PLAIN)) for r, own in s.arms.items() if arm in own} for arm in s.arms[s.top]
    }
    return {"pair": s.pair.name, "table": s.table_name, "over_none": over, "workloads": gain}
