"""What llama.cpp logs: sizes, and the reasons of failures."""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from edgeinfer.errors import BudgetExceeded, UnsupportedModel

_logger = logging.getLogger(__package__)
_logger.addHandler(logging.NullHandler())

_DEBUG, _ERROR = 1, 4  # enum ggml_log_level


class Log(threading.local):
    """Takes what llama.cpp logs; each thread sees its own lines."""

    def __init__(self) -> None:
        self._lines: list[tuple[int, str]] | None = None

    @contextmanager
    def record(self, library: Any) -> Iterator[list[tuple[int, str]]]:
        """Lines (level, text) that this thread has logged meanwhile, but for DEBUG."""
        listen(library)  # again: whoever else uses llama.cpp in this process may have had the log go elsewhere
        lines: list[tuple[int, str]] = []
        self._lines = lines
        try:
            yield lines
        finally:
            self._lines = None

    def receive(self, level: int, text: bytes, _: object) -> None:
        """A ggml_log_callback."""
        line = text.decode(errors="replace").rstrip()
        _logger.debug("%s", line)
        if self._lines is not None and level > _DEBUG:
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
    errors = [line for level, line in lines if level == _ERROR and not line.endswith(": failed to load model")]
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
