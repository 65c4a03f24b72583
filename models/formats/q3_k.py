"""Q3_K: w = d (sc[k / 16] - 32) (q - 4).

::

    | 32 bytes | 2 x 32 bytes | 12 bytes of scales | d |        110 bytes
    bit j of byte i of the first 32: bit 2 of q[32j + i].  2 x 32: bits 0, 1 as in Q2_K

    bits            7654       3210                          76        54       32       10
    byte j: sc[j+8]   sc[j], bits 0-3      byte 8+j: sc[j+12]  sc[j+8]  sc[j+4]  sc[j], bits 4-5
            j = 0..7                               j = 0..3
"""

from __future__ import annotations

import numpy as np

from edgeinfer.models.formats.codes import Bytes, Codes, Floats, from_f16, nibbles, signed
from edgeinfer.models.formats.q2_k import SHIFTS, two_bits


def codes_of(blocks: Bytes) -> Codes:
    """Of (n, 110) bytes."""
    high: Bytes = np.unpackbits(blocks[:, None, :32], axis=1, bitorder="little")  # (n, 8, 32)
    codes = two_bits(blocks[:, 32:96]) | high << 2
    return Codes(signed(codes.reshape(-1, 16), 4), _scales_of(blocks).reshape(-1, 1))


def _scales_of(blocks: Bytes) -> Floats:
    """d (sc[j] - 32): (n, 16)."""
    high = (blocks[:, None, 104:108] >> SHIFTS & 3).reshape(-1, 16)  # four by four
    sc = signed(nibbles(blocks[:, 96:104]) | high << 4, 32)
    return from_f16(blocks[:, 108:110]) * sc
