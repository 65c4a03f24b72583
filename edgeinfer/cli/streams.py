"""The three standard streams as a program may find them: closed, full, write-only, or with a reader that has gone.

What follows from that is the same for all commands. A closed standard input is an empty one. A result that cannot be
written to standard output is an error, a line on standard error and exit code 1; where its reader has gone, the program
ends without a word. Notes that cannot be written to standard error are lost, and change nothing.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

from edgeinfer.errors import EdgeInferError

_STREAMS = (  # as if stdin were empty, stdout refused everything, and stderr took everything
    ("stdin", os.O_RDONLY, "r"),
    ("stdout", os.O_RDONLY, "w"),
    ("stderr", os.O_WRONLY, "w"),
)


def fill_closed() -> None:
    """Put the null device where a standard stream is closed.

    The next file that is opened would else get its descriptor, and with it what is meant for the stream. To be called
    before that.
    """
    for descriptor, (name, flags, mode) in enumerate(_STREAMS):
        if _is_open(descriptor) and getattr(sys, name) is not None:
            continue
        null = os.open(os.devnull, flags)  # gets the lowest free number: this one if it is free
        os.set_inheritable(null, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(null, mode, encoding="utf-8"))  # noqa: SIM115  # for as long as the program runs


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def check_stdout() -> None:
    """Before a long way to a result: raises EdgeInferError where standard output is closed."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError, AttributeError):  # no file, as in a test
        return
    with writing_result():
        os.write(descriptor, b"")


@contextmanager
def writing_result() -> Iterator[None]:
    """Within, an error of standard output says so. A reader that has gone stays BrokenPipeError."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise lost_result(error) from error


def lost_result(error: OSError) -> EdgeInferError:
    """What a failed write of a result is."""
    reason = "it is closed" if error.errno == errno.EBADF else error.strerror or str(error)
    return EdgeInferError(f"standard output cannot be written: {reason}")


class Command(click.Command):
    """A command whose help is a result too."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """As click's, which writes the help where that is asked for."""
        with writing_result():
            return super().make_context(*args, **extra)


def give_up_failed() -> None:
    """Have streams lead nowhere that cannot be written, so that Python does not try and complain when it ends.

    Everything that was shown has been flushed, and errors of that were told.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError, AttributeError):  # no file behind it
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)
