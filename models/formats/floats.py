"""F32, F16 and BF16: weights that are floats already, a block of one each."""

from __future__ import annotations

import numpy as np

from edgeinfer.models.formats.codes import Bytes, Floats, from_f16

dequantize_f16 = from_f16


def dequantize_f32(blocks: Bytes) -> Floats:
    """A copy of the weights."""
    return blocks.copy().view("<f4").astype(np.float32, copy=False)


def dequantize_bf16(blocks: Bytes) -> Floats:
    """Each is the upper half of a float32."""
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def quantize_f32(blocks: Floats) -> Bytes:
    """The weights as they are."""
    return blocks.astype("<f4").view(np.uint8)
