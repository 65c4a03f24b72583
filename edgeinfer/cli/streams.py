"""The three standard streams, which may be closed, full, write-only, or without a reader.

All commands behave the same. A closed stdin counts as empty. If a result cannot be written to stdout, that is an error:
a line on stderr and exit code 1; if its reader is gone, the program ends silently. Notes that cannot be written to
stderr are lost.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

from edgeinfer.common.errors import EdgeInferError

_STREAMS = (  # as if stdin were empty, stdout refused everything, and stderr took everything
    ("stdin", os.O_RDONLY, "r"),
    ("stdout", os.O_RDONLY, "w"),
    ("stderr", os.O_WRONLY, "w"),
)


def fill_closed() -> None:
    """Open the null device in place of each closed standard stream.

    Otherwise the next file that is opened would get its descriptor, and with it the output meant for the stream. Call
    this before opening any file.
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
    """Before long work: raises EdgeInferError if stdout is closed."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError, AttributeError):  # no file, as in a test
        return
    with writing_result():
        os.write(descriptor, b"")


@contextmanager
def writing_result() -> Iterator[None]:
    """Context in which an error of stdout becomes an EdgeInferError that says so. A missing reader stays
    BrokenPipeError.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise lost_result(error) from error


def lost_result(error: OSError) -> EdgeInferError:
    """The error for a failed write of a result."""
    reason = "it is closed" if error.errno == errno.EBADF else error.strerror or str(error)
    return EdgeInferError(f"standard output cannot be written: {reason}")


class Command(click.Command):
    """A command with help in groups, which counts as a result, and with a check that no input is overwritten."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options in groups."""
        from edgeinfer.cli.help import write_options

        write_options(self, ctx, formatter)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's. Raises click.UsageError for old names of options and variables."""
        from edgeinfer.cli.renamed import check_variables, explained

        check_variables(self, os.environ)
        given = list(args)  # as click empties it
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            raise explained(error, given) from None

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """As click's, which also writes the help if that is requested."""
        with writing_result():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """As click's. Raises InvalidArgument if an output is also an input."""
        from edgeinfer.cli.outputs import check_outputs  # here, as it imports the options, which import this module

        check_outputs(ctx)
        return super().invoke(ctx)


def give_up_failed() -> None:
    """Redirect streams that cannot be written to the null device, so that Python does not complain when it exits.

    Everything shown has been flushed, and its errors were reported.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError, AttributeError):  # it is no file
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)
