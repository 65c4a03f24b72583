"""Laguna (poolside 2026): softplus gates on what heads give, windows in three of four layers, experts after dense ones.

Layers with a window may have more heads than those that see everything, and have a rotation of their own: of whole
heads, which is not scaled for long contexts.
"""

from __future__ import annotations

from dataclasses import replace

from edgeinfer.models.expert_reader import ExpertRecipe
from edgeinfer.models.reader import QK_NORMS, Architecture, Reader, each_mixer
from edgeinfer.models.spec import Attention, ModelSpec, OutputGate, attention_of

_PERIOD = 4  # every fourth layer sees everything where the file does not say it, the first among them
_SWA_DIMS = "rope.dimension_count_swa"


def _refine(reader: Reader, spec: ModelSpec) -> ModelSpec:
    window = reader.integer("attention.sliding_window", 0, 1 << 31, default=0)
    if window:
        head_dim, base = attention_of(spec.layers[0]).head_dim, reader.rope_base()
        full = reader.rope(head_dim, base)
        base_swa = reader.number("rope.freq_base_swa", 1.0, 1e15, default=base)
        local = reader.rope(head_dim, base_swa, scaled=False, key=_SWA_DIMS)
        spec = reader.windows(spec, window, _PERIOD, full, local, full_first=True)
    return each_mixer(spec, lambda layer, mixer: _gated(reader, layer, mixer))


def _gated(reader: Reader, layer: int, mixer: Attention) -> Attention:
    """With the kind of gate that the tensor's rows tell."""
    if mixer.n_heads % mixer.n_kv_heads:
        key, reason = "attention.head_count", f"must be a multiple of {mixer.n_kv_heads} in layer {layer}"
        reader.refuse(key, f"{reason}: found {mixer.n_heads}")
    info = reader.file.tensors.get(str(mixer.gate))
    by_number = info is not None and info.shape[0] == mixer.n_q
    kind: OutputGate = "per_number" if by_number else "per_head"
    return replace(mixer, output_gate=kind, gate_function="softplus")


ARCHITECTURE = Architecture(
    name="laguna",
    rope_kind="halves",
    required=QK_NORMS | {"mixer.gate"},
    optional=frozenset(),
    qk_norm="per_head",
    experts=ExpertRecipe(
        n_ff="own",
        n_ff_shared="length or none",
        router_function="sigmoid",
        required=frozenset({"selection_bias"}),
        reads=frozenset(
            {"leading_dense_block_count", "expert_gating_func", "expert_weights_norm", "expert_weights_scale"}
        ),
    ),
    reads=frozenset({"attention.head_count", _SWA_DIMS}),
    refine=_refine,
)
