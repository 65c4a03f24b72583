"""Muse Glimmer (Meta 2026): normed embeddings, gates on what heads give, norms around both blocks, mostly windows.

Only layers with a window are rotated. The norms after the blocks have an epsilon of their own. Text only.
"""

from __future__ import annotations

from dataclasses import replace

from edgeinfer.models.reader import POST_NORMS, QK_NORMS, Architecture, Reader, each_ffn, each_mixer
from edgeinfer.models.spec import ModelSpec, attention_of

_PERIOD = 4
_POST_EPSILON = 1e-8


def _refine(reader: Reader, spec: ModelSpec) -> ModelSpec:
    head_dim, base = attention_of(spec.layers[0]).head_dim, reader.rope_base()
    window = reader.integer("attention.sliding_window", 1, 1 << 31)
    local = reader.rope(head_dim, reader.number("rope.freq_base_swa", 1.0, 1e15, default=base))
    spec = reader.windows(spec, window, _PERIOD, None, local)
    spec = each_mixer(spec, lambda _, mixer: replace(mixer, output_gate="per_number", post_norm_epsilon=_POST_EPSILON))
    return replace(
        each_ffn(spec, lambda _, ffn: replace(ffn, post_norm_epsilon=_POST_EPSILON)),
        embedding_norm=True,
        logit_scale=reader.scale("logit_scale", 1.0),
        logit_soft_cap=reader.scale("final_logit_softcapping", 0.0) or None,
    )


ARCHITECTURE = Architecture(
    name="muse-glimmer",
    rope_kind="interleaved",
    required=POST_NORMS | QK_NORMS | {"mixer.gate"},
    optional=frozenset(),
    output="required",
    qk_norm="per_head",
    refine=_refine,
)
