"""SmolLM3 (Bakouch et al. 2025): Llama without rotation in every fourth layer (NoPE, Yang et al., arXiv:2501.18795)."""

from dataclasses import replace

from edgeinfer.models.reader import Architecture, Reader
from edgeinfer.models.spec import AttentionSpec, ModelSpec

PERIOD = 4  # in no key of the file


def _refine(reader: Reader, spec: ModelSpec) -> ModelSpec:
    attention = [
        AttentionSpec(None) if layer % PERIOD == PERIOD - 1 else turned for layer, turned in enumerate(spec.attention)
    ]
    return replace(spec, attention=tuple(attention))


ARCHITECTURE = Architecture(name="smollm3", rope_kind="interleaved", refine=_refine)
