"""Weights of a GGUF file as constants of a TFLite file, with the same numbers where TFLite has a kernel for them.

XNNPACK, which runs TFLite on CPUs, multiplies with matrices of float32 and float16, of int8 with one scale a row, and
of int4 with one scale for every 32 weights of a row, which it rounds to bfloat16. So

    Q4_0, Q4_1, Q4_K     int4 in runs of 32: the codes of the file, as w = scale code + base. The bases, one a run, are
                         a small float16 matrix by which the sums of the runs of x are multiplied. Q4_0 has some too,
                         for XNNPACK refuses scales below 0: code -> -1 - code, and the base is -scale
    other quantised ones int8 with a scale a row: rounded again
    F32, F16, BF16       float32, float16, float16

Rows of queries and keys whose rotation turns pairs (2i, 2i + 1) are put in another order, that of pairs (i, i + n / 2).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.exporters.litertlm.tflite import Constant, Type
from edgeinfer.models import TensorRef, TensorRows
from edgeinfer.models.formats import check_type, codes_of, dequantize
from edgeinfer.models.formats.codes import Codes
from edgeinfer.models.gguf import GGMLType, ModelFile

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]

RUN = 32  # weights that share a scale in an int4 matrix
PIECE_WEIGHTS = 4 << 20  # are unpacked at once
_FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
_INT4 = (GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q4_K)
_MIDDLE = np.int8(8)  # of codes 0..15, where they have a minimum


@dataclass(frozen=True)
class Matrix:
    """A matrix (n_out, n_in) of the TFLite file: weights, and the bases (n_out, n_in / 32) of its runs, if any."""

    weights: Constant
    bases: Constant | None = None


@dataclass(frozen=True)
class Part:
    """A tensor of a file, or some of its rows, (n_out, n_in) or (n,).

    order: for each row of the TFLite matrix the row of the file, None where they are the same.
    """

    model: ModelFile
    name: str
    type: GGMLType
    shape: tuple[int, ...]
    first: int
    order: Rows | None = None

    @property
    def key(self) -> str:
        """A name of the constant; parts of one tensor, and orders of rows, differ in it."""
        return f"{self.name}[{self.first}:{self.first + self.shape[0]}{'' if self.order is None else ' by halves'}]"

    @property
    def n_in(self) -> int:
        """Numbers in a row."""
        return self.shape[-1]

    def pieces(self) -> Iterator[NDArray[np.uint8]]:
        """The bytes of the rows, some rows at a time; all of them where they are put in order."""
        n_out = self.shape[0]
        row_bytes = self.type.n_bytes(self.n_in)
        n_rows = n_out if self.order is not None else max(1, PIECE_WEIGHTS // self.n_in)
        for first in range(0, n_out, n_rows):
            last = min(n_out, first + n_rows)
            span = (self.first + first) * row_bytes, (self.first + last) * row_bytes
            data = self.model.data(self.name, *span)
            yield data if self.order is None else data.reshape(n_out, row_bytes)[self.order].reshape(-1)
            self.model.release(self.name, *span)

    def weights(self) -> Iterator[Floats]:
        """The weights of some rows at a time, (n, n_in)."""
        for data in self.pieces():
            yield dequantize(self.type, data, (data.size // self.type.n_bytes(self.n_in), self.n_in))


def part_of(model: ModelFile, ref: TensorRef, order: Rows | None = None) -> Part:
    """What a reference to a tensor means. Raises UnsupportedModel for a type without a rule."""
    name = ref.name if isinstance(ref, TensorRows) else ref
    info = model.tensors[name]
    try:
        check_type(info.type)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{model.path}: tensor {name}: {error}") from None
    if info.type == GGMLType.I2_S:
        raise UnsupportedModel(f"{model.path}: tensor {name} is I2_S, which the litertlm target cannot read: use TQ2_0")
    if not isinstance(ref, TensorRows):
        return Part(model, name, info.type, info.shape, 0, order)
    return Part(model, name, info.type, (ref.last - ref.first, *info.shape[1:]), ref.first, order)


def by_halves(n_rows: int, head_dim: int, n_dims: int) -> Rows:
    """For rows of heads whose first n_dims numbers are turned in pairs (2i, 2i + 1): the rows with all first ones of
    the pairs before all second ones."""
    turned = np.arange(n_dims).reshape(-1, 2).T.reshape(-1)
    head = np.concatenate([turned, np.arange(n_dims, head_dim)])
    rows: Rows = (np.arange(0, n_rows, head_dim)[:, None] + head).reshape(-1)
    return rows


def vector_of(part: Part) -> Floats:
    """A norm or a bias, (n,)."""
    each = part.type.n_bytes(1)
    data = part.model.data(part.name, part.first * each, (part.first + part.shape[0]) * each)
    values = dequantize(part.type, data, part.shape)
    return values if part.order is None else values[part.order]


def type_in_file(type: GGMLType, n_in: int) -> Type:
    """Type of the TFLite matrix that a matrix of this type becomes."""
    if type in _FLOATS:
        return Type.FLOAT32 if type == GGMLType.F32 else Type.FLOAT16
    return Type.INT4 if type in _INT4 and n_in % RUN == 0 else Type.INT8


def is_rounded_again(type: GGMLType) -> bool:
    """Whether the TFLite matrix has other numbers than the file's, beside the rounding of scales to bfloat16."""
    return type not in (*_FLOATS, *_INT4)


def matrix_of(part: Part) -> Matrix:
    """How a matrix goes into the file. Nothing is read yet."""
    type = type_in_file(part.type, part.n_in)
    if type in (Type.FLOAT32, Type.FLOAT16):
        dtype = np.float32 if type == Type.FLOAT32 else np.float16
        return Matrix(_constant(part, "", type, part.shape, lambda: (_as(rows, dtype) for rows in part.weights())))
    return _int4(part) if type == Type.INT4 else _int8(part)


def vector_constant(part: Part) -> Constant:
    """A norm or a bias in float32."""
    return _constant(part, "", Type.FLOAT32, part.shape, lambda: [vector_of(part)])


def _constant(
    part: Part, role: str, type: Type, shape: tuple[int, ...], pieces: Callable[[], Iterable[NDArray[Any]]], **more: Any
) -> Constant:
    return Constant(part.key + role, type, shape, pieces, tensor=part.name, **more)


def _as(rows: Floats, dtype: type[np.floating[Any]]) -> NDArray[Any]:
    limits = np.finfo(dtype)
    return np.clip(rows, limits.min, limits.max).astype(dtype)


def _int8(part: Part) -> Matrix:
    """Rounded to int8, with the largest weight of a row as 127."""

    @functools.cache
    def scales() -> Floats:
        limits = np.concatenate([np.abs(rows).max(axis=1) for rows in part.weights()])
        return np.maximum(limits / np.float32(127), np.float32(1e-30)).astype(np.float32)

    def codes() -> Iterator[NDArray[np.int8]]:
        first = 0
        for rows in part.weights():
            yield np.rint(rows / scales()[first : first + len(rows), None]).astype(np.int8)
            first += len(rows)

    return Matrix(_constant(part, "", Type.INT8, part.shape, codes, row_scales=scales))


def _int4(part: Part) -> Matrix:
    """The codes of the file."""
    n_out, n_in = part.shape
    runs = n_out, n_in // RUN

    def made(of_codes: Callable[[Codes], NDArray[Any]]) -> Callable[[], Iterator[NDArray[Any]]]:
        return lambda: (of_codes(codes_of(part.type, data)) for data in part.pieces())

    scales = _constant(part, " scales", Type.FLOAT16, runs, made(_scales))
    bases = _constant(part, " bases", Type.FLOAT16, runs, made(_bases))
    codes = _constant(part, "", Type.INT4, part.shape, made(_packed), block_scales=scales, block_size=RUN)
    return Matrix(codes, bases)


def _packed(codes: Codes) -> NDArray[np.uint8]:
    """Two codes in a byte, around 0 and for scales above 0: -1 - code is ~code."""
    centred = codes.values if codes.minimums is None else codes.values - _MIDDLE
    raw: NDArray[np.uint8] = np.where(codes.scales < 0, ~centred, centred).reshape(-1).view(np.uint8)
    low, high = raw[0::2] & np.uint8(15), raw[1::2] << np.uint8(4)
    return low | high


def _scales(codes: Codes) -> NDArray[np.float16]:
    """XNNPACK refuses 0: the smallest, where all weights are 0."""
    return np.maximum(np.abs(codes.scales), np.float32(2.0**-24)).astype(np.float16).reshape(-1)


def _bases(codes: Codes) -> NDArray[np.float16]:
    if codes.minimums is None:
        return np.maximum(-codes.scales, np.float32(0)).astype(np.float16).reshape(-1)
    return (codes.minimums + codes.scales * np.float32(_MIDDLE)).astype(np.float16).reshape(-1)
