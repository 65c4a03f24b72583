"""What a long benchmark found so far, kept in a file: the same command goes on where it was stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Records:
    """Rows by key, each appended to a file as a line of JSON as soon as it is there; path None keeps them in memory.

    The first line of the file is the settings; a file of other settings is refused.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self._path = path
        self.rows: dict[str, Any] = {}
        if path is None:
            return
        whole, newline, cut = (path.read_text() if path.exists() else "").rpartition("\n")
        if cut:  # by a stop in the middle of a line: that row is made again
            path.write_text(whole + newline)
        if not whole:
            self._append(settings)
            return
        first, *rest = map(json.loads, whole.splitlines())
        if first != settings:
            raise SystemExit(f"{path} is of other settings, {first}, than {settings}: name another file")
        self.rows = {row["key"]: row["value"] for row in rest}

    def add(self, key: str, value: Any) -> None:
        """Keep a row. value: anything that JSON has."""
        self.rows[key] = value
        self._append({"key": key, "value": value})

    def _append(self, line: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
