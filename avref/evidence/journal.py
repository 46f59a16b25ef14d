"""The bench's journal: one line of JSON per finished run, so that an interrupted bench goes on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Journal:
    """`bench.jsonl`: a line with the settings, then a record per finished run, under a key of its own.

    A line is written in one piece and is on the disk before the next run starts; one that a kill cut short is dropped.
    Raises ValueError when the file belongs to other settings, or is no journal.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path, self.records = path, dict[str, dict[str, Any]]()
        self.settings = json.loads(json.dumps(settings))  # as they look once they were written
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = self._whole_lines()
        self.begun = not lines  # by this call
        if self.begun:
            self._write({"settings": self.settings})
            return
        self._check(lines[0].get("settings"))
        for number, line in enumerate(lines[1:], start=2):
            if not isinstance(line.get("key"), str):
                raise ValueError(f"{path}, line {number}, is no record of a run; use another folder, or delete it")
            self.records[line["key"]] = line

    def __contains__(self, key: str) -> bool:
        return key in self.records

    def append(self, key: str, record: Mapping[str, Any]) -> None:
        """Write down one finished run."""
        self.records[key] = {"key": key, **record}
        self._write(self.records[key])

    def _whole_lines(self) -> list[dict[str, Any]]:
        if not self.path.is_file():
            return []
        raw = self.path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) < len(raw):
            os.truncate(self.path, len(whole))
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{self.path} is no journal of a bench: {error}; give another folder, or delete it"
            ) from error
        return [line if isinstance(line, dict) else {} for line in lines]

    def _write(self, line: Mapping[str, Any]) -> None:
        with self.path.open("ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")
            os.fsync(file.fileno())

    def _check(self, before: Any) -> None:
        if not isinstance(before, dict):
            raise ValueError(f"{self.path} does not begin with its settings; use another folder, or delete it")
        names = [n for n in {**before, **self.settings} if before.get(n) != self.settings.get(n)]
        if names:
            differences = "; ".join(f"{n} was {before.get(n)!r}, is {self.settings.get(n)!r}" for n in names)
            raise ValueError(
                f"{self.path} was begun with other settings ({differences}): its runs and new ones cannot be compared. "
                "Use another folder, or the settings of that one"
            )
