"""Golden vectors of a ternary product: inputs that try extremes, and the exact results."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeinfer.hls.packing import Trits

Inputs = NDArray[np.int8]
_ROWS_BYTES = 32 << 20  # of weights in float32 at once
_EXACT = 1 << 24  # float32 holds all integers up to it


def golden_inputs(trits: Trits, n: int, seed: int) -> Inputs:
    """Activations (n, n_in) for a matrix: first three with extreme sums, then random ones.

    All -128; then what makes the sum of row 0 largest, 127 where its weight is 1 and -128 where it is -1; then -128 and
    127 in turn. The same arguments give the same numbers on every machine.
    """
    n_in = trits.shape[1]
    x = random_bytes(n * n_in, seed).view(np.int8).reshape(n, n_in)
    extremes = (
        np.full(n_in, -128),
        np.where(trits[0] == 1, 127, -128),
        np.where(np.arange(n_in) % 2 == 0, -128, 127),
    )
    for row, extreme in zip(x, extremes, strict=False):
        row[:] = extreme
    return x


def products(trits: Trits, x: Inputs) -> NDArray[np.int32]:
    """The exact sums x W^T, (n, n_out). trits: (n_out, n_in).  x: (n, n_in)."""
    n_out, n_in = trits.shape
    # Each partial sum is an integer that the type holds, so that the order of the sum does not matter.
    dtype = np.float32 if 128 * n_in <= _EXACT else np.float64
    y = np.empty((len(x), n_out), dtype=np.int32)
    columns, n_rows = x.astype(dtype).T, max(1, _ROWS_BYTES // (4 * max(1, n_in)))
    for first in range(0, n_out, n_rows):
        y[:, first : first + n_rows] = np.matmul(trits[first : first + n_rows].astype(dtype), columns).T
    return y


def random_bytes(n: int, seed: int) -> NDArray[np.uint8]:
    """n bytes of SplitMix64, the same on every machine (Steele et al., 2014, doi:10.1145/2714064.2660195)."""
    with np.errstate(over="ignore"):
        z = (np.arange(1, n // 8 + 2, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return z.astype("<u8").view(np.uint8)[:n].copy()
