"""Which tensors get a format of their own, the formats that each may have, and the error that one makes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.native.weights import MATRIX_TYPES
from edgeinfer.common.errors import ShapeError, UnsupportedModel
from edgeinfer.exporters.gguf.file_types import is_quantised
from edgeinfer.exporters.source import Bytes, Floats, Source, SourceTensor
from edgeinfer.models import ExpertRows, Experts, LatentAttention, ModelSpec, TensorRows
from edgeinfer.models import formats as weight_formats
from edgeinfer.models.gguf import GGMLType
from edgeinfer.models.spec import is_matrix

_NAMES = ("Q2_K", "Q3_K", "Q4_0", "Q4_K", "Q4_1", "Q5_0", "Q5_K", "Q5_1", "Q6_K", "Q8_0", "F16")
FORMATS = tuple(GGMLType[name] for name in _NAMES)
FLOATS = frozenset((GGMLType.F32, GGMLType.F16, GGMLType.BF16))
# Mean squares of the inputs of a matrix, by tensor: (n_in,), or (n_experts, n_in) of a tensor of experts. A tensor that
# is missing is rounded without.
Importance: TypeAlias = Mapping[str, NDArray[np.float32]]
PLAIN = frozenset((GGMLType.F32, GGMLType.F16, GGMLType.BF16, GGMLType.Q8_0))  # rounded the same with importance
_RUNS, _ROWS_OF_RUN = 16, 16  # of a tensor, in which errors are compared


@dataclass(frozen=True)
class Subject:
    """A tensor whose format is chosen."""

    tensor: SourceTensor
    formats: tuple[GGMLType, ...]  # from the smallest on
    shape: tuple[int, int]  # (n_out, n_in) of each matrix in it
    n_matrices: int  # more than one for experts
    n_used: int  # matrices that one token uses; 0 for embeddings that no product reads
    layer: int  # the first one that reads it; for the output matrix the number of layers

    @property
    def name(self) -> str:
        """Of the tensor."""
        return self.tensor.name

    def n_bytes(self, type: GGMLType) -> int:
        """In a format."""
        return type.n_bytes(self.tensor.n_rows * self.tensor.n_in)


def subjects_of(source: Source, spec: ModelSpec) -> list[Subject]:
    """The tensors whose formats are chosen: matrices in floats, without routers. The others stay as they are."""
    products, layers = _products_of(spec), _layers_of(spec)
    found = []
    for tensor in source.tensors:
        if tensor.name not in products and tensor.name != spec.token_embd:
            continue
        formats = formats_of(tensor)
        if len(tensor.shape) < 2 or len(formats) < 2:
            continue
        n_matrices = tensor.n_rows // tensor.shape[-2]
        shape, n_used = (tensor.shape[-2], tensor.n_in), min(n_matrices, products.get(tensor.name, 0))
        found.append(Subject(tensor, formats, shape, n_matrices, n_used, layers[tensor.name]))
    return found


def drafting_types(source: Source, spec: ModelSpec, subjects: Sequence[Subject], size: int) -> dict[str, GGMLType]:
    """Types of the matrices of blocks that draft (MTP), whose errors change no text: one format, as far as rows fit it.

    size: bytes of all weights at most. The format is the largest one that all matrices could have in it.
    """
    first = re.compile(r"blk\.(\d+)\.")
    found = []
    for tensor in source.tensors:
        block, formats = first.match(tensor.name), formats_of(tensor)
        if block and int(block[1]) >= spec.n_layers and is_quantised(tensor) and formats:
            found.append(Subject(tensor, formats, (tensor.shape[-2], tensor.n_in), 1, 0, spec.n_layers))
    n_weights = sum(each.tensor.n_rows * each.tensor.n_in for each in (*subjects, *found))
    usual = [each for each in FORMATS if each.n_bytes(each.block_elements) * n_weights <= size * each.block_elements]
    return uniform(found, (usual or [FORMATS[0]])[-1])


def table_types(source: Source, spec: ModelSpec) -> dict[str, GGMLType]:
    """The type of the table of LayerInputs, which is too large to be held and measured: 8 bits, where it has more."""
    if spec.layer_inputs is None:
        return {}
    table = next(tensor for tensor in source.tensors if tensor.name == spec.layer_inputs.table)
    return {table.name: GGMLType.Q8_0} if GGMLType.Q8_0 in formats_of(table) else {}


def _products_of(spec: ModelSpec) -> dict[str, int]:
    """How many of its matrices a token is multiplied with, by tensor, without routers. Heads may have one each."""
    n_used = {name: block.n_used for name, block in spec.blocks() if isinstance(block, Experts)}
    n_heads = {name: block.n_heads for name, block in spec.blocks() if isinstance(block, LatentAttention)}
    products = {}
    for weight in spec.weights():
        if not is_matrix(weight) or "router" in weight.role:
            continue
        ref = weight.tensor
        name = ref.name if isinstance(ref, TensorRows | ExpertRows) else ref
        of_heads = n_heads.get(weight.block, 1) if weight.role in ("k_b", "v_b") else 1
        products[name] = n_used[weight.block] if len(weight.shape) == 3 else of_heads
    return products


def _layers_of(spec: ModelSpec) -> dict[str, int]:
    """The first layer that reads a tensor."""
    layers: dict[str, int] = {} if spec.token_embd is None else {spec.token_embd: 0}
    for weight in spec.weights():
        ref = weight.tensor
        name = ref.name if isinstance(ref, TensorRows | ExpertRows) else ref
        layers.setdefault(name, spec.first_layer_of(weight.block))
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


def rounded_bytes(tensor: SourceTensor, type: GGMLType, importance: Importance, first: int, last: int) -> Bytes:
    """Rows first..last-1 of a tensor in a format, as GGUF stores them."""
    if type == tensor.type and tensor.stored is not None:
        return tensor.stored(first, last)
    pieces = [
        _quantized(tensor.rows(*run), type, importance_of(tensor, importance, run[0]))
        for run in _within_matrices(tensor, first, last)
    ]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def rounded_rows(tensor: SourceTensor, type: GGMLType, importance: Importance, first: int, last: int) -> Floats:
    """What rows first..last-1 are in that format, (last - first, n_in)."""
    data = rounded_bytes(tensor, type, importance, first, last)
    return weight_formats.dequantize(type, data, (last - first, tensor.n_in))


def amplified_rows(
    tensor: SourceTensor, type: GGMLType, gain: float, importance: Importance, first: int, last: int
) -> Floats:
    """Rows first..last-1 with the error of a format times a gain, (last - first, n_in)."""
    weights = tensor.rows(first, last)
    return weights + np.float32(gain) * (rounded_rows(tensor, type, importance, first, last) - weights)


def errors_of(tensor: SourceTensor, types: Iterable[GGMLType], importance: Importance) -> dict[GGMLType, float]:
    """Sum of the squared errors of some rows in each format, each weighted by the importance of its column.

    The rows are 16 runs of 16, spread evenly.
    """
    by_matrix: dict[int, list[Floats]] = {}
    for run in sampled_runs(tensor.n_rows):
        for first, last in _within_matrices(tensor, *run):
            by_matrix.setdefault(first // _rows_of_matrix(tensor), []).append(tensor.rows(first, last))
    errors = dict.fromkeys(types, 0.0)
    for matrix, pieces in by_matrix.items():
        weights = np.concatenate(pieces)
        by_column = importance_of(tensor, importance, matrix * _rows_of_matrix(tensor))
        for type in errors:
            data = _quantized(weights, type, by_column)
            squares = np.square(weights - weight_formats.dequantize(type, data, weights.shape)).sum(
                axis=0, dtype=np.float64
            )
            errors[type] += float(squares.sum() if by_column is None else squares @ by_column)
    return errors


def sampled_runs(n_rows: int) -> list[tuple[int, int]]:
    """(first, last) of the rows in which errors are compared; all rows of a small tensor."""
    if n_rows <= _RUNS * _ROWS_OF_RUN:
        return [(0, n_rows)]
    firsts = [i * (n_rows - _ROWS_OF_RUN) // (_RUNS - 1) for i in range(_RUNS)]
    return [(first, first + _ROWS_OF_RUN) for first in firsts]


def importance_of(tensor: SourceTensor, importance: Importance, row: int) -> NDArray[np.float32] | None:
    """The importance (n_in,) of the columns of the matrix that a row belongs to. Raises ShapeError."""
    found = importance.get(tensor.name)
    if found is None:
        return None
    if found.shape[-1] != tensor.n_in or found.ndim > 2 or (found.ndim == 2 and len(found) != tensor.shape[0]):
        raise ShapeError(
            f"the importance matrix has {found.shape} for {tensor.name}, which is {tensor.shape}: it is that of "
            f"another model"
        )
    return found if found.ndim == 1 else found[row // _rows_of_matrix(tensor)]


def _quantized(weights: Floats, type: GGMLType, by_column: NDArray[np.float32] | None) -> Bytes:
    if type in PLAIN:
        return weight_formats.quantize(type, weights)
    return weight_formats.quantize(type, weights, importance=by_column)


def _rows_of_matrix(tensor: SourceTensor) -> int:
    return tensor.shape[-2] if len(tensor.shape) > 2 else tensor.n_rows


def _within_matrices(tensor: SourceTensor, first: int, last: int) -> Iterator[tuple[int, int]]:
    """The rows, cut where the matrix of an expert ends."""
    each = _rows_of_matrix(tensor)
    while first < last:
        end = min(last, (first // each + 1) * each)
        yield first, end
        first = end
