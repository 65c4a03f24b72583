"""I2_S: w = d (q - 1), q in {0, 1, 2}, with one float32 d for the whole tensor (bitnet.cpp).

::

    | 32 bytes | 32 bytes | ... | d | 28 bytes |
    byte i of the b-th 32: bits 6 - 2n, 7 - 2n = q[128b + 32n + i], n = 0..3
"""

from __future__ import annotations

import numpy as np

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.models.formats.codes import Bytes, Codes, signed
from edgeinfer.models.formats.ternary_matrix import TernaryMatrix
from edgeinfer.models.gguf import I2_S_TAIL_BYTES, GGMLType

_SHIFTS = np.array([6, 4, 2, 0], dtype=np.uint8)[:, None]


def codes_of(data: Bytes) -> Codes:
    """Of all bytes of a tensor, in one dimension."""
    scale = data[-I2_S_TAIL_BYTES:][:4].copy().view("<f4")
    codes = data[:-I2_S_TAIL_BYTES].reshape(-1, 1, 32) >> _SHIFTS & 3
    return Codes(signed(codes.reshape(-1, 128), 1), scale.astype(np.float32).reshape(1, 1))


def pack(name: str, matrix: TernaryMatrix) -> Bytes:
    """The bytes of a tensor. Raises UnsupportedModel."""
    if matrix.trits.shape[1] % GGMLType.I2_S.block_elements:
        raise UnsupportedModel(
            f"tensor {name}: i2_s needs rows of a multiple of 128 inputs: found {matrix.trits.shape[1]}"
        )
    packed = np.bitwise_or.reduce(matrix.codes().reshape(-1, 4, 32) << _SHIFTS, axis=1)
    tail = np.zeros(I2_S_TAIL_BYTES // 4, dtype="<f4")
    tail[0] = matrix.one_scale(name)
    return np.concatenate([packed.reshape(-1), tail.view(np.uint8)])
