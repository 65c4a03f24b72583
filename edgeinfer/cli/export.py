"""`edgeinfer export`: a model in another format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from edgeinfer.cli import ENVIRONMENT
from edgeinfer.cli.terminal import ProgressBar, note

if TYPE_CHECKING:
    from edgeinfer.exporters.ternary import Format, Head


@click.command(context_settings=ENVIRONMENT)
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--to", type=click.Choice(["ternary"]), required=True, help="What to make of it.")
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="The file to write.")
@click.option(
    "--format",
    type=click.Choice(["i2_s", "tq1_0", "tq2_0"]),
    default="i2_s",
    show_default=True,
    help="Of the ternary matrices: one scale each and activations rounded by token, or scales of 256 inputs.",
)
@click.option(
    "--head",
    type=click.Choice(["keep", "q6_k", "f16"]),
    default="keep",
    show_default=True,
    help="Format of the output matrix; q6_k is two fifths of f16.",
)
def export(source: Path, to: Literal["ternary"], out: Path, format: Format, head: Head) -> None:
    """Write a model in another format.

    SOURCE is a ternary checkpoint of Hugging Face, a folder with config.json, tokenizer.json and .safetensors files, or
    a GGUF file with ternary matrices. What is not ternary is refused.
    """
    from edgeinfer.errors import InvalidArgument
    from edgeinfer.exporters.checkpoint import Checkpoint
    from edgeinfer.exporters.ternary import export_ternary
    from edgeinfer.gguf import ModelFile

    if out.exists() and source.exists() and out.samefile(source):
        raise InvalidArgument(f"{out}: --out must be another file than the one that is read")
    with ProgressBar("exporting") as bar:
        if source.is_dir():
            export_ternary(Checkpoint.open(source), out, format, head, progress=bar)
        else:
            with ModelFile.open(source) as file:
                export_ternary(file, out, format, head, progress=bar)
    note(f"{out}: {out.stat().st_size / 1e6:.0f} MB")
