"""Importance matrices from passes of the native engine over calibration texts."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from edgeinfer.backends.native.model import NativeModel
from edgeinfer.common.errors import InvalidArgument, NumericalError, UnsupportedModel
from edgeinfer.exporters.calibration import prompts
from edgeinfer.exporters.calibration.imatrix import Imatrix, Squares, read_imatrix, write_imatrix
from edgeinfer.exporters.calibration.running import native_model, read_text
from edgeinfer.exporters.calibration.texts import (
    ANSWER_TOKENS,
    CHUNK_TOKENS,
    DEFAULT,
    answer_context,
    own_answers,
    texts_of_file,
)
from edgeinfer.exporters.manifest import sha256_of, tool_version
from edgeinfer.exporters.request import StepProgress, no_progress
from edgeinfer.exporters.source import Source
from edgeinfer.exporters.virtual_file import model_file_of
from edgeinfer.models import LatentAttention, ModelSpec, read_draft_spec
from edgeinfer.models.draft_head import HEADS
from edgeinfer.models.spec import Weight, is_matrix

Progress = Callable[[float], None]
_COLUMN_BYTES = 8 + 8 + 4  # float64 in the engine and of what it gives, float32 of the file


def imatrix_of(
    source: Source, calibration: Path | None, n_threads: int | None = None, progress: Progress | None = None
) -> Imatrix:
    """The importance matrix of a model on a text, or on its own answers to the built-in prompts.

    progress: called with the share of the texts that is done.
    Raises UnsupportedModel for a model that the native engine does not run, BudgetExceeded, InvalidArgument, OSError.
    """
    if source.metadata.get("general.architecture") in HEADS:
        raise UnsupportedModel(f"{source.path} is a draft head: an importance matrix is measured on a whole model")
    with model_file_of(source) as file:
        texts = None if calibration is None else texts_of_file(calibration, file)
        n_ctx = answer_context(file) if texts is None else max(map(len, texts))
        with native_model(file, n_ctx, n_threads, squares_bytes(read_draft_spec(file))) as model:
            texts = own_answers(model, file) if texts is None else texts
            of = _squares(model, texts, progress)
    for name, squares in of.items():
        if not np.isfinite(squares.sums).all():
            raise NumericalError(f"{source.path}: what {name} reads are not numbers, or too large to be squared")
    n_chunks = -(-sum(map(len, texts)) // CHUNK_TOKENS)
    return Imatrix(of, [DEFAULT if calibration is None else calibration.name], n_chunks, CHUNK_TOKENS)


def squares_bytes(spec: ModelSpec) -> int:
    """Memory for the sums of all columns, of each expert apart: in the engine, as arrays in Python, and in the file.

    The engine has one for what several matrices read, so that this is a little more than it takes.
    """
    n_heads = {name: block.n_heads for name, block in spec.blocks() if isinstance(block, LatentAttention)}
    return _COLUMN_BYTES * sum(_n_columns(weight, n_heads.get(weight.block, 1)) for weight in spec.weights())


def _n_columns(weight: Weight, n_heads: int) -> int:
    """Columns that are summed of a weight: of matrices that inputs are multiplied with, but for that of the output.

    n_heads: heads of latent attention, whose matrices count apart.
    """
    n_matrices = n_heads if weight.role in ("k_b", "v_b") else math.prod(weight.shape[:-2])
    return n_matrices * weight.shape[-1] if is_matrix(weight) and weight.block != "" else 0


def imatrix_beside(source: Source, out: Path, calibration: Path | None, report: StepProgress = no_progress) -> Path:
    """The importance matrix beside an output: the one that is there, if it was made of the same, or a new one."""
    path = out.with_name(f"{out.name}.imatrix.gguf")
    made_of = _made_of(source, calibration)
    there = read_imatrix(path).made_of if path.exists() else None
    if there == made_of:
        return path
    if there == "":
        what = "is there and was not made by --imatrix auto"
        raise InvalidArgument(f"{path}: {what}: move it, or name it with --imatrix")
    report("importance matrix: reading the text", 0.0)
    imatrix = imatrix_of(
        source, calibration, progress=lambda share: report("importance matrix: reading the text", share)
    )
    write_imatrix(path, Imatrix(imatrix.of, imatrix.datasets, imatrix.n_chunks, imatrix.chunk_size, made_of))
    return path


def _squares(model: NativeModel, texts: Sequence[Sequence[int]], progress: Progress | None) -> dict[str, Squares]:
    model.record_inputs(True)
    for n, text in enumerate(texts):
        session = model.session(len(text))
        read_text(session, text)
        session.close()
        if progress is not None:
            progress((n + 1) / len(texts))
    summed = model.input_squares()
    model.record_inputs(False)
    return {
        name: Squares(sums.astype(np.float32), counts.astype(np.float32)) for name, (sums, counts) in summed.items()
    }


def _made_of(source: Source, calibration: Path | None) -> str:
    """A hash of all that an importance matrix is a function of."""
    text: object = [prompts.PROMPTS, ANSWER_TOKENS] if calibration is None else sha256_of(calibration)
    parts = [[sha256_of(path) for path in source.files], text, CHUNK_TOKENS, tool_version()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
