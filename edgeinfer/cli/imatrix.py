"""`edgeinfer imatrix`: how much each input of a model's matrices matters, for quantisation."""

from __future__ import annotations

from pathlib import Path

import click

from edgeinfer.cli.model_names import ModelCommand
from edgeinfer.cli.options import FileName, OutputName, threads_option, warnings_as_notes
from edgeinfer.cli.terminal import ProgressBar, note


@click.command(cls=ModelCommand, model="model", may_be_folder=True)
@click.argument("model", type=FileName())
@click.option("--calibration", type=FileName(), help="Text to run.  [default: the model's answers to built-in prompts]")
@click.option("-o", "--out", type=OutputName(), required=True, help="The file to write.")
@threads_option
def imatrix(model: Path, calibration: Path | None, out: Path, n_threads: int | None) -> None:
    """Compute the importance matrix of a model.

    MODEL, a GGUF file or a folder of Hugging Face, runs a text, and the squares of what each matrix reads are summed by
    column. The file is for `edgeinfer export --imatrix` and for llama.cpp's llama-quantize.
    """
    from edgeinfer.common.file_identity import Sources
    from edgeinfer.common.files import check_writable
    from edgeinfer.exporters.calibration.collect import imatrix_of
    from edgeinfer.exporters.calibration.imatrix import write_imatrix
    from edgeinfer.exporters.manifest import source_files
    from edgeinfer.exporters.source import open_source

    check_writable(out)
    read = [*source_files(model), *([] if calibration is None else [calibration])]
    with warnings_as_notes(), Sources(read).unchanged(), open_source(model) as source:
        with ProgressBar("running the text") as bar:
            found = imatrix_of(source, calibration, n_threads, bar)
        write_imatrix(out, found)
    n_tokens = max(float(squares.counts.sum()) for squares in found.of.values())
    note(f"{out}: {len(found.of)} matrices, {found.n_chunks} chunks of {found.chunk_size} tokens, {n_tokens:.0f} rows")
