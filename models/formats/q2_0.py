"""Q2_0: w = d (q - 1); the matrix is ternary where no q is 3.

::

    | d | byte i: bits 2n, 2n + 1 = q[4i + n], n = 0..3, i = 0..15 |        18 bytes
"""

from __future__ import annotations

import numpy as np

from edgeinfer.models.formats.codes import Bytes, Codes, from_f16, signed


def codes_of(blocks: Bytes) -> Codes:
    """Of (n, 18) bytes."""
    shift = np.array([0, 2, 4, 6], dtype=np.uint8)
    codes = blocks[:, 2:, None] >> shift & 3
    return Codes(signed(codes.reshape(-1, 64), 1), from_f16(blocks[:, :2]))
