"""What llama.cpp logs: sizes, and the reasons of failures."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from edgeinfer.common.errors import BudgetExceeded, UnsupportedModel

_DEBUG, _ERROR = 1, 4  # enum ggml_log_level


class Log:
    """Takes what llama.cpp logs, and writes it to stderr, of which the host reads the last line after a crash.

    every: all lines since it was emptied, for the host's log; None where that is not wanted.
    """

    def __init__(self) -> None:
        self.every: list[str] | None = None
        self._lines: list[tuple[int, str]] | None = None

    @contextmanager
    def record(self) -> Iterator[list[tuple[int, str]]]:
        """Lines (level, text) that are logged meanwhile, but for DEBUG."""
        lines: list[tuple[int, str]] = []
        self._lines = lines
        try:
            yield lines
        finally:
            self._lines = None

    def receive(self, level: int, text: bytes, _: object) -> None:
        """A ggml_log_callback."""
        line = text.decode(errors="replace").rstrip()
        if self.every is not None:
            self.every.append(line)
        if level > _DEBUG:
            print(line, file=sys.stderr, flush=True)
            if self._lines is not None:
                self._lines.append((level, line))


log = Log()


@functools.cache
def _callback(library: Any) -> Any:
    return library.llama_log_callback(log.receive)


def listen(library: Any) -> None:
    """Have llama.cpp log here."""
    library.llama_log_set(_callback(library), None)


def quote(lines: list[tuple[int, str]]) -> str:
    """What llama.cpp gave as the reason of a failure."""
    errors = [line for level, line in lines if level == _ERROR and "failed to load model" not in line]
    return errors[-1] if errors else "it gives no reason"


def refuse(path: Path, lines: list[tuple[int, str]]) -> NoReturn:
    """Raise what llama.cpp's reason for not loading a model means: BudgetExceeded, else UnsupportedModel."""
    reason = quote(lines)
    if "alloc" in reason:
        raise BudgetExceeded(f"{path}: llama.cpp found too little memory: {reason}")
    raise UnsupportedModel(f"{path}: llama.cpp cannot load this model: {reason}")


def mebibytes(line: tuple[int, str], what: str) -> int:
    """Bytes of "what = 1.25 MiB" in a line of the log, 0 if it does not say that."""
    match = re.search(what + r" = +([0-9.]+) MiB", line[1])
    return round(float(match[1]) * 2**20) if match else 0
