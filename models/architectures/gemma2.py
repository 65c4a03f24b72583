"""Gemma 2 (arXiv:2408.00118): norms before and after, GELU, capped scores and logits, windows in every second layer.

The weights of the norms are in the file with the 1 added that Gemma adds to them.
"""

import math
from dataclasses import replace

from edgeinfer.models.reader import POST_NORMS, Architecture, Reader, each_ffn, each_mixer
from edgeinfer.models.spec import Attention, ModelSpec, attention_of

PERIOD = 2
N_LAYERS_27B = 46  # the one size that scales by the width of a head as it would be, not as it is


def _refine(reader: Reader, spec: ModelSpec) -> ModelSpec:
    head_dim, n_heads = attention_of(spec.layers[0]).head_dim, attention_of(spec.layers[0]).n_heads
    full = reader.rope(head_dim, reader.rope_base())
    local = reader.rope(head_dim, reader.number("rope.freq_base_swa", 1.0, 1e15, default=reader.rope_base()))
    window = reader.integer("attention.sliding_window", 1, 1 << 30, default=4096)
    width = spec.n_embd // n_heads if spec.n_layers == N_LAYERS_27B else head_dim
    cap = reader.number("attn_logit_softcapping", 0.0, 1e6, default=50.0)

    def change(_: int, mixer: Attention) -> Attention:
        return replace(mixer, scale=1 / math.sqrt(width), soft_cap=cap)

    spec = reader.windows(each_mixer(spec, change), window, PERIOD, full, local)
    return replace(
        each_ffn(spec, lambda _, ffn: replace(ffn, activation="gelu_tanh")),
        embedding_scale=math.sqrt(spec.n_embd),
        logit_soft_cap=reader.number("final_logit_softcapping", 0.0, 1e6, default=30.0),
    )


ARCHITECTURE = Architecture(
    name="gemma2",
    rope_kind="halves",
    required=POST_NORMS,
    output="tied",
    # With others llama.cpp scales the two kinds of layers apart.
    fixed={"rope.scaling.type": ("linear",), "rope.scaling.attn_factor": (1.0,)},
    refine=_refine,
)
