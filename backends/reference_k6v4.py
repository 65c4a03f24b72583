"""What a k6v4 KV cache holds, in plain numpy: keys of 6 bits and values of 4, Hadamard transformed (see Attention and
native's kv_head.h and attention_block.cpp).

Scores of transformed queries with transformed keys are those of queries with keys. A bias of the keys is held as it is:
its turned values depend on the position only, not on the sequence.
"""

from __future__ import annotations

import numpy as np

from edgeinfer.backends.reference_math import Floats, round_activations


def hadamard(heads: Floats, is_back: bool) -> Floats:
    """The Walsh-Hadamard transform of heads (..., head_dim), in blocks of the largest power of two that divides it.

    is_back: of queries and of sums of values; there and back is the identity.
    """
    n = heads.shape[-1]
    block = n & -n
    y = heads.reshape(*heads.shape[:-1], n // block, block)
    half = 1
    while half < block:
        pairs = y.reshape(*y.shape[:-1], block // (2 * half), 2, half)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        y = np.stack([first + second, first - second], axis=-2).reshape(y.shape)
        half *= 2
    factor = 2.0 ** -((block.bit_length() - 1) // 2)
    scaled: Floats = y * np.float32(1 / (block * factor) if is_back else factor)
    return scaled.reshape(heads.shape)


def rounded(heads: Floats, top: int, step: int) -> Floats:
    """Heads as codes 0..top hold them: (step * code - step * top / 2) * scale, a scale for each head in bf16."""
    largest: Floats = np.abs(heads).max(axis=-1, keepdims=True)
    smallest_scale: Floats = largest / np.float32(step * (top + 1) / 2)
    bits = np.where(largest < 1e-30, np.float32(0), smallest_scale).astype(np.float32).view(np.uint32)
    scale = ((bits + np.uint32(0xFFFF)) >> np.uint32(16) << np.uint32(16)).view(np.float32)
    factor = np.divide(np.float32(1), np.float32(step) * scale, out=np.zeros_like(scale), where=scale > 0)
    places = (heads.astype(np.float64) * factor + top / 2).astype(np.float32)
    codes: Floats = np.rint(np.clip(places, 0, top))
    numbers: Floats = (np.float32(step) * codes - np.float32(step * top / 2)) * scale
    return numbers


def held_keys(keys: Floats, turned_bias: Floats | None) -> Floats:
    """Keys (n, n_kv_heads, head_dim) without their bias, and after each that bias turned to its position."""
    held = rounded(hadamard(keys, is_back=False), 63, 2)
    return held if turned_bias is None else np.concatenate([held, turned_bias], axis=-1)


def held_values(values: Floats) -> Floats:
    """Values (n, n_kv_heads, head_dim), transformed."""
    return rounded(hadamard(values, is_back=False), 15, 16)


def asking(queries: Floats, has_bias: bool) -> Floats:
    """Queries (n, n_heads, head_dim) for held keys: in 8 bits, and after each itself for the bias."""
    turned = hadamard(queries, is_back=True)
    codes = round_activations(turned.reshape(-1, queries.shape[-1]), queries.shape[-1]).reshape(queries.shape)
    return np.concatenate([codes, queries], axis=-1) if has_bias else codes
