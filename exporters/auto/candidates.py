"""Which tensors get a format of their own, and the formats that each may have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from edgeinfer.backends.native.weights import MATRIX_TYPES
from edgeinfer.errors import UnsupportedModel
from edgeinfer.exporters.source import Source, SourceTensor
from edgeinfer.models import ExpertRows, Experts, ModelSpec, TensorRows
from edgeinfer.models import formats as weight_formats
from edgeinfer.models.gguf import GGMLType

_NAMES = ("Q2_K", "Q3_K", "Q4_0", "Q4_K", "Q4_1", "Q5_0", "Q5_K", "Q5_1", "Q6_K", "Q8_0", "F16")
FORMATS = tuple(GGMLType[name] for name in _NAMES)
FLOATS = frozenset((GGMLType.F32, GGMLType.F16, GGMLType.BF16))


@dataclass(frozen=True)
class Subject:
    """A tensor whose format is chosen.

    formats: from the smallest on.  shape: (n_out, n_in) of each matrix in it.  n_matrices: more than one for experts.
    n_used: of these a token wants so many; 0 for embeddings that no product reads.  layer: the first one that reads
    it; for the output matrix the number of layers.
    """

    tensor: SourceTensor
    formats: tuple[GGMLType, ...]
    shape: tuple[int, int]
    n_matrices: int
    n_used: int
    layer: int

    @property
    def name(self) -> str:
        """Of the tensor."""
        return self.tensor.name

    def n_bytes(self, type: GGMLType) -> int:
        """In a format."""
        return type.n_bytes(self.tensor.n_rows * self.tensor.n_in)


def subjects_of(source: Source, spec: ModelSpec) -> list[Subject]:
    """The tensors that are chosen for: matrices in floats, without routers. The others stay as the source has them."""
    products, layers = _products_of(spec), _layers_of(spec)
    found = []
    for tensor in source.tensors:
        if tensor.name not in products and tensor.name != spec.token_embd:
            continue
        formats = formats_of(tensor)
        if len(tensor.shape) < 2 or len(formats) < 2:
            continue
        n_matrices = tensor.n_rows // tensor.shape[-2]
        shape = (tensor.shape[-2], tensor.n_in)
        found.append(Subject(tensor, formats, shape, n_matrices, products.get(tensor.name, 0), layers[tensor.name]))
    return found


def _products_of(spec: ModelSpec) -> dict[str, int]:
    """How many of its matrices a token is multiplied with, by tensor, without routers."""
    n_used = {
        f"layers.{i}.ffn": layer.ffn.n_used for i, layer in enumerate(spec.layers) if isinstance(layer.ffn, Experts)
    }
    products = {}
    for weight in spec.weights():
        if len(weight.shape) < 2 or "router" in weight.role or weight.role.endswith("_bias"):
            continue
        ref = weight.tensor
        name = ref.name if isinstance(ref, TensorRows | ExpertRows) else ref
        products[name] = n_used[weight.block] if len(weight.shape) == 3 else 1
    return products


def _layers_of(spec: ModelSpec) -> dict[str, int]:
    """The first layer that reads a tensor."""
    layers: dict[str, int] = {} if spec.token_embd is None else {spec.token_embd: 0}
    for weight in spec.weights():
        ref = weight.tensor
        name = ref.name if isinstance(ref, TensorRows | ExpertRows) else ref
        layers.setdefault(name, int(weight.block.split(".")[1]) if weight.block else spec.n_layers)
    return layers


def formats_of(tensor: SourceTensor) -> tuple[GGMLType, ...]:
    """What a tensor may be written in: nothing above what the source has, and nothing where that is rounded already."""
    if tensor.type not in FLOATS:
        return ()
    highest = GGMLType.F16 if tensor.type == GGMLType.F32 else tensor.type
    usual = [each for each in FORMATS if each != GGMLType.F16 and each in MATRIX_TYPES and _is_written(each)]
    return tuple(each for each in (*usual, highest) if tensor.n_in % each.block_elements == 0)


@cache
def _is_written(type: GGMLType) -> bool:
    try:
        weight_formats.quantize(type, np.zeros((1, type.block_elements), dtype=np.float32))
    except UnsupportedModel:
        return False
    return True


def uniform(subjects: Sequence[Subject], type: GGMLType) -> dict[str, GGMLType]:
    """Every tensor in one format; in the next larger one where its rows do not fit it."""
    bits = type.block_bytes / type.block_elements
    chosen = {}
    for subject in subjects:
        fitting = [each for each in subject.formats if each.block_bytes / each.block_elements >= bits]
        chosen[subject.name] = type if type in subject.formats else (fitting or [subject.formats[-1]])[0]
    return chosen
