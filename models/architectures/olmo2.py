"""OLMo 2 and 3 (arXiv:2501.00656, arXiv:2512.13961): norms behind attention and network, and on whole queries and keys.

OLMo 3 has windows in three of four layers, whose rotation is not scaled for long contexts.
"""

from dataclasses import replace

from edgeinfer.models.reader import QKV_BIASES, Architecture, Reader
from edgeinfer.models.spec import ModelSpec

PERIOD = 4


def _refine(reader: Reader, spec: ModelSpec) -> ModelSpec:
    base = reader.rope_base()
    if reader.number("rope.freq_base_swa", 1.0, 1e15, default=base) != base:
        reader.refuse("rope.freq_base_swa", f"must equal rope.freq_base {base:g}")
    window = reader.integer("attention.sliding_window", 0, 1 << 30, default=0)
    if not window:
        return spec
    full, local = reader.rope(spec.head_dim, base), reader.rope(spec.head_dim, base, scaled=False)
    return replace(spec, attention=reader.attention(full, local, window, PERIOD))


ARCHITECTURE = Architecture(
    name="olmo2",
    rope_kind="halves",
    required=frozenset({"attn_post_norm", "ffn_post_norm", "attn_q_norm", "attn_k_norm"}),
    optional=QKV_BIASES,
    without=frozenset({"attn_norm", "ffn_norm"}),
    output="required",
    qk_norm="whole",
    refine=_refine,
)
