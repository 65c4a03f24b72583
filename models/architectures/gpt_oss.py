"""gpt-oss (OpenAI, arXiv:2508.10925): biases everywhere, attention sinks, windows in every second layer.

Its experts are in MXFP4, clamp what goes into them, and have weights that are a softmax over the chosen ones.
"""

from edgeinfer.models.expert_reader import EXPERT_BIASES, ExpertRecipe
from edgeinfer.models.reader import Architecture, Reader
from edgeinfer.models.spec import ModelSpec, attention_of

PERIOD = 2


def _refine(reader: Reader, spec: ModelSpec) -> ModelSpec:
    head_dim, base = attention_of(spec.layers[0]).head_dim, reader.rope_base()
    reader.integer("rope.dimension_count", head_dim, head_dim, default=head_dim)
    local = reader.rope(head_dim, reader.number("rope.freq_base_swa", 1.0, 1e15, default=base))
    window = reader.integer("attention.sliding_window", 1, 1 << 30)
    return reader.windows(spec, window, PERIOD, full=reader.rope(head_dim, base), local=local)


ARCHITECTURE = Architecture(
    name="gpt-oss",
    rope_kind="halves",
    required=frozenset({"mixer.output_bias", "mixer.sinks"}),
    renamed={"ffn.norm": "post_attention_norm.weight"},
    output="required",
    experts=ExpertRecipe(
        n_ff="own", router_function="softmax_of_top_k", activation="clamped_swiglu", required=EXPERT_BIASES
    ),
    refine=_refine,
)
