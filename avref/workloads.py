"""The prompts that reported numbers are measured on: five workloads of 40 prompts each, and 40 more for warming up.

All were written for this project, and none is used for training a drafter (`avref.train.prompts` makes those). `NAMES`
goes from answers that the prompt determines to answers that it leaves open, where drafts are expected to be harder.
"""

import json
from importlib.resources import files

NAMES = ("low_entropy", "math", "code", "chat", "high_entropy")
WARMUP = "warmup"


def load(name: str, num: int | None = None) -> list[str]:
    """Return the first `num` prompts of one workload (all 40 when `num` is None), always in the same order.

    `name` is one of `NAMES`, or "warmup": prompts of all five kinds that warm the estimator up and profile the cost
    table, and that no result is measured on. Raises ValueError for another name, or for a `num` that is not between
    0 and the number of prompts.
    """
    allowed = (*NAMES, WARMUP)
    if name not in allowed:
        raise ValueError(f"unknown workload {name!r}; choose one of {', '.join(allowed)}")
    text = (files("avref") / "data" / "workloads" / f"{name}.json").read_text(encoding="utf-8")
    return _first(json.loads(text)["prompts"], num, name)


def mix(num: int | None = None) -> list[str]:
    """Return the first `num` prompts (all 200 when `num` is None) of the five workloads in turn.

    The order is low_entropy 0, math 0, code 0, chat 0, high_entropy 0, low_entropy 1, ...: any multiple of five holds
    equal shares. Raises ValueError when `num` is not between 0 and the number of prompts.
    """
    rounds = zip(*(load(name) for name in NAMES), strict=True)
    return _first([prompt for one_of_each in rounds for prompt in one_of_each], num, "mix")


def _first(prompts: list[str], num: int | None, name: str) -> list[str]:
    if num is None:
        return prompts
    if not 0 <= num <= len(prompts):
        available = len(prompts)
        raise ValueError(f"num is {num}, but {name} has {available} prompts; choose 0 to {available}, or None for all")
    return prompts[:num]
