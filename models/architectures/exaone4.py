"""EXAONE 4.0 (LG AI Research, arXiv:2507.11407): norms after attention and network, and on each query and key.

The 32B model has windows in three of four layers, and its other layers no rotation.
"""

from edgeinfer.models.reader import POST_NORMS, QK_NORMS, ROPE_FREQS, Architecture, Reader
from edgeinfer.models.spec import ModelSpec, attention_of

PERIOD = 4
N_LAYERS_32B = 64  # in others llama.cpp, whose reading of a file is the standard here, applies no windows
WINDOW_32B = 4096  # where the file has none


def _refine(reader: Reader, spec: ModelSpec) -> ModelSpec:
    head_dim, base = attention_of(spec.layers[0]).head_dim, reader.rope_base()
    reader.integer("rope.dimension_count", head_dim, head_dim, default=head_dim)
    if reader.number("rope.freq_base_swa", 1.0, 1e15, default=base) != base:
        reader.refuse("rope.freq_base_swa", f"must equal rope.freq_base {base:g}")
    is_32b = spec.n_layers == N_LAYERS_32B
    window = reader.integer("attention.sliding_window", 0, 1 << 30, default=WINDOW_32B if is_32b else 0)
    if bool(window) != is_32b:
        reader.refuse("attention.sliding_window", f"must be set with {N_LAYERS_32B} layers only: found {window}")
    if not window:
        return spec
    spec = reader.windows(spec, window, PERIOD, full=None, local=reader.rope(head_dim, base))
    for index, layer in enumerate(spec.layers):
        if (attention_of(layer).window is None) != (index % PERIOD == PERIOD - 1):
            reader.refuse("attention.sliding_window_pattern", "must be three of four layers, others are not supported")
    return spec


ARCHITECTURE = Architecture(
    name="exaone4",
    rope_kind="halves",
    required=POST_NORMS | QK_NORMS,
    without=frozenset({"mixer.norm", "ffn.norm"}),
    qk_norm="per_head",
    rope_factors=ROPE_FREQS,
    refine=_refine,
)
