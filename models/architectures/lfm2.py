"""LFM2 and LFM2.5 (Liquid AI, arXiv:2511.23404): short convolutions in most layers, attention where heads have keys."""

from __future__ import annotations

from dataclasses import replace

from edgeinfer.models.reader import QK_NORMS, Architecture, Reader, each_attention
from edgeinfer.models.spec import Mixer, ModelSpec, ShortConv


def short_conv(reader: Reader, layer: int) -> Mixer | None:
    """The convolution of a layer whose heads have no keys, None where they do."""
    if reader.of_layers("attention.head_count_kv", 0, 1 << 14)[layer]:
        return None
    prefix = f"blk.{layer}."
    return ShortConv(
        n_embd=reader.integer("embedding_length", 1, 1 << 20),
        n_conv=reader.integer("shortconv.l_cache", 2, 16),
        conv=f"{prefix}shortconv.conv.weight",
        input=f"{prefix}shortconv.in_proj.weight",
        output=f"{prefix}shortconv.out_proj.weight",
        norm=f"{prefix}attn_norm.weight",
    )


def with_windows(reader: Reader, spec: ModelSpec) -> ModelSpec:
    """The spec with its last norm, whose tensor is named after the embeddings, and with the window of attention."""
    spec = replace(spec, output_norm="token_embd_norm.weight")
    window = reader.integer("attention.sliding_window", 0, 1 << 31, default=0)
    return each_attention(spec, lambda mixer: replace(mixer, window=window)) if window else spec


ARCHITECTURE = Architecture(
    name="lfm2",
    rope_kind="halves",
    required=QK_NORMS,
    optional=frozenset(),
    qk_norm="per_head",
    recurrence=short_conv,
    refine=with_windows,
)
