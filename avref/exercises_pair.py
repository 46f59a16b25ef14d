"""Checkers for the exercises of notebook 08, in the way of `avref.exercises`: each prints what is wrong."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import Any

import numpy as np

from avref.exercises import _say
from avref.vllm_args import VLLM_KEYS


def check_accepted_needed(needed: Callable[[float, float, float], Any]) -> bool:
    """Exercise 1: `needed(plain_ms, draft_ms, verify_ms)` -> accepted drafts per request and step to break even.

    R requests emit R / plain_ms tokens per millisecond without drafts and R (1 + a) / (draft_ms + verify_ms) with
    them; equal at a = (draft_ms + verify_ms) / plain_ms - 1, whatever R is.
    """
    for plain_ms, draft_ms, verify_ms in ((20.0, 5.0, 25.0), (8.0, 0.0, 8.0), (30.0, 30.0, 90.0)):
        answer = needed(plain_ms, draft_ms, verify_ms)
        if answer is None:
            return _say("not written yet: return a number of drafts")
        plain, rate = 1 / plain_ms, (1 + float(answer)) / (draft_ms + verify_ms)
        if not abs(rate / plain - 1) <= 1e-9:
            return _say(
                f"{plain_ms:g} ms without drafts, {draft_ms:g} + {verify_ms:g} ms with: with {float(answer):.4g} "
                f"accepted a request gets {rate:.4f} tokens per ms, without drafts {plain:.4f}; they should be equal"
            )
    return _say("right: the step may get longer by as many per cent as the accepted drafts add tokens", True)


def check_came_from_a_draft(share: Callable[[float, float], Any]) -> bool:
    """Exercise 2: `share(p_y, q_y)` -> probability that a token of the target's text came from an accepted draft.

    By listing drafts and verdicts: P(y is drafted and accepted) / P(y is emitted) = q(y) min(1, p(y) / q(y)) / p(y).
    """
    rng = np.random.default_rng(0)
    for _ in range(20):
        p, q = rng.dirichlet(np.ones(4)), rng.dirichlet(np.ones(4))
        accepted = q * np.minimum(1, p / q)  # [V] drafted and accepted
        residual = np.maximum(p - q, 0)
        emitted = accepted + (1 - accepted.sum()) * residual / residual.sum()  # [V]
        for y in range(4):
            answer, right = share(float(p[y]), float(q[y])), accepted[y] / emitted[y]
            if answer is None:
                return _say("not written yet: return a probability")
            if not abs(float(answer) - right) <= 1e-9:
                return _say(
                    f"p(y) = {p[y]:.3f}, q(y) = {q[y]:.3f}: you say {float(answer):.3f}, listing all drafts and "
                    f"verdicts gives {right:.3f}"
                )
    return _say("right: the acceptance rule read backwards, from the emitted token", True)


def check_clashes(clashes: Callable[[dict[str, int], dict[str, int]], Any]) -> bool:
    """Exercise 3: `clashes(target, drafter)` -> tokens, sorted, for which the two vocabularies cannot work together."""
    cases: tuple[tuple[str, dict[str, int], dict[str, int]], ...] = (
        ("the same", {"a": 0, "b": 1}, {"b": 1, "a": 0}),
        ("two ids swapped", {"a": 0, "b": 1, "c": 2}, {"a": 0, "b": 2, "c": 1}),
        ("a token that only the drafter has", {"a": 0}, {"a": 0, "b": 1}),
        ("a token that only the target has", {"a": 0, "b": 1}, {"a": 0}),
        ("the same tokens and ids, but one", {"a": 0, "b": 1, "<end>": 2}, {"a": 0, "b": 1, "<eos>": 2}),
    )
    for what, target, drafter in cases:
        answer = clashes(dict(target), dict(drafter))
        if answer is None:
            return _say("not written yet: return a list of tokens")
        right = sorted({token for token, _ in target.items() ^ drafter.items()})
        if list(answer) != right:
            return _say(f"{what}: target {target}, drafter {drafter}: you say {list(answer)}, expected are {right}")
    return _say("right: speculative decoding compares ids, so each token needs the same id on both sides", True)


def check_for_vllm(for_vllm: Callable[[dict[str, Any]], Any]) -> bool:
    """Exercise 4: `for_vllm(config)` -> text behind `vllm serve MODEL`, read back as a shell and a JSON parser do."""
    full: dict[str, Any] = {"method": "draft_model", "model": "my model's folder", "num_speculative_tokens": 4}
    full |= {"draft_sample_method": "probabilistic", "enable_adaptive_verification": True}
    short: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 2}
    stale, newton = {"budget_rule": "stale", "probe_interval": 0}, {"estimator": {"step": "newton"}}
    cases: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = ((full, {}), (full, stale), (full, newton), (short, {}))
    for config, more in cases:
        answer = for_vllm({**config, **more})
        if answer is None:
            return _say("not written yet: return the text of the flag and its value")
        try:
            words = shlex.split(str(answer))
        except ValueError as error:
            return _say(f"a shell cannot read {answer!r} ({error}): the folder's name holds an apostrophe")
        if len(words) != 2 or words[0] != "--speculative-config":
            return _say(f"a shell reads {words}; expected are --speculative-config and one word of JSON")
        try:
            found = json.loads(words[1])
        except json.JSONDecodeError as error:
            return _say(f"{words[1]!r} is no JSON ({error}): true and double quotes, not True and single ones")
        unknown = [key for key in found if key not in VLLM_KEYS]
        if unknown:
            return _say(f"vLLM does not know {', '.join(unknown)} and would refuse to start")
        if found != config:
            return _say(f"read back as {found}, configured was {config}")
    return _say("right: vLLM's keys only, as JSON, quoted for the shell", True)
