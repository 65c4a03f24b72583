"""`edgeinfer profile --board`: a ternary model on an FPGA board, as the model of the board has it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from edgeinfer.cli.options import Command
from edgeinfer.cli.terminal import note, show, visible
from edgeinfer.common.errors import BudgetExceeded, InvalidArgument

if TYPE_CHECKING:
    from edgeinfer.models.spec import ModelSpec

_MAY_BE_TERNARY = ("I2_S", "TQ1_0", "TQ2_0", "Q2_0", "F32", "F16", "BF16")
CONTEXT = 1024  # positions, where none is given
_OF_A_BOARD = ("encoding", "rows", "tables", "engines", "attention_lanes")
_OF_BOTH = (*_OF_A_BOARD, "model", "hf_repo", "hf_file", "board", "n_ctx", "as_json")


def board_options(command: Command) -> Command:
    """The options of a board, for `profile`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option("--board", metavar="NAME", help="A ternary model on an FPGA board instead: kv260. All is modelled."),
    click.option(
        "--encoding",
        type=click.Choice(["base3", "g3x5", "2bit"]),
        default="base3",
        show_default=True,
        help="--board: how its weights are stored.",
    ),
    click.option("--rows", type=click.IntRange(1, 64), help="--board: rows of an engine.  [default: 4, g3x5: 16]"),
    click.option("--tables", type=click.IntRange(1, 64), help="--board: tables of an engine.  [default: 16, g3x5: 4]"),
    click.option("--engines", type=click.IntRange(1, 64), default=1, show_default=True, help="--board: engines."),
    click.option(
        "--attention-lanes",
        type=click.IntRange(0, 4096),
        default=0,
        show_default=True,
        help="--board: multiply-adds a cycle of attention in the fabric; 0: the processor does it.",
    ),
)


def check_board_options(context: click.Context, board: str | None) -> None:
    """Raises InvalidArgument for options of the command line that go only with a board, or only without one."""
    for option in context.command.params:
        name = option.name or ""
        if context.get_parameter_source(name) != ParameterSource.COMMANDLINE:
            continue
        if board is None and name in _OF_A_BOARD:
            raise InvalidArgument(f"{option.opts[-1]} goes with --board")
        if board is not None and name not in _OF_BOTH:
            raise InvalidArgument(f"{option.opts[-1]} does not go with --board: it is of this machine")


def _matrices(spec: ModelSpec) -> Iterator[str]:
    """Names of the matrices of layers."""
    for weight in spec.weights():
        if weight.block and len(weight.shape) == 2 and isinstance(weight.tensor, str):
            yield weight.tensor


def profile_board(model: Path, board: str, flags: dict[str, Any], as_json: bool) -> None:
    """Print the report. Raises BudgetExceeded where the board has no room, InvalidArgument, UnsupportedModel."""
    from edgeinfer.hls.board.boards import board_of
    from edgeinfer.hls.board.counted import counts_of
    from edgeinfer.hls.board.model import Design
    from edgeinfer.hls.board.report import report, report_lines
    from edgeinfer.hls.board.workload import workload_of
    from edgeinfer.hls.geometry import default_geometry
    from edgeinfer.models.architectures import read_spec
    from edgeinfer.models.gguf import ModelFile

    geometry = default_geometry(flags["encoding"], flags["rows"], flags["tables"])
    design = Design(board_of(board), geometry, flags["engines"], flags["attention_lanes"])
    with ModelFile.open(model) as file:
        spec = read_spec(file)
        others = sorted({file.tensors[name].type.name for name in _matrices(spec)} - set(_MAY_BE_TERNARY))
    if others:
        note(f"the matrices of this file are {', '.join(others)}, not ternary: `export --to fpga` would refuse it")
    n_ctx = flags["n_ctx"] or min(spec.n_ctx_train, CONTEXT)
    found = report(design, workload_of(model.name, spec), n_ctx, counts_of(geometry))
    show(json.dumps(found.as_dict()) if as_json else visible("\n".join(report_lines(found))))
    short = [each.what for each in found.room if not each.fits]
    if short:
        raise BudgetExceeded(f"{model}: {board} has too little {', '.join(short)}: take another geometry or context")
