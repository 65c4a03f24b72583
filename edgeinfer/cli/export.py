"""`edgeinfer export`: a model in another format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
from click.core import ParameterSource

from edgeinfer.cli.options import FileName
from edgeinfer.cli.streams import Command
from edgeinfer.cli.terminal import ProgressBar, note

if TYPE_CHECKING:
    from edgeinfer.backends.onnx.library import Style
    from edgeinfer.exporters.ternary import Format, Head

_DEFAULT_N_CTX = 4096
_ONLY_FOR = {"format": "ternary", "head": "ternary"}
_ONLY_FOR |= dict.fromkeys(("target", "n_ctx", "operators", "external_data"), "onnx")


@click.command(cls=Command)
@click.argument("source", type=FileName())
@click.option("--to", type=click.Choice(["ternary", "onnx"]), required=True, help="Target format.")
@click.option("-o", "--out", type=FileName(), required=True, help="The file to write.")
@click.option(
    "--format",
    type=click.Choice(["i2_s", "tq1_0", "tq2_0"]),
    default="i2_s",
    show_default=True,
    help="ternary: i2_s has one scale per matrix and rounds activations per token; the others one per 256 inputs.",
)
@click.option(
    "--head",
    type=click.Choice(["keep", "q6_k", "f16"]),
    default="keep",
    show_default=True,
    help="ternary: type of the output matrix; q6_k takes 40 % of f16.",
)
@click.option("--target", type=FileName(), help="onnx: the model that SOURCE, a draft head, belongs to.")
@click.option(
    "-c",
    "--ctx",
    "n_ctx",
    type=click.IntRange(min=1),
    help=f"onnx: context size.  [default: as trained, at most {_DEFAULT_N_CTX}]",
)
@click.option(
    "--operators",
    type=click.Choice(["contrib", "plain"]),
    default="contrib",
    show_default=True,
    help="onnx: contrib uses ONNX Runtime's operators for quantised products and attention; plain the standard's.",
)
@click.option("--external-data", is_flag=True, help="onnx: weights in a separate file, as always above 1 GiB.")
@click.pass_context
def export(
    context: click.Context,
    source: Path,
    to: Literal["ternary", "onnx"],
    out: Path,
    format: Format,
    head: Head,
    target: Path | None,
    n_ctx: int | None,
    operators: Style,
    external_data: bool,
) -> None:
    """Convert a model to another format.

    --to ternary: SOURCE is a ternary Hugging Face checkpoint (a folder with config.json, tokenizer.json and
    .safetensors files) or a GGUF file with ternary matrices. Other models are refused. --to onnx: SOURCE is the GGUF
    file of a model or a draft head; --out may be a folder.
    """
    from edgeinfer.errors import InvalidArgument
    from edgeinfer.files import check_writable

    for option in context.command.params:
        wanted = _ONLY_FOR.get(option.name or "", to)
        if wanted != to and context.get_parameter_source(option.name or "") == ParameterSource.COMMANDLINE:
            raise InvalidArgument(f"{option.opts[-1]} goes with --to {wanted}, not with --to {to}")
    if out.exists() and source.exists() and out.samefile(source):
        raise InvalidArgument(f"{out}: --out must be another file than the one that is read")
    check_writable(out / "model.onnx" if to == "onnx" and out.is_dir() else out)
    with ProgressBar("exporting") as bar:
        if to == "onnx":
            written = _export_onnx(source, out, target, n_ctx, operators, external_data, bar)
        else:
            written = _export_ternary(source, out, format, head, bar)
    for path in written:
        note(f"{path}: {path.stat().st_size / 1e6:.0f} MB")


def _export_ternary(source: Path, out: Path, format: Format, head: Head, bar: ProgressBar) -> list[Path]:
    from edgeinfer.exporters.checkpoint import TernaryCheckpoint
    from edgeinfer.exporters.ternary import export_ternary
    from edgeinfer.models.gguf import ModelFile

    if source.is_dir():
        export_ternary(TernaryCheckpoint.open(source), out, format, head, progress=bar)
    else:
        with ModelFile.open(source) as file:
            export_ternary(file, out, format, head, progress=bar)
    return [out]


def _export_onnx(
    source: Path, out: Path, target: Path | None, n_ctx: int | None, operators: Style, external: bool, bar: ProgressBar
) -> list[Path]:
    from contextlib import ExitStack

    from edgeinfer.exporters.onnx import export_onnx, trained_context
    from edgeinfer.models.gguf import ModelFile

    with ExitStack() as opened:
        file = opened.enter_context(ModelFile.open(source))
        model = opened.enter_context(ModelFile.open(target)) if target is not None else None
        n_ctx = n_ctx or min(trained_context(file), _DEFAULT_N_CTX)
        return export_onnx(file, out, model, n_ctx=n_ctx, style=operators, beside=external, progress=bar)
