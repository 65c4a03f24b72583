"""Tensors made of other tensors, still read some rows at a time; see SourceTensor.

What only moves weights moves the stored bytes too, so that they can be written as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgeinfer.exporters.checkpoint import Checkpoint
from edgeinfer.exporters.source import Bytes, Floats, ReadBytes, SourceTensor, StoredBytes
from edgeinfer.models.formats import dequantize
from edgeinfer.models.formats.finite import MXFP4_LARGEST
from edgeinfer.models.gguf import GGMLType

Order = Callable[[NDArray[np.int64]], NDArray[np.int64]]  # from row numbers of the result to those of the source

_FAR = 128  # rows from one to the next that are not read together
_SAME = {"F32": GGMLType.F32, "F16": GGMLType.F16, "BF16": GGMLType.BF16}


def of_checkpoint(checkpoint: Checkpoint, name: str) -> SourceTensor:
    """A tensor of a checkpoint as it is, under its own name. Raises ModelFileError if it is missing or no floats."""
    shape, kind = checkpoint.shape(name), checkpoint.type(name)
    stored = None
    if _SAME.get(checkpoint.dtype(name)) == kind:
        stored = StoredBytes(partial(checkpoint.data, name), checkpoint.place(name))
    return SourceTensor(name, shape, kind, partial(checkpoint.rows, name), stored)


def of_array(name: str, values: Floats) -> SourceTensor:
    """A tensor in memory, as F32."""
    flat = values.reshape(-1, values.shape[-1]).astype(np.float32)
    return SourceTensor(name, values.shape, GGMLType.F32, lambda first, last: flat[first:last])


def as_f32(tensor: SourceTensor) -> SourceTensor:
    """The same weights as F32: for small tensors that much depends on."""
    return tensor if tensor.type == GGMLType.F32 else replace(tensor, type=GGMLType.F32, stored=None)


def mapped(tensor: SourceTensor, function: Callable[[Floats], Floats]) -> SourceTensor:
    """A function of each weight, as F32."""
    return replace(as_f32(tensor), rows=lambda first, last: function(tensor.rows(first, last)), stored=None)


def shifted(tensor: SourceTensor, by: float) -> SourceTensor:
    """Each weight plus a number, as F32."""
    return mapped(tensor, lambda weights: weights + np.float32(by))


def scaled(tensor: SourceTensor, factors: Floats) -> SourceTensor:
    """Each row of a matrix times a factor of its own, (n_rows,), as F32."""

    def rows(first: int, last: int) -> Floats:
        found: Floats = tensor.rows(first, last) * factors[first:last, None]
        return found

    return replace(as_f32(tensor), rows=rows, stored=None)


def without_axis(tensor: SourceTensor, axis: int) -> SourceTensor:
    """The same weights without an axis of length 1; as they are where there are two axes already."""
    if len(tensor.shape) == 2 or tensor.shape[axis] != 1:
        return tensor
    return replace(tensor, shape=tensor.shape[:axis] + tensor.shape[axis + 1 :])


def arranged(tensor: SourceTensor, shape: tuple[int, ...], order: Order) -> SourceTensor:
    """Other rows of a tensor, or the same in another order. shape: of the result, whose rows are as long."""
    row_bytes = tensor.type.n_bytes(tensor.n_in)

    def rows(first: int, last: int) -> Floats:
        return _gathered(tensor.rows, order(np.arange(first, last)), tensor.n_in)

    def stored(read: ReadBytes, first: int, last: int) -> Bytes:
        return _gathered(lambda *ends: read(*ends).reshape(-1, row_bytes), order(np.arange(first, last)), row_bytes)

    moved = None if tensor.stored is None else partial(_flat, partial(stored, tensor.stored))
    return replace(tensor, shape=shape, rows=rows, stored=moved)


def part(tensor: SourceTensor, first: int, last: int) -> SourceTensor:
    """Rows first..last-1 of each matrix."""
    n_rows, n = tensor.shape[-2], last - first
    shape = (*tensor.shape[:-2], n, tensor.n_in)
    if first == 0 and len(shape) == 2:
        return replace(tensor, shape=shape)  # which stays where it lies
    return arranged(tensor, shape, lambda rows: rows // n * n_rows + first + rows % n)


def cut(tensor: SourceTensor, n: int) -> SourceTensor:
    """A vector as F32 in a matrix whose rows have n numbers."""

    def rows(first: int, last: int) -> Floats:
        found: Floats = tensor.rows(0, 1).reshape(-1, n)[first:last]
        return found

    return replace(as_f32(tensor), shape=(tensor.n_in // n, n), rows=rows, stored=None)


def every_second(tensor: SourceTensor, first: int) -> SourceTensor:
    """Rows first, first + 2, ... of each matrix."""
    shape = (*tensor.shape[:-2], tensor.shape[-2] // 2, tensor.n_in)
    return arranged(tensor, shape, lambda rows: 2 * rows + first)


def pairs_together(tensor: SourceTensor, head_dim: int) -> SourceTensor:
    """Rows of each head in the order 0, d/2, 1, d/2 + 1, ...: rotary pairs side by side, not half a head apart."""

    def order(rows: NDArray[np.int64]) -> NDArray[np.int64]:
        heads, places = rows // head_dim, rows % head_dim
        return heads * head_dim + places % 2 * (head_dim // 2) + places // 2

    if len(tensor.shape) == 1:
        return columns(tensor, order(np.arange(tensor.n_in)))
    return arranged(tensor, tensor.shape, order)


def columns(tensor: SourceTensor, index: NDArray[np.int64]) -> SourceTensor:
    """Chosen weights of each row, in this order. For floats."""
    width = tensor.type.block_bytes
    read = tensor.stored

    def stored(read: ReadBytes, first: int, last: int) -> Bytes:
        return read(first, last).reshape(last - first, tensor.n_in, width)[:, index].reshape(-1)

    return replace(
        tensor,
        shape=(*tensor.shape[:-1], len(index)),
        rows=lambda first, last: np.ascontiguousarray(tensor.rows(first, last)[:, index]),
        stored=None if read is None else partial(stored, read),
    )


def transposed(tensor: SourceTensor) -> SourceTensor:
    """Each matrix (n, m) of a tensor as (m, n). Reading some rows of the result reads whole matrices."""
    n, m = tensor.shape[-2:]

    def rows(first: int, last: int) -> Floats:
        found = []
        for matrix in range(first // m, -(-last // m)):
            start, stop = max(first - matrix * m, 0), min(last - matrix * m, m)
            found.append(tensor.rows(matrix * n, (matrix + 1) * n)[:, start:stop].T)
        return np.ascontiguousarray(np.concatenate(found)) if found else np.empty((0, n), np.float32)

    return replace(tensor, shape=(*tensor.shape[:-2], m, n), rows=rows, stored=None)


def stacked(tensors: Sequence[SourceTensor]) -> SourceTensor:
    """Matrices of one shape as one tensor of three axes, in this order."""
    each, kinds = tensors[0].n_rows, {tensor.type for tensor in tensors}
    kind = kinds.pop() if len(kinds) == 1 else GGMLType.F32

    def pieces(first: int, last: int) -> list[tuple[SourceTensor, int, int]]:
        whole = range(first // each, -(-last // each))
        return [(tensors[n], max(first - n * each, 0), min(last - n * each, each)) for n in whole]

    def rows(first: int, last: int) -> Floats:
        found = [tensor.rows(*ends) for tensor, *ends in pieces(first, last)]
        return np.concatenate(found) if found else np.empty((0, tensors[0].n_in), np.float32)

    def stored(first: int, last: int) -> Bytes:
        found = [tensor.stored(*ends) for tensor, *ends in pieces(first, last) if tensor.stored]
        return np.concatenate(found) if found else np.empty(0, np.uint8)

    is_stored = not kinds and all(tensor.stored for tensor in tensors)
    shape = (len(tensors), *tensors[0].shape)
    return SourceTensor(tensors[0].name, shape, kind, rows, stored if is_stored else None)


def mxfp4(checkpoint: Checkpoint, blocks: str, scales: str) -> SourceTensor:
    """Matrices in MXFP4 as gpt-oss has them: 4-bit floats, two in a byte, and an exponent for 32 of them.

    blocks: (..., n_in / 32, 16) bytes, the first of two numbers in the low half.  scales: (..., n_in / 32). In GGUF a
    block is its exponent, then 16 bytes with number j in the low half and number j + 16 in the high half.
    Raises ModelFileError.
    """
    shape = checkpoint.shape(scales)
    for name, expected in ((blocks, (*shape, 16)), (scales, shape)):
        checkpoint.check_shape(name, expected)
        if checkpoint.dtype(name) != "U8":
            checkpoint.refuse(name, f"must be U8: found {checkpoint.dtype(name)}")
    n_blocks = shape[-1]

    def stored(first: int, last: int) -> Bytes:
        packed = checkpoint.data(blocks, first * n_blocks, last * n_blocks).reshape(-1, 16)
        numbers = np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1, 32)
        exponents = checkpoint.data(scales, first, last).reshape(-1, 1)
        if exponents.size and exponents.max() > MXFP4_LARGEST:
            checkpoint.refuse(scales, f"must have exponents up to {MXFP4_LARGEST}, else weights are no float32 numbers")
        return np.concatenate([exponents, numbers[:, :16] | numbers[:, 16:] << 4], axis=1).reshape(-1)

    def rows(first: int, last: int) -> Floats:
        return dequantize(GGMLType.MXFP4, stored(first, last), (last - first, 32 * n_blocks))

    return SourceTensor(blocks, (*shape[:-1], 32 * n_blocks), GGMLType.MXFP4, rows, stored)


def _flat(read: ReadBytes, first: int, last: int) -> Bytes:
    return read(first, last).reshape(-1)


def _gathered(read: Callable[[int, int], NDArray], index: NDArray[np.int64], width: int) -> NDArray:  # type: ignore[type-arg]
    """Rows by number. Of those that lie near one another the run that has them all is read."""
    if not len(index):
        return read(0, 0).reshape(0, width)
    found = []
    for near in np.split(index, np.flatnonzero(np.abs(np.diff(index)) > _FAR) + 1):
        first = int(near.min())
        found.append(read(first, int(near.max()) + 1)[near - first])
    return np.concatenate(found)
