"""Weight formats, one file a format: its block layout and reading in plain numpy.

They are written in C++ (`quantizing`), by the files of the same names here.
`ternary_packing` has the formats in which the native engine holds ternary matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import ShapeError, UnsupportedModel
from edgeinfer.models.formats import (
    floats,
    i2_s,
    mxfp4,
    q2_0,
    q2_k,
    q3_k,
    q4_0,
    q4_1,
    q4_k,
    q5_0,
    q5_1,
    q5_k,
    q6_k,
    q8_0,
    tq1_0,
    tq2_0,
)
from edgeinfer.models.formats.codes import Bytes, Codes, Floats
from edgeinfer.models.formats.quantizing import quantize, quantize_plain
from edgeinfer.models.formats.ternary_matrix import TernaryMatrix
from edgeinfer.models.gguf import GGMLType

__all__ = ["PACK", "Codes", "check_type", "codes_of", "dequantize", "quantize", "quantize_plain"]

# Each turns blocks (n, block_bytes) into weights (n, block_elements).
_FLOATS_OF: dict[GGMLType, Callable[[Bytes], Floats]] = {
    GGMLType.F32: floats.dequantize_f32,
    GGMLType.F16: floats.dequantize_f16,
    GGMLType.BF16: floats.dequantize_bf16,
}
# Each turns blocks (n, block_bytes) into codes.
_CODES_OF: dict[GGMLType, Callable[[Bytes], Codes]] = {
    GGMLType.Q8_0: q8_0.codes_of,
    GGMLType.Q4_0: q4_0.codes_of,
    GGMLType.Q4_1: q4_1.codes_of,
    GGMLType.Q5_0: q5_0.codes_of,
    GGMLType.Q5_1: q5_1.codes_of,
    GGMLType.Q2_K: q2_k.codes_of,
    GGMLType.Q3_K: q3_k.codes_of,
    GGMLType.Q4_K: q4_k.codes_of,
    GGMLType.Q5_K: q5_k.codes_of,
    GGMLType.Q6_K: q6_k.codes_of,
    GGMLType.MXFP4: mxfp4.codes_of,
    GGMLType.TQ1_0: tq1_0.codes_of,
    GGMLType.TQ2_0: tq2_0.codes_of,
    GGMLType.Q2_0: q2_0.codes_of,
}
# Each turns a ternary matrix, with the name of its tensor for messages, into the bytes of the tensor.
PACK: dict[GGMLType, Callable[[str, TernaryMatrix], Bytes]] = {
    GGMLType.I2_S: i2_s.pack,
    GGMLType.TQ1_0: tq1_0.pack,
    GGMLType.TQ2_0: tq2_0.pack,
}


def codes_of(type: GGMLType, data: NDArray[np.uint8]) -> Codes:
    """Codes of a quantised tensor, or of some rows of it. data: whole blocks as they stand in the file.

    Raises UnsupportedModel for a type that has no codes.
    """
    if type == GGMLType.I2_S:
        return i2_s.codes_of(data)
    if type not in _CODES_OF:
        raise UnsupportedModel(f"tensor type {type.name} has no codes; those with codes: {_names(_CODES_OF)}")
    return _CODES_OF[type](data.reshape(-1, type.block_bytes))


def dequantize(type: GGMLType, data: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The weights in float32, as an array of its own.

    data: (n_bytes,) as it stands in the file.  shape: of the tensor, rows are whole blocks.
    Raises UnsupportedModel for a type without a rule here, ShapeError if data and shape do not go together.
    """
    check_type(type)
    if not shape or shape[-1] % type.block_elements:
        raise ShapeError(f"rows of {type.name} must be a multiple of {type.block_elements}: found shape {shape}")
    n_bytes = type.n_bytes(math.prod(shape))
    if data.dtype != np.uint8 or data.shape != (n_bytes,):
        raise ShapeError(f"{type.name} {shape} needs {n_bytes} bytes: found {data.dtype} {data.shape}")
    if type in _FLOATS_OF:
        return _FLOATS_OF[type](data.reshape(-1, type.block_bytes)).reshape(shape)
    return codes_of(type, data).weights().reshape(shape)


def check_type(type: GGMLType) -> None:
    """Raises UnsupportedModel if there is no rule for this type."""
    known = [*_FLOATS_OF, *_CODES_OF, GGMLType.I2_S]
    if type not in known:
        raise UnsupportedModel(f"tensor type {type.name} is not supported; supported: {_names(known)}")


def _names(types: Iterable[GGMLType]) -> str:
    return ", ".join(sorted(type.name for type in types))
