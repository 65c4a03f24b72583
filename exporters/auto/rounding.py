"""Tensors of a source in another format, some rows at a time, and the error that this makes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import ShapeError
from edgeinfer.exporters.source import Bytes, Floats, SourceTensor
from edgeinfer.models import formats
from edgeinfer.models.gguf import GGMLType

# Mean squares of the inputs of a matrix, by tensor: (n_in,), or (n_experts, n_in) of a tensor of experts. A tensor that
# is missing is rounded without.
Importance: TypeAlias = Mapping[str, NDArray[np.float32]]

PLAIN = frozenset((GGMLType.F32, GGMLType.F16, GGMLType.BF16, GGMLType.Q8_0))  # rounded the same with importance
_RUNS, _ROWS_OF_RUN = 16, 16  # of a tensor, in which errors are compared


def rounded_bytes(tensor: SourceTensor, type: GGMLType, importance: Importance, first: int, last: int) -> Bytes:
    """Rows first..last-1 of a tensor in a format, as GGUF stores them."""
    if type == tensor.type and tensor.stored is not None:
        return tensor.stored(first, last)
    pieces = [
        _quantized(tensor.rows(*run), type, importance_of(tensor, importance, run[0]))
        for run in _within_matrices(tensor, first, last)
    ]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def rounded_rows(tensor: SourceTensor, type: GGMLType, importance: Importance, first: int, last: int) -> Floats:
    """What rows first..last-1 are in that format, (last - first, n_in)."""
    data = rounded_bytes(tensor, type, importance, first, last)
    return formats.dequantize(type, data, (last - first, tensor.n_in))


def amplified_rows(
    tensor: SourceTensor, type: GGMLType, gain: float, importance: Importance, first: int, last: int
) -> Floats:
    """Rows first..last-1 with the error of a format times a gain, (last - first, n_in)."""
    weights = tensor.rows(first, last)
    return weights + np.float32(gain) * (rounded_rows(tensor, type, importance, first, last) - weights)


def errors_of(tensor: SourceTensor, types: Iterable[GGMLType], importance: Importance) -> dict[GGMLType, float]:
    """Sum of the squared errors of some rows in each format, each weighted by the importance of its column.

    The rows are 16 runs of 16, spread evenly.
    """
    by_matrix: dict[int, list[Floats]] = {}
    for run in sampled_runs(tensor.n_rows):
        for first, last in _within_matrices(tensor, *run):
            by_matrix.setdefault(first // _rows_of_matrix(tensor), []).append(tensor.rows(first, last))
    errors = dict.fromkeys(types, 0.0)
    for matrix, pieces in by_matrix.items():
        weights = np.concatenate(pieces)
        by_column = importance_of(tensor, importance, matrix * _rows_of_matrix(tensor))
        for type in errors:
            data = _quantized(weights, type, by_column)
            squares = np.square(weights - formats.dequantize(type, data, weights.shape)).sum(axis=0, dtype=np.float64)
            errors[type] += float(squares.sum() if by_column is None else squares @ by_column)
    return errors


def sampled_runs(n_rows: int) -> list[tuple[int, int]]:
    """(first, last) of the rows in which errors are compared; all rows of a small tensor."""
    if n_rows <= _RUNS * _ROWS_OF_RUN:
        return [(0, n_rows)]
    firsts = [i * (n_rows - _ROWS_OF_RUN) // (_RUNS - 1) for i in range(_RUNS)]
    return [(first, first + _ROWS_OF_RUN) for first in firsts]


def importance_of(tensor: SourceTensor, importance: Importance, row: int) -> NDArray[np.float32] | None:
    """The importance (n_in,) of the columns of the matrix that a row belongs to. Raises ShapeError."""
    found = importance.get(tensor.name)
    if found is None:
        return None
    if found.shape[-1] != tensor.n_in or found.ndim > 2 or (found.ndim == 2 and len(found) != tensor.shape[0]):
        raise ShapeError(
            f"the importance matrix has {found.shape} for {tensor.name}, which is {tensor.shape}: it is that of "
            f"another model"
        )
    return found if found.ndim == 1 else found[row // _rows_of_matrix(tensor)]


def _quantized(weights: Floats, type: GGMLType, by_column: NDArray[np.float32] | None) -> Bytes:
    if type in PLAIN:
        return formats.quantize(type, weights)
    return formats.quantize(type, weights, importance=by_column)


def _rows_of_matrix(tensor: SourceTensor) -> int:
    return tensor.shape[-2] if len(tensor.shape) > 2 else tensor.n_rows


def _within_matrices(tensor: SourceTensor, first: int, last: int) -> Iterator[tuple[int, int]]:
    """The rows, cut where the matrix of an expert ends."""
    each = _rows_of_matrix(tensor)
    while first < last:
        end = min(last, (first // each + 1) * each)
        yield first, end
        first = end
