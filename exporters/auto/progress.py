"""What a search has measured so far, in a file from which it goes on, and what it says of itself meanwhile."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from edgeinfer.exporters.request import StepProgress, no_progress

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


class Pace:
    """Tells how many of some measurements are done.

    weights: the relative time that each of them takes.  of: what they are of, such as "tensors".  clock: in seconds.
    """

    def __init__(
        self,
        stage: str,
        of: str,
        weights: Sequence[float],
        report: StepProgress = no_progress,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stage, self._of, self._weights, self._report, self._clock = stage, of, weights, report, clock
        self._n_done = 0
        self._began = clock()
        self._seconds = self._measured = 0.0  # of what was measured now, and its weight

    def done(self, was_known: bool = False) -> None:
        """One more is done.  was_known: an earlier search has measured it, so that it took no time."""
        now = self._clock()
        if not was_known:
            self._seconds += now - self._began
            self._measured += self._weights[self._n_done]
        self._began = now
        self._n_done += 1
        n = len(self._weights)
        what = f"{self._stage}: {self._n_done} of {n} {self._of}"
        left = self.seconds_left()
        self._report(what if left is None else f"{what}, {left:.0f} s left", self._n_done / n)

    def seconds_left(self) -> float | None:
        """For what is not done, as if nothing of it were known; None where nothing was measured, or nothing is left."""
        left = sum(self._weights[self._n_done :])
        return self._seconds * left / self._measured if self._measured and left else None
