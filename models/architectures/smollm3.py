"""SmolLM3 (Bakouch et al. 2025): Llama without rotation in every fourth layer (NoPE, Yang et al., arXiv:2501.18795)."""

from dataclasses import replace

from edgeinfer.models.reader import Architecture, Reader, each_mixer
from edgeinfer.models.spec import Attention, ModelSpec

PERIOD = 4  # in no key of the file


def _refine(reader: Reader, spec: ModelSpec) -> ModelSpec:
    def change(layer: int, mixer: Attention) -> Attention:
        return replace(mixer, rope=None) if layer % PERIOD == PERIOD - 1 else mixer

    return each_mixer(spec, change)


ARCHITECTURE = Architecture(name="smollm3", rope_kind="interleaved", refine=_refine)
