"""BitNet b1.58 as llama.cpp runs it (arXiv:2402.17764): ternary matrices, norms inside attention and network, SiLU."""

from edgeinfer.models.reader import BIASES, Architecture

SUB_NORMS = frozenset({"mixer.sub_norm", "ffn.sub_norm"})

ARCHITECTURE = Architecture(
    name="bitnet",
    rope_kind="halves",
    required=SUB_NORMS,
    optional=BIASES,
    output="tied",
)
