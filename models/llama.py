"""Llama 1 to 3 and what copies them, SmolLM2 among them (Touvron et al., arXiv:2302.13971)."""

from edgeinfer.models.spec import Architecture

ARCHITECTURE = Architecture(
    name="llama",
    rope_kind="interleaved",
    optional=frozenset({"attn_q_bias", "attn_k_bias", "attn_v_bias", "attn_output_bias"}),
    unsupported_keys={"expert_count": "mixture-of-experts models are not supported yet"},
)
