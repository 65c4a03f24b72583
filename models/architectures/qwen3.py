"""Qwen3 (Yang et al., arXiv:2505.09388): Llama with RMS norms on the queries and keys of each head."""

from edgeinfer.models.reader import Architecture

ARCHITECTURE = Architecture(
    name="qwen3",
    rope_kind="halves",
    required=frozenset({"attn_q_norm", "attn_k_norm"}),
    qk_norm="per_head",
)
