"""Qwen3 (Yang et al., arXiv:2505.09388): Llama with RMS norms on the queries and keys of each head."""

from edgeinfer.models.reader import QK_NORMS, Architecture

ARCHITECTURE = Architecture(
    name="qwen3",
    rope_kind="halves",
    required=QK_NORMS,
    qk_norm="per_head",
)
