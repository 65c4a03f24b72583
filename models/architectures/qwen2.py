"""Qwen2 and Qwen2.5 (Yang et al., arXiv:2407.10671): Llama with biases on queries, keys and values."""

from edgeinfer.models.reader import QKV_BIASES, ROPE_FREQS, Architecture

ARCHITECTURE = Architecture(
    name="qwen2",
    rope_kind="halves",
    required=QKV_BIASES,
    rope_factors=ROPE_FREQS,
)
