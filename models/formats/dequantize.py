"""Weights of a GGUF tensor as float32, or as codes with scales, in plain numpy.

In the drawings a block is a row of bytes from left to right, `d` and `m` (`dmin`) are little-endian float16, and q[k]
is the code of weight k. "low" and "high" are the halves of a byte, bits 0-3 and 4-7.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import ShapeError, UnsupportedModel
from edgeinfer.models.gguf import I2_S_TAIL_BYTES, GGMLType

_Bytes = NDArray[np.uint8]
_Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Codes:
    """Quantised weights in runs that share a scale: w = scale code + minimum.

    values: (n_runs, run) int8, in the order of the weights.  scales, minimums: (n_runs, 1) float32, or (1, 1) for all;
    minimums is None where there are none.
    """

    values: NDArray[np.int8]
    scales: _Floats
    minimums: _Floats | None = None

    def weights(self) -> _Floats:
        """(n_runs, run) float32."""
        weights: _Floats = self.scales * self.values
        return weights if self.minimums is None else weights + self.minimums


def codes_of(type: GGMLType, data: NDArray[np.uint8]) -> Codes:
    """Codes of a quantised tensor, or of some rows of it. data: whole blocks as they stand in the file.

    Raises UnsupportedModel for a type that has no codes.
    """
    if type == GGMLType.I2_S:
        return _i2_s(data)
    if type not in _CODES_OF:
        raise UnsupportedModel(f"tensor type {type.name} has no codes; those with codes: {_names(_CODES_OF)}")
    return _CODES_OF[type](data.reshape(-1, type.block_bytes))


def dequantize(type: GGMLType, data: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The weights in float32, as an array of its own.

    data: (n_bytes,) as it stands in the file.  shape: of the tensor, rows are whole blocks.
    Raises UnsupportedModel for a type without a rule here, ShapeError if data and shape do not go together.
    """
    check_type(type)
    if not shape or shape[-1] % type.block_elements:
        raise ShapeError(f"rows of {type.name} must be a multiple of {type.block_elements}: found shape {shape}")
    n_bytes = type.n_bytes(math.prod(shape))
    if data.dtype != np.uint8 or data.shape != (n_bytes,):
        raise ShapeError(f"{type.name} {shape} needs {n_bytes} bytes: found {data.dtype} {data.shape}")
    if type in _FLOATS_OF:
        return _FLOATS_OF[type](data.reshape(-1, type.block_bytes)).reshape(shape)
    return codes_of(type, data).weights().reshape(shape)


def check_type(type: GGMLType) -> None:
    """Raises UnsupportedModel if there is no rule for this type."""
    known = [*_FLOATS_OF, *_CODES_OF, GGMLType.I2_S]
    if type not in known:
        raise UnsupportedModel(f"tensor type {type.name} is not supported; supported: {_names(known)}")


def _names(types: Iterable[GGMLType]) -> str:
    return ", ".join(sorted(type.name for type in types))


def _f16(data: _Bytes) -> _Floats:
    """float16 numbers of (n, 2 m) bytes: (n, m)."""
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


def _nibbles(data: _Bytes) -> _Bytes:
    """(n, m) bytes: (n, 2 m) codes, first all low halves, then all high ones."""
    return np.hstack([data & 15, data >> 4])


def _signed(codes: NDArray[np.integer[Any]], offset: int) -> NDArray[np.int8]:
    """Codes less an offset, in the same shape."""
    return codes.astype(np.int8) - np.int8(offset)


def _f32(blocks: _Bytes) -> _Floats:
    return blocks.copy().view("<f4").astype(np.float32, copy=False)


def _bf16(blocks: _Bytes) -> _Floats:
    """The upper half of a float32."""
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q8_0(blocks: _Bytes) -> Codes:
    """w = d q, q signed.

    ::

        | d | q[0] ... q[31] |        34 bytes
    """
    return Codes(blocks[:, 2:].view(np.int8), _f16(blocks[:, :2]))


def _q4_0(blocks: _Bytes) -> Codes:
    """w = d (q - 8).

    ::

        | d | byte i: low q[i], high q[i + 16], i = 0..15 |        18 bytes
    """
    return Codes(_signed(_nibbles(blocks[:, 2:]), 8), _f16(blocks[:, :2]))


def _q4_1(blocks: _Bytes) -> Codes:
    """w = d q + m.

    ::

        | d | m | byte i: low q[i], high q[i + 16], i = 0..15 |        20 bytes
    """
    return Codes(_signed(_nibbles(blocks[:, 4:]), 0), _f16(blocks[:, :2]), _f16(blocks[:, 2:4]))


def _q5_0(blocks: _Bytes) -> Codes:
    """w = d (q - 16).

    ::

        | d | bit k of 4 bytes: bit 4 of q[k] | byte i: low bits 0-3 of q[i], high of q[i + 16] |        22 bytes
    """
    return Codes(_signed(_five_bits(blocks[:, 2:6], blocks[:, 6:]), 16), _f16(blocks[:, :2]))


def _q5_1(blocks: _Bytes) -> Codes:
    """w = d q + m.

    ::

        | d | m | bit k of 4 bytes: bit 4 of q[k] | byte i: low bits 0-3 of q[i], high of q[i + 16] |        24 bytes
    """
    codes = _signed(_five_bits(blocks[:, 4:8], blocks[:, 8:]), 0)
    return Codes(codes, _f16(blocks[:, :2]), _f16(blocks[:, 2:4]))


def _five_bits(high: _Bytes, low: _Bytes) -> _Bytes:
    """(n, 4) bytes with a bit a code and (n, 16) with four bits: codes (n, 32)."""
    top: _Bytes = np.unpackbits(high, axis=1, bitorder="little")
    return _nibbles(low) + np.uint8(16) * top


def _q4_k(blocks: _Bytes) -> Codes:
    """w = d sc[j] q - dmin m[j] in sub-block j of 32, j = 0..7.

    ::

        | d | dmin | 12 bytes of scales, see _scales | 4 x 32 bytes |        144 bytes
        byte i of the p-th 32: low q[64p + i], high q[64p + 32 + i]: sub-blocks 2p and 2p + 1
    """
    scale, minimum = _scales(blocks)
    return Codes(_signed(_paired_nibbles(blocks[:, 16:]).reshape(-1, 32), 0), scale, -minimum)


def _q5_k(blocks: _Bytes) -> Codes:
    """w = d sc[j] q - dmin m[j] in sub-block j of 32, j = 0..7.

    ::

        | d | dmin | 12 bytes of scales, see _scales | 32 bytes | 4 x 32 bytes |        176 bytes
        bit j of byte i of the 32: bit 4 of q[32j + i].  4 x 32: bits 0-3 as in Q4_K
    """
    scale, minimum = _scales(blocks)
    high: _Bytes = np.unpackbits(blocks[:, None, 16:48], axis=1, bitorder="little")  # (n, 8, 32)
    codes = _paired_nibbles(blocks[:, 48:]) | high << 4
    return Codes(_signed(codes.reshape(-1, 32), 0), scale, -minimum)


def _paired_nibbles(data: _Bytes) -> _Bytes:
    """(n, 128) bytes: codes (n, 8, 32), where sub-blocks 2p and 2p + 1 share 32 bytes."""
    runs = data.reshape(-1, 4, 1, 32)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(-1, 8, 32)


def _scales(blocks: _Bytes) -> tuple[_Floats, _Floats]:
    """d sc[j] and dmin m[j], both (8 n, 1), from the first 16 bytes of a Q4_K or Q5_K block.

    ::

        bits       76 543210                     76 543210                      7654   3210
        byte j: sc[j+4] sc[j]     byte 4+j: m[j+4] m[j]     byte 8+j: m[j+4] sc[j+4]        j = 0..3
                bits 45  0-5               bits 45  0-5            bits 0-3  0-3
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    sc = np.hstack([first & 63, third & 15 | first >> 6 << 4])
    m = np.hstack([second & 63, third >> 4 | second >> 6 << 4])
    return (_f16(blocks[:, :2]) * sc).reshape(-1, 1), (_f16(blocks[:, 2:4]) * m).reshape(-1, 1)


def _q6_k(blocks: _Bytes) -> Codes:
    """w = d sc[k / 16] (q - 32), sc signed.

    ::

        | 2 x 64 bytes | 2 x 32 bytes | sc[0] ... sc[15] | d |        210 bytes
        half h has weights 128h + 0..127, in four runs of 32; run g, weight i of it:
        bits 0-3 in byte 32 (g mod 2) + i of the h-th 64, low for g < 2, else high
        bits 4-5 in bits 2g, 2g + 1 of byte i of the h-th 32
    """
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    shift = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shift & 3
    scale = _f16(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8)
    return Codes(_signed((low | high << 4).reshape(-1, 16), 32), scale.reshape(-1, 1))


def _tq1_0(blocks: _Bytes) -> Codes:
    """w = d t, t in {-1, 0, 1}.

    ::

        | 32 bytes: t[i + 32 n] | 16 bytes: t[160 + i + 16 n] | 4 bytes: t[240 + i + 4 n] | d |        54 bytes
        byte i = ceil(256 v / 243), where v has the digits t + 1 of n = 0, 1, ... in base three, the highest first;
        digits are carried out at the top: digit n is 3 (byte 3^n mod 256) / 256, rounded down
    """
    digits = []
    for first, last, n_digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = np.array([1, 3, 9, 27, 81], dtype=np.uint8)[:n_digits, None]
        shifted = blocks[:, None, first:last] * powers  # modulo 256
        digits.append((shifted.astype(np.uint16) * 3 >> 8).reshape(len(blocks), -1))
    return Codes(_signed(np.hstack(digits), 1), _f16(blocks[:, 52:]))


def _tq2_0(blocks: _Bytes) -> Codes:
    """w = d (q - 1), q in {0, 1, 2}.

    ::

        | 2 x 32 bytes | d |        66 bytes
        byte i of the h-th 32: bits 2n, 2n + 1 = q[128h + 32n + i], n = 0..3
    """
    shift = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    codes = blocks[:, :64].reshape(-1, 2, 1, 32) >> shift & 3
    return Codes(_signed(codes.reshape(-1, 256), 1), _f16(blocks[:, 64:]))


def _q2_0(blocks: _Bytes) -> Codes:
    """w = d (q - 1); the matrix is ternary where no q is 3.

    ::

        | d | byte i: bits 2n, 2n + 1 = q[4i + n], n = 0..3, i = 0..15 |        18 bytes
    """
    shift = np.array([0, 2, 4, 6], dtype=np.uint8)
    codes = blocks[:, 2:, None] >> shift & 3
    return Codes(_signed(codes.reshape(-1, 64), 1), _f16(blocks[:, :2]))


def _i2_s(data: _Bytes) -> Codes:
    """w = d (q - 1), q in {0, 1, 2}, with one float32 d for the whole tensor (bitnet.cpp).

    ::

        | 32 bytes | 32 bytes | ... | d | 28 bytes |
        byte i of the b-th 32: bits 6 - 2n, 7 - 2n = q[128b + 32n + i], n = 0..3
    """
    scale = data[-I2_S_TAIL_BYTES:][:4].copy().view("<f4")
    shift = np.array([6, 4, 2, 0], dtype=np.uint8)[:, None]
    codes = data[:-I2_S_TAIL_BYTES].reshape(-1, 1, 32) >> shift & 3
    return Codes(_signed(codes.reshape(-1, 128), 1), scale.astype(np.float32).reshape(1, 1))


# Each turns blocks (n, block_bytes) into weights (n, block_elements).
_FLOATS_OF: dict[GGMLType, Callable[[_Bytes], _Floats]] = {
    GGMLType.F32: _f32,
    GGMLType.F16: _f16,
    GGMLType.BF16: _bf16,
}
# Each turns blocks (n, block_bytes) into codes.
_CODES_OF: dict[GGMLType, Callable[[_Bytes], Codes]] = {
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
    GGMLType.TQ1_0: _tq1_0,
    GGMLType.TQ2_0: _tq2_0,
    GGMLType.Q2_0: _q2_0,
}
