"""The packed formats of a ternary matrix in numpy, as edgeinfer.models.formats.ternary_packing draws them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import ShapeError
from edgeinfer.models.formats.ternary_packing import (
    BASE_THREE_INPUTS,
    LINE_BYTES,
    ROWS,
    SCALE_BYTES,
    TWO_BIT_INPUTS,
    Bytes,
    Scales,
    packed_shape,
)

Trits = NDArray[np.int8]
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


def _pack(trits: Trits, scales: Scales, inputs_of_line: int, bytes_of: Callable[[Trits], Bytes]) -> Bytes:
    """bytes_of: turns trits (n_groups, 16, n_lines, inputs of a line / 4, 4) into (n_groups, 16, n_lines, 4)."""
    _check_trits(trits, scales)
    n_out, n_in = trits.shape
    n_groups, group_bytes = packed_shape(n_out, n_in, inputs_of_line)
    n_lines = (group_bytes - SCALE_BYTES) // LINE_BYTES
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
    scales = np.ascontiguousarray(packed[:, :SCALE_BYTES]).view("<f4").astype(np.float32).reshape(-1)
    lines = packed[:, SCALE_BYTES:].reshape(shape[0], -1, ROWS, 4).transpose(0, 2, 1, 3)
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
