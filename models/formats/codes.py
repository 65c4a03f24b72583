"""Quantised weights as codes with scales, and the steps that several formats share.

In the drawings of the formats a block is a row of bytes from left to right, `d` and `m` (`dmin`) are little-endian
float16, and q[k] is the code of weight k. "low" and "high" are the halves of a byte, bits 0-3 and 4-7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Codes:
    """Quantised weights in runs that share a scale: w = scale code + minimum."""

    values: NDArray[np.int8]  # (n_runs, run) int8, in the order of the weights
    # scales, minimums: (n_runs, 1) float32, or (1, 1) for all; minimums is None where there are none
    scales: Floats
    minimums: Floats | None = None

    def weights(self) -> Floats:
        """(n_runs, run) float32."""
        weights: Floats = self.scales * self.values
        return weights if self.minimums is None else weights + self.minimums


# ---- Reading -----------------------------------------------------------------------------------------------------


def from_f16(data: Bytes) -> Floats:
    """float16 numbers of (n, 2 m) bytes: (n, m)."""
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


def nibbles(data: Bytes) -> Bytes:
    """(n, m) bytes: (n, 2 m) codes, first all low halves, then all high ones."""
    return np.hstack([data & 15, data >> 4])


def five_bits(high: Bytes, low: Bytes) -> Bytes:
    """(n, 4) bytes with a bit a code and (n, 16) with four bits: codes (n, 32)."""
    top: Bytes = np.unpackbits(high, axis=1, bitorder="little")
    return nibbles(low) + np.uint8(16) * top


def signed(codes: NDArray[np.integer[Any]], offset: int) -> NDArray[np.int8]:
    """Codes less an offset, in the same shape."""
    return codes.astype(np.int8) - np.int8(offset)


# ---- Writing -----------------------------------------------------------------------------------------------------


def as_f16(scales: Floats) -> Bytes:
    """(n_blocks, 2): the bytes of one float16 a block."""
    return scales.astype("<f2").reshape(-1, 1).view(np.uint8)
