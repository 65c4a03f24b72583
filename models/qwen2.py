"""Qwen2 and Qwen2.5 (Yang et al., arXiv:2407.10671): Llama with biases on queries, keys and values."""

from edgeinfer.models.spec import Architecture

ARCHITECTURE = Architecture(
    name="qwen2",
    rope_kind="halves",
    required=frozenset({"attn_q_bias", "attn_k_bias", "attn_v_bias"}),
)
