"""MXFP4 (Rouhani et al., arXiv:2310.10537, and OCP Microscaling Formats 1.0): w = 2^(e - 127) times a number of 4 bits.

::

    | e | byte i: low q[i], high q[i + 16], i = 0..15 |        17 bytes

q is E2M1: a sign, and 0, 0.5, 1, 1.5, 2, 3, 4 or 6. Codes are twice that, integers, so scales are 2^(e - 128). As in
ggml 255 is an exponent like the others, not NaN.
"""

from __future__ import annotations

import numpy as np

from edgeinfer.models.formats.codes import Bytes, Codes, Floats, nibbles

DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int8)
_LARGEST_EXPONENT = 2  # of E2M1: 6 = 1.5 * 2^2


def codes_of(blocks: Bytes) -> Codes:
    """Of (n, 17) bytes."""
    return Codes(DOUBLED[nibbles(blocks[:, 1:])], _scales(blocks[:, :1]))


def quantize(blocks: Floats) -> Bytes:
    """(n, 17) bytes of (n, 32) weights, each rounded to the nearest number, of two as near to the smaller code.

    The exponent is that of the block's largest weight less 2 (section 6.3 of the specification), so what is above 6
    becomes 6.
    """
    largest: Floats = np.abs(blocks).max(axis=1, keepdims=True)
    exponents = np.frexp(largest)[1] - 1 - _LARGEST_EXPONENT + 127
    exponents = np.where(largest > 0, exponents.clip(0, 255), 0).astype(np.uint8)
    distances = np.abs(_scales(exponents)[:, :, None] * DOUBLED - blocks[:, :, None])
    codes = distances.argmin(axis=2).astype(np.uint8)
    return np.hstack([exponents, codes[:, :16] | codes[:, 16:] << 4])


def _scales(exponents: Bytes) -> Floats:
    """2^(e - 128), which is not a normal number for 0 and 1."""
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 128).astype(np.float32)
