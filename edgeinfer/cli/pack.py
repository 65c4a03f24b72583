"""`edgeinfer pack`: packed weights into a file, so that later loads only map it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from edgeinfer.cli.model_names import ModelCommand
from edgeinfer.cli.options import FileName, warnings_as_notes
from edgeinfer.cli.terminal import ProgressBar, note
from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.common.files import check_kept, check_writable

if TYPE_CHECKING:
    from edgeinfer.common.settings import TernaryBits


@click.command(cls=ModelCommand, model="model")
@click.argument("model", type=FileName())
@click.option(
    "--ternary-bits",
    type=click.Choice(["auto", "2", "1.6"]),
    default="auto",
    show_default=True,
    help="Bits per weight of a ternary model; auto: the faster one here.",
)
@click.option("--verify", is_flag=True, help="Write nothing: compare all bytes of MODEL and MODEL.packed.")
def pack(model: Path, ternary_bits: TernaryBits | Literal["auto"], verify: bool) -> None:
    """Pack a model to load in milliseconds.

    Writes MODEL.packed beside MODEL. Loading MODEL then maps this file, and processes that use the model share its
    pages. MODEL is unchanged and still needed. If MODEL changes, pack it again.
    """
    from edgeinfer.backends.native import NativeBackend
    from edgeinfer.backends.native.packing.packed import packed_path, verify_packed
    from edgeinfer.models import read_spec
    from edgeinfer.models.gguf import ModelFile

    with warnings_as_notes(), ModelFile.open(model) as file, ProgressBar("packing") as bar:
        target = packed_path(file.paths[0])
        if verify:
            verify_packed(target, file)
            note(f"{target}: as it was packed from {file.path}")
            return
        check_writable(target)
        check_kept(target, [target], file.paths, "MODEL.packed")
        try:
            n_bytes = NativeBackend(ternary_bits=ternary_bits).pack(file, read_spec(file), target, bar)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{error}; only the native engine reads packed weights") from error
    note(f"{target}: {n_bytes / 1e6:.0f} MB")
