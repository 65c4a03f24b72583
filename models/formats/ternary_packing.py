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
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import ShapeError

Trits = NDArray[np.int8]
Bytes = NDArray[np.uint8]
Scales = NDArray[np.float32]

ROWS = 16  # of a row group
LINE_BYTES = 64
TWO_BIT_INPUTS = 16  # of a line
BASE_THREE_INPUTS = 20

_SCALE_BYTES = 4 * ROWS
_POWERS = 3 ** np.arange(5, dtype=np.int32)


def pack_two_bit(trits: Trits, scales: Scales) -> Bytes:
    """Row groups (n_groups, bytes of a group) with two bits a weight.

    trits: (n_out, n_in).  scales: (n_out,). Raises ShapeError, also for a number that is no trit.
    """
    return _pack(trits, scales, TWO_BIT_INPUTS, _two_bit_bytes)


def unpack_two_bit(packed: Bytes, n_out: int, n_in: int) -> tuple[Trits, Scales]:
    """(trits, scales) of `pack_two_bit`. Raises ShapeError for another size, and for code 3, which is no trit."""
    return _unpack(packed, n_out, n_in, TWO_BIT_INPUTS, _two_bit_trits)


def pack_base_three(trits: Trits, scales: Scales) -> Bytes:
    """Row groups (n_groups, bytes of a group) with five trits a byte. See `pack_two_bit`."""
    return _pack(trits, scales, BASE_THREE_INPUTS, _base_three_bytes)


def unpack_base_three(packed: Bytes, n_out: int, n_in: int) -> tuple[Trits, Scales]:
    """(trits, scales) of `pack_base_three`. Raises ShapeError for another size, and for magnitudes above 121."""
    return _unpack(packed, n_out, n_in, BASE_THREE_INPUTS, _base_three_trits)


def packed_shape(n_out: int, n_in: int, inputs_of_line: int) -> tuple[int, int]:
    """(n_groups, bytes of a group). Raises ShapeError."""
    if n_out < 1 or n_in < 1:
        raise ShapeError(f"a matrix has at least one row and one input: found ({n_out}, {n_in})")
    return math.ceil(n_out / ROWS), _SCALE_BYTES + math.ceil(n_in / inputs_of_line) * LINE_BYTES


def _pack(trits: Trits, scales: Scales, inputs_of_line: int, bytes_of: Callable[[Trits], Bytes]) -> Bytes:
    """bytes_of: turns trits (n_groups, 16, n_lines, inputs of a line / 4, 4) into (n_groups, 16, n_lines, 4)."""
    _check_trits(trits, scales)
    n_out, n_in = trits.shape
    n_groups, group_bytes = packed_shape(n_out, n_in, inputs_of_line)
    n_lines = (group_bytes - _SCALE_BYTES) // LINE_BYTES
    padded = np.zeros((n_groups * ROWS, n_lines * inputs_of_line), dtype=np.int8)
    padded[:n_out, :n_in] = trits
    padded[:n_out, n_in:] = -1
    padded_scales = np.zeros(n_groups * ROWS, dtype="<f4")
    padded_scales[:n_out] = scales
    lines = bytes_of(padded.reshape(n_groups, ROWS, n_lines, inputs_of_line // 4, 4)).transpose(0, 2, 1, 3)
    return np.hstack([padded_scales.view(np.uint8).reshape(n_groups, -1), lines.reshape(n_groups, -1)])


def _unpack(
    packed: Bytes, n_out: int, n_in: int, inputs_of_line: int, trits_of: Callable[[Bytes], Trits]
) -> tuple[Trits, Scales]:
    """trits_of: the inverse of bytes_of in `_pack`."""
    shape = packed_shape(n_out, n_in, inputs_of_line)
    if packed.dtype != np.uint8 or packed.shape != shape:
        raise ShapeError(
            f"({n_out}, {n_in}) must be packed as uint8 {shape}: found {packed.dtype} {packed.shape}; it is cut short "
            f"or of another matrix"
        )
    scales = np.ascontiguousarray(packed[:, :_SCALE_BYTES]).view("<f4").astype(np.float32).reshape(-1)
    lines = packed[:, _SCALE_BYTES:].reshape(shape[0], -1, ROWS, 4).transpose(0, 2, 1, 3)
    trits = trits_of(lines).reshape(shape[0] * ROWS, -1)
    return np.ascontiguousarray(trits[:n_out, :n_in]), scales[:n_out]


def _check_trits(trits: Trits, scales: Scales) -> None:
    if trits.ndim != 2 or trits.dtype != np.int8:
        raise ShapeError(f"trits must be int8 (n_out, n_in): found {trits.dtype} {trits.shape}")
    if scales.shape != trits.shape[:1] or scales.dtype != np.float32:
        raise ShapeError(f"scales must be float32 {trits.shape[:1]}, one a row: found {scales.dtype} {scales.shape}")
    if trits.size and (trits.min() < -1 or trits.max() > 1):
        raise ShapeError(f"trits must be -1, 0 or 1: found {trits.min()}..{trits.max()}; this matrix is not ternary")


def _two_bit_bytes(trits: Trits) -> Bytes:
    codes = (trits + 1).astype(np.uint8) << np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    packed: Bytes = np.bitwise_or.reduce(codes, axis=3)
    return packed


def _two_bit_trits(lines: Bytes) -> Trits:
    codes = lines[:, :, :, None, :] >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None] & np.uint8(3)
    if (codes == 3).any():
        raise ShapeError("the codes of a ternary matrix are 0, 1 and 2: found 3; this matrix is not ternary or damaged")
    return codes.astype(np.int8) - np.int8(1)


def _base_three_bytes(trits: Trits) -> Bytes:
    values = (trits * _POWERS[:, None]).sum(axis=3)
    packed: Bytes = (np.abs(values) | (values < 0) << 7).astype(np.uint8)
    return packed


def _base_three_trits(lines: Bytes) -> Trits:
    magnitudes = (lines & np.uint8(0x7F)).astype(np.int32)
    if magnitudes.size and magnitudes.max() > 121:
        raise ShapeError(f"five trits make at most 121: found {magnitudes.max()}; this matrix is damaged")
    values = np.where(lines >> 7, -magnitudes, magnitudes)
    digits = (values[:, :, :, None, :] + 121) // _POWERS[:, None] % 3  # 121 = 11111 in base three: all digits are t + 1
    return digits.astype(np.int8) - np.int8(1)
