"""Gemma 2 (arXiv:2408.00118): norms before and behind, GELU, capped scores and logits, windows in every second layer.

The weights of the norms are in the file with the 1 added that Gemma adds to them.
"""

import math
from dataclasses import replace

from edgeinfer.models.reader import Architecture, Reader
from edgeinfer.models.spec import ModelSpec

PERIOD = 2
N_LAYERS_27B = 46  # the one size that scales by the width of a head as it would be, not as it is


def _refine(reader: Reader, spec: ModelSpec) -> ModelSpec:
    full = reader.rope(spec.head_dim, reader.rope_base())
    local = reader.rope(spec.head_dim, reader.number("rope.freq_base_swa", 1.0, 1e15, default=reader.rope_base()))
    window = reader.integer("attention.sliding_window", 1, 1 << 30, default=4096)
    width = spec.n_embd // spec.n_heads if spec.n_layers == N_LAYERS_27B else spec.head_dim
    return replace(
        spec,
        attention=reader.attention(full, local, window, PERIOD),
        attention_scale=1 / math.sqrt(width),
        activation="gelu_tanh",
        embedding_scale=math.sqrt(spec.n_embd),
        attention_soft_cap=reader.number("attn_logit_softcapping", 0.0, 1e6, default=50.0),
        logit_soft_cap=reader.number("final_logit_softcapping", 0.0, 1e6, default=30.0),
    )


ARCHITECTURE = Architecture(
    name="gemma2",
    rope_kind="halves",
    required=frozenset({"attn_post_norm", "ffn_post_norm"}),
    output="tied",
    # With others llama.cpp scales the two kinds of layers apart.
    fixed={"rope.scaling.type": ("linear",), "rope.scaling.attn_factor": (1.0,)},
    refine=_refine,
)
