"""The arithmetic of the HLS attention kernels (`include/ei_attention.hpp`) in numpy, operation by operation.

All is float32 with each operation rounded by itself, so the kernels must give the same bits. Positions are summed from
the newest to the oldest.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]

_ONE = np.float32(1)
_FACTORS = [_ONE / np.float32(n) for n in (720, 120, 24, 6)] + [np.float32(0.5), _ONE, _ONE]  # of a series of e^r


def exp_of_negative(x: Floats) -> Floats:
    """e^x of numbers up to 0, within two units in the last place; 0 below -87."""
    is_zero = x < -87
    x = np.maximum(x, np.float32(-87))
    n = np.trunc(x * np.float32(1.44269504) - np.float32(0.5))
    r = (x - n * np.float32(0.693359375)) - n * np.float32(-2.12194440e-4)
    p = np.full_like(x, _FACTORS[0])
    for factor in _FACTORS[1:]:
        p = p * r + factor
    exponents = (n.astype(np.int32) + 127).astype(np.uint32)
    powers: Floats = (exponents << np.uint32(23)).view(np.float32)
    found: Floats = np.where(is_zero, np.float32(0), p * powers)
    return found


def pairwise_sum(x: Floats) -> Floats:
    """Sums over the last axis as a tree of neighbours, filled up with zeros to a power of two."""
    n = 1 << (x.shape[-1] - 1).bit_length()
    x = np.concatenate([x, np.zeros((*x.shape[:-1], n - x.shape[-1]), np.float32)], axis=-1)
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    total: Floats = x[..., 0]
    return total


def decode_attention(q: Floats, keys: Halves, values: Halves, scale: float) -> Floats:
    """Attention (n_heads, head_dim) of one token, which sees all positions.

    q: (n_heads, head_dim).  keys, values: (n_kv_heads, n_positions, head_dim).
    """
    group = len(q) // len(keys)
    k = np.repeat(keys.astype(np.float32), group, axis=0)
    v = np.repeat(values.astype(np.float32), group, axis=0)
    scores = pairwise_sum(q[:, None, :] * k) * np.float32(scale)
    weights = exp_of_negative(scores - scores.max(axis=1, keepdims=True))
    total, out = np.zeros((len(q), 1), np.float32), np.zeros_like(q)
    for j in reversed(range(keys.shape[1])):
        total = total + weights[:, j, None]
        out = out + weights[:, j, None] * v[:, j]
    result: Floats = out / total
    return result


def prefill_attention(q: Floats, keys: Halves, values: Halves, scale: float, first: int = 0) -> Floats:
    """Attention (n_tokens, n_heads, head_dim) of tokens at positions first and on.

    Each sees the positions up to its own.  q: (n_tokens, n_heads, head_dim).  keys, values: (n_kv_heads, first +
    n_tokens, head_dim).
    """
    rows = [
        decode_attention(row, keys[:, : first + token + 1], values[:, : first + token + 1], scale)
        for token, row in enumerate(q)
    ]
    return np.stack(rows)


def write_golden(
    folder: Path, q: Floats, keys: Halves, values: Halves, scale: float, first: int, n_positions: int
) -> None:
    """Write what `tb/tb_attention.cpp` reads: inputs, and outputs of tokens at positions first and on.

    q: (n_tokens, n_heads, head_dim).  keys, values: (n_kv_heads, stride, head_dim), n_positions of the stride in use.
    """
    out = prefill_attention(q, keys[:, :n_positions], values[:, :n_positions], scale, first)
    n_kv, stride, head_dim = keys.shape
    shape = np.array([head_dim, q.shape[1] // n_kv, n_kv, first, len(q), stride], "<i4")
    arrays = {"shape": shape, "scale": np.array([scale], "<f4"), "q": q, "keys": keys, "values": values, "out": out}
    for name, array in arrays.items():
        array.astype(array.dtype.newbyteorder("<")).tofile(folder / f"{name}.bin")
