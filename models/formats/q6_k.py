"""Q6_K: w = d sc[k / 16] (q - 32), sc signed.

::

    | 2 x 64 bytes | 2 x 32 bytes | sc[0] ... sc[15] | d |        210 bytes
    half h has weights 128h + 0..127, in four runs of 32; run g, weight i of it:
    bits 0-3 in byte 32 (g mod 2) + i of the h-th 64, low for g < 2, else high
    bits 4-5 in bits 2g, 2g + 1 of byte i of the h-th 32
"""

from __future__ import annotations

import numpy as np

from edgeinfer.models.formats.codes import Bytes, Codes, from_f16, signed

_SHIFTS = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]  # of bits 4-5, by run


def codes_of(blocks: Bytes) -> Codes:
    """Of (n, 210) bytes."""
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> _SHIFTS & 3
    scale = from_f16(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8)
    return Codes(signed((low | high << 4).reshape(-1, 16), 32), scale.reshape(-1, 1))
