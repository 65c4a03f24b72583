"""Attention in plain numpy, for the reference backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends import reference_k6v4 as k6v4
from edgeinfer.backends.query_scales import QueryScales
from edgeinfer.backends.reference_math import (
    Floats,
    attend,
    rms_norm,
    rotate,
    round_activations,
    sigmoid,
    softplus,
)
from edgeinfer.common.settings import CacheType
from edgeinfer.models import Attention, TensorRef

if TYPE_CHECKING:
    from edgeinfer.backends.reference import LayerRows, ReferenceDecoder

_CACHE_DTYPES: dict[CacheType, type[np.floating]] = {"f16": np.float16, "q8_0": np.float32, "k6v4": np.float32}


class ReferenceAttention:
    """See ReferenceMixer. Its state is keys, after rope, and values: (n_ctx, n_kv_heads, numbers) each."""

    fields = (
        *("n_embd", "n_in", "n_heads", "n_kv_heads", "head_dim", "scale", "q", "k", "v", "output", "rope", "window"),
        *("soft_cap", "query_temperature", "qk_norm", "norm", "post_norm", "sub_norm", "q_norm", "k_norm"),
        *("q_bias", "k_bias", "v_bias", "output_bias", "sinks", "output_gate", "gate"),
        *("gate_function", "post_norm_epsilon", "normed_values", "kv_of", "of_target"),
    )

    def state(self, block: Attention, n_ctx: int, cache_type: CacheType) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        """See ReferenceMixer. k6v4 holds biases of keys apart, after each key."""
        if not block.has_own_keys:
            return []
        dtype = np.dtype(_CACHE_DTYPES[cache_type])
        n_key = block.head_dim * (2 if _separate_bias(block, cache_type) is not None else 1)
        return [((n_ctx, block.n_kv_heads, n), dtype) for n in (n_key, block.head_dim)]

    def run(self, block: Attention, decoder: ReferenceDecoder, x: Floats, at: LayerRows) -> Floats:
        """See ReferenceMixer."""
        bias = _separate_bias(block, at.cache_type)
        h = decoder.norm(block.norm, x) if at.inputs is None else at.inputs
        q, k, v, gate = _queries_keys_values(block, decoder, h, block.k_bias if bias is None else None)
        positions = np.array([len(path) - (not block.of_target) for path in at.paths])

        def turned(heads: Floats) -> Floats:
            return heads if block.rope is None else rotate(heads, positions, block.rope.of_context(at.n_ctx))

        q, k = turned(q), turned(k)
        q = q * QueryScales.of(block, at.n_ctx).at(positions)[:, None, None]
        if at.cache_type == "q8_0":
            q, k, v = (rounded_heads(each) for each in (q, k, v))
        elif at.cache_type == "k6v4":
            biases = (
                None if bias is None else turned(np.broadcast_to(decoder.values_of(bias).reshape(k[0].shape), k.shape))
            )
            q, k, v = k6v4.asking(q, bias is not None), k6v4.held_keys(k, biases), k6v4.held_values(v)
        y = _attended(block, decoder, q, k, v, at)
        if at.cache_type == "k6v4":
            y = k6v4.hadamard(y, is_back=True)
        if gate is not None:
            y = y * {"sigmoid": sigmoid, "softplus": softplus}[block.gate_function](gate)
        heads = decoder.norm(block.sub_norm, y.reshape(len(x), -1))
        added = decoder.linear(block.output, block.output_bias, heads)
        return decoder.norm(block.post_norm, added, block.post_norm_epsilon)


def rounded_heads(heads: Floats) -> Floats:
    """Heads (n, n_heads, head_dim) as a cache of q8_0 holds them."""
    return round_activations(heads.reshape(-1, heads.shape[-1]), 32).reshape(heads.shape)


def _separate_bias(block: Attention, cache_type: CacheType) -> TensorRef | None:
    """The bias of keys that is not part of the keys in the cache."""
    return block.separate_key_bias if cache_type == "k6v4" else None


def _attended(block: Attention, decoder: ReferenceDecoder, q: Floats, k: Floats, v: Floats, at: LayerRows) -> Floats:
    """Keys and values into the cache, and what the queries see there, (n, n_heads, head_dim)."""
    keys, values = at.state
    if block.has_own_keys:
        slots = [path[-1] for path in at.paths]
        keys[slots], values[slots] = k, v
    sinks = None if block.sinks is None else decoder.values_of(block.sinks)
    y = np.empty((len(q), block.n_heads, block.head_dim), dtype=np.float32)
    for i, path in enumerate(at.paths):
        decoder.poll()
        n_seen = len(path) if block.window is None else block.window - block.of_target
        seen: NDArray[np.intp] = path[max(0, len(path) - n_seen) :]
        y[i] = attend(q[i], keys[seen], values[seen], block.soft_cap, sinks)
    return y


def _queries_keys_values(
    block: Attention, decoder: ReferenceDecoder, h: Floats, key_bias: TensorRef | None
) -> tuple[Floats, Floats, Floats, Floats | None]:
    """(n, heads, head_dim) each, with norms on queries and keys where the block has them; and the gates, if any."""
    q = decoder.linear(block.q, block.q_bias, h)
    k, v = _keys_values(block, decoder, h, key_bias)
    gate = None
    if block.output_gate == "in_q":
        both = q.reshape(len(h), block.n_heads, 2, block.head_dim)
        q, gate = both[:, :, 0].reshape(len(h), -1), both[:, :, 1]
    elif block.gate is not None:  # (n, n_heads, 1) or (n, n_heads, head_dim)
        gate = decoder.linear(block.gate, None, h).reshape(len(h), block.n_heads, -1)
    if block.qk_norm == "whole":
        q, k = decoder.norm(block.q_norm, q), decoder.norm(block.k_norm, k)
    q, k, v = (rows.reshape(len(h), -1, block.head_dim) for rows in (q, k, v))
    if block.normed_values:
        v = rms_norm(v, np.ones(block.head_dim, np.float32), decoder.decoder.norm_epsilon)
    if block.qk_norm == "per_head":
        q = decoder.norm(block.q_norm, q)
        k = decoder.norm(block.k_norm, k) if block.has_own_keys else k
    return q, k, v, gate


def _keys_values(
    block: Attention, decoder: ReferenceDecoder, h: Floats, key_bias: TensorRef | None
) -> tuple[Floats, Floats]:
    """(n, n_kv) each; of a layer that reads those of another one zeros, which are not stored."""
    if not block.has_own_keys:
        nothing = np.zeros((len(h), block.n_kv), np.float32)
        return nothing, nothing
    k = decoder.linear(block.k, key_bias, h)
    return k, decoder.linear(block.v, block.v_bias, h) if block.has_own_values else k
