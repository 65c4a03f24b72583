"""Weights that are NaN or infinite, found without making numbers of a whole tensor: only floats and scales are read."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeinfer.models.formats.codes import Bytes
from edgeinfer.models.gguf import I2_S_TAIL_BYTES, GGMLType

_PIECE_BYTES = 1 << 20  # what is made of a piece stays in the cache
# Floats by their exponent, which NaN and the infinities have all ones in: its mask, and the type that it is read as.
_HALF, _BRAIN, _SINGLE, _DOUBLE = (0x7C00, "<u2"), (0x7F80, "<u2"), (0x7F800000, "<u4"), (0x7FF << 52, "<u8")
_FLOATS = {
    GGMLType.F16: _HALF,
    GGMLType.BF16: _BRAIN,
    GGMLType.F32: _SINGLE,
    GGMLType.F64: _DOUBLE,
}
_HALF_SCALES = {  # where the float16 scales and minimums of a block begin: ggml-common.h
    **dict.fromkeys((GGMLType.Q4_0, GGMLType.Q5_0, GGMLType.Q8_0, GGMLType.Q1_0, GGMLType.Q2_0), (0,)),
    **dict.fromkeys((GGMLType.Q4_1, GGMLType.Q5_1, GGMLType.Q8_1, GGMLType.Q4_K, GGMLType.Q5_K), (0, 2)),
    **dict.fromkeys((GGMLType.IQ2_XXS, GGMLType.IQ2_XS, GGMLType.IQ2_S, GGMLType.IQ3_XXS, GGMLType.IQ3_S), (0,)),
    **dict.fromkeys((GGMLType.IQ1_S, GGMLType.IQ4_NL, GGMLType.IQ4_XS), (0,)),
    GGMLType.Q2_K: (80, 82),
    GGMLType.Q3_K: (108,),
    GGMLType.Q6_K: (208,),
    GGMLType.TQ1_0: (52,),
    GGMLType.TQ2_0: (64,),
}
MXFP4_LARGEST = 252  # exponent of a block whose weights are all float32 numbers, of at most 6 * 2^125
_NVFP4_NAN = 127  # of a scale, an unsigned E4M3


def first_not_finite(type: GGMLType, data: Bytes) -> int | None:
    """Number of the first weight of which a float or a scale is NaN or infinite, None where all are numbers.

    data: (n_bytes,) whole blocks as they stand in a file, of I2_S its last I2_S_TAIL_BYTES alone or with blocks. The
    weight is the first of its block. Of integers, and of formats without floats, none is found.
    """
    if type == GGMLType.I2_S:
        return 0 if _where(data[-I2_S_TAIL_BYTES:][:4], _SINGLE).any() else None
    step = max(1, _PIECE_BYTES // type.block_bytes) * type.block_bytes
    for first in range(0, data.size, step):
        found = np.flatnonzero(_in_blocks(type, data[first : first + step].reshape(-1, type.block_bytes)))
        if len(found):
            return (first // type.block_bytes + int(found[0])) * type.block_elements
    return None


def _in_blocks(type: GGMLType, blocks: Bytes) -> NDArray[np.bool_]:
    """(n,): whether one of the floats of a block (n, block_bytes) is NaN or infinite."""
    if type in _FLOATS:
        return _where(blocks, _FLOATS[type])
    found = np.zeros(len(blocks), np.bool_)
    for at in _HALF_SCALES.get(type, ()):
        found |= _where(blocks[:, at : at + 2], _HALF)
    if type == GGMLType.MXFP4:
        found |= blocks[:, 0] > MXFP4_LARGEST
    elif type == GGMLType.NVFP4:
        found |= (blocks[:, :4] & 127 == _NVFP4_NAN).any(axis=1)
    elif type == GGMLType.IQ1_M:  # its float16 is cut into the high halves of bytes 49, 51, 53 and 55
        found |= (blocks[:, 55] & 0x70 == 0x70) & (blocks[:, 53] & 0xC0 == 0xC0)
    elif type == GGMLType.Q8_K:
        found |= _where(blocks[:, :4], _SINGLE)
    return found


def _where(data: Bytes, kind: tuple[int, str]) -> NDArray[np.bool_]:
    """(n,): where floats of this kind, in bytes (n, n_bytes), have an exponent of ones alone."""
    mask, dtype = kind
    bits = data.view(dtype).reshape(-1)
    found: NDArray[np.bool_] = bits & bits.dtype.type(mask) == bits.dtype.type(mask)
    return found
