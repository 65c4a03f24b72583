"""Gemma 3 (arXiv:2503.19786): Gemma 2 with norms on queries and keys for the caps, and windows in five of six layers.

Layers with a window have a rotation of their own, which is not scaled for long contexts.
"""

import math
from dataclasses import replace

from edgeinfer.models.reader import POST_NORMS, QK_NORMS, Architecture, Reader, each_ffn, each_mixer
from edgeinfer.models.spec import ModelSpec, attention_of

PERIOD = 6
N_LAYERS_27B = 62  # the one size that scales by the width of a head as it would be, not as it is


def _refine(reader: Reader, spec: ModelSpec) -> ModelSpec:
    head_dim, n_heads = attention_of(spec.layers[0]).head_dim, attention_of(spec.layers[0]).n_heads
    window = reader.integer("attention.sliding_window", 0, 1 << 30, default=0)
    if window:
        full = reader.rope(head_dim, reader.rope_base())
        base = reader.number("rope.freq_base_swa", 1.0, 1e15, default=10000.0)
        spec = reader.windows(spec, window, PERIOD, full, reader.rope(head_dim, base, scaled=False))
    width = spec.n_embd // n_heads if spec.n_layers == N_LAYERS_27B else head_dim
    spec = each_mixer(spec, lambda _, mixer: replace(mixer, scale=1 / math.sqrt(width)))
    return replace(
        each_ffn(spec, lambda _, ffn: replace(ffn, activation="gelu_tanh")),
        embedding_scale=math.sqrt(spec.n_embd),
        logit_soft_cap=reader.scale("final_logit_softcapping", 0.0) or None,
    )


ARCHITECTURE = Architecture(
    name="gemma3",
    rope_kind="halves",
    required=POST_NORMS | QK_NORMS,
    qk_norm="per_head",
    # With others llama.cpp scales the two kinds of layers apart.
    fixed={"rope.scaling.type": ("linear", "none"), "rope.scaling.attn_factor": (1.0,)},
    unsupported_keys={"attn_logit_softcapping": "Gemma 3 has no cap on its scores"},
    refine=_refine,
)
