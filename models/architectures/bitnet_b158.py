"""BitNet b1.58 2B4T (arXiv:2504.12285): like bitnet, with the square of ReLU in place of SiLU."""

from dataclasses import replace

from edgeinfer.models.architectures.bitnet import SUB_NORMS
from edgeinfer.models.reader import Architecture, Reader, each_ffn
from edgeinfer.models.spec import ModelSpec


def _refine(reader: Reader, spec: ModelSpec) -> ModelSpec:
    return each_ffn(spec, lambda _, ffn: replace(ffn, activation="relu2"))


ARCHITECTURE = Architecture(
    name="bitnet-b1.58",
    rope_kind="halves",
    required=SUB_NORMS,
    optional=frozenset(),
    refine=_refine,
)
