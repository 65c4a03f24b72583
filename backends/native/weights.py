"""The weights of a model file for the decoder: which tensors, in which packed format, and packing them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.base import Progress
from edgeinfer.backends.native import _core
from edgeinfer.common.errors import ModelFileError, UnsupportedModel
from edgeinfer.common.settings import TernaryBits
from edgeinfer.common.types import MemoryUse
from edgeinfer.models import ExpertRows, ModelSpec, TensorRows, Weight
from edgeinfer.models.gguf import I2_S_TAIL_BYTES, TERNARY_TYPES, GGMLType, ModelFile, TensorInfo
from edgeinfer.models.gguf_reader.mapping import MappedFile

MATRIX_TYPES = frozenset(
    GGMLType[name]
    for name in "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K TQ1_0 TQ2_0 I2_S Q2_0 MXFP4".split()
)
# What packs to 1.6 bits a weight, and the number of that format in matrix.h. Q2_0's blocks are too short to gain.
BASE_THREE = {GGMLType.TQ1_0: 1034, GGMLType.TQ2_0: 1034, GGMLType.I2_S: 1036}
VECTOR_TYPES = frozenset((GGMLType.F32, GGMLType.F16))  # of norms and biases
PIECE_BYTES = 1 << 20  # of a matrix, as the file has it, are in memory beside what is packed
# For drafts: matrices of more bits a weight are rounded to Q4_0, and only the first tokens get logits. A vocabulary
# made by merging has its frequent tokens first: of 145,000 in prompts 96.5 % are among these of Qwen2.5's 151,936.
DRAFT_BITS, DRAFT_TOKENS = 5.0, 49152
CONVOLUTION = "conv"  # the role of (n_channels, n_conv), kept as one vector, a column after the other
_FLAT = frozenset(("decay", "skip", "out_norm"))  # what a file may have as a matrix, kept as one vector
_BIASES_OF_EXPERTS = frozenset(("gate_bias", "up_bias", "down_bias"))  # (n_experts, n), kept as one vector


@dataclass(frozen=True)
class Packing:
    """Packed formats of matrices that differ from the file's."""

    rounded: bool = False  # larger ones in Q4_0, for draft models
    ternary_bits: TernaryBits = "2"  # of a ternary weight

    def format_of(self, info: TensorInfo, role: str = "") -> int:
        """The number of a tensor's packed format in matrix.h. Routers, which are small, stay as they are."""
        if self.ternary_bits == "1.6" and info.type in BASE_THREE:
            return BASE_THREE[info.type]
        bits = 8 * info.type.block_bytes / info.type.block_elements
        is_large = len(info.shape) > 1 and bits > DRAFT_BITS and info.shape[-1] % GGMLType.Q4_0.block_elements == 0
        return int(GGMLType.Q4_0 if self.rounded and is_large and role != "router" else info.type)


class Part(NamedTuple):
    """A tensor of the file, or some of its rows, and the block and role that it has in the decoder."""

    block: str
    role: str
    name: str
    type: GGMLType
    packed_as: int  # see Packing.format_of
    shape: tuple[int, ...]  # (n_out, n_in) or (n,)
    n_bytes: int  # as GGUF stores it, from first_byte of the tensor on
    first_byte: int = 0
    scale: float = 1.0  # of I2_S, whose bytes are without it
    # n_runs, distance: of a vector that is several runs of bytes, which begin so far from each other
    n_runs: int = 1
    distance: int = 0
    n_columns: int = 1  # of a vector that is kept column by column, where the file has rows

    def data(self, model: ModelFile, first: int = 0, last: int | None = None) -> NDArray[np.uint8]:
        """Bytes first..last-1 of it."""
        return model.data(
            self.name, self.first_byte + first, self.first_byte + (self.n_bytes if last is None else last)
        )


@dataclass(frozen=True)
class EmbeddingRows:
    """Where a decoder finds the rows of the embedding matrix, or of the table that has a part for each layer."""

    info: TensorInfo
    # "output", the packed output matrix, which is the same tensor; "file", from which a pass reads the rows of its
    # tokens; "memory", a copy
    place: Literal["output", "file", "memory"]

    @property
    def n_bytes(self) -> int:
        """Memory that they take beside the packed weights."""
        return self.info.n_bytes if self.place == "memory" else 0


# Lets a _core.ProductDevice multiply with some of the matrices that were packed of these parts (Weights.set_device),
# before there is a decoder. Gives the memory that it takes.
Placement: TypeAlias = Callable[[_core.Weights, ModelFile, Sequence[Part]], MemoryUse]

# ---- which tensors ---------------------------------------------------------------------------------------------------


def parts_of(model: ModelFile, weights: Iterable[Weight], packing: Packing = Packing()) -> list[Part]:  # noqa: B008
    """What is packed of these weights, in their order, without the matrices of experts: see experts/model_experts.py.

    Raises UnsupportedModel, ModelFileError.
    """
    return [_part(model, weight, packing) for weight in weights if len(weight.shape) < 3]


def inputs_of(parts: Sequence[Part]) -> set[tuple[int, int]]:
    """Packed format and n_in of the matrices that a decoder multiplies; what makes features has inputs of its own."""
    return {(part.packed_as, part.shape[1]) for part in parts if len(part.shape) == 2 and part.block != "features"}


def packed_bytes(parts: Sequence[Part]) -> int:
    """Bytes of all of them when packed."""
    return sum(_core.packed_bytes(part.packed_as, part.shape[0], (*part.shape, 0)[1]) for part in parts)


def embedding_of(
    model: ModelFile, spec: ModelSpec, parts: Sequence[Part], is_held: bool = False
) -> EmbeddingRows | None:
    """Where the rows of the embedding matrix are found; None for a head that takes its target's.

    parts: what is packed.  is_held: nothing is read from the file after loading. Raises UnsupportedModel.
    """
    if spec.token_embd is None:
        return None
    info = _info(model, spec.token_embd)
    if info.type == GGMLType.I2_S:
        raise UnsupportedModel(f"{model.path}: tensor {spec.token_embd} is I2_S, whose rows cannot be read one by one")
    if any(_has_all_rows(part, info) for part in parts):
        return EmbeddingRows(info, "output")
    return EmbeddingRows(info, "memory" if is_held or model.makes(info.name) else "file")


def layer_table_of(model: ModelFile, spec: ModelSpec, is_held: bool = False) -> EmbeddingRows | None:
    """Where the rows of the table of LayerInputs are found; None without. Never packed. Raises UnsupportedModel.

    is_held: see embedding_of. A table that is made is held too, unless its bytes lie in another file.
    """
    if spec.layer_inputs is None:
        return None
    info = _info(model, spec.layer_inputs.table)
    if info.type == GGMLType.I2_S:
        raise UnsupportedModel(f"{model.path}: tensor {info.name} is I2_S, whose rows cannot be read one by one")
    return EmbeddingRows(info, "memory" if is_held or model.place(info.name) is None else "file")


def _has_all_rows(part: Part, info: TensorInfo) -> bool:
    """Whether the output matrix is this tensor, packed without rounding."""
    is_same = (part.block, part.role, part.name, part.shape) == ("", "output", info.name, info.shape)
    return is_same and part.packed_as in (info.type, BASE_THREE.get(info.type))


def set_embedding(weights: _core.Weights, model: ModelFile, rows: EmbeddingRows, of_layers: bool = False) -> None:
    """Tell packed weights where they find the rows. of_layers: those of LayerInputs. Raises ModelFileError."""
    info = rows.info
    n_vocab, n_embd = info.shape
    if rows.place == "output":
        weights.set_embedding_of_matrix("", "output")
    elif rows.place == "memory":
        weights.set_embedding(int(info.type), n_vocab, n_embd, _copied(model, info), of_layers)
    else:
        place = model.place(info.name)
        assert place is not None  # as embedding_of and layer_table_of say it
        where = (place.descriptor, str(place.path), place.offset)
        weights.set_embedding_of_file(int(info.type), n_vocab, n_embd, *where, of_layers)


def _copied(model: ModelFile, info: TensorInfo) -> NDArray[np.uint8]:
    """The bytes of a tensor in memory of their own, copied piece by piece."""
    copy = np.empty(info.n_bytes, np.uint8)
    for first in range(0, info.n_bytes, PIECE_BYTES):
        last = min(info.n_bytes, first + PIECE_BYTES)
        copy[first:last] = model.data(info.name, first, last)
        model.release(info.name, first, last)
    return copy


def of_frequent_tokens(model: ModelFile, spec: ModelSpec) -> ModelSpec:
    """The spec with an output matrix for the first tokens only, where there are more and the file has all."""
    output, is_cut = spec.output, spec.n_logits < spec.n_vocab
    if is_cut or spec.n_vocab <= DRAFT_TOKENS or not isinstance(output, str):
        return spec
    if model.tensors[output].type == GGMLType.I2_S:
        return spec
    return replace(spec, n_logits=DRAFT_TOKENS, output=TensorRows(output, 0, DRAFT_TOKENS))


def n_base_three(parts: Sequence[Part]) -> int:
    """Number of weights that can be had in 1.6 bits."""
    return sum(math.prod(part.shape) for part in parts if part.type in BASE_THREE)


def is_mostly_ternary(parts: Sequence[Part]) -> bool:
    """Whether most bytes are those of ternary weights."""
    n_ternary = sum(part.n_bytes for part in parts if part.type in TERNARY_TYPES)
    return 2 * n_ternary > sum(part.n_bytes for part in parts)


def _info(model: ModelFile, name: str, is_vector: bool = False) -> TensorInfo:
    """A tensor. Raises UnsupportedModel for a type that the engine lacks."""
    info = model.tensors[name]
    known = MATRIX_TYPES if len(info.shape) > 1 and not is_vector else VECTOR_TYPES
    if info.type not in known:
        raise UnsupportedModel(
            f"{model.path}: tensor {name} {info.shape} has type {info.type.name}, which the native engine lacks; it "
            f"has {', '.join(sorted(each.name for each in known))}"
        )
    return info


def _part(model: ModelFile, weight: Weight, packing: Packing) -> Part:
    """What a weight means in the file."""
    if weight.role in _BIASES_OF_EXPERTS:
        return _biases_of_experts(model, weight)
    if weight.role == CONVOLUTION:
        return _convolution(model, weight)
    if weight.role in _FLAT and len(weight.shape) == 2:
        return _flat(model, weight)
    ref = weight.tensor
    assert not isinstance(ref, ExpertRows)  # of matrices of experts and of their biases only
    name = ref.name if isinstance(ref, TensorRows) else ref
    if isinstance(ref, TensorRows) and model.tensors[name].type == GGMLType.I2_S:
        raise UnsupportedModel(f"{model.path}: tensor {name} is I2_S, which cannot be cut into several matrices")
    info = _info(model, name, is_vector=len(weight.shape) == 1)
    packed_as = packing.format_of(info, weight.role)
    shape = info.shape if isinstance(ref, TensorRows) else weight.shape  # in the file (1, n) may stand for (n,)
    part = Part(weight.block, weight.role, name, info.type, packed_as, shape, info.n_bytes)
    if info.type == GGMLType.I2_S:
        return part._replace(n_bytes=info.n_bytes - I2_S_TAIL_BYTES, scale=_scale(model, name))
    if isinstance(ref, TensorRows):
        row_bytes, n_rows = info.n_bytes // info.shape[0], ref.last - ref.first
        shape = (n_rows, *info.shape[1:])
        return part._replace(shape=shape, n_bytes=n_rows * row_bytes, first_byte=ref.first * row_bytes)
    return part


def _convolution(model: ModelFile, weight: Weight) -> Part:
    """The weights of a convolution as one vector."""
    assert isinstance(weight.tensor, str)  # a whole tensor
    info = _info(model, weight.tensor, is_vector=True)
    n_channels, n_conv = weight.shape
    n = n_channels * n_conv
    return Part(weight.block, weight.role, info.name, info.type, int(info.type), (n,), info.n_bytes, n_columns=n_conv)


def _flat(model: ModelFile, weight: Weight) -> Part:
    """The numbers of a matrix as one vector, row after row."""
    assert isinstance(weight.tensor, str)  # a whole tensor
    info = _info(model, weight.tensor, is_vector=True)
    shape = (math.prod(weight.shape),)
    return Part(weight.block, weight.role, info.name, info.type, int(info.type), shape, info.n_bytes)


def _biases_of_experts(model: ModelFile, weight: Weight) -> Part:
    """Biases (n_experts, n) as one vector."""
    ref, n_experts, n = weight.tensor, *weight.shape
    info = _info(model, ref if isinstance(ref, str) else ref.name, is_vector=True)
    part = Part(weight.block, weight.role, info.name, info.type, int(info.type), (n_experts * n,), info.n_bytes)
    if not isinstance(ref, ExpertRows):
        return part
    each = info.n_bytes // (n_experts * info.shape[1])
    return part._replace(
        n_bytes=n_experts * n * each, first_byte=ref.first * each, n_runs=n_experts, distance=info.shape[1] * each
    )


def _scale(model: ModelFile, name: str) -> float:
    """The scale of an I2_S tensor. Raises ModelFileError."""
    scale = float(model.data(name)[-I2_S_TAIL_BYTES:][:4].copy().view("<f4")[0])
    if not math.isfinite(scale):
        raise ModelFileError(f"{model.path}: tensor {name} must have a finite scale: found {scale}")
    return scale


# ---- packing ---------------------------------------------------------------------------------------------------------


def pack_weights(
    weights: _core.Weights,
    model: ModelFile,
    parts: Sequence[Part],
    threads: _core.Threads,
    progress: Progress | None = None,
) -> None:
    """Fill weights in from a file. Raises ModelFileError for ternary matrices with other codes."""
    total = sum(part.n_bytes for part in parts)
    done = 0
    for part in parts:
        if len(part.shape) == 1:
            weights.set_vector(part.block, part.role, _vector(model, part))
        else:
            weights.set_matrix(part.block, part.role, part.packed_as, *part.shape)
            pack_matrix(weights, model, part, threads)
        done += part.n_bytes
        if progress is not None:
            progress(done / total)


def map_weights(weights: _core.Weights, parts: Sequence[Part], progress: Progress | None = None) -> None:
    """Name what lies in mapped weights, in the order in which it was packed."""
    for part in parts:
        if len(part.shape) == 1:
            weights.map_vector(part.block, part.role, part.shape[0])
        else:
            weights.set_matrix(part.block, part.role, part.packed_as, *part.shape)
    if progress is not None:
        progress(1.0)


def read_weights(n_bytes: int, file: MappedFile, offset: int) -> _core.Weights:
    """Packed weights that lie in a file from an offset on, read into memory. Raises ModelFileError."""
    weights = _core.Weights(n_bytes)
    try:
        weights.read_packed(str(file.path), offset)
    except RuntimeError as error:
        file.check()
        raise ModelFileError(f"{file.path}: packed weights cannot be read: {error}") from error
    file.watch.check_name()  # it was opened by that
    file.check()
    return weights


def pack_matrix(weights: _core.Weights, model: ModelFile, part: Part, threads: _core.Threads) -> None:
    """Pack a matrix piece by piece, so that little of the file is in memory beside what it becomes.

    One that is packed already is overwritten. Raises ModelFileError for ternary matrices with other codes.
    """
    n_out = part.shape[0]
    row_bytes = part.n_bytes // n_out
    n_rows = max(1, PIECE_BYTES // (16 * row_bytes)) * 16
    for first_row in range(0, n_out, n_rows):
        first, last = first_row * row_bytes, min(n_out, first_row + n_rows) * row_bytes
        data = part.data(model, first, last)
        if part.type in TERNARY_TYPES and not _core.holds_trits(int(part.type), data):
            raise ModelFileError(
                f"{model.path}: tensor {part.name} is {part.type.name}, whose codes are 0, 1 and 2: found 3; it is "
                f"damaged, or not ternary"
            )
        weights.pack_rows(part.block, part.role, first_row, int(part.type), data, threads, part.scale)
        model.release(part.name, part.first_byte + first, part.first_byte + last)


def _vector(model: ModelFile, part: Part) -> NDArray[np.float32]:
    """A norm or a bias as float32."""
    kind = "<f4" if part.type == GGMLType.F32 else "<f2"
    n_bytes = part.n_bytes // part.n_runs
    firsts = (run * part.distance for run in range(part.n_runs))
    data = b"".join(part.data(model, first, first + n_bytes).tobytes() for first in firsts)
    model.release(part.name)
    values = np.frombuffer(data, dtype=kind).astype(np.float32, copy=False)
    return np.ascontiguousarray(values.reshape(-1, part.n_columns).T).reshape(-1)
