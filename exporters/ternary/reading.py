"""Ternary models of GGUF files and of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.exporters.checkpoint import TernaryCheckpoint
from edgeinfer.exporters.finite import FiniteFile
from edgeinfer.exporters.ternary.checkpoint import of_checkpoint
from edgeinfer.exporters.ternary.source import (
    PIECE_WEIGHTS,
    Bytes,
    Floats,
    SourceTensor,
    StoredTensor,
    TernarySource,
    TernaryTensor,
)
from edgeinfer.models.draft_head import is_draft_head
from edgeinfer.models.formats import codes_of, dequantize
from edgeinfer.models.formats.ternary_matrix import TernaryMatrix
from edgeinfer.models.gguf import GGMLType, ModelFile, TensorInfo

_TERNARY = (GGMLType.I2_S, GGMLType.TQ1_0, GGMLType.TQ2_0, GGMLType.Q2_0)
_FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
_OF_THE_FILE = ("general.alignment", "general.file_type", "split.no", "split.count", "split.tensors.count")


@contextmanager
def open_ternary(path: Path) -> Iterator[TernarySource]:
    """The ternary model of a GGUF file or of a folder of Hugging Face. Raises UnsupportedModel, ModelFileError."""
    if path.is_dir():
        yield of_checkpoint(TernaryCheckpoint.open(path))
    else:
        with FiniteFile.open(path) as file:
            yield of_file(file)


def of_file(file: ModelFile) -> TernarySource:
    """The model of a GGUF file, which stays open while it is read."""
    metadata = {key: value for key, value in file.metadata.items() if key not in _OF_THE_FILE}
    output = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
    return TernarySource(file.path, metadata, output, list(_of_file(file, output)))


def _of_file(file: ModelFile, output: str) -> Iterator[SourceTensor]:
    """Raises UnsupportedModel for a file whose layers are not ternary, as far as types tell."""
    if is_draft_head(file):
        _check_head(file)
    for name, info in file.tensors.items():
        if name != output and _is_of_layer(info):
            _check_type(file, info)
            yield TernaryTensor(name, info.type, info.shape, partial(_matrix_of_file, file, name))
        else:
            yield StoredTensor(name, info.type, info.shape, partial(_stored, file, name), partial(file.release, name))


def _stored(file: ModelFile, name: str, first: int, last: int) -> Bytes:
    """The bytes of some rows; I2_S has more behind its last row."""
    info = file.tensors[name]
    row_bytes = info.shape[-1] // info.type.block_elements * info.type.block_bytes
    is_end = last * info.shape[-1] == info.n_elements
    return file.data(name, first * row_bytes, info.n_bytes if is_end else last * row_bytes)


def _is_of_layer(info: TensorInfo) -> bool:
    """Whether a tensor is a matrix of a layer, which is to be ternary."""
    return info.name.startswith("blk.") and len(info.shape) == 2


def _check_head(file: ModelFile) -> None:
    """Raises UnsupportedModel for a draft head that is not in a ternary type, as those that are trained here."""
    other = {info.type for info in file.tensors.values() if _is_of_layer(info)} - set(_TERNARY)
    if other:
        raise UnsupportedModel(
            f"{file.path} is a draft head with matrices in {', '.join(sorted(kind.name for kind in other))}: --to "
            f"ternary rounds nothing, it takes ternary matrices ({', '.join(kind.name for kind in _TERNARY)}) alone; "
            "for a smaller head take --to gguf --type Q4_0"
        )


def _check_type(file: ModelFile, info: TensorInfo) -> None:
    """Raises UnsupportedModel for a matrix whose type holds more than three values."""
    if info.type not in (*_TERNARY, *_FLOATS):
        known = ", ".join(kind.name for kind in (*_TERNARY, *_FLOATS))
        raise UnsupportedModel(
            f"{file.path}: tensor {info.name} is {info.type.name}, which is not ternary; these can be: {known}"
        )


def _matrix_of_file(file: ModelFile, name: str) -> TernaryMatrix:
    """Raises UnsupportedModel for a matrix that is not ternary."""
    info, data = file.tensors[name], file.data(name)
    if info.type in _TERNARY:
        codes = codes_of(info.type, data)
        matrix = TernaryMatrix.of_codes(name, codes.values.reshape(info.shape), codes.scales)
    else:
        parts = [TernaryMatrix.of_weights(name, piece) for piece in _rows_of(info.type, data, info.shape)]
        trits, scales = (np.concatenate([getattr(part, each) for part in parts]) for each in ("trits", "scales"))
        matrix = TernaryMatrix(trits, scales)
    file.release(name)
    return matrix


def _rows_of(kind: GGMLType, data: Bytes, shape: tuple[int, ...]) -> Iterator[Floats]:
    """The weights of a matrix, some rows at a time. Raises UnsupportedModel for a type that is not known."""
    n_out, n_in = shape
    row_bytes, n_rows = data.nbytes // n_out, max(1, PIECE_WEIGHTS // n_in)
    for first in range(0, n_out, n_rows):
        last = min(n_out, first + n_rows)
        yield dequantize(kind, data[first * row_bytes : last * row_bytes], (last - first, n_in))
