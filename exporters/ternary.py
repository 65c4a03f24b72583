"""Ternary models to GGUF: from Hugging Face checkpoints, and from one ternary format to another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import ShapeError, UnsupportedModel
from edgeinfer.exporters.checkpoint import TernaryCheckpoint
from edgeinfer.exporters.gguf.writer import Progress, Tensor, write_gguf
from edgeinfer.exporters.request import Plan, PlannedTensor, Request, Result
from edgeinfer.exporters.vocabulary import read_vocabulary
from edgeinfer.models.draft_head import is_draft_head
from edgeinfer.models.formats import PACK, dequantize, quantize
from edgeinfer.models.formats.ternary_matrix import TernaryMatrix
from edgeinfer.models.gguf import GGMLType, MetadataValue, ModelFile, TensorInfo

Bytes = NDArray[np.uint8]
Format = Literal["i2_s", "tq1_0", "tq2_0"]
Head = Literal["keep", "q6_k", "f16"]

PIECE_WEIGHTS = 8 << 20  # are in memory as float32 at once
_FILE_TYPES = {"i2_s": 40, "tq1_0": 36, "tq2_0": 37}  # general.file_type of bitnet.cpp and of llama.cpp
_TERNARY = (GGMLType.I2_S, GGMLType.TQ1_0, GGMLType.TQ2_0, GGMLType.Q2_0)
_FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
_OF_THE_FILE = ("general.alignment", "general.file_type", "split.no", "split.count", "split.tensors.count")
_ARCHITECTURES = {("bitnet", "relu2"): "bitnet-b1.58", ("llama", "silu"): "llama"}  # by model_type and hidden_act
_LINEARS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
}


class TernaryTarget:
    """`--to ternary`, see Target. Options: format, head."""

    def plan(self, request: Request) -> Plan:
        """See Target.plan."""
        with _opened(request.source) as source:
            tensors = _content(source, request.more.get("format", "i2_s"), request.more.get("head", "keep"), True)[1]
            found = {name: info.type for name, info in source.tensors.items()} if isinstance(source, ModelFile) else {}
        planned = [
            PlannedTensor(each.name, found.get(each.name, each.type), each.type, each.n_bytes) for each in tensors
        ]
        n_bytes = sum(each.n_bytes for each in planned)
        # A matrix is in memory as trits of a byte, in parts and as a whole, and as it is written.
        most = max((3 * math.prod(each.shape) + each.n_bytes for each in tensors), default=0)
        return Plan(planned, {request.out: n_bytes}, most + 4 * 4 * PIECE_WEIGHTS, n_bytes)

    def write(self, request: Request, progress: Progress) -> Result:
        """See Target.write. It is exact, or refused."""
        with _opened(request.source) as source:
            format, head = request.more.get("format", "i2_s"), request.more.get("head", "keep")
            export_ternary(source, request.out, format, head, progress=progress)
        return Result([request.out], None)


@contextmanager
def _opened(path: Path) -> Iterator[TernaryCheckpoint | ModelFile]:
    if path.is_dir():
        yield TernaryCheckpoint.open(path)
    else:
        with ModelFile.open(path) as file:
            yield file


def export_ternary(
    source: TernaryCheckpoint | ModelFile,
    target: Path,
    format: Format = "i2_s",
    head: Head = "keep",
    vocabulary: bool = True,
    progress: Progress | None = None,
) -> None:
    """Write a GGUF file with the ternary matrices of a model in one format; what is no matrix of a layer is copied.

    source: a checkpoint of BitNet or Llama, or a GGUF file whose layers are ternary.  head: what becomes of the output
    matrix, which is that of the embeddings where a model has only one.  vocabulary: of a checkpoint; without one a file
    serves sessions, which take token ids.  tq1_0 and tq2_0 round the scales to float16.
    Raises UnsupportedModel, ModelFileError, OSError.
    """
    metadata, tensors = _content(source, format, head, vocabulary)
    write_gguf(target, metadata, tensors, progress)


def _content(
    source: TernaryCheckpoint | ModelFile, format: Format, head: Head, vocabulary: bool
) -> tuple[dict[str, MetadataValue], list[Tensor]]:
    """Metadata and tensors of the file to write."""
    if isinstance(source, TernaryCheckpoint):
        metadata, tensors = _checkpoint_metadata(source, vocabulary), list(_of_checkpoint(source, format, head))
    else:
        metadata = {key: value for key, value in source.metadata.items() if key not in _OF_THE_FILE}
        tensors = list(_of_file(source, format, head))
    return metadata | {"general.file_type": _FILE_TYPES[format]}, tensors


# ---- GGUF files ------------------------------------------------------------------------------------------------------


def _of_file(file: ModelFile, format: Format, head: Head) -> Iterator[Tensor]:
    """Raises UnsupportedModel for a file whose layers are not ternary, as far as types tell."""
    if is_draft_head(file):
        _check_head(file)
    output = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
    for name, info in file.tensors.items():
        if name == output:
            yield _head(name, info.shape, info.type, file.data(name), head)
        elif _is_of_layer(info):
            _check_type(file, info)
            yield _ternary(name, info.shape, format, partial(_matrix_of_file, file, name))
        else:
            yield Tensor(name, info.type, info.shape, partial(_one, file.data(name)))


def _is_of_layer(info: TensorInfo) -> bool:
    """Whether a tensor is a matrix of a layer, which is to be ternary."""
    return info.name.startswith("blk.") and len(info.shape) == 2


def _check_head(file: ModelFile) -> None:
    """Raises UnsupportedModel for a draft head that is not in a ternary type, as those that are trained here."""
    other = {info.type for info in file.tensors.values() if _is_of_layer(info)} - set(_TERNARY)
    if other:
        raise UnsupportedModel(
            f"{file.path} is a draft head with matrices in {', '.join(sorted(kind.name for kind in other))}: --to "
            f"ternary rounds nothing, it takes ternary matrices ({', '.join(kind.name for kind in _TERNARY)}) alone; "
            "for a smaller head take --to gguf --type Q4_0"
        )


def _check_type(file: ModelFile, info: TensorInfo) -> None:
    """Raises UnsupportedModel for a matrix whose type holds more than three values."""
    if info.type not in (*_TERNARY, *_FLOATS):
        known = ", ".join(kind.name for kind in (*_TERNARY, *_FLOATS))
        raise UnsupportedModel(
            f"{file.path}: tensor {info.name} is {info.type.name}, which is not ternary; these can be: {known}"
        )


def _matrix_of_file(file: ModelFile, name: str) -> TernaryMatrix:
    """Raises UnsupportedModel for a matrix that is not ternary."""
    info, data = file.tensors[name], file.data(name)
    if info.type == GGMLType.I2_S:
        parts = [TernaryMatrix.of_weights(name, dequantize(info.type, data, info.shape))]
    else:
        parts = [TernaryMatrix.of_weights(name, piece) for piece in _rows(info.type, data, info.shape)]
    file.release(name)
    return TernaryMatrix(*(np.concatenate([getattr(part, each) for part in parts]) for each in ("trits", "scales")))


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def _architecture(checkpoint: TernaryCheckpoint) -> str:
    kind = (checkpoint.config.get("model_type"), checkpoint.config.get("hidden_act"))
    if kind not in _ARCHITECTURES:
        known = ", ".join(f"{model} with {activation}" for model, activation in _ARCHITECTURES)
        raise UnsupportedModel(f"{checkpoint.path}: model {kind[0]} with {kind[1]} is not supported; {known} is")
    return _ARCHITECTURES[kind]


def _checkpoint_metadata(checkpoint: TernaryCheckpoint, vocabulary: bool) -> dict[str, MetadataValue]:
    architecture, config = _architecture(checkpoint), checkpoint.config
    head_dim = _head_dim(checkpoint)
    values: dict[str, MetadataValue] = {
        "context_length": _size(checkpoint, "max_position_embeddings"),
        "embedding_length": _size(checkpoint, "hidden_size"),
        "feed_forward_length": _size(checkpoint, "intermediate_size"),
        "block_count": _size(checkpoint, "num_hidden_layers"),
        "attention.head_count": _size(checkpoint, "num_attention_heads"),
        "attention.head_count_kv": _size(checkpoint, "num_key_value_heads"),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.number("rms_norm_eps", 1e-6),
        "rope.dimension_count": head_dim,
        "rope.freq_base": _rope_base(checkpoint),
    }
    metadata: dict[str, MetadataValue] = {"general.architecture": architecture, "general.name": checkpoint.path.name}
    metadata |= {f"{architecture}.{key}": value for key, value in values.items()}
    if vocabulary:
        n_rows = checkpoint.shape("model.embed_tokens.weight")[0]
        metadata |= read_vocabulary(checkpoint.folder, config, n_rows)
    return metadata


def _size(checkpoint: TernaryCheckpoint, key: str) -> int:
    """A positive number of config.json. Raises ModelFileError."""
    return checkpoint.config.integer(key)


def _head_dim(checkpoint: TernaryCheckpoint) -> int:
    if checkpoint.config.get("head_dim"):
        return _size(checkpoint, "head_dim")
    return _size(checkpoint, "hidden_size") // _size(checkpoint, "num_attention_heads")


def _rope_base(checkpoint: TernaryCheckpoint) -> float:
    """Raises UnsupportedModel for a rotation that is scaled."""
    rope = checkpoint.config.rope()
    if rope.kind != "default":
        raise UnsupportedModel(f"{checkpoint.path}: rope_type must be default: found {rope.kind!r:.80}")
    return rope.theta


def _check_names(checkpoint: TernaryCheckpoint) -> None:
    """Raises UnsupportedModel for a tensor that would be left out, such as a bias."""
    in_layer = {f"{name}.weight" for name in (*_LINEARS, *_NORMS)} | {f"{name}.weight_scale" for name in _LINEARS}
    in_layer |= {"self_attn.rotary_emb.inv_freq"}
    known = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    known |= {f"model.layers.{n}.{name}" for n in range(_size(checkpoint, "num_hidden_layers")) for name in in_layer}
    unknown = sorted(set(checkpoint.names) - known)
    if unknown:
        raise UnsupportedModel(f"{checkpoint.path}: tensor {unknown[0]} has no place in the models that are known")


def _of_checkpoint(checkpoint: TernaryCheckpoint, format: Format, head: Head) -> Iterator[Tensor]:
    _check_names(checkpoint)
    tied = bool(checkpoint.config.get("tie_word_embeddings")) or "lm_head.weight" not in checkpoint.names
    yield _floats(checkpoint, "model.embed_tokens.weight", "token_embd.weight", head if tied else "keep")
    yield _vector(checkpoint, "model.norm.weight", "output_norm.weight")
    if not tied:
        yield _floats(checkpoint, "lm_head.weight", "output.weight", head)
    for layer in range(_size(checkpoint, "num_hidden_layers")):
        ours, theirs = f"blk.{layer}", f"model.layers.{layer}"
        for module, name in _NORMS.items():
            if f"{theirs}.{module}.weight" in checkpoint.names:
                yield _vector(checkpoint, f"{theirs}.{module}.weight", f"{ours}.{name}.weight")
        for module, name in _LINEARS.items():
            shape = _shape(checkpoint, name)
            matrix = partial(_matrix_of_checkpoint, checkpoint, f"{theirs}.{module}", name, shape)
            yield _ternary(f"{ours}.{name}.weight", shape, format, matrix)


def _shape(checkpoint: TernaryCheckpoint, name: str) -> tuple[int, int]:
    n_embd, n_ff = _size(checkpoint, "hidden_size"), _size(checkpoint, "intermediate_size")
    heads, kv_heads = _size(checkpoint, "num_attention_heads"), _size(checkpoint, "num_key_value_heads")
    n_q, n_kv = heads * _head_dim(checkpoint), kv_heads * _head_dim(checkpoint)
    return {
        "attn_q": (n_q, n_embd),
        "attn_k": (n_kv, n_embd),
        "attn_v": (n_kv, n_embd),
        "attn_output": (n_embd, n_q),
        "ffn_gate": (n_ff, n_embd),
        "ffn_up": (n_ff, n_embd),
        "ffn_down": (n_embd, n_ff),
    }[name]


def _matrix_of_checkpoint(
    checkpoint: TernaryCheckpoint, module: str, name: str, shape: tuple[int, int]
) -> TernaryMatrix:
    """Rows as GGUF has them: in llama, rotary pairs stand side by side, not half a head apart."""
    matrix = checkpoint.ternary(module, shape)
    if name not in ("attn_q", "attn_k") or _architecture(checkpoint) != "llama":
        return matrix
    order = np.arange(shape[0]).reshape(-1, 2, _head_dim(checkpoint) // 2).swapaxes(1, 2).reshape(-1)
    scales = matrix.scales if matrix.scales.size == 1 else matrix.scales[order]
    return TernaryMatrix(matrix.trits[order], scales)


def _floats(checkpoint: TernaryCheckpoint, theirs: str, ours: str, head: Head) -> Tensor:
    shape = checkpoint.shape(theirs)
    return _head(ours, shape, checkpoint.type(theirs), checkpoint.data(theirs), head)


def _vector(checkpoint: TernaryCheckpoint, theirs: str, ours: str) -> Tensor:
    values = checkpoint.floats(theirs)
    return Tensor(ours, GGMLType.F32, values.shape, partial(_one, values.astype("<f4").view(np.uint8)))


# ---- tensors ---------------------------------------------------------------------------------------------------------


def _ternary(name: str, shape: tuple[int, ...], format: Format, matrix: Callable[[], TernaryMatrix]) -> Tensor:
    """matrix: gives the TernaryMatrix, when it is written."""
    kind = GGMLType[format.upper()]
    if shape[-1] % kind.block_elements:
        raise UnsupportedModel(
            f"tensor {name}: {format} needs rows of a multiple of {kind.block_elements} inputs: found {shape[-1]}"
        )
    return Tensor(name, kind, shape, lambda: [PACK[kind](name, matrix())])


def _head(name: str, shape: tuple[int, ...], kind: GGMLType, data: Bytes, head: Head) -> Tensor:
    """The output matrix in the format that is wanted."""
    wanted = {"keep": kind, "q6_k": GGMLType.Q6_K, "f16": GGMLType.F16}[head]
    if wanted == kind:
        return Tensor(name, kind, shape, partial(_one, data))
    if shape[-1] % wanted.block_elements:
        raise UnsupportedModel(
            f"tensor {name}: {head} needs rows of a multiple of {wanted.block_elements} inputs: found {shape[-1]}; use "
            f"--head keep or f16"
        )
    return Tensor(name, wanted, shape, lambda: (_written(name, wanted, piece) for piece in _rows(kind, data, shape)))


def _rows(kind: GGMLType, data: Bytes, shape: tuple[int, ...]) -> Iterator[NDArray[np.float32]]:
    """The weights of a matrix, some rows at a time. Raises UnsupportedModel for a type that is not known."""
    n_out, n_in = shape
    row_bytes, n_rows = data.nbytes // n_out, max(1, PIECE_WEIGHTS // n_in)
    for first in range(0, n_out, n_rows):
        last = min(n_out, first + n_rows)
        yield dequantize(kind, data[first * row_bytes : last * row_bytes], (last - first, n_in))


def _written(name: str, type: GGMLType, weights: NDArray[np.float32]) -> Bytes:
    """The bytes of some rows. Raises UnsupportedModel for weights that the type cannot hold."""
    try:
        return quantize(type, weights)
    except ShapeError as error:
        raise UnsupportedModel(f"tensor {name}: {error}") from error


def _one(data: Bytes) -> list[Bytes]:
    return [data]
