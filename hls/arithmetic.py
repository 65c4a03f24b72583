"""What the kernels of a ternary linear compute, in numpy: each operation rounded to float32 as they have it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeinfer.hls.files.golden import products
from edgeinfer.hls.packing import Trits

Floats = NDArray[np.float32]
_ROUND = np.float32(12582912.0)  # 1.5 * 2^23: added, it rounds to the nearest integer, which the low bits then are
_MOST = np.float32(127.0)
_SQUARES = 32  # sums of squares; kSquares of ei_norm.hpp


def quantise(x: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Activations (n_tokens, n) as int8 and a scale a token, as BitNet b1.58 and the native engine for I2_S round them.

    x is about q * scale; the largest magnitude becomes 127, 1e-5 where it is smaller.
    """
    most = np.maximum(np.abs(x).max(axis=1), np.float32(1e-5)).astype(np.float32)
    shifted = x * (_MOST / most)[:, None] + _ROUND
    return (shifted.view(np.uint32) & 0xFF).astype(np.uint8).view(np.int8), most / _MOST


def linear(trits: Trits, scales: Floats, x: Floats) -> Floats:
    """(n_tokens, n_out): the product of x (n_tokens, n_in), rounded to int8, with trits * scales, (n_out, n_in)."""
    q, x_scale = quantise(x)
    return (products(trits, q).astype(np.float32) * scales) * x_scale[:, None]


def rms_norm(x: Floats, weight: Floats, epsilon: float) -> Floats:
    """(n_tokens, n): x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich, arXiv:1910.07467).

    The order of the sum is that of ei_norm.hpp: x[i]^2 goes to sum i % 32, then sums are added in pairs 16, 8, 4, 2 and
    1 apart.
    """
    n = x.shape[1]
    padded = np.zeros((len(x), -(-n // _SQUARES) * _SQUARES), dtype=np.float32)
    padded[:, :n] = x
    squares = np.zeros((len(x), _SQUARES), dtype=np.float32)
    for values in np.moveaxis(padded.reshape(len(x), -1, _SQUARES), 1, 0):
        squares += values * values
    while squares.shape[1] > 1:
        half = squares.shape[1] // 2
        squares = squares[:, :half] + squares[:, half:]
    factor = np.float32(1) / np.sqrt(squares / np.float32(n) + np.float32(epsilon))
    scaled: Floats = (x * factor) * weight
    return scaled
