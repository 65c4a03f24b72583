"""The bytes of tensors as they are written: copied where the source has them, else some rows after the others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import InvalidArgument, ShapeError, UnsupportedModel
from edgeinfer.exporters.gguf.writer import Tensor
from edgeinfer.exporters.source import Source, SourceTensor
from edgeinfer.models.formats import quantize
from edgeinfer.models.gguf import GGMLType

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

PIECE_WEIGHTS = 4 << 20  # are in memory as float32 at once
_MOST_PIECE_BYTES = 8  # a weight of a piece takes, in the source, as float32 and written, when it is quantised


def written_tensor(source: Source, tensor: SourceTensor, type: GGMLType, importance: Floats | None = None) -> Tensor:
    """A tensor of a source as a file of another type has it.

    importance: (n_matrices, n_in), the mean squared input of each column of each matrix, or None.
    Raises InvalidArgument for one of another shape.
    """
    n_matrices = math.prod(tensor.shape[:-2])
    if importance is not None and importance.shape != (n_matrices, tensor.n_in):
        raise InvalidArgument(
            f"tensor {tensor.name}: the importance matrix has {importance.shape}, wanted is "
            f"{(n_matrices, tensor.n_in)}: it is of another model"
        )
    return Tensor(tensor.name, type, tensor.shape, partial(_pieces, source, tensor, type, importance))


def peak_bytes(tensor: SourceTensor, type: GGMLType) -> int:
    """Most memory that writing a tensor takes: a piece in all its forms, and what a source that makes rows keeps."""
    n_weights = tensor.n_rows * tensor.n_in
    kept = 0 if tensor.stored is not None else tensor.type.n_bytes(n_weights)
    return kept + _MOST_PIECE_BYTES * 4 * min(n_weights, _piece(tensor))


def is_copied(tensor: SourceTensor, type: GGMLType) -> bool:
    """Whether the bytes of the source are written as they are."""
    return tensor.type == type and tensor.stored is not None


def _piece(tensor: SourceTensor) -> int:
    return max(1, PIECE_WEIGHTS // tensor.n_in) * tensor.n_in


def _pieces(source: Source, tensor: SourceTensor, type: GGMLType, importance: Floats | None) -> Iterator[Bytes]:
    """The bytes of a tensor, some rows at a time, none of which cross the border between two matrices."""
    n_rows = max(1, PIECE_WEIGHTS // tensor.n_in)
    try:
        if is_copied(tensor, type) and tensor.stored is not None:
            for first in range(0, tensor.n_rows, n_rows):
                yield tensor.stored(first, min(tensor.n_rows, first + n_rows))
                source.release(tensor.name)
            return
        rows_of_matrix = tensor.shape[-2] if len(tensor.shape) > 1 else 1
        for start in range(0, tensor.n_rows, rows_of_matrix):
            of_matrix = None if importance is None else importance[start // rows_of_matrix]
            for first in range(start, start + rows_of_matrix, n_rows):
                rows = tensor.rows(first, min(start + rows_of_matrix, first + n_rows))
                yield _quantized(tensor.name, type, rows, of_matrix)
    finally:
        source.release(tensor.name)


def _quantized(name: str, type: GGMLType, rows: Floats, importance: Floats | None) -> Bytes:
    """Raises UnsupportedModel for weights that the type cannot hold."""
    try:
        return quantize(type, rows, importance)
    except ShapeError as error:
        raise UnsupportedModel(f"tensor {name}: {error}") from error
