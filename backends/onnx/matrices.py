"""Weights of a GGUF file as constants of a graph: codes with scales as they are, or floats.

A quantised format is kept exactly. Its runs of 16 to 256 weights become blocks of MatMulNBits or DequantizeLinear:
codes of 4 or 8 bits around a zero point in the middle, a scale a block in float32, and where the format has minimums
the value of a code of that zero point, which a second product adds. (Zero points that are no integers would do the same
in one; ONNX Runtime has no fast kernel for them on the CPU.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.models import TensorRef, TensorRows
from edgeinfer.models.formats import check_type, codes_of, dequantize
from edgeinfer.models.gguf import GGMLType, ModelFile

Array = NDArray[np.generic]

PIECE_WEIGHTS = 8 << 20  # are unpacked at once
_FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
# Weights of a run, and the bits that their codes need. In K formats a run is a sub-block with a scale of its own.
_RUNS: dict[GGMLType, tuple[int, int]] = {
    GGMLType.Q4_0: (32, 4),
    GGMLType.Q4_1: (32, 4),
    GGMLType.Q5_0: (32, 8),
    GGMLType.Q5_1: (32, 8),
    GGMLType.Q8_0: (32, 8),
    GGMLType.Q2_K: (16, 4),
    GGMLType.Q3_K: (16, 4),
    GGMLType.Q4_K: (32, 4),
    GGMLType.Q5_K: (32, 8),
    GGMLType.Q6_K: (16, 8),
    GGMLType.TQ1_0: (256, 4),
    GGMLType.TQ2_0: (256, 4),
    GGMLType.Q2_0: (64, 4),
    GGMLType.I2_S: (128, 4),
    GGMLType.MXFP4: (32, 8),
}
# Formats with minimums, and what is taken from their codes, which begin at 0: the nearer to 0, the less is cancelled
# between the two products.
_WITH_MINIMUMS = {GGMLType.Q4_1: 8, GGMLType.Q5_1: 0, GGMLType.Q2_K: 2, GGMLType.Q4_K: 8, GGMLType.Q5_K: 0}


@dataclass(frozen=True)
class Constant:
    """An array of a graph that is made when it is needed.

    is_int4: it stands for signed numbers of 4 bits, (.., 2 n) of them in the bytes (.., n), the even ones low.
    """

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    make: Callable[[], Array]
    is_int4: bool = False

    @classmethod
    def of(cls, array: Array) -> Constant:
        """One that is there already."""
        return cls(array.dtype, array.shape, lambda: array)

    @property
    def n_bytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Floats:
    """A matrix (n_out, n_in) or a vector (n,) without codes; float16 where the file has that, else float32."""

    values: Constant


@dataclass(frozen=True)
class Blocks:
    """A matrix (n_out, n_in) in blocks: w = scale (code - zero point) + base, zero point 2^(bits - 1).

    scales, bases: (n_out, n_blocks) float32; bases is None where all are 0.
    """

    part: Part
    bits: int
    size: int
    scales: Constant
    bases: Constant | None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(n_out, n_blocks, size)."""
        n_out, n_in = self.part.shape
        return n_out, n_in // self.size, self.size

    def codes(self, bits: int | None = None) -> Constant:
        """(n_out, n_blocks, size) uint8 with zero point 128, for 8 bits; (.., size / 2) for 4, the even ones low."""
        bits = self.bits if bits is None else bits
        n_out, n_blocks, size = self.shape
        shape = n_out, n_blocks, size * bits // 8
        return Constant(np.dtype(np.uint8), shape, lambda: self._codes(bits, 1 << bits - 1))

    def signed_codes(self) -> Constant:
        """(n_out, n_in) int8 or int4, of zero point 0."""
        n_out, n_in = self.part.shape
        dtype, shape = np.dtype(np.int8), (n_out, n_in * self.bits // 8)
        return Constant(dtype, shape, lambda: self._codes(self.bits, 0).reshape(shape).view(dtype), self.bits == 4)

    def _codes(self, bits: int, zero_point: int) -> NDArray[np.uint8]:
        n_out, n_blocks, size = self.shape
        codes = np.empty((n_out, n_blocks, size * bits // 8), dtype=np.uint8)
        for first, last, piece in self.part.pieces():
            centred = _centred(self.part.type, piece).reshape(last - first, n_blocks, size)
            raised = (centred.astype(np.int16) + zero_point).astype(np.uint8)
            codes[first:last] = raised if bits == 8 else raised[..., 0::2] & 15 | (raised[..., 1::2] & 15) << 4
        return codes


@dataclass(frozen=True)
class Part:
    """A tensor of a file, or some of its rows, (n_out, n_in) or (n,), whose bytes are read when they are used."""

    type: GGMLType
    shape: tuple[int, ...]
    read: Callable[[], NDArray[np.uint8]]

    @property
    def data(self) -> NDArray[np.uint8]:
        """The bytes."""
        return self.read()

    def pieces(self) -> Iterator[tuple[int, int, NDArray[np.uint8]]]:
        """(first row, last row, bytes) of some rows at a time."""
        n_out, n_in = self.shape
        n_rows = n_out if self.type == GGMLType.I2_S else max(1, PIECE_WEIGHTS // n_in)
        data = self.data
        row_bytes = data.nbytes // n_out
        for first in range(0, n_out, n_rows):
            last = min(n_out, first + n_rows)
            whole = last - first == n_out
            yield first, last, data if whole else data[first * row_bytes : last * row_bytes]


def part_of(model: ModelFile, ref: TensorRef) -> Part:
    """What a reference to a tensor means. Raises UnsupportedModel for a type without a rule."""
    name = ref.name if isinstance(ref, TensorRows) else ref
    info = model.tensors[name]
    try:
        check_type(info.type)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{model.path}: tensor {name}: {error}") from None
    if not isinstance(ref, TensorRows):
        return Part(info.type, info.shape, partial(model.data, name))
    if info.type == GGMLType.I2_S:
        raise UnsupportedModel(f"{model.path}: tensor {name} is I2_S, which cannot be cut into several matrices")
    row_bytes = info.n_bytes // info.shape[0]
    shape = ref.last - ref.first, *info.shape[1:]
    return Part(info.type, shape, partial(model.data, name, ref.first * row_bytes, ref.last * row_bytes))


def weights_of(part: Part) -> Floats | Blocks:
    """How a tensor goes into a graph. Nothing is converted yet."""
    if part.type in _FLOATS or len(part.shape) == 1:
        dtype = np.dtype(np.float16 if part.type == GGMLType.F16 else np.float32)
        return Floats(Constant(dtype, part.shape, lambda: dequantize(part.type, part.data, part.shape).astype(dtype)))
    size, bits = _RUNS[part.type]
    of_block = np.dtype(np.float32), (part.shape[0], part.shape[1] // size)
    return Blocks(
        part,
        bits,
        size,
        scales=Constant(*of_block, lambda: _of_blocks(part, size, _scales)),
        bases=Constant(*of_block, lambda: _of_blocks(part, size, _bases)) if part.type in _WITH_MINIMUMS else None,
    )


def vector_of(part: Part) -> NDArray[np.float32]:
    """A norm or a bias."""
    return dequantize(part.type, part.data, part.shape)


def _of_blocks(
    part: Part, size: int, of_piece: Callable[[GGMLType, NDArray[np.uint8]], NDArray[np.float32]]
) -> NDArray[np.float32]:
    """(n_out, n_blocks) float32 of what a function gives for the blocks of some rows."""
    n_out, n_in = part.shape
    values = np.empty((n_out, n_in // size), dtype=np.float32)
    for first, last, piece in part.pieces():
        found = of_piece(part.type, piece)
        values[first:last] = found if found.size == 1 else found.reshape(last - first, -1)
    return values


def _centred(type: GGMLType, piece: NDArray[np.uint8]) -> NDArray[np.int8]:
    return codes_of(type, piece).values - np.int8(_WITH_MINIMUMS.get(type, 0))


def _scales(type: GGMLType, piece: NDArray[np.uint8]) -> NDArray[np.float32]:
    return codes_of(type, piece).scales


def _bases(type: GGMLType, piece: NDArray[np.uint8]) -> NDArray[np.float32]:
    codes = codes_of(type, piece)
    assert codes.minimums is not None
    bases: NDArray[np.float32] = codes.minimums + codes.scales * np.float32(_WITH_MINIMUMS[type])
    return bases
