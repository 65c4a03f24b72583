"""BitNet b1.58 as llama.cpp runs it (arXiv:2402.17764): ternary matrices, norms inside attention and network, SiLU."""

from edgeinfer.models.reader import QKV_BIASES, Architecture

SUB_NORMS = frozenset({"attn_sub_norm", "ffn_sub_norm"})

ARCHITECTURE = Architecture(
    name="bitnet",
    rope_kind="halves",
    required=SUB_NORMS,
    optional=QKV_BIASES | {"attn_output_bias"},
    output="tied",
)
