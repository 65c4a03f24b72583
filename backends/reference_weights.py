"""The weights of a model file for the reference: all of them dequantised."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from edgeinfer.backends.base import Progress
from edgeinfer.backends.reference_math import Floats
from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.models import ExpertRows, ExpertsRef, TensorRef
from edgeinfer.models.formats import check_type, dequantize
from edgeinfer.models.gguf import GGMLType, ModelFile

Activations = Literal["float32", "int8"]
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]  # of tensors, by name


@dataclass(frozen=True)
class Weights:
    """A matrix (n_out, n_in), vector (n,) or matrices of experts (n_experts, n_out, n_in).

    block: that the input of a product is rounded in, 1 for not at all.
    """

    values: Floats
    block: int

    def part(self, ref: TensorRef | ExpertsRef) -> Weights:
        """What a reference to this tensor means: the whole, or some rows of it or of each expert."""
        if isinstance(ref, str):
            return self
        rows = slice(ref.first, ref.last)
        return Weights(self.values[:, rows] if isinstance(ref, ExpertRows) else self.values[rows], self.block)


def read_weights(
    model: ModelFile, shapes: Shapes, activations: Activations, progress: Progress | None = None
) -> dict[str, Weights]:
    """Some tensors of a file. Raises UnsupportedModel."""
    check_types(model, shapes)
    weights = {}
    for done, (name, shape) in enumerate(shapes.items(), start=1):
        kind = model.tensors[name].type
        block = 1 if activations == "float32" else _block(kind, shape)
        weights[name] = Weights(dequantize(kind, model.data(name), shape), block)
        if progress is not None:
            progress(done / len(shapes))
    return weights


def check_types(model: ModelFile, shapes: Shapes) -> None:
    """Raises UnsupportedModel if a tensor cannot be dequantised."""
    for name in shapes:
        try:
            check_type(model.tensors[name].type)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{model.path}: tensor {name}: {error}") from None


def count(shapes: Shapes) -> tuple[int, int]:
    """How many numbers there are: without the matrices of experts, and in those."""
    sizes = [(len(shape) == 3, math.prod(shape)) for shape in shapes.values()]
    return sum(n for is_experts, n in sizes if not is_experts), sum(n for is_experts, n in sizes if is_experts)


def _block(kind: GGMLType, shape: tuple[int, ...]) -> int:
    """Block in which the native engine rounds the input of such a matrix."""
    return {GGMLType.I2_S: shape[-1], GGMLType.Q2_0: 32}.get(kind, kind.block_elements)
