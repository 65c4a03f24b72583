"""Gated delta nets, Mamba2 and short convolutions in plain numpy, in the order of the papers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.reference_math import Floats, rms_norm, sigmoid, silu, softplus
from edgeinfer.common.settings import CacheType
from edgeinfer.models import GatedDeltaNet, Mamba2, ShortConv

if TYPE_CHECKING:
    from edgeinfer.backends.reference import LayerRows, ReferenceDecoder

StateArrays = list[tuple[tuple[int, ...], np.dtype[Any]]]
_FLOAT32 = np.dtype(np.float32)


class ReferenceGatedDeltaNet:
    """See ReferenceMixer. Its state is what goes into the convolution, and S after each token: (n_value_heads, head_dim
    of k, head_dim of v).
    """

    fields = (
        *("n_embd", "n_conv", "conv", "n_key_heads", "n_value_heads", "head_dim", "key_heads", "qkv", "gate", "decay"),
        *("step_bias", "out_norm", "output", "norm", "beta", "alpha", "beta_alpha"),
    )

    def state(self, block: GatedDeltaNet, n_ctx: int, cache_type: CacheType) -> StateArrays:
        """See ReferenceMixer. The type of the KV cache is not its own."""
        of_token = (block.n_value_heads, block.head_dim, block.head_dim)
        return [((n_ctx, block.n_channels), _FLOAT32), ((n_ctx, *of_token), _FLOAT32)]

    def run(self, block: GatedDeltaNet, decoder: ReferenceDecoder, x: Floats, at: LayerRows) -> Floats:
        """See ReferenceMixer."""
        h = decoder.norm(block.norm, x)
        rows, states = at.state
        mixed = silu(convolved(decoder.linear(block.qkv, None, h), decoder.values_of(block.conv), rows, at.paths))
        z = decoder.linear(block.gate, None, h).reshape(len(x), block.n_value_heads, block.head_dim)
        q, k, v = _queries_keys_values(block, mixed, decoder.decoder.norm_epsilon)
        b, a = _steps(block, decoder, h)
        rate = softplus(a + decoder.values_of(block.step_bias)) * decoder.values_of(block.decay)
        decays, betas = np.exp(rate), sigmoid(b)
        y = np.empty_like(z)
        for i, path in enumerate(at.paths):
            decoder.poll()
            before = states[path[-2]] if len(path) > 1 else np.zeros_like(states[0])
            states[path[-1]], y[i] = delta_step(before, q[i], k[i], v[i], decays[i], betas[i])
        y = rms_norm(y, decoder.values_of(block.out_norm), decoder.decoder.norm_epsilon) * silu(z)
        return decoder.linear(block.output, None, y.reshape(len(x), -1))


class ReferenceMamba2:
    """See ReferenceMixer. Its state is what goes into the convolution, and S after each token: (n_heads, n_per_key,
    head_dim).
    """

    fields = (
        *("n_embd", "n_conv", "conv", "n_heads", "head_dim", "n_groups", "n_per_key", "input", "decay", "skip"),
        *("step_bias", "output", "norm", "conv_bias", "out_norm"),
    )

    def state(self, block: Mamba2, n_ctx: int, cache_type: CacheType) -> StateArrays:
        """See ReferenceMixer. The type of the KV cache is not its own."""
        of_token = (block.n_heads, block.n_per_key, block.head_dim)
        return [((n_ctx, block.n_channels), _FLOAT32), ((n_ctx, *of_token), _FLOAT32)]

    def run(self, block: Mamba2, decoder: ReferenceDecoder, x: Floats, at: LayerRows) -> Floats:
        """See ReferenceMixer."""
        n, n_v, n_k = len(x), block.n_v, block.n_k
        product = decoder.linear(block.input, None, decoder.norm(block.norm, x))
        z, u, t = np.split(product, [n_v, n_v + block.n_channels], axis=1)
        rows, states = at.state
        mixed = convolved(u, decoder.values_of(block.conv), rows, at.paths)
        mixed = silu(mixed if block.conv_bias is None else mixed + decoder.values_of(block.conv_bias))
        v = mixed[:, :n_v].reshape(n, block.n_heads, block.head_dim)
        b, c = (each.reshape(n, block.n_groups, -1) for each in np.split(mixed[:, n_v:], [n_k], axis=1))
        groups = np.arange(block.n_heads) // (block.n_heads // block.n_groups)
        decay, skip = (decoder.values_of(each).reshape(-1) for each in (block.decay, block.skip))
        steps = softplus(t + decoder.values_of(block.step_bias))
        decays = np.exp(steps * decay)
        y = np.empty_like(v)
        for i, path in enumerate(at.paths):
            decoder.poll()
            before = states[path[-2]] if len(path) > 1 else np.zeros_like(states[0])
            scaled = steps[i][:, None] * v[i]
            states[path[-1]], read = mamba_step(before, c[i, groups], b[i, groups], scaled, decays[i])
            y[i] = read + skip[:, None] * v[i]
        out = (y.reshape(n, -1) * silu(z)).reshape(n, block.n_groups, -1)
        if block.out_norm is not None:
            weights = decoder.values_of(block.out_norm).reshape(block.n_groups, -1)
            out = rms_norm(out, weights, decoder.decoder.norm_epsilon)
        return decoder.linear(block.output, None, out.reshape(n, -1))


class ReferenceShortConv:
    """See ReferenceMixer. Its state is what goes into the convolution, b * u."""

    fields = ("n_embd", "n_conv", "conv", "input", "output", "norm")

    def state(self, block: ShortConv, n_ctx: int, cache_type: CacheType) -> StateArrays:
        """See ReferenceMixer."""
        return [((n_ctx, block.n_embd), _FLOAT32)]

    def run(self, block: ShortConv, decoder: ReferenceDecoder, x: Floats, at: LayerRows) -> Floats:
        """See ReferenceMixer."""
        b, c, u = np.split(decoder.linear(block.input, None, decoder.norm(block.norm, x)), 3, axis=1)
        (rows,) = at.state
        y: Floats = c * convolved(b * u, decoder.values_of(block.conv), rows, at.paths)
        return decoder.linear(block.output, None, y)


def convolved(
    u: Floats, weights: Floats, rows: NDArray[np.floating], paths: Sequence[NDArray[np.intp]]
) -> NDArray[np.float32]:
    """Each channel of u (n, n_channels) convolved over time, with zeros before the text; u goes into its slots.

    weights: (n_channels, n_conv), the last column on the newest token.  rows: (n_ctx, n_channels), by slot.  paths:
    see LayerRows.
    """
    rows[[path[-1] for path in paths]] = u
    n_conv = weights.shape[1]
    y = np.zeros_like(u)
    for i, path in enumerate(paths):
        seen = path[-n_conv:]
        for column, slot in zip(range(n_conv - len(seen), n_conv), seen, strict=True):
            y[i] += weights[:, column] * rows[slot]
    return y


def delta_step(
    state: NDArray[np.floating], q: Floats, k: Floats, v: Floats, decay: Floats, beta: Floats
) -> tuple[Floats, Floats]:
    """The state after a token, and what is read from it: (n_heads, head_dim, head_dim) and (n_heads, head_dim).

    q, k, v: (n_heads, head_dim).  decay, beta: (n_heads,), by value head. Equation 10 of arXiv:2412.06464, with the
    state transposed.
    """
    decayed: Floats = state * decay[:, None, None]
    d = beta[:, None] * (v - (k[:, None] @ decayed)[:, 0])
    after: Floats = decayed + k[:, :, None] * d[:, None]
    return after, (q[:, None] @ after)[:, 0]


def mamba_step(state: NDArray[np.floating], c: Floats, b: Floats, v: Floats, decay: Floats) -> tuple[Floats, Floats]:
    """The state after a token, and what is read from it: (n_heads, n_per_key, head_dim) and (n_heads, head_dim).

    c, b: (n_heads, n_per_key).  v: (n_heads, head_dim), scaled by its step.  decay: (n_heads,). Equation 1 of
    arXiv:2405.21060 after its discretisation, with the state transposed.
    """
    after: Floats = state * decay[:, None, None] + b[:, :, None] * v[:, None]
    return after, (c[:, None] @ after)[:, 0]


def _queries_keys_values(block: GatedDeltaNet, mixed: Floats, epsilon: float) -> tuple[Floats, Floats, Floats]:
    """(n, n_value_heads, head_dim) each; queries and keys are those of the key head that each value head reads."""
    n, key_heads = len(mixed), [block.key_head(head) for head in range(block.n_value_heads)]
    q, k, v = np.split(mixed, [block.n_k, 2 * block.n_k], axis=1)

    def unit(heads: Floats) -> Floats:
        by_head = heads.reshape(n, block.n_key_heads, block.head_dim)
        length = np.sqrt((by_head * by_head).sum(axis=-1, keepdims=True) + np.float32(epsilon))
        found: Floats = (by_head / length)[:, key_heads]
        return found

    return unit(q) * np.float32(block.head_dim**-0.5), unit(k), v.reshape(n, block.n_value_heads, block.head_dim)


def _steps(block: GatedDeltaNet, decoder: ReferenceDecoder, h: Floats) -> tuple[Floats, Floats]:
    """b and a of each value head, (n, n_value_heads) each."""
    if block.beta_alpha is not None:
        both = decoder.linear(block.beta_alpha, None, h).reshape(len(h), block.n_key_heads, 2, -1)
        return both[:, :, 0].reshape(len(h), -1), both[:, :, 1].reshape(len(h), -1)
    assert block.beta is not None and block.alpha is not None  # files have these, or the one matrix
    return decoder.linear(block.beta, None, h), decoder.linear(block.alpha, None, h)
