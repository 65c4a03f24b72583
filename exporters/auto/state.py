"""What was measured so far, in a file, so that a search that was stopped goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from edgeinfer.exporters.auto.candidates import Subject
from edgeinfer.exporters.auto.rounding import Importance
from edgeinfer.exporters.auto.windows import Window

_VERSION = 1


class State:
    """Numbers by name, one a line of a file of JSON; without a path only in memory.

    fingerprint: of what they depend on. What a file has of anything else is dropped.
    """

    def __init__(self, path: Path | None, fingerprint: str) -> None:
        self._path, self._numbers = path, dict[str, float]()
        self._first = json.dumps({"edgeinfer.auto": _VERSION, "fingerprint": fingerprint})
        if path is not None:
            self._numbers = _read(path, self._first)
            lines = [self._first, *(json.dumps([name, value]) for name, value in self._numbers.items())]
            path.write_text("".join(f"{line}\n" for line in lines))

    def get(self, name: str) -> float | None:
        """What was measured under this name."""
        return self._numbers.get(name)

    def add(self, name: str, value: float) -> float:
        """Keep a number; gives it back. Raises OSError."""
        self._numbers[name] = value
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps([name, value]) + "\n")
        return value


def fingerprint_of(
    subjects: Sequence[Subject], windows: Sequence[Window], importance: Importance, more: str = ""
) -> str:
    """Of the tensors (their first rows), their formats, the texts and the importance. more: what else there is."""
    digest = hashlib.sha256()
    for subject in subjects:
        digest.update(repr((subject.name, subject.tensor.shape, [each.name for each in subject.formats])).encode())
        digest.update(subject.tensor.rows(0, 1).tobytes())
        found = importance.get(subject.name)
        digest.update(b"" if found is None else found.tobytes())
    digest.update(repr([(list(window.tokens), list(window.rows)) for window in windows]).encode())
    digest.update(more.encode())
    return digest.hexdigest()


def _read(path: Path, first: str) -> dict[str, float]:
    """The numbers of a file that begins with that line; a last line that was cut short is left out."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError):
        return {}
    numbers: dict[str, float] = {}
    if not lines or lines[0] != first:
        return numbers
    for line in lines[1:]:
        with suppress(ValueError, TypeError):
            name, value = json.loads(line)
            numbers[str(name)] = float(value)
    return numbers
