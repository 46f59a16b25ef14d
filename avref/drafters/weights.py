"""Trained drafters on disk: a folder with `config.json` and `model.safetensors` (and a card).

Those that ship with the package lie in `avref/weights/`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from avref.config import SpeculativeConfig
from avref.models import DEFAULT_TARGET

if TYPE_CHECKING:
    from avref.llm import LLM

SHIPPED = Path(__file__).parent.parent / "weights"


def save(model: Any, folder: Path, method: str, target: str) -> None:
    """Write a drafter's configuration and bfloat16 weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        k: (v.bfloat16() if v.is_floating_point() else v.int()).contiguous() for k, v in model.state_dict().items()
    }
    config = {"method": method, "target": target, **asdict(model.config)}
    save_file(tensors, folder / "model.safetensors.part", metadata={"format": "pt"})
    (folder / "model.safetensors.part").replace(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load(config: SpeculativeConfig, llm: LLM, config_class: type, model_class: type) -> Any:
    """The drafter in the folder `config.model`, or the one shipped for the default target."""
    method = config.method
    if config.model is not None and not isinstance(config.model, (str, Path)):
        raise ValueError(
            f"speculative_config['model'] is {type(config.model).__name__}; method {method!r} takes a folder or None"
        )
    folder = Path(config.model) if config.model is not None else SHIPPED / f"{method}-{DEFAULT_TARGET}"
    if config.model is None and llm.name != DEFAULT_TARGET:
        raise ValueError(
            f"no {method} drafter is shipped for {llm.name!r}, only for {DEFAULT_TARGET!r}; "
            f"pass speculative_config['model'] or train one: python -m avref train {method}"
        )
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise ValueError(
                f"{str(folder)!r} is no {method} drafter: it holds no {name}; "
                f"train one with: python -m avref train {method}"
            )
    try:
        stored = dict(json.loads((folder / "config.json").read_bytes()))
        if stored.pop("method", None) != method:
            raise ValueError(f"{str(folder)!r} was not made for method {method!r}")
        stored.pop("target", None)
        stored["target_layers"] = tuple(stored["target_layers"])
        model = model_class(config_class(**stored))
        tensors = load_file(folder / "model.safetensors")
        model.load_state_dict({k: v.float() if v.is_floating_point() else v.long() for k, v in tensors.items()})
    except (
        json.JSONDecodeError,
        UnicodeDecodeError,
        KeyError,
        TypeError,
        AttributeError,
        SafetensorError,
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
