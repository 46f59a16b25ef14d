"""What a bench compares and on which prompts: drafters found, prompts in two halves, and the journal's settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import avref
from avref import profiling, workloads
from avref.drafters import weights
from avref.evidence import prompt_sets
from avref.evidence.bench_plan import MIX, TOP_P, TUNING, Plan
from avref.llm import LLM
from avref.models import DEFAULT_TARGET

TRAINED, UNTRAINED = ("draft_model", "eagle", "mtp", "dflash", "dspark"), ("layer_skip", "ngram")


@dataclass(frozen=True)
class Halves:
    """Prompts by workload: those that settings are chosen on, and those that are reported."""

    tuning: Mapping[str, list[str]]
    reported: Mapping[str, list[str]]


def halves(prompts: str | Path | None) -> Halves:
    """Prompts 0, 2, 4, ... of each workload for choosing settings, 1, 3, 5, ... to report.

    None takes the five shipped workloads, else a set or file as `prompt_sets.load` takes it is the only workload.
    """
    if prompts is None:
        sets = {name: workloads.load(name) for name in workloads.NAMES}
    else:
        path = Path(prompts)
        name = path.stem if path.suffix else str(prompts)
        if name in (TUNING, MIX, *TOP_P):
            raise ValueError(f"prompts is {str(prompts)!r}, and {name!r} means something else here: rename the file")
        sets = {name: prompt_sets.load(prompts)}
    for name, texts in sets.items():
        if len(texts) < 2:
            raise ValueError(f"{name} holds {len(texts)} prompt; give at least 2: one half of them is reported")
    return Halves({n: t[0::2] for n, t in sets.items()}, {n: t[1::2] for n, t in sets.items()})


def token_ids(base: LLM, texts: Halves, max_tokens: int) -> dict[str, list[list[int]]]:
    """Token ids of the prompts of every case; ValueError when one leaves no room for its answer."""
    ids = {name: base.prompt_ids(own) for name, own in texts.reported.items()}
    ids[MIX] = _in_turn([ids[name] for name in texts.reported])
    ids[TUNING] = _in_turn([base.prompt_ids(own) for own in texts.tuning.values()])
    check_room(base, [p for own in ids.values() for p in own], max_tokens)
    return ids | dict.fromkeys(TOP_P, ids[MIX])


def check_room(base: LLM, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    """Raise ValueError when a prompt and its answer are longer than the LLM's `max_model_len`."""
    longest = max(map(len, prompts))
    if longest + max_tokens > base.max_model_len:
        raise ValueError(
            f"the longest prompt has {longest} tokens; with answers of {max_tokens} that is beyond "
            f"max_model_len={base.max_model_len}: raise it to {longest + max_tokens}, or shorten the prompts"
        )


def _in_turn(lists: Sequence[list[list[int]]]) -> list[list[int]]:
    """The first of each list, the second of each, ...; all are used, whatever their lengths."""
    return [own[i] for i in range(max(map(len, lists))) for own in lists if i < len(own)]


def shipped(target: str) -> dict[str, Any]:
    """Methods that can draft for a target without a drafter being named: those shipped for it, and the untrained."""
    trained = [m for m in TRAINED if target == DEFAULT_TARGET and weights.shipped(m).is_dir()]
    return dict.fromkeys((*trained, *UNTRAINED))


def depth_of(method: str, drafter: Any, depth: int) -> int:
    """`depth`, or fewer positions where the drafter was trained for fewer."""
    if isinstance(drafter, torch.nn.Module):
        return min(depth, getattr(drafter.config, "depth", depth))
    try:
        folder = weights.shipped(method) if drafter is None else Path(drafter)
        return min(depth, int(json.loads((folder / "config.json").read_bytes()).get("depth", depth)))
    except (OSError, TypeError, ValueError):
        return depth


def settings(base: LLM, plan: Plan, max_tokens: int, texts: Halves) -> dict[str, Any]:
    """What every run of a journal has in common.

    Blocks, repeats and the list of concurrencies only say which runs there are, so they may grow; the largest
    concurrency is the size of the cost tables.
    """
    machine = profiling.describe(base)
    shared = ("device", "threads", "dtype", "target", "target_parameters", "torch", "transformers", "python")
    return {
        **{name: machine[name] for name in shared},
        "avref": avref.__version__,
        "target_hash": fingerprint(base.model),
        "method": plan.method,
        "drafters": {m: drafter_hash(m, d) for m, d in plan.drafters.items()},
        "num_speculative_tokens": dict(plan.depths),
        "largest_concurrency": plan.most,
        "max_tokens": max_tokens,
        "max_model_len": base.max_model_len,
        "temperature": 1.0,
        "top_p": 0.95,
        "workloads": list(texts.reported),
        "prompts_hash": _hash(json.dumps([texts.tuning, texts.reported]).encode()),
        "chosen_on": "prompts 0, 2, 4, ... of each workload",
        "reported_on": "prompts 1, 3, 5, ... of each workload",
    }


def fingerprint(model: torch.nn.Module) -> str:
    """A hash of names, shapes and the first and last weights of every tensor: models that differ differ here."""
    parts = []
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().flatten()
        ends = torch.cat([flat[:32], flat[-32:]]).double().cpu().tolist()
        parts.append((name, list(tensor.shape), ends))
    return _hash(json.dumps(parts).encode())


def drafter_hash(method: str, drafter: Any) -> str | None:
    """Of the weights in a folder or of a loaded model; a name or a number (of layers) stands for itself."""
    if isinstance(drafter, torch.nn.Module):
        return fingerprint(drafter)
    folder = weights.shipped(method) if drafter is None else Path(str(drafter))
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return _hash(b"".join(hashlib.sha256(f.read_bytes()).digest() for f in files))
    return None if drafter is None else str(drafter)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
