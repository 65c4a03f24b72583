"""Latent attention in plain numpy, for the reference backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from edgeinfer.backends.reference_math import Floats, attend, rotate, round_activations
from edgeinfer.common.settings import CacheType
from edgeinfer.models import LatentAttention, TensorRef, TensorRows

if TYPE_CHECKING:
    from edgeinfer.backends.reference import LayerRows, ReferenceDecoder

_CACHE_DTYPES: dict[CacheType, type[np.floating]] = {"f16": np.float16, "q8_0": np.float32}


class ReferenceLatentAttention:
    """See ReferenceMixer. Its state is the rows, (n_ctx, 1, n_row)."""

    fields = (
        *("n_embd", "n_heads", "n_plain", "n_turned", "n_latent", "n_value", "scale", "rope", "kv", "kv_norm"),
        *("k_b", "v_b", "output", "norm", "q", "n_q_latent", "q_a", "q_norm", "q_b"),
    )

    def state(
        self, block: LatentAttention, n_ctx: int, cache_type: CacheType
    ) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        """See ReferenceMixer."""
        return [((n_ctx, 1, block.n_row), np.dtype(_CACHE_DTYPES[cache_type]))]

    def run(self, block: LatentAttention, decoder: ReferenceDecoder, x: Floats, at: LayerRows) -> Floats:
        """See ReferenceMixer."""
        h = decoder.norm(block.norm, x)
        positions, rope = np.array([len(path) - 1 for path in at.paths]), block.rope.of_context(at.n_ctx)
        q = _queries(block, decoder, h).reshape(len(x), block.n_heads, -1)
        plain, turned = q[..., : block.n_plain], rotate(q[..., block.n_plain :], positions, rope)
        queries = np.concatenate([_by_head(decoder, block.k_b, plain), turned], axis=-1) * np.float32(block.scale)
        rows = decoder.linear(block.kv, None, h)
        latents, keys = decoder.norm(block.kv_norm, rows[:, : block.n_latent]), rows[:, None, block.n_latent :]
        rows = np.concatenate([latents, rotate(keys, positions, rope)[:, 0]], axis=-1)
        if at.cache_type == "q8_0":
            rows = round_activations(rows, 32)
        (kept,) = at.state
        kept[[path[-1] for path in at.paths], 0] = rows
        y = np.empty((len(x), block.n_heads, block.n_latent), dtype=np.float32)
        for i, path in enumerate(at.paths):
            decoder.poll()
            y[i] = attend(queries[i], kept[path], kept[path][..., : block.n_latent])
        return decoder.linear(block.output, None, _by_head(decoder, block.v_b, y).reshape(len(x), -1))


def _queries(block: LatentAttention, decoder: ReferenceDecoder, h: Floats) -> Floats:
    """(n, n_q)."""
    if block.q is not None:
        return decoder.linear(block.q, None, h)
    assert block.q_a is not None and block.q_b is not None  # else the block has q
    return decoder.linear(block.q_b, None, decoder.norm(block.q_norm, decoder.linear(block.q_a, None, h)))


def _by_head(decoder: ReferenceDecoder, matrices: TensorRef, x: Floats) -> Floats:
    """Each head's own matrix times its numbers: (n, n_heads, n_in) to (n, n_heads, n_out)."""
    assert isinstance(matrices, str)  # a whole tensor
    n_heads = x.shape[1]
    n_out = len(decoder.values_of(matrices)) // n_heads
    parts = [TensorRows(matrices, n_out * head, n_out * (head + 1)) for head in range(n_heads)]
    return np.stack([decoder.linear(part, None, x[:, head]) for head, part in enumerate(parts)], axis=1)
