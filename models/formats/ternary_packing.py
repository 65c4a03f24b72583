"""The packed formats of a ternary matrix: trits t in {-1, 0, 1} with one scale a row, weight = t * scale.

Both are made of row groups, 16 rows each, one contiguous run of bytes a group. A group begins with the 16 scales as
little-endian float32, 64 bytes; lines of 64 bytes follow, 4 bytes a row, so that a vector lane of 32 bits sums one row
and nothing is summed across a vector. Rows past n_out have trits 0 and scale 0. Inputs past n_in have trits -1, whose
code is 0: whatever activations stand there count nothing.

Two bits a weight, a line has 16 inputs (for dot products of unsigned bytes: vpdpbusd, usdot, sdot)::

    byte 4 * row + b of line i, codes t + 1:
        bits   7   6   5   4   3   2   1   0
             k=16i+12+b k=16i+8+b k=16i+4+b  k=16i+b              b = 0..3

Base three, five trits a byte, 1.6 bits a weight, a line has 20 inputs; v = sum of t[j] 3^j, j = 0..4, |v| <= 121::

    byte 4 * row + b of line i, t[j] = trit at k = 20i + 4j + b:
        bit    7     6 ... 0
            v < 0      |v|                                        b = 0..3

Sign and magnitude, because 122 magnitudes fit into a table of 128 bytes, which a CPU with vpermi2b looks up in two
registers; the trits of -v are those of v with their signs turned.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import ShapeError

Bytes = NDArray[np.uint8]
Scales = NDArray[np.float32]

ROWS = 16  # of a row group
LINE_BYTES = 64
TWO_BIT_INPUTS = 16  # of a line
BASE_THREE_INPUTS = 20

SCALE_BYTES = 4 * ROWS


def packed_shape(n_out: int, n_in: int, inputs_of_line: int) -> tuple[int, int]:
    """(n_groups, bytes of a group). Raises ShapeError."""
    if n_out < 1 or n_in < 1:
        raise ShapeError(f"a matrix has at least one row and one input: found ({n_out}, {n_in})")
    return math.ceil(n_out / ROWS), SCALE_BYTES + math.ceil(n_in / inputs_of_line) * LINE_BYTES
