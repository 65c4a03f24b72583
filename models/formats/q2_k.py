"""Q2_K: w = d sc[k / 16] q - dmin m[k / 16].

::

    | 16 bytes | 2 x 32 bytes | d | dmin |        84 bytes
    byte j of the 16: low sc[j], high m[j]
    half h has weights 128h + 0..127, in four runs of 32: bits 2g, 2g + 1 of byte i of the h-th 32: q[128h + 32g + i]
"""

from __future__ import annotations

import numpy as np

from edgeinfer.models.formats.codes import Bytes, Codes, from_f16, signed

SHIFTS = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]  # of the four codes of a byte


def codes_of(blocks: Bytes) -> Codes:
    """Of (n, 84) bytes."""
    scale = from_f16(blocks[:, 80:82]) * (blocks[:, :16] & 15)
    minimum = from_f16(blocks[:, 82:84]) * (blocks[:, :16] >> 4)
    return Codes(signed(two_bits(blocks[:, 16:80]).reshape(-1, 16), 0), scale.reshape(-1, 1), -minimum.reshape(-1, 1))


def two_bits(data: Bytes) -> Bytes:
    """(n, 64) bytes: codes (n, 8, 32), where the four runs of a half share 32 bytes."""
    codes: Bytes = data.reshape(-1, 2, 1, 32) >> SHIFTS & np.uint8(3)
    return codes.reshape(-1, 8, 32)
