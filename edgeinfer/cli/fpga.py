"""`edgeinfer fpga`: ternary models on FPGA boards. Folders for boards, plans of designs, and a simulated engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgeinfer.cli.chat import chat, chat_options
from edgeinfer.cli.constraints import constraint_options
from edgeinfer.cli.export import run_export
from edgeinfer.cli.generate import generate
from edgeinfer.cli.model_names import ModelCommand
from edgeinfer.cli.options import (
    Command,
    FileName,
    OutputName,
    json_option,
    model_options,
    out_option,
    overwrite_option,
    quiet_option,
    sampling_options,
    stop_option,
    text_argument,
)
from edgeinfer.cli.streams import Command as PlainCommand
from edgeinfer.cli.streams import check_stdout
from edgeinfer.cli.terminal import ReportLines, note, show, visible
from edgeinfer.common.errors import BadBoardFolder, BudgetExceeded

if TYPE_CHECKING:
    from edgeinfer.models.spec import ModelSpec

_MAY_BE_TERNARY = ("I2_S", "TQ1_0", "TQ2_0", "Q2_0", "F32", "F16", "BF16")
_CONTEXT = 1024  # positions of a plan, where none is given


class _Group(click.Group):
    """A group that lists its commands in the order of their use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_Group)
def fpga() -> None:
    """Run ternary models on FPGA boards.

    docs/exporting.md describes the folders, hls/README.md the engine.
    """


def _design_options(command: Command) -> Command:
    """Adds the options of a plan and of an export: the board, and the engine on it."""
    for option in reversed(_DESIGN_OPTIONS):
        command = option(command)
    return command


_DESIGN_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option("--board", metavar="NAME", default="kv260", show_default=True, help="The board."),
    click.option(
        "--encoding",
        type=click.Choice(["base3", "g3x5", "2bit"]),
        default="base3",
        show_default=True,
        help="How weights are stored: five in a byte, three in 5 bits, or one in 2 bits.",
    ),
    click.option("--rows", type=click.IntRange(1, 64), help="Rows of the engine.  [default: by encoding]"),
    click.option(
        "--tables", type=click.IntRange(1, 64), help="Tables of the engine, a power of 2.  [default: by encoding]"
    ),
)


# ---- export ----------------------------------------------------------------------------------------------------------


@fpga.command(cls=ModelCommand, model="source", may_be_folder=True)
@click.argument("source", type=FileName())
@out_option(OutputName(keeps=True), required=True, help="The folder to write.")
@overwrite_option
@_design_options
@click.option(
    "-c",
    "--ctx-size",
    "n_ctx",
    type=click.IntRange(min=1),
    help="Context size in tokens.  [default: as trained, at most 4096]",
)
@click.option(
    "--embedding-type",
    "embeddings",
    type=click.Choice(["int8", "bf16"]),
    default="int8",
    show_default=True,
    help="Type of the embeddings.",
)
@click.option(
    "--shortlist",
    "rescored",
    type=click.IntRange(0, 1 << 20),
    default=0,
    metavar="N",
    help="Shortlist of the output matrix: ternary picks N tokens, int8 rescores them.  [default: none]",
)
@click.option(
    "--golden",
    type=click.IntRange(0, 4096),
    default=4,
    show_default=True,
    metavar="N",
    help="Test vectors of each matrix.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be written, and stop.")
@click.option("--no-check", is_flag=True, help="Do not compare what was written with the source.")
def export(
    source: Path, out: Path, overwrite: bool, n_ctx: int | None, dry_run: bool, no_check: bool, **more: Any
) -> None:
    """Write a ternary model as the files of a board's engine.

    SOURCE is a GGUF file or a folder of Hugging Face, with ternary matrices. The folder has streams of weights, tables,
    test vectors, headers, the tokenizer and a manifest. It is written atomically.
    """
    from edgeinfer.exporters.request import Request

    given = {name: value for name, value in more.items() if value is not None}
    run_export("fpga", Request(source, out, n_ctx=n_ctx, check=not no_check, more=given), dry_run, overwrite)


# ---- check, unpack ---------------------------------------------------------------------------------------------------


@fpga.command(cls=PlainCommand)
@click.argument("folder", type=FileName())
def check(folder: Path) -> None:
    """Look for faults in the folder of an export.

    Prints each one. The exit code is 3 where there are some.
    """
    from edgeinfer.exporters.fpga.doctor import faults_in, summary

    check_stdout()
    faults = list(faults_in(folder))
    for fault in faults[:-1]:
        show(fault)
    if faults:
        raise BadBoardFolder(faults[-1])
    show(f"{folder}: {summary(folder)}")


@fpga.command(cls=PlainCommand)
@click.argument("folder", type=FileName())
@out_option(OutputName(keeps=True), required=True, help="The file to write, .gguf or .npz.")
@overwrite_option
def unpack(folder: Path, out: Path, overwrite: bool) -> None:
    """Give the matrices of an exported folder back.

    They have the weights and scales of the model that the folder was made of.
    """
    from edgeinfer.exporters.fpga.unpack import unpack_folder

    with ReportLines() as lines:
        said = unpack_folder(folder, out, lambda share: lines(f"unpacking: {100 * share:.0f} %", share))
    note(f"{out}: {said}")


# ---- plan ------------------------------------------------------------------------------------------------------------


@fpga.command(cls=ModelCommand, model="model")
@click.argument("model", type=FileName())
@_design_options
@click.option("--engines", type=click.IntRange(1, 64), default=1, show_default=True, help="Engines on the board.")
@click.option(
    "--attention-lanes",
    type=click.IntRange(0, 4096),
    default=0,
    show_default=True,
    help="Multiply-adds per cycle of attention in the fabric; 0: the processor does it.",
)
@click.option(
    "-c",
    "--ctx-size",
    "n_ctx",
    type=click.IntRange(1),
    help=f"Context size in tokens.  [default: as trained, at most {_CONTEXT}]",
)
@json_option
def plan(model: Path, board: str, n_ctx: int | None, as_json: bool, **design: Any) -> None:
    """Plan room and speed of a model on a board.

    Reads the header of a GGUF file alone. All figures are of a model of the board; no board was measured. The exit code
    is 4 where the board has too little room.
    """
    from edgeinfer.hls.board.boards import board_of
    from edgeinfer.hls.board.counted import counts_of
    from edgeinfer.hls.board.model import Design
    from edgeinfer.hls.board.report import report, report_lines
    from edgeinfer.hls.board.workload import workload_of
    from edgeinfer.hls.geometry import default_geometry
    from edgeinfer.models.architectures import read_spec
    from edgeinfer.models.gguf import ModelFile

    check_stdout()
    geometry = default_geometry(design["encoding"], design["rows"], design["tables"])
    built = Design(board_of(board), geometry, design["engines"], design["attention_lanes"])
    with ModelFile.open(model) as file:
        spec = read_spec(file)
        others = sorted({file.tensors[name].type.name for name in _matrices(spec)} - set(_MAY_BE_TERNARY))
    if others:
        note(f"the matrices of this file are {', '.join(others)}, not ternary: `edgeinfer fpga export` would refuse it")
    found = report(built, workload_of(model.name, spec), n_ctx or min(spec.n_ctx_train, _CONTEXT), counts_of(geometry))
    show(json.dumps(found.as_dict()) if as_json else visible("\n".join(report_lines(found))))
    short = [each.what for each in found.room if not each.fits]
    if short:
        raise BudgetExceeded(f"{model}: {board} has too little {', '.join(short)}: take another geometry or context")


def _matrices(spec: ModelSpec) -> Iterator[str]:
    """Names of the matrices of layers."""
    for weight in spec.weights():
        if weight.block and len(weight.shape) == 2 and isinstance(weight.tensor, str):
            yield weight.tensor


# ---- simulate --------------------------------------------------------------------------------------------------------


@fpga.command(cls=ModelCommand, model="model", draft="model_draft", finds=False)
@text_argument
@click.option(
    "--folder",
    "fpga_folder",
    type=FileName(),
    help="Folder of `edgeinfer fpga export`, made of the model: its engine and weights.  [default: a small engine]",
)
@click.option("--complete", "completes", is_flag=True, help="Complete TEXT, as `edgeinfer generate` does.")
@model_options
@chat_options
@stop_option
@sampling_options
@constraint_options
@quiet_option
@json_option
@click.pass_context
def simulate(context: click.Context, /, completes: bool, **flags: Any) -> None:
    """Chat with a model that runs in a simulated engine.

    The products of I2_S matrices are computed by the Verilog engine, clock cycle by clock cycle, which is slow. The
    text is that of `edgeinfer chat`, whose options these are.
    """
    flags["backend"] = "fpga-sim"
    if not completes:
        context.invoke(_callback(chat), **flags)
        return
    names = {each.name for each in chat.params} - {each.name for each in generate.params}
    if given := [name for name in names if flags.get(name)]:
        option = next(each for each in context.command.params if each.name == given[0])
        raise click.UsageError(f"{option.opts[0]} is for a chat: leave --complete out", context)
    rest = {name: value for name, value in flags.items() if name not in names}
    context.invoke(_callback(generate), file=None, logprobs=None, **rest)


def _callback(command: click.Command) -> Callable[..., Any]:
    assert command.callback is not None
    return command.callback
