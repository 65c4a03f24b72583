"""Q5_K: w = d sc[j] q - dmin m[j] in sub-block j of 32, j = 0..7.

::

    | d | dmin | 12 bytes of scales, as in Q4_K | 32 bytes | 4 x 32 bytes |        176 bytes
    bit j of byte i of the 32: bit 4 of q[32j + i].  4 x 32: bits 0-3 as in Q4_K
"""

from __future__ import annotations

import numpy as np

from edgeinfer.models.formats.codes import Bytes, Codes, signed
from edgeinfer.models.formats.q4_k import paired_nibbles, scales_of


def codes_of(blocks: Bytes) -> Codes:
    """Of (n, 176) bytes."""
    scale, minimum = scales_of(blocks)
    high: Bytes = np.unpackbits(blocks[:, None, 16:48], axis=1, bitorder="little")  # (n, 8, 32)
    codes = paired_nibbles(blocks[:, 48:]) | high << 4
    return Codes(signed(codes.reshape(-1, 32), 0), scale, -minimum)
