"""Mistral Small 3.1 and Ministral 3 (Mistral AI 2025): Llama, with queries that may grow with the position."""

from dataclasses import replace

from edgeinfer.models.reader import BIASES, ROPE_FREQS, Architecture, Reader, each_mixer
from edgeinfer.models.spec import ModelSpec, QueryTemperature


def _refine(reader: Reader, spec: ModelSpec) -> ModelSpec:
    scale = reader.scale("attention.temperature_scale", 0.0)
    if not scale:
        return spec
    temperature = QueryTemperature(scale, reader.original_context())
    return each_mixer(spec, lambda _, mixer: replace(mixer, query_temperature=temperature))


ARCHITECTURE = Architecture(
    name="mistral3",
    rope_kind="interleaved",
    optional=BIASES,
    rope_factors=ROPE_FREQS,
    reads=frozenset({"rope.scaling.yarn_log_multiplier"}),
    refine=_refine,
)
