"""Q6_K: w = d sc[k / 16] (q - 32), sc signed.

::

    | 2 x 64 bytes | 2 x 32 bytes | sc[0] ... sc[15] | d |        210 bytes
    half h has weights 128h + 0..127, in four runs of 32; run g, weight i of it:
    bits 0-3 in byte 32 (g mod 2) + i of the h-th 64, low for g < 2, else high
    bits 4-5 in bits 2g, 2g + 1 of byte i of the h-th 32
"""

from __future__ import annotations

import numpy as np

from edgeinfer.models.formats.codes import Bytes, Codes, Floats, divided, from_f16, signed

_SHIFTS = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]  # of bits 4-5, by run


def codes_of(blocks: Bytes) -> Codes:
    """Of (n, 210) bytes."""
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> _SHIFTS & 3
    scale = from_f16(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8)
    return Codes(signed((low | high << 4).reshape(-1, 16), 32), scale.reshape(-1, 1))


def quantize(blocks: Floats) -> Bytes:
    """(n, 210) bytes of (n, 256) weights.

    Each 16 weights are rounded to -32..31 times a scale that puts the largest of them on -32. The scales of 256 are
    rounded to -128..127 times a float16. Of gaussian weights the error is 1.8 % (root mean square).
    """
    parts = blocks.reshape(len(blocks), -1, 16)
    scale = _signed_largest(parts) / np.float32(-32)  # (n, 16)
    d = (_signed_largest(scale) / np.float32(-128))[:, None].astype("<f2")  # (n, 1)
    scales = np.rint(divided(scale, d)).clip(-128, 127).astype(np.int8)
    steps = d.astype(np.float32) * scales
    codes = np.rint(divided(parts, steps[:, :, None])).clip(-32, 31).astype(np.int8) + np.int8(32)
    runs = codes.astype(np.uint8).reshape(-1, 2, 4, 32)  # halves of 128, in them four runs of 32
    low = (runs[:, :, :2] & 15 | (runs[:, :, 2:] & 15) << 4).reshape(-1, 128)
    top = np.bitwise_or.reduce((runs >> 4) << _SHIFTS, axis=2).reshape(-1, 64)
    return np.hstack([low, top, scales.view(np.uint8), d.view(np.uint8)])


def _signed_largest(values: Floats) -> Floats:
    """What has the largest magnitude along the last axis, with its sign."""
    at = np.abs(values).argmax(axis=-1, keepdims=True)
    largest: Floats = np.take_along_axis(values, at, axis=-1)[..., 0]
    return largest
