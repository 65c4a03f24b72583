"""TQ2_0: w = d (q - 1), q in {0, 1, 2}.

::

    | 2 x 32 bytes | d |        66 bytes
    byte i of the h-th 32: bits 2n, 2n + 1 = q[128h + 32n + i], n = 0..3
"""

from __future__ import annotations

import numpy as np

from edgeinfer.models.formats.codes import Bytes, Codes, as_f16, from_f16, signed
from edgeinfer.models.formats.ternary_matrix import TernaryMatrix

_SHIFTS = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]


def codes_of(blocks: Bytes) -> Codes:
    """Of (n, 66) bytes."""
    codes = blocks[:, :64].reshape(-1, 2, 1, 32) >> _SHIFTS & 3
    return Codes(signed(codes.reshape(-1, 256), 1), from_f16(blocks[:, 64:]))


def pack(name: str, matrix: TernaryMatrix) -> Bytes:
    """The bytes of a tensor. Raises UnsupportedModel."""
    scales = matrix.scales_of(name, 256)
    packed = np.bitwise_or.reduce(matrix.codes().reshape(-1, 2, 4, 32) << _SHIFTS, axis=2)
    return np.hstack([packed.reshape(-1, 64), as_f16(scales)]).reshape(-1)
