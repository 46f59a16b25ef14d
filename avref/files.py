"""Files that appear whole or not at all, and tensors that are checked when they are read back."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path beside `path` to write to; what was written takes the place of `path` when the block ends well.

    So whoever reads, and whoever goes on after a kill, finds the old file or the new one, never a part. Folders are
    made. Raises OSError, which names the file and the reason, when the disk is full or cannot be written.
    """
    path = Path(path)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"could not write {str(path)!r}: {error}; free some space or choose a folder that can be written "
            "(a file of that name is left as it was)"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file in UTF-8, whole or not at all."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def json_checksum(content: Any) -> str:
    """SHA-256 of what fits into JSON, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def save_tensors(tensors: Mapping[str, Tensor], path: str | os.PathLike[str], **metadata: Any) -> None:
    """Write tensors as safetensors, with metadata that fit into JSON and a checksum over both."""
    text = json.dumps(metadata)
    stored = {"format": "pt", "metadata": text, "sha256": _checksum(tensors, text)}
    with replacing(path) as part:
        save_file(dict(tensors), part, metadata=stored)


def load_tensors(path: str | os.PathLike[str], remedy: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and metadata that `save_tensors` wrote; another safetensors file has no metadata and no checksum.

    Raises RuntimeError, which names the file and says what to do (`remedy`), for one that is missing, truncated or
    altered.
    """
    try:
        with safe_open(path, "pt") as file:
            stored = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError) as error:
        raise RuntimeError(f"{str(path)!r} cannot be read, it is missing or damaged: {error}; {remedy}") from error
    text = stored.get("metadata", "{}")
    if {"metadata", "sha256"} & stored.keys() and stored.get("sha256") != _checksum(tensors, text):
        raise RuntimeError(f"{str(path)!r} is damaged: its checksum does not match what it holds; {remedy}")
    return tensors, json.loads(text)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """How two settings differ, for an error message: "steps was 3, is 4"; empty when they do not.

    Both are compared as they look once they were written as JSON.
    """
    old, new = json.loads(json.dumps([dict(before), dict(now)], default=str))
    names = [n for n in {**old, **new} if old.get(n) != new.get(n)]
    return "; ".join(f"{n} was {old.get(n)!r}, is {new.get(n)!r}" for n in names)


def _checksum(tensors: Mapping[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
