"""Mistral Small 3.1 and Ministral 3 (Mistral AI 2025): Llama, with queries that may grow with the position."""

from dataclasses import replace

from edgeinfer.models.reader import QKV_BIASES, ROPE_FREQS, Architecture, Reader
from edgeinfer.models.spec import ModelSpec, QueryTemperature


def _refine(reader: Reader, spec: ModelSpec) -> ModelSpec:
    scale = reader.scale("attention.temperature_scale", 0.0)
    if not scale:
        return spec
    return replace(spec, query_temperature=QueryTemperature(scale, reader.original_context()))


ARCHITECTURE = Architecture(
    name="mistral3",
    rope_kind="interleaved",
    optional=QKV_BIASES | {"attn_output_bias"},
    rope_factors=ROPE_FREQS,
    reads=frozenset({"rope.scaling.yarn_log_multiplier"}),
    refine=_refine,
)
