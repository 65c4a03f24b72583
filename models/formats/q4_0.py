"""Q4_0: w = d (q - 8).

::

    | d | byte i: low q[i], high q[i + 16], i = 0..15 |        18 bytes
"""

from __future__ import annotations

import numpy as np

from edgeinfer.models.formats.codes import Bytes, Codes, Floats, divided, from_f16, nibbles, signed

SCALE_STEPS = np.linspace(0.82, 1.06, 13, dtype=np.float32)  # of the scale at which the largest weight has code -8


def codes_of(blocks: Bytes) -> Codes:
    """Of (n, 18) bytes."""
    return Codes(signed(nibbles(blocks[:, 2:]), 8), from_f16(blocks[:, :2]))


def quantize(blocks: Floats) -> Bytes:
    """(n, 18) bytes of (n, 32) weights, with the scale of the smallest squared error among SCALE_STEPS."""
    places = np.abs(blocks).argmax(axis=1)[:, None]
    largest = np.take_along_axis(blocks, places, axis=1) / np.float32(-8)  # code -8 has no counterpart of its size
    scale, least = np.zeros_like(largest), np.full_like(largest, np.inf)
    for step in SCALE_STEPS:
        tried = (largest * step).astype("<f2").astype(np.float32)
        error = np.square(_rounded(blocks, tried) * tried - blocks).sum(axis=1, keepdims=True)
        scale, least = np.where(error < least, tried, scale), np.minimum(error, least)
    codes = (_rounded(blocks, scale) + 8).astype(np.uint8)
    return np.hstack([scale.astype("<f2").view(np.uint8), codes[:, :16] | codes[:, 16:] << 4])


def _rounded(blocks: Floats, scale: Floats) -> Floats:
    """Weights over their scale, to the nearest of -8..7."""
    codes: Floats = np.rint(divided(blocks, scale)).clip(-8, 7)
    return codes
