"""Matrices on an OpenCL device: the formats, how they are made from a file's tensors, and their products.

All have tiles of 16 rows, so that the work-items of 16 rows read one run of memory, and nothing is summed across them.
Codes of 2, 4 or 8 bits lie in lines of 64 bytes, a word of 4 bytes a row::

    byte b of a row's word in line i, B bits a code, L = 32 / B inputs a line:
        bits B*f .. B*f + B - 1: code of k = L*i + 4*f + b, f = 0 .. 8/B - 1             b = 0..3

With two bits that is the format of models/formats/ternary_packing.py. Scales are half floats, [tile][block][row],
behind each the minimum of the block where there are any; weight = scale * (code - offset) + minimum. Half floats and
floats are kept as they are, [tile][k][row].

Codes of 3 bits take 4, those of 5 and 6 bits 8, and so do those of MXFP4, which are twice its numbers. Q8_0, Q5_0,
Q4_0, Q4_1, Q5_1, TQ1_0, TQ2_0 and I2_S have the weights of the file, and so has MXFP4 where its scales are half
floats, 2^-24 to 2^15.
Scales of Q2_K to Q6_K are products of two numbers, here rounded to half floats: a relative error of 2^-11 at
most, or 2^-25 absolute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.opencl.device import Buffer, OpenCLDevice
from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.models import TensorRef, TensorRows
from edgeinfer.models.formats import Codes, codes_of, dequantize
from edgeinfer.models.gguf import I2_S_TAIL_BYTES, GGMLType, ModelFile

ROWS = 16  # of a tile
RUN = 32  # activations that share a scale
PIECE_BYTES = 16 << 20  # of a tensor are converted at once
_Number = TypeVar("_Number", bound=np.generic)

_TOKENS = 4  # passed through a weight once it is read, where there are several
_SOURCES = ("dot.cl", "matrix.cl")


@dataclass(frozen=True)
class Format:
    """How weights lie on the device. bits: of a code, 0 for numbers. block: inputs that share a scale."""

    bits: int
    offset: int = 0
    block: int = RUN
    has_minimum: bool = False
    is_half: bool = False  # where bits is 0

    @property
    def element_bytes(self) -> int:
        """Bytes of a word of codes, or of a number."""
        return 2 if self.is_half else 4

    @property
    def line(self) -> int:
        """Inputs in a row's word."""
        return 32 // self.bits if self.bits else 1

    def weight_bytes(self, n_out: int, n_in: int) -> int:
        """Bytes of the codes or numbers of a matrix."""
        return _tiles(n_out) * ROWS * n_in // self.line * self.element_bytes

    def scale_bytes(self, n_out: int, n_in: int) -> int:
        """Bytes of the scales and minimums of a matrix; a buffer has at least 4."""
        if not self.bits:
            return 4
        return _tiles(n_out) * ROWS * n_in // self.block * (4 if self.has_minimum else 2)

    def defines(self) -> dict[str, int]:
        """The macros of matrix.cl."""
        return {
            "BITS": self.bits,
            "OFFSET": self.offset,
            "BLOCK": self.block,
            "HAS_MINIMUM": int(self.has_minimum),
            "IS_HALF": int(self.is_half),
        }


_TRITS = Format(2, offset=1)
FORMATS = {
    GGMLType.F32: Format(0),
    GGMLType.BF16: Format(0),
    GGMLType.F16: Format(0, is_half=True),
    GGMLType.Q8_0: Format(8),
    GGMLType.Q5_0: Format(8),
    GGMLType.Q5_1: Format(8, has_minimum=True),
    GGMLType.Q5_K: Format(8, has_minimum=True),
    GGMLType.Q6_K: Format(8, block=16),
    GGMLType.Q2_K: Format(2, block=16, has_minimum=True),
    GGMLType.Q3_K: Format(4, offset=4, block=16),
    GGMLType.Q4_0: Format(4, offset=8),
    GGMLType.Q4_1: Format(4, has_minimum=True),
    GGMLType.Q4_K: Format(4, has_minimum=True),
    GGMLType.MXFP4: Format(8),
    GGMLType.TQ1_0: _TRITS,
    GGMLType.TQ2_0: _TRITS,
    GGMLType.I2_S: _TRITS,
}


@dataclass(frozen=True)
class Part:
    """A matrix of the file, or some rows of one: (n_out, n_in), and its bytes there.

    factor: of all weights, 1 but for I2_S, whose one scale is a float32.
    """

    name: str
    type: GGMLType
    n_out: int
    n_in: int
    data: NDArray[np.uint8]
    factor: float = 1.0

    @property
    def format(self) -> Format:
        """Its format on the device."""
        return FORMATS[self.type]


def part_of(model: ModelFile, ref: TensorRef) -> Part:
    """What a reference to a matrix means. Raises UnsupportedModel for a type without a format, or rows of I2_S."""
    name = ref.name if isinstance(ref, TensorRows) else ref
    info, data = model.tensors[name], model.data(name)
    n_in = info.shape[-1]
    if info.type not in FORMATS or len(info.shape) != 2 or (FORMATS[info.type].bits and n_in % RUN):
        known = ", ".join(sorted(type.name for type in FORMATS))
        raise UnsupportedModel(
            f"{model.path}: tensor {name} {info.shape} has type {info.type.name}, which the opencl backend lacks in "
            f"that shape; it has matrices of {known}"
        )
    if info.type == GGMLType.I2_S:
        if isinstance(ref, TensorRows):
            raise UnsupportedModel(f"{model.path}: tensor {name} is I2_S, which cannot be cut into several matrices")
        factor = float(data[-I2_S_TAIL_BYTES:][:4].copy().view("<f4")[0])
        return Part(name, info.type, info.shape[0], n_in, data[:-I2_S_TAIL_BYTES], factor)
    if not isinstance(ref, TensorRows):
        return Part(name, info.type, info.shape[0], n_in, data)
    row_bytes = info.n_bytes // info.shape[0]
    rows = data[ref.first * row_bytes : ref.last * row_bytes]
    return Part(name, info.type, ref.last - ref.first, n_in, rows)


def joined(parts: Sequence[Part]) -> list[list[Part]]:
    """Parts with the same input, in runs that can be one matrix: of one format and whole tiles."""
    runs: list[list[Part]] = []
    for part in parts:
        before = runs[-1] if runs else []
        fits = before and before[-1].n_out % ROWS == 0 and before[-1].format == part.format
        if fits and before[-1].factor == part.factor == 1.0:
            before.append(part)
        else:
            runs.append([part])
    return runs


def vector_of(model: ModelFile, ref: TensorRef) -> NDArray[np.float32]:
    """A norm or a bias, (n,). Raises UnsupportedModel for a type that is no kind of float."""
    name = ref.name if isinstance(ref, TensorRows) else ref
    info = model.tensors[name]
    if info.type not in (GGMLType.F32, GGMLType.F16, GGMLType.BF16):
        raise UnsupportedModel(f"{model.path}: tensor {name} is {info.type.name}; norms and biases must be floats")
    values = dequantize(info.type, model.data(name), info.shape)
    return values[ref.first : ref.last] if isinstance(ref, TensorRows) else values


@dataclass(frozen=True)
class Activations:
    """Inputs of products: values (n, n_in) float32, and the same as codes with a scale and a sum for each RUN."""

    values: Buffer
    codes: Buffer
    scales: Buffer
    sums: Buffer


class DeviceMatrix:
    """One matrix (n_out, n_in) on a device, made of parts of one format, one below the other. Raises BackendLost.

    before: a matrix that is no longer needed; if its buffers fit exactly, they are used again.
    """

    def __init__(self, device: OpenCLDevice, parts: Sequence[Part], before: DeviceMatrix | None = None) -> None:
        self.format, self.n_in = parts[0].format, parts[0].n_in
        self.n_out = sum(part.n_out for part in parts)
        self.factor = parts[0].factor
        self._device = device
        self.sizes: tuple[int, int] = (
            self.format.weight_bytes(self.n_out, self.n_in),
            self.format.scale_bytes(self.n_out, self.n_in),
        )
        if before is not None and before.sizes == self.sizes:
            self._buffers: tuple[Buffer, Buffer] = before._buffers
        else:
            self._buffers = device.buffer(self.sizes[0]), device.buffer(self.sizes[1])
        self._weights, self._scales = self._buffers
        self._slices = 1 if device.is_cpu else max(1, min(128, device.info.max_work_group) // ROWS)
        defines = self.format.defines() | {"SLICES": self._slices}
        self._gather = device.kernel("gather", _SOURCES, defines | {"TOKENS": 1})
        self._of_one, self._of_several = (
            device.kernel("multiply", _SOURCES, defines | {"TOKENS": n}) for n in (1, _TOKENS)
        )
        first = 0
        for part in parts:
            self._upload(part, first)
            first += part.n_out

    def multiply(
        self,
        x: Activations,
        out: Buffer,
        n: int,
        first_out: int,
        stride: int,
        bias: Buffer | None = None,
        factor: float = 1.0,
        keep: float = 0.0,
        first: int = 0,
    ) -> None:
        """Add factor * product + bias to keep * what is in out (., stride), from column first_out on.

        Of n rows of x, from number `first` on; those of out are the same.
        """
        kernel, per_item = (self._of_one, 1) if n == 1 else (self._of_several, _TOKENS)
        items, group = [self.n_out, self._slices, -(-n // per_item)], [ROWS, self._slices, 1]
        self._device.run(
            *(kernel, items, group, self._weights, self._scales, x.codes, x.scales, x.sums, x.values),
            *(self._scales if bias is None else bias, int(bias is not None), out, self.n_out, self.n_in, first, n),
            *(first_out, stride, factor * self.factor, keep),
        )

    def gather(self, ids: Buffer, out: Buffer, n: int, multiplier: float, first: int = 0) -> None:
        """Rows ids[first] and those that follow as floats, times a factor: out (n, n_in). ids: int32."""
        arguments = self._weights, self._scales, ids, out, first, self.n_in, multiplier * self.factor
        self._device.run(self._gather, [self.n_in, n], [ROWS, 1], *arguments)

    def _upload(self, part: Part, first_row: int) -> None:
        """Convert and write a part piece by piece, so that little of the file is in memory beside what it becomes."""
        row_bytes = len(part.data) // part.n_out
        n_rows = max(1, PIECE_BYTES // (ROWS * row_bytes)) * ROWS
        for first in range(0, part.n_out, n_rows):
            last = min(part.n_out, first + n_rows)
            weights, scales = _converted(part, first, last)
            tile = (first_row + first) // ROWS
            self._device.write(self._weights, weights, tile * self.format.weight_bytes(ROWS, self.n_in))
            if self.format.bits:
                self._device.write(self._scales, scales, tile * self.format.scale_bytes(ROWS, self.n_in))
            self._device.finish()


def _converted(part: Part, first: int, last: int) -> tuple[NDArray[np.generic], NDArray[np.float16]]:
    """(weights, scales) of rows first .. last - 1 as they lie on the device, in whole tiles."""
    row_bytes = len(part.data) // part.n_out
    data, n_rows = part.data[first * row_bytes : last * row_bytes], last - first
    if not part.format.bits:
        kind = np.float16 if part.format.is_half else np.float32
        return _tiled(dequantize(part.type, data, (n_rows, part.n_in)).astype(kind)), np.empty(0, dtype=np.float16)
    if part.type == GGMLType.I2_S:  # the one scale is the matrix's factor
        codes = codes_of(part.type, np.append(data, np.zeros(I2_S_TAIL_BYTES, dtype=np.uint8)))
        codes = Codes(codes.values, np.ones((1, 1), dtype=np.float32))
    else:
        codes = codes_of(part.type, data)
    return _words(codes.values.reshape(n_rows, part.n_in), part.format), _scales(codes, n_rows, part)


def _words(codes: NDArray[np.int8], format: Format) -> NDArray[np.uint32]:
    """Codes (n, n_in) in tiles of lines of words."""
    unsigned = codes if not format.offset else codes + np.int8(format.offset)
    fields = np.ascontiguousarray(unsigned).view("<u4").reshape(len(codes), -1, 8 // format.bits)
    words = fields[:, :, 0].copy()
    for field in range(1, fields.shape[2]):  # four codes at once: none reaches into the next byte
        words |= fields[:, :, field] << np.uint32(format.bits * field)
    return _tiled(words)


def _scales(codes: Codes, n_rows: int, part: Part) -> NDArray[np.float16]:
    """Scales, with the minimums behind them where the format has any."""
    block = part.format.block
    numbers = [codes.scales] if codes.minimums is None else [codes.scales, codes.minimums]
    repeats = codes.values.shape[1] // block
    runs = [np.broadcast_to(each, (len(codes.values), 1)).repeat(repeats, axis=0) for each in numbers]
    with np.errstate(over="ignore"):  # of a damaged file; its logits are then no numbers, which is noticed
        return _tiled(np.hstack(runs).reshape(n_rows, part.n_in // block, len(numbers)).astype(np.float16))


def _tiled(rows: NDArray[_Number]) -> NDArray[_Number]:
    """(n, columns, ...) with the rows of a tile side by side: (n_tiles, columns, 16, ...); missing rows are zeros."""
    padded = np.zeros((_tiles(len(rows)) * ROWS, *rows.shape[1:]), dtype=rows.dtype)
    padded[: len(rows)] = rows
    return np.ascontiguousarray(padded.reshape(-1, ROWS, *rows.shape[1:]).swapaxes(1, 2))


def _tiles(n_out: int) -> int:
    return -(-n_out // ROWS)
