"""Trained drafters on disk: a folder with `config.json` and `model.safetensors` (and a card).

Those that ship with the package lie in `avref/weights/`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from avref.config import SpeculativeConfig
from avref.files import json_checksum, load_tensors, save_tensors, write_text
from avref.models import DEFAULT_TARGET

if TYPE_CHECKING:
    from avref.llm import LLM

SHIPPED = Path(__file__).parent.parent / "weights"


def shipped(method: str) -> Path:
    """Where the package keeps the drafter of a method for the default target."""
    return SHIPPED / f"{method}-{DEFAULT_TARGET}"


def is_drafter(folder: Any) -> bool:
    """Whether a folder holds a drafter that `save` wrote: only then does its `config.json` name a method."""
    try:
        return "method" in json.loads((Path(folder).expanduser() / "config.json").read_bytes())
    except (OSError, TypeError, ValueError):
        return False


def check_not_where_it_was_trained(folder: Any) -> None:
    """Raise ValueError for the folder of a training run: the drafter lies one deeper."""
    if is_drafter(out := Path(folder) / "out"):
        raise ValueError(f"{str(folder)!r} holds a training run; pass the drafter that it made, {str(out)!r}")


def check_vocab_ids(vocab_ids: Tensor, vocab_size: int, method: str) -> None:
    """Raise ValueError unless a draft vocabulary [V_d] holds different ids of the target's `vocab_size`."""
    if len(vocab_ids.unique()) < len(vocab_ids) or int(vocab_ids.min()) < 0:
        raise ValueError(
            f"this {method} drafter's vocab_ids hold a token twice or a negative id; fetch or train it again"
        )
    if int(vocab_ids.max()) >= vocab_size:
        raise ValueError(
            f"this {method} drafter drafts up to token id {int(vocab_ids.max())}, the target has ids 0 to "
            f"{vocab_size - 1}; train one for it: python -m avref train {method}"
        )


def save(model: Any, folder: Path, method: str, target: str) -> None:
    """Write a drafter's configuration and bfloat16 weights."""
    tensors = {
        k: (v.bfloat16() if v.is_floating_point() else v.int()).contiguous() for k, v in model.state_dict().items()
    }
    config = {"method": method, "target": target, **asdict(model.config)}
    save_tensors(tensors, folder / "model.safetensors")
    write_text(folder / "config.json", json.dumps(config | {"sha256": json_checksum(config)}, indent=2) + "\n")


def check_shipped(method: str, target: str) -> None:
    """Raise ValueError unless a drafter is shipped for this target."""
    if target != DEFAULT_TARGET:
        raise ValueError(
            f"no {method} drafter is shipped for {target!r}, only for {DEFAULT_TARGET!r}; "
            f"pass speculative_config['model'] or train one: python -m avref train {method}"
        )


def load(config: SpeculativeConfig, llm: LLM, config_class: type, model_class: type) -> Any:
    """The drafter in the folder `config.model`, or the one shipped for the default target.

    Raises ValueError where none is shipped, and for a path that is no folder or no drafter; RuntimeError for a damaged
    one.
    """
    method = config.method
    if config.model is not None and not isinstance(config.model, (str, Path)):
        raise ValueError(
            f"speculative_config['model'] is {type(config.model).__name__}; method {method!r} takes a folder or None"
        )
    folder = Path(config.model).expanduser() if config.model is not None else shipped(method)
    if config.model is None:
        check_shipped(method, llm.name)
    elif not folder.exists():
        raise ValueError(
            f"speculative_config['model'] is {str(config.model)!r}, which is no folder; method {method!r} "
            f"takes one that `python -m avref train {method}` wrote (a hub id only works with 'draft_model')"
        )
    return read(folder, method, config_class, model_class)


def read(folder: Path, method: str, config_class: type, model_class: type) -> Any:
    """The drafter in a folder, in float32: `model_class(config_class(**numbers))` with the stored tensors.

    Raises ValueError for a folder that holds no drafter, or one of another method; RuntimeError, which names the first
    tensor that is wrong, for one that is damaged.
    """
    check_not_where_it_was_trained(folder)
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise ValueError(
                f"{str(folder)!r} is no {method} drafter: it holds no {name}; "
                f"train one with: python -m avref train {method}"
            )
    tensors, _ = load_tensors(folder / "model.safetensors", "fetch or train it again")
    try:
        stored = dict(json.loads((folder / "config.json").read_bytes()))
        made_for = stored.get("method")
        if made_for != method:
            instead = f"but for {made_for!r}" if made_for else "and its config.json names none"
            raise ValueError(f"{str(folder)!r} was not made for method {method!r} {instead}")
        written = stored.pop("sha256", None)  # older ones have none
        if written is not None and written != json_checksum(stored):
            raise RuntimeError("config.json was altered after it was written, its checksum does not match")
        for name in ("method", "target"):
            stored.pop(name, None)
        if "target_layers" in stored:
            stored["target_layers"] = tuple(stored["target_layers"])
        model = model_class(config_class(**stored))
        model.load_state_dict({k: v.float() if v.is_floating_point() else v.long() for k, v in tensors.items()})
    except (
        json.JSONDecodeError,
        UnicodeDecodeError,
        KeyError,
        TypeError,
        AttributeError,
        RuntimeError,
    ) as error:
        first = " ".join(str(error).split())[:300]
        raise RuntimeError(
            f"the drafter in {str(folder)!r} is damaged or of another version: {first}; fetch or train it again"
        ) from error
    bad = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if bad:
        raise RuntimeError(
            f"the drafter in {str(folder)!r} holds numbers that are not finite in {bad[0]}; fetch or train it again"
        )
    return model.to(torch.float32)
