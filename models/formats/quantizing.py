"""Weights to the bytes of a tensor, in C++ on all cores."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.devices import default_n_threads
from edgeinfer.common.errors import ShapeError, UnsupportedModel
from edgeinfer.models.formats import _quantize, floats, mxfp4
from edgeinfer.models.formats.codes import Bytes, Floats
from edgeinfer.models.gguf import GGMLType


class _Search(Enum):
    """Which search the C++ runs, by the name that it has there."""

    PLAIN = "plain"  # as llama.cpp without an importance matrix
    WEIGHTED = "weighted"  # as llama.cpp with one
    OWN = "own"  # a better one of ours


# How weights are quantised without importance: where the error is smaller, not as llama.cpp does it. docs/models.md has
# the errors. WEIGHTED is with an importance that is the same for all columns.
_WITHOUT_IMPORTANCE = {
    GGMLType.F16: _Search.PLAIN,
    GGMLType.BF16: _Search.PLAIN,
    GGMLType.Q8_0: _Search.PLAIN,
    GGMLType.Q4_0: _Search.OWN,
    GGMLType.Q4_1: _Search.WEIGHTED,
    GGMLType.Q5_0: _Search.WEIGHTED,
    GGMLType.Q5_1: _Search.WEIGHTED,
    GGMLType.Q2_K: _Search.WEIGHTED,
    GGMLType.Q3_K: _Search.WEIGHTED,
    GGMLType.Q4_K: _Search.PLAIN,
    GGMLType.Q5_K: _Search.PLAIN,
    GGMLType.Q6_K: _Search.PLAIN,
}
_IN_NUMPY = {GGMLType.F32: floats.quantize_f32, GGMLType.MXFP4: mxfp4.quantize}
_NO_SEARCH = {GGMLType.F16, GGMLType.BF16, GGMLType.Q8_0, *_IN_NUMPY}  # importance changes nothing
_RUNS = {GGMLType.Q2_K: 16, GGMLType.Q3_K: 16, GGMLType.Q6_K: 16}  # weights that share a scale; 32 in the others
_LIMITS = {GGMLType.F32: np.finfo(np.float32).max, GGMLType.MXFP4: np.finfo(np.float32).max}
_LIMITS[GGMLType.BF16] = np.uint32(0x7F7F0000).view(np.float32)  # all others have scales in float16
_UNSEEN = np.float32(2**-20)  # of the largest importance


def quantize(
    type: GGMLType,
    weights: NDArray[np.float32],
    importance: NDArray[np.float32] | None = None,
    n_threads: int | None = None,
) -> NDArray[np.uint8]:
    """The bytes of a tensor that approximates weights (..., n_in), n_in a multiple of the block: (n_bytes,).

    importance: (n_in,), not negative: how much an error in a column counts, its mean squared input. The bytes are those
    of llama.cpp with an importance matrix. Where a run of columns with a scale of its own has no importance at all, its
    columns count a little, all alike; llama.cpp makes such weights 0 or rounds them without a search. F32, F16, BF16,
    Q8_0 and MXFP4 have nothing to search.
    Without importance the bytes are llama.cpp's (`quantize_plain`), unless a search of smaller error is known.
    n_threads: one per core if None. The bytes of a row depend on this row alone, and not on threads.

    Raises UnsupportedModel for a type that cannot be written, ShapeError, and that too for weights that are not finite
    or too large for the format, and for importance that is negative or not finite.
    """
    _check_rows(type, weights.shape)
    columns = None if importance is None else _checked(importance, weights.shape)
    if type not in _WITHOUT_IMPORTANCE:
        return _written_in_numpy(type, weights)
    search = _WITHOUT_IMPORTANCE[type] if columns is None or type in _NO_SEARCH else _Search.WEIGHTED
    if search is _Search.WEIGHTED:
        columns = np.ones(weights.shape[-1:], np.float32) if columns is None else _usable(columns, _RUNS.get(type, 32))
    return _searched(type, weights, search, columns, n_threads)


def quantize_plain(type: GGMLType, weights: NDArray[np.float32], n_threads: int | None = None) -> NDArray[np.uint8]:
    """The bytes that llama.cpp writes without an importance matrix; otherwise as `quantize`."""
    if type not in _WITHOUT_IMPORTANCE:
        return _written_in_numpy(type, weights)
    return _searched(type, weights, _Search.PLAIN, None, n_threads)


def _searched(
    type: GGMLType,
    weights: NDArray[np.float32],
    search: _Search,
    columns: Floats | None,
    n_threads: int | None,
) -> Bytes:
    threads = default_n_threads() if n_threads is None else n_threads
    matrix = _matrix(type, weights, threads)
    to = np.empty(type.n_bytes(matrix.size), dtype=np.uint8)
    _quantize.quantize(type.name, search.value, matrix, columns, to, threads)
    return to


def _written_in_numpy(type: GGMLType, weights: NDArray[np.float32]) -> Bytes:
    if type not in _IN_NUMPY:
        known = [*_WITHOUT_IMPORTANCE, *_IN_NUMPY]
        raise UnsupportedModel(f"tensor type {type.name} cannot be written; these can: {_names(known)}")
    matrix = _matrix(type, weights, n_threads=1)
    return np.ascontiguousarray(_IN_NUMPY[type](matrix.reshape(-1, type.block_elements))).reshape(-1).view(np.uint8)


def _matrix(type: GGMLType, weights: NDArray[np.float32], n_threads: int) -> Floats:
    """The weights as rows (n_rows, n_in), which are whole blocks of numbers that the format can hold."""
    _check_rows(type, weights.shape)
    matrix = np.ascontiguousarray(weights, dtype=np.float32).reshape(math.prod(weights.shape[:-1]), weights.shape[-1])
    limit = float(_LIMITS.get(type, np.finfo(np.float16).max))
    at = _quantize.first_above(matrix.reshape(-1), limit, n_threads)
    if at is not None:
        found, place = matrix.flat[at], np.unravel_index(at, weights.shape)
        raise ShapeError(
            f"weights of {type.name} must be finite and at most {limit:g}: found {found:g} at {tuple(map(int, place))}"
        )
    return matrix


def _check_rows(type: GGMLType, shape: tuple[int, ...]) -> None:
    if not shape or shape[-1] % type.block_elements:
        raise ShapeError(f"rows of {type.name} must be a multiple of {type.block_elements}: found {shape}")


def _checked(importance: NDArray[np.float32], shape: tuple[int, ...]) -> Floats:
    if importance.shape != shape[-1:]:
        raise ShapeError(f"importance must be one number a column of weights {shape}: found shape {importance.shape}")
    columns = np.ascontiguousarray(importance, dtype=np.float32)
    bad = np.flatnonzero(~(np.isfinite(columns) & (columns >= 0)))
    if len(bad):
        raise ShapeError(f"importance must be finite and not negative: found {columns[bad[0]]:g} in column {bad[0]}")
    return columns


def _usable(columns: Floats, run: int) -> Floats:
    """Importance times a power of two, so that nothing overflows, and a little of it where a whole run has none."""
    largest = columns.max(initial=0)
    scaled = np.ldexp(columns, -int(np.frexp(largest)[1]))
    runs = scaled.reshape(-1, run)
    runs[~runs.any(axis=1)] = _UNSEEN
    return scaled


def _names(types: Iterable[GGMLType]) -> str:
    return ", ".join(sorted(type.name for type in types))
