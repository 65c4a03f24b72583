"""Quantisation in numpy, for files that are written; edgeinfer.models.formats.dequantize describes the formats."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import ShapeError, UnsupportedModel
from edgeinfer.models.gguf import GGMLType

_Bytes = NDArray[np.uint8]
_Floats = NDArray[np.float32]

Q4_0_STEPS = np.linspace(0.82, 1.06, 13, dtype=np.float32)  # of the scale at which the largest weight has code -8


def quantize(type: GGMLType, weights: _Floats) -> _Bytes:
    """The bytes of a tensor that approximates weights (..., n_in), n_in a multiple of the block: (n_bytes,).

    Raises UnsupportedModel for a type that cannot be written, ShapeError, and that too for weights that are not finite
    or too large for the half floats of the format.
    """
    if type not in _BYTES_OF:
        known = ", ".join(sorted(known.name for known in _BYTES_OF))
        raise UnsupportedModel(f"tensor type {type.name} cannot be written; these can: {known}")
    if weights.shape[-1] % type.block_elements:
        raise ShapeError(f"rows of {type.name} must be a multiple of {type.block_elements}: found {weights.shape}")
    limit = np.finfo(np.float32 if type == GGMLType.F32 else np.float16).max
    if not (np.abs(weights) <= limit).all():  # False for NaN
        raise ShapeError(f"weights of {type.name} must be finite and at most {limit:g}: found {np.abs(weights).max()}")
    blocks = np.ascontiguousarray(weights, dtype=np.float32).reshape(-1, type.block_elements)
    return np.ascontiguousarray(_BYTES_OF[type](blocks)).reshape(-1).view(np.uint8)


def _f32(blocks: _Floats) -> _Bytes:
    return blocks.astype("<f4").view(np.uint8)


def _f16(blocks: _Floats) -> _Bytes:
    return blocks.astype("<f2").view(np.uint8)


def _q8_0(blocks: _Floats) -> _Bytes:
    """Each block's largest weight gets code 127 or -127; the others are rounded to nearest."""
    scale = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype("<f2")
    codes = np.rint(_divided(blocks, scale)).clip(-127, 127).astype(np.int8)
    return np.hstack([scale.view(np.uint8), codes.view(np.uint8)])


def _q4_0(blocks: _Floats) -> _Bytes:
    """Of some scales for each block, the one with the smallest squared error."""
    places = np.abs(blocks).argmax(axis=1)[:, None]
    largest = np.take_along_axis(blocks, places, axis=1) / np.float32(-8)  # code -8 has no counterpart of its size
    scale, least = np.zeros_like(largest), np.full_like(largest, np.inf)
    for step in Q4_0_STEPS:
        tried = (largest * step).astype("<f2").astype(np.float32)
        error = np.square(_q4_codes(blocks, tried) * tried - blocks).sum(axis=1, keepdims=True)
        scale, least = np.where(error < least, tried, scale), np.minimum(error, least)
    codes = (_q4_codes(blocks, scale) + 8).astype(np.uint8)
    return np.hstack([scale.astype("<f2").view(np.uint8), codes[:, :16] | codes[:, 16:] << 4])


def _q6_k(blocks: _Floats) -> _Bytes:
    """Each 16 weights are rounded to -32..31 times a scale that puts the largest of them on -32.

    The scales of 256 are rounded to -128..127 times a float16. Of gaussian weights the error is 1.8 % (root mean
    square).
    """
    parts = blocks.reshape(len(blocks), -1, 16)
    scale = _signed_largest(parts) / np.float32(-32)  # (n, 16)
    d = (_signed_largest(scale) / np.float32(-128))[:, None].astype("<f2")  # (n, 1)
    scales = np.rint(_divided(scale, d)).clip(-128, 127).astype(np.int8)
    steps = d.astype(np.float32) * scales
    codes = np.rint(_divided(parts, steps[:, :, None])).clip(-32, 31).astype(np.int8) + np.int8(32)
    runs = codes.astype(np.uint8).reshape(-1, 2, 4, 32)  # halves of 128, in them four runs of 32
    low = (runs[:, :, :2] & 15 | (runs[:, :, 2:] & 15) << 4).reshape(-1, 128)
    high = (runs >> 4) << np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    top = np.bitwise_or.reduce(high, axis=2).reshape(-1, 64)
    return np.hstack([low, top, scales.view(np.uint8), d.view(np.uint8)])


def _signed_largest(values: _Floats) -> _Floats:
    """What has the largest magnitude along the last axis, with its sign."""
    at = np.abs(values).argmax(axis=-1, keepdims=True)
    largest: _Floats = np.take_along_axis(values, at, axis=-1)[..., 0]
    return largest


def _q4_codes(blocks: _Floats, scale: _Floats) -> _Floats:
    codes: _Floats = np.rint(_divided(blocks, scale)).clip(-8, 7)
    return codes


def _divided(blocks: _Floats, scale: NDArray[np.floating]) -> _Floats:
    """blocks / scale, 0 where the scale is 0."""
    divisor = scale.astype(np.float32)
    return np.divide(blocks, divisor, out=np.zeros_like(blocks), where=divisor != 0)


# Each turns blocks (n, block_elements) into (n, block_bytes).
_BYTES_OF: dict[GGMLType, Callable[[_Floats], _Bytes]] = {
    GGMLType.F32: _f32,
    GGMLType.F16: _f16,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q6_K: _q6_k,
}
