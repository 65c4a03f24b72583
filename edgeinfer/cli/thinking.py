"""The display of a model's reasoning."""

from __future__ import annotations

import sys
import time
from contextlib import suppress

import click

from edgeinfer.cli.markdown import answer_writer
from edgeinfer.cli.terminal import has_colours, terminal_width
from edgeinfer.common.errors import EdgeInferError

_SECONDS = 0.1  # between counts of the tokens


class Thinking:
    """Shows on stderr that a model reasons before it answers: the text, or on a terminal a line with a count."""

    def __init__(self, is_shown: bool, *, is_plain: bool = False) -> None:
        style = "2" if has_colours(sys.stderr) else ""
        self._writer = answer_writer(sys.stderr, is_plain=is_plain, style=style) if is_shown else None
        self._start: float | None = None  # None: before the reasoning, or after it
        self._n_tokens = 0
        self._last_line = 0.0
        self._in_line = False

    @property
    def is_open(self) -> bool:
        """Whether the model reasons."""
        return self._start is not None

    def write(self, text: str, n_tokens: int) -> None:
        """The next part of the reasoning, and how many tokens it took."""
        now = time.monotonic()
        self._start = now if self._start is None else self._start
        self._n_tokens += n_tokens
        if self._writer is not None:
            with suppress(OSError, EdgeInferError):  # lost where nothing can be written there
                self._writer.write(text)
        elif sys.stderr.isatty() and now - self._last_line > _SECONDS:
            self._last_line = now
            line = f"thinking ... {self._n_tokens} tokens, {now - self._start:.0f} s "
            self._write_line("\r" + line[: terminal_width(sys.stderr) - 1])  # a longer one could not be written over
            self._in_line = True

    def end(self) -> None:
        """Call when the answer begins, or when there is none."""
        if self._start is None:
            return
        if self._writer is not None:
            with suppress(OSError, EdgeInferError):
                self._writer.end_line()
            self._write_line("\n")
        elif self._in_line:
            seconds = time.monotonic() - self._start
            line = f"thought for {self._n_tokens} tokens, {seconds:.1f} s   "
            self._write_line(f"\r{line[: terminal_width(sys.stderr) - 1]}\n")
        self._start, self._n_tokens, self._last_line, self._in_line = None, 0, 0.0, False

    def _write_line(self, text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(click.style(text, dim=True) if has_colours(sys.stderr) else text)
            sys.stderr.flush()
