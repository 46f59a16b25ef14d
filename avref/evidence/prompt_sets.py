"""Prompts by name or from a file: the public sets that the article was measured on, fetched from where users get them.

    humaneval     code to complete           openai/openai_humaneval
    gsm8k         word problems              openai/gsm8k
    mt_bench      first turns of chats       HuggingFaceH4/mt_bench_prompts
    speed_bench   SPEED-Bench, qualitative   nvidia/SPEED-Bench

They come as files from the Hugging Face hub, .parquet ones read with `pyarrow`. None is part of this project; each has
a licence of its own. A name may also be one of the shipped workloads (`avref.workloads`).
A file is .txt (a prompt on each line), .jsonl (a row on each line) or .json (a list of rows); a row is a string, or an
object with a field "prompt", "question" or "turns" (the first turn is taken), as in the sets' own files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from avref import hub, workloads

FIELDS = ("prompt", "question", "turns")
SUFFIXES = (".txt", ".jsonl", ".json")
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


@dataclass(frozen=True)
class Source:
    """A dataset repository on the hub, and the files in it that hold the prompts."""

    repo: str
    files: tuple[str, ...]


SOURCES = {
    "humaneval": Source("openai/openai_humaneval", ("openai_humaneval/test*",)),
    "gsm8k": Source("openai/gsm8k", ("main/test*",)),
    "mt_bench": Source("HuggingFaceH4/mt_bench_prompts", ("raw/question.jsonl", "data/train*")),
    "speed_bench": Source("nvidia/SPEED-Bench", ("qualitative/test*",)),
}


def load(source: str | Path) -> list[str]:
    """The prompts of a file, a public set or a shipped workload, in their own order.

    Raises ValueError for an unknown name, and for a file that holds no prompts or something else; RuntimeError, within
    seconds, for a set that cannot be fetched.
    """
    name, path = str(source), Path(source)
    if name in SOURCES:
        return [_prompt(row, f"{name}, row {i}") for i, row in enumerate(_fetch(name, SOURCES[name]))]
    if name in workloads.NAMES:
        return workloads.load(name)
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"{name!r} is no set of prompts; give a file ({', '.join(SUFFIXES)}), one of {', '.join(SOURCES)}, or a "
            f"shipped workload: {', '.join(workloads.NAMES)}"
        )
    return _from_file(path)


# ---- files ----
def _from_file(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"the prompts in {str(path)!r} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    prompts = [_prompt(row, place) for place, row in _rows(path.suffix, text, str(path))]
    if not prompts:
        raise ValueError(f"{str(path)!r} holds no prompts")
    return prompts


def _rows(suffix: str, text: str, path: str) -> Iterator[tuple[str, Any]]:
    """(place, row) of a file's text, blank lines left out."""
    if suffix == ".json":
        rows = _json(text, path)
        if not isinstance(rows, list):
            raise ValueError(f"{path} holds a JSON {type(rows).__name__}; give a list of prompts")
        yield from ((f"{path}, item {i}", row) for i, row in enumerate(rows))
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{path}, line {number}"
            yield place, line.strip() if suffix == ".txt" else _json(line, place)


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not valid JSON: {error}") from error


def _prompt(row: Any, place: str) -> str:
    """The prompt of a row: itself, or its first field of `FIELDS`; of several turns the first."""
    value = row
    if isinstance(row, Mapping):
        field = next((f for f in FIELDS if row.get(f)), None)
        if field is None:
            raise ValueError(f"{place} has fields {', '.join(map(str, row)) or 'none'}; it needs one of {FIELDS}")
        value = row[field]
    if isinstance(value, (list, tuple)) and value:
        value = value[0]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{place} holds {value!r} where a prompt, text that is not empty, was expected")
    return value


# ---- the hub ----
def _fetch(name: str, source: Source) -> list[Any]:
    """The rows of a set: from the hub's local cache, else from the hub."""
    from huggingface_hub import constants

    tried, rows = "the hub's cache on this machine", None
    try:
        rows = _from_hub(source, local=True)
        if rows is None:
            tried += f", then {constants.ENDPOINT}"
            if hub.reachable(constants.ENDPOINT):
                rows = _from_hub(source, local=False)
            else:
                tried += f" (no answer within {hub.TIMEOUT_S + 1:.0f} s)"
    except Exception as error:  # whatever a hub client raises: the reader needs the remedy, not its kind
        tried += f" ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    if not rows:
        raise RuntimeError(
            f"the prompts of {name} ({source.repo} on the Hugging Face hub) could not be had; tried: {tried}. Run once "
            f"with a network that reaches the hub (pip install pyarrow, if that is missing), or save the prompts "
            f"yourself and pass the file ({', '.join(SUFFIXES)})"
        )
    if any(PLACEHOLDER in json.dumps(row, default=str) for row in rows):
        raise RuntimeError(
            f"{source.repo} holds placeholders where other sources' prompts belong; build the set with the script that "
            f"comes with it, and pass the file ({', '.join(SUFFIXES)})"
        )
    return rows


def _from_hub(source: Source, local: bool) -> list[Any] | None:
    """The rows in a repository's files; None when they are not in the cache and `local` forbids to fetch them."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            source.repo, repo_type="dataset", allow_patterns=list(source.files), local_files_only=local, etag_timeout=3
        )
    except LocalEntryNotFoundError:
        if local:
            return None
        raise
    files = sorted({f for pattern in source.files for f in Path(folder).glob(pattern)})
    return [row for file in files for row in _read(file)] or None


def _read(file: Path) -> list[Any]:
    if file.suffix == ".parquet":
        from pyarrow import parquet

        return list(parquet.read_table(file).to_pylist())
    return [row for _, row in _rows(file.suffix, file.read_text(encoding="utf-8"), file.name)]
