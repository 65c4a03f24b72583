"""Output for people: text that cannot control the terminal, notes, and a progress bar."""

from __future__ import annotations

import io
import os
import shutil
import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

import click

from edgeinfer.cli.streams import writing_result

if TYPE_CHECKING:
    from rich.progress import Progress

_BAR_AFTER_SECONDS = 1.0
_LINE_SECONDS = 10.0  # between lines about a long run

# C0 except tab and newline, DEL, C1, and marks of direction. Without them there are no escape sequences.
_VISIBLE = (
    {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"}
    | {127: "\u2421"}
    | {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}
    | {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
)


def terminal_width(stream: TextIO) -> int:
    """Columns of a stream's terminal; 80 if that is not known."""
    with suppress(OSError, ValueError, AttributeError):
        if (columns := os.get_terminal_size(stream.fileno()).columns) > 0:
            return columns
    return shutil.get_terminal_size().columns


def visible(text: str) -> str:
    """The text with control characters replaced by visible ones."""
    return text.translate(_VISIBLE)


def one_line(text: str) -> str:
    """A text from a file, or its name, on one line, without control characters."""
    sound = text.encode(errors="replace").decode()  # bytes that are no UTF-8 are lone surrogates
    return visible(sound).replace("\n", "\\n").replace("\t", "\\t")


class Writer:
    """Writes a model's text to a stream as it is generated. On a terminal control characters are made visible.

    Raises EdgeInferError if the stream is closed or full, BrokenPipeError if its reader is gone.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._in_line = False

    @classmethod
    def to_stdout(cls, *, silent: bool = False) -> Writer:
        """A writer of the answer; silent if that will be a part of something else."""
        return cls(io.StringIO() if silent else sys.stdout)

    def write(self, text: str) -> None:
        """Write and show at once."""
        if text:
            with writing_result():
                self._stream.write(visible(text) if self._is_terminal else text)
                self._stream.flush()
            self._in_line = not text.endswith("\n")

    def end_line(self) -> None:
        """End the line if there is something in it."""
        if self._in_line:
            self.write("\n")


def show(text: str) -> None:
    """Print a result on stdout. Raises EdgeInferError if that is closed or full."""
    with writing_result():
        click.echo(text)


def note(text: str, hang: int = 0) -> None:
    """Print a note on stderr, dimmed if possible; lost if stderr cannot be written.

    hang: columns by which continuation lines are indented, on a terminal.
    """
    text = _fitted(text, hang)
    _echo(click.style(text, dim=True) if has_colours(sys.stderr) else text)


def _fitted(text: str, hang: int = 0) -> str:
    """A text for stderr; on a terminal it breaks between words."""
    from edgeinfer.cli.layout import wrapped

    text = visible(text)
    return wrapped(text, terminal_width(sys.stderr), hang) if sys.stderr.isatty() else text


def reason(error: BaseException) -> str:
    """The message of an error, without the system's error number."""
    if isinstance(error, OSError) and error.strerror:
        names = " -> ".join(os.fsdecode(name) for name in (error.filename, error.filename2) if _is_name(name))
        return f"{names}: {error.strerror}" if names else error.strerror
    return str(error)


def _is_name(value: object) -> bool:
    return isinstance(value, (str, bytes, os.PathLike)) and bool(value)


def complain(text: str) -> None:
    """Print an error on stderr; lost if stderr cannot be written."""
    _echo(_fitted(text))


def _echo(text: str) -> None:
    with suppress(OSError):
        click.echo(text, err=True)


def has_colours(stream: TextIO) -> bool:
    """Whether a stream is a terminal that shows styles."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class ProgressBar:
    """A progress bar on stderr, shown on a terminal if the work takes more than a second."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._start = time.monotonic()
        self._bar: Progress | None = None

    def __call__(self, share: float, what: str | None = None) -> None:
        """Show the share that is done, 0..1. what: the current work, if it changed."""
        if self._bar is None:
            if time.monotonic() - self._start < _BAR_AFTER_SECONDS or not sys.stderr.isatty():
                return
            self._bar = self._show()
        from rich.markup import escape

        self._bar.update(self._bar.task_ids[0], completed=share, description=escape(one_line(what or self._what)))

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self) -> Progress:
        from rich.console import Console
        from rich.progress import Progress

        class ConsoleWithCursor(Console):
            """Never hides the cursor, which would stay hidden in a suspended program."""

            def show_cursor(self, show: bool = True) -> bool:
                return False

        bar = Progress(console=ConsoleWithCursor(stderr=True), transient=True)
        bar.add_task(self._what, total=1.0)
        bar.start()
        return bar

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class ReportLines:
    """Progress of a long run: a bar on a terminal, elsewhere a line from time to time. A context manager."""

    def __init__(self) -> None:
        self._bar = ProgressBar("")
        self._stage = ""
        self._last_line = 0.0

    def __call__(self, what: str, share: float) -> None:
        """Show the share of a work that is done, 0..1. what: its name, or with details after a colon."""
        stage = what.partition(":")[0]
        is_due = stage != self._stage or share >= 1.0 or time.monotonic() - self._last_line > _LINE_SECONDS
        if is_due and not sys.stderr.isatty():
            note(f"{what} ({share:.0%})")
            self._last_line = time.monotonic()
        if stage != self._stage:
            self._bar.close()
            self._bar = ProgressBar(stage)
            self._stage = stage
        self._bar(share, what)

    def __enter__(self) -> ReportLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()
