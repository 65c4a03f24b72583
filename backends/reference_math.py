"""The functions of a forward pass in plain numpy, written like the papers. All in float32."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgeinfer.models import Activation, RopeSpec

Floats = NDArray[np.float32]


def rms_norm(x: Floats, weight: Floats, epsilon: float) -> Floats:
    """x / sqrt(mean(x^2) + epsilon) * weight, by row (Zhang and Sennrich, arXiv:1910.07467). x: (n, n_embd)."""
    root: Floats = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(epsilon))
    return x / root * weight


def rotate(x: Floats, positions: NDArray[np.intp], rope: RopeSpec) -> Floats:
    """Heads with their position turned in. x: (n, heads, head_dim), positions: (n,); see RopeSpec."""
    angles = positions[:, None] * np.array(rope.inverse_frequencies)  # (n, n_dims / 2), float64
    cosine = (np.cos(angles) * rope.magnitude).astype(np.float32)[:, None]
    sine = (np.sin(angles) * rope.magnitude).astype(np.float32)[:, None]
    half = rope.n_dims // 2
    first, second = {
        "interleaved": (slice(0, rope.n_dims, 2), slice(1, rope.n_dims, 2)),
        "halves": (slice(0, half), slice(half, rope.n_dims)),
    }[rope.kind]
    turned = x.copy()
    turned[..., first] = x[..., first] * cosine - x[..., second] * sine
    turned[..., second] = x[..., first] * sine + x[..., second] * cosine
    return turned


def attend(
    q: Floats,
    keys: NDArray[np.floating],
    values: NDArray[np.floating],
    score_cap: float | None = None,
    sinks: Floats | None = None,
) -> Floats:
    """Attention of one token: softmax(soft_cap(q k)) v, (n_heads, numbers of a value).

    q: (n_heads, head_dim), scaled.  keys, values: (t, n_kv_heads, n), those that the token sees. With fewer
    heads of keys than of queries, each serves a group of consecutive queries (Ainslie et al., arXiv:2305.13245).
    sinks: (n_heads,), one more score of each head, which has no value.
    """
    n_heads, head_dim = q.shape
    n_kv_heads = keys.shape[1]
    groups = q.reshape(n_kv_heads, n_heads // n_kv_heads, head_dim)
    k, v = keys.astype(np.float32).transpose(1, 2, 0), values.astype(np.float32).transpose(1, 0, 2)
    scores = soft_cap(groups @ k, score_cap)  # (n_kv_heads, group, t)
    if sinks is not None:
        scores = np.concatenate([scores, sinks.reshape(*scores.shape[:2], 1)], axis=-1)
    weights: Floats = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights[..., : len(keys)] @ v).reshape(n_heads, -1)


def scale(x: Floats, factor: float) -> Floats:
    """x * factor, the factor rounded to float32; x itself where that is 1."""
    return x if factor == 1.0 else x * np.float32(factor)


def soft_cap(x: Floats, cap: float | None) -> Floats:
    """cap * tanh(x * (1 / cap)), in float32, 1 / cap rounded once (Bello et al., arXiv:1611.09940); x where it is None.

    For an engine with an exp of its own: tanh(y) = (1 - t) / (1 + t), t = exp(-2 |y|), with the sign of y; its error
    is 1e-7, here 1e-7 * cap.
    """
    if cap is None:
        return x
    y: Floats = np.tanh(x * np.float32(1 / cap)) * np.float32(cap)
    return y


def relu2(x: Floats) -> Floats:
    """max(x, 0)^2 (So et al., arXiv:2109.08668)."""
    y: Floats = np.square(np.maximum(x, np.float32(0)))
    return y


def silu(x: Floats) -> Floats:
    """x * sigmoid(x) = x / (1 + exp(-x))."""
    with np.errstate(over="ignore"):  # far below zero x / inf is right
        y: Floats = x / (1 + np.exp(-x))
    return y


def gelu_tanh(x: Floats) -> Floats:
    """x (1 + tanh(u)) / 2, u = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks and Gimpel, arXiv:1606.08415, section 2).

    Computed as x / (1 + exp(-2 u)), which is silu with another exponent: -2 u = -x * (a + b * (x * x)) in float32,
    a = 2 sqrt(2 / pi) and b = 0.044715 a rounded once.
    """
    a = np.float32(2 * math.sqrt(2 / math.pi))
    b = np.float32(0.044715 * 2 * math.sqrt(2 / math.pi))
    with np.errstate(over="ignore"):
        y: Floats = x / (1 + np.exp(-x * (a + b * (x * x))))
    return y


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x))."""
    with np.errstate(over="ignore"):  # far below zero 1 / inf is right
        y: Floats = np.ones_like(x) / (1 + np.exp(-x))
    return y


def softplus(x: Floats) -> Floats:
    """ln(1 + exp(x)); x itself above 20, as in torch and ggml."""
    y: Floats = np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, np.float32(20)))))
    return y


def clamped_swiglu(gate: Floats, up: Floats) -> Floats:
    """g sigmoid(1.702 g) (u + 1) with g = min(gate, 7), u = up within -7..7 (gpt-oss, arXiv:2508.10925)."""
    limit = np.float32(7)
    g: Floats = np.minimum(gate, limit)
    u: Floats = np.clip(up, -limit, limit)
    y: Floats = g * sigmoid(g * np.float32(1.702)) * (u + np.float32(1))
    return y


_ACTIVATIONS: dict[Activation, Callable[[Floats], Floats]] = {"silu": silu, "gelu_tanh": gelu_tanh, "relu2": relu2}


def activated(activation: Activation, x: Floats) -> Floats:
    """What a network without a gate makes of x; see Activation."""
    return _ACTIVATIONS[activation](x)


def gated(activation: Activation, gate: Floats, up: Floats) -> Floats:
    """What a gated network makes of gate and up; see Activation."""
    return clamped_swiglu(gate, up) if activation == "clamped_swiglu" else _ACTIVATIONS[activation](gate) * up


def round_activations(x: Floats, block: int) -> Floats:
    """x rounded to 8 bits in blocks along each row: a * scale, a = round(x * 127 / max|x|), scale = max|x| / 127.

    Half rounds to even; all in float32. Blocks below 1e-30, whose inverse would overflow, become zeros.
    x: (n, n_in), n_in a multiple of block.
    """
    blocks = x.reshape(len(x), x.shape[1] // block, block)
    largest: Floats = np.abs(blocks).max(axis=-1, keepdims=True)
    inverse: Floats = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest >= 1e-30)
    codes: Floats = np.rint(blocks * inverse)
    return (codes * (largest / np.float32(127))).reshape(x.shape)
