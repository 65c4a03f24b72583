"""Q4_K: w = d sc[j] q - dmin m[j] in sub-block j of 32, j = 0..7.

::

    | d | dmin | 12 bytes of scales | 4 x 32 bytes |        144 bytes
    byte i of the p-th 32: low q[64p + i], high q[64p + 32 + i]: sub-blocks 2p and 2p + 1

The scales, of Q5_K too::

    bits       76 543210                     76 543210                      7654   3210
    byte j: sc[j+4] sc[j]     byte 4+j: m[j+4] m[j]     byte 8+j: m[j+4] sc[j+4]        j = 0..3
            bits 45  0-5               bits 45  0-5            bits 0-3  0-3
"""

from __future__ import annotations

import numpy as np

from edgeinfer.models.formats.codes import Bytes, Codes, Floats, from_f16, signed


def codes_of(blocks: Bytes) -> Codes:
    """Of (n, 144) bytes."""
    scale, minimum = scales_of(blocks)
    return Codes(signed(paired_nibbles(blocks[:, 16:]).reshape(-1, 32), 0), scale, -minimum)


def scales_of(blocks: Bytes) -> tuple[Floats, Floats]:
    """d sc[j] and dmin m[j], both (8 n, 1), from the first 16 bytes of each block."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    sc = np.hstack([first & 63, third & 15 | first >> 6 << 4])
    m = np.hstack([second & 63, third >> 4 | second >> 6 << 4])
    return (from_f16(blocks[:, :2]) * sc).reshape(-1, 1), (from_f16(blocks[:, 2:4]) * m).reshape(-1, 1)


def paired_nibbles(data: Bytes) -> Bytes:
    """(n, 128) bytes: codes (n, 8, 32), where sub-blocks 2p and 2p + 1 share 32 bytes."""
    runs = data.reshape(-1, 4, 1, 32)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(-1, 8, 32)
