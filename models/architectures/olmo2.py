"""OLMo 2 and 3 (arXiv:2501.00656, arXiv:2512.13961): norms after attention and network, and on whole queries and keys.

OLMo 3 has windows in three of four layers, whose rotation is not scaled for long contexts. Its GGUF files have the name
olmo2 too, there is no other.
"""

from edgeinfer.models.reader import POST_NORMS, QK_NORMS, QKV_BIASES, Architecture, Reader
from edgeinfer.models.spec import ModelSpec, attention_of

PERIOD = 4


def _refine(reader: Reader, spec: ModelSpec) -> ModelSpec:
    base = reader.rope_base()
    if reader.number("rope.freq_base_swa", 1.0, 1e15, default=base) != base:
        reader.refuse("rope.freq_base_swa", f"must equal rope.freq_base {base:g}")
    window = reader.integer("attention.sliding_window", 0, 1 << 30, default=0)
    if not window:
        return spec
    head_dim = attention_of(spec.layers[0]).head_dim
    full, local = reader.rope(head_dim, base), reader.rope(head_dim, base, scaled=False)
    return reader.windows(spec, window, PERIOD, full, local)


ARCHITECTURE = Architecture(
    name="olmo2",
    rope_kind="halves",
    required=POST_NORMS | QK_NORMS,
    optional=QKV_BIASES,
    without=frozenset({"mixer.norm", "ffn.norm"}),
    output="required",
    qk_norm="whole",
    refine=_refine,
)
