"""The command line. One file per command, imported when it is called, so that `--help` is fast.

Exit codes are those of `edgeinfer.common.errors`; `--help` lists them.
"""

from __future__ import annotations

import difflib
import importlib
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import click

from edgeinfer.cli import streams
from edgeinfer.cli.terminal import complain, reason
from edgeinfer.common.errors import BudgetExceeded, EdgeInferError, Interrupted

_EXIT_CODES = (
    "Exit codes: 0 ok, 1 failure, 2 usage, 3 the model file is bad, unsupported or lacks what is asked of it, "
    "4 it does not fit into memory, 5 a backend was lost, 130 interrupted."
)
COMMANDS = {  # name: what --help says of it; the command is edgeinfer.cli.<name>.<name>
    "chat": "Chat with a model.",
    "generate": "Complete a text.",
    "batch": "Answer the requests of a file.",
    "serve": "Answer programs over HTTP.",
    "models": "List the models on this machine.",
    "cache": "List or clear the contexts on disk.",
    "inspect": "Show the contents of a GGUF file.",
    "profile": "Plan the memory and the speed of a model.",
    "bench": "Measure the speed of a model here.",
    "pack": "Pack a model to load in milliseconds.",
    "imatrix": "Compute the importance matrix of a model.",
    "export": "Convert a model to another format.",
    "fpga": "Run ternary models on FPGA boards.",
    "devices": "List the devices that can run models.",
    "distill": "Train a draft head for a model.",
    "evaluate": "Measure the acceptance of a draft head.",
}


class _Group(click.Group):
    """Imports a command when it is called, and turns errors into a line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"edgeinfer.cli.{cmd_name}"), cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(_no_such_command(args[0]), ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command line as click does, and exit with its exit code, whatever the state of the standard streams."""
        run: Callable[..., Any] = super().main  # click's overloads differ from one version to the next
        if not options.get("standalone_mode", True):
            return run(*args, **options)
        streams.fill_closed()
        try:
            exit_code = run(*args, **(options | {"standalone_mode": False})) or 0
        except click.ClickException as error:
            with suppress(OSError):
                error.show()
            exit_code = error.exit_code
        except click.Abort:
            exit_code = Interrupted.exit_code
        except OSError as error:  # of --help and --version; those of commands are in invoke
            complain(f"error: {streams.lost_result(error)}")
            exit_code = EdgeInferError.exit_code
        finally:
            streams.give_up_failed()
        sys.exit(exit_code)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            if error.option_name in ("-m", "--model") and error.ctx is not None and _takes_file(error.ctx.command):
                hint = f"{error.message} Name the file without it: {error.ctx.command_path} FILE"
                raise click.UsageError(hint, error.ctx) from None
            raise
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise  # click's own ways to end
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, BrokenPipeError) and error.filename is None:
                raise  # the reader of our output has gone; click ends without a word
            if ctx.params.get("debug"):
                complain(traceback.format_exc().rstrip("\n"))
            message, exit_code = _explain(error)
            complain(f"error: {message}")
            ctx.exit(exit_code)


def _takes_file(command: click.Command) -> bool:
    """Whether a file is the argument of a command."""
    return any(isinstance(parameter, click.Argument) for parameter in command.params)


def _no_such_command(name: str) -> str:
    """The message for a command that does not exist."""
    if name.endswith(".gguf"):
        return f"{name} is no command: edgeinfer chat -m {name} talks with a model"
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    return f"No such command {name!r}. " + (f"Did you mean {near[0]}?" if near else f"There are {', '.join(COMMANDS)}.")


def _explain(error: BaseException) -> tuple[str, int]:
    """The message and the exit code for an error."""
    if isinstance(error, EdgeInferError):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", Interrupted.exit_code
    if isinstance(error, MemoryError):
        return "the system gave no more memory; use a smaller model or context (-c)", BudgetExceeded.exit_code
    if isinstance(error, OSError):
        return reason(error), EdgeInferError.exit_code
    return f"{type(error).__name__}: {error} (a bug: edgeinfer --debug shows where)", EdgeInferError.exit_code


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EXIT_CODES)
@click.version_option(package_name="edgeinfer", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:
    """Run language models on this machine, with speculative decoding."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a character that the terminal lacks must not end an answer
