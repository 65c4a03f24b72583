"""`edgeinfer export` and folders for FPGA boards: options of `--to fpga`, the doctor, and the way back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from edgeinfer.cli.streams import check_stdout
from edgeinfer.cli.terminal import ReportLines, note, show

BOARD_OPTIONS = ("board", "encoding", "rows", "tables", "golden", "embeddings", "rescored")
_Command = TypeVar("_Command", bound=Callable[..., Any])
_OPTIONS = (
    click.option("--board", metavar="NAME", help="fpga: the board.  [default: kv260]"),
    click.option(
        "--encoding",
        type=click.Choice(["base3", "g3x5", "2bit"]),
        help="fpga: how weights are stored: five in a byte, three in 5 bits, or one in 2.  [default: base3]",
    ),
    click.option("--rows", type=click.IntRange(1, 64), help="fpga: rows of the engine.  [default: by encoding]"),
    click.option(
        "--tables", type=click.IntRange(1, 64), help="fpga: its tables, a power of 2.  [default: by encoding]"
    ),
    click.option("--golden", type=click.IntRange(0, 4096), help="fpga: test vectors of each matrix.  [default: 4]"),
    click.option(
        "--embeddings", type=click.Choice(["int8", "bf16"]), help="fpga: type of the embeddings.  [default: int8]"
    ),
    click.option(
        "--rescored",
        type=click.IntRange(0, 1 << 20),
        metavar="N",
        help="fpga: with a ternary first stage of the output matrix, whose N best tokens are computed again; 256 is "
        "usual.  [default: 0, none]",
    ),
    click.option("--unpack", is_flag=True, help="Give the matrices of a folder for a board back, as .gguf or .npz."),
)


def board_options(command: _Command) -> _Command:
    """The command with these options, the first one first."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def missing(context: click.Context, name: str) -> click.MissingParameter:
    """The error about an option that was not given."""
    parameter = next(each for each in context.command.params if each.name == name)
    return click.MissingParameter(ctx=context, param=parameter)


def run_on_folder(context: click.Context, folder: Path, to: str | None, out: Path | None) -> None:
    """What `edgeinfer export` does without --to: --unpack, or --check. Raises InvalidArgument, BadBoardFolder, OSError.

    Raises MissingParameter where neither is asked for.
    """
    from edgeinfer.common.errors import InvalidArgument

    if context.params["unpack"]:
        if to is not None:
            raise InvalidArgument("--unpack reads a folder that --to fpga wrote: leave --to out")
        if out is None:
            raise missing(context, "out")
        _unpack(folder, out)
    elif _asks_for_check(context) and not folder.is_file():
        _check(folder)
    else:
        raise missing(context, "to")


def _asks_for_check(context: click.Context) -> bool:
    """Whether --check was given; without --to it is the doctor."""
    is_given = context.get_parameter_source("check") == ParameterSource.COMMANDLINE
    return is_given and bool(context.params["check"])


def _check(folder: Path) -> None:
    """Print each fault of a folder. Raises BadBoardFolder where there are some."""
    from edgeinfer.common.errors import BadBoardFolder
    from edgeinfer.exporters.fpga.doctor import faults_in, summary

    check_stdout()
    faults = list(faults_in(folder))
    for fault in faults[:-1]:
        show(fault)
    if faults:
        raise BadBoardFolder(faults[-1])
    show(f"{folder}: {summary(folder)}")


def _unpack(folder: Path, out: Path) -> None:
    from edgeinfer.exporters.fpga.unpack import unpack_folder

    with ReportLines() as lines:
        said = unpack_folder(folder, out, lambda share: lines(f"unpacking: {100 * share:.0f} %", share))
    note(f"{out}: {said}")
