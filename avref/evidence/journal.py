"""A journal: one line of JSON per finished unit of work, so that what was interrupted goes on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from avref.files import differences


class Journal:
    """A line with the settings, then a record per finished run, under a key of its own; in memory when path is None.

    `holds`: what every record has. A line is on the disk before the next run starts; one that a kill cut short is
    dropped. Raises ValueError when the file belongs to other settings, or is no journal, OSError when it cannot be
    written.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any], holds: Collection[str] = ()) -> None:
        self.path, self.records = path, dict[str, dict[str, Any]]()
        self.settings = json.loads(json.dumps(settings))  # as they look once they were written
        lines = self._whole_lines()
        self.begun = not lines  # by this call
        if self.begun:
            self._write({"settings": self.settings})
            return
        self._check(lines[0].get("settings"))
        for number, line in enumerate(lines[1:], start=2):
            if not isinstance(line.get("key"), str):
                raise ValueError(f"{path}, line {number}, is no record of a run; use another folder, or delete it")
            if lacks := [name for name in holds if name not in line]:
                raise ValueError(
                    f"{path}, line {number}: the record of {line['key']!r} lacks {', '.join(lacks)}; delete the line, "
                    "and the next start does that run again"
                )
            self.records[line["key"]] = line

    def __contains__(self, key: str) -> bool:
        return key in self.records

    def append(self, key: str, record: Mapping[str, Any]) -> None:
        """Write down one finished run."""
        self._write({"key": key, **record})
        self.records[key] = {"key": key, **record}

    def _whole_lines(self) -> list[dict[str, Any]]:
        if self.path is None or not self.path.is_file():
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
        if self.path is None:
            return
        before = self.path.stat().st_size if self.path.is_file() else 0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(json.dumps(line).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if self.path.is_file():
                os.truncate(self.path, before)  # half a line would spoil the next one
            raise OSError(
                f"could not write {str(self.path)!r}: {error}; free some space or choose a folder that can be written, "
                "then start again: what is finished is not done twice"
            ) from error

    def _check(self, before: Any) -> None:
        if not isinstance(before, dict):
            raise ValueError(f"{self.path} does not begin with its settings; use another folder, or delete it")
        if changed := differences(before, self.settings):
            raise ValueError(
                f"{self.path} was begun with other settings ({changed}): its runs and new ones cannot be compared. "
                "Use another folder, or the settings of that one"
            )
