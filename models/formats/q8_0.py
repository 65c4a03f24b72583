"""Q8_0: w = d q, q signed.

::

    | d | q[0] ... q[31] |        34 bytes
"""

from __future__ import annotations

import numpy as np

from edgeinfer.models.formats.codes import Bytes, Codes, Floats, divided, from_f16


def codes_of(blocks: Bytes) -> Codes:
    """Of (n, 34) bytes."""
    return Codes(blocks[:, 2:].view(np.int8), from_f16(blocks[:, :2]))


def quantize(blocks: Floats) -> Bytes:
    """(n, 34) bytes of (n, 32) weights.

    Each block's largest weight gets code 127 or -127; the others are rounded to nearest.
    """
    scale = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype("<f2")
    codes = np.rint(divided(blocks, scale)).clip(-127, 127).astype(np.int8)
    return np.hstack([scale.view(np.uint8), codes.view(np.uint8)])
