"""Ternary models to GGUF: from Hugging Face checkpoints, and from one ternary format to another."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import ShapeError, UnsupportedModel
from edgeinfer.common.overriding import override
from edgeinfer.exporters.checkpoint import TernaryCheckpoint
from edgeinfer.exporters.gguf.writer import Metadata, Progress, Tensor, write_gguf
from edgeinfer.exporters.request import ExportTarget, Plan, PlannedTensor, Request, Result
from edgeinfer.exporters.ternary.checkpoint import of_checkpoint
from edgeinfer.exporters.ternary.reading import of_file, open_ternary
from edgeinfer.exporters.ternary.source import (
    PIECE_WEIGHTS,
    Bytes,
    SourceTensor,
    StoredTensor,
    TernarySource,
    TernaryTensor,
)
from edgeinfer.exporters.vocabulary.chat_templates import template_notes
from edgeinfer.models.formats import PACK, quantize
from edgeinfer.models.gguf import GGMLType, ModelFile

Format = Literal["i2_s", "tq1_0", "tq2_0"]
Head = Literal["keep", "q6_k", "f16"]

_FILE_TYPES = {"i2_s": 40, "tq1_0": 36, "tq2_0": 37}  # general.file_type of bitnet.cpp and of llama.cpp


class TernaryTarget(ExportTarget):
    """`--to ternary`, see ExportTarget. Options: format, head."""

    @override
    def plan(self, request: Request) -> Plan:
        with open_ternary(request.source) as source:
            tensors = _content(source, request.more.get("format", "i2_s"), request.more.get("head", "keep"))[1]
        found = {each.name: each.found if isinstance(each, TernaryTensor) else each.type for each in source.tensors}
        planned = [PlannedTensor(each.name, found[each.name] or each.type, each.type, each.n_bytes) for each in tensors]
        n_bytes = sum(each.n_bytes for each in planned)
        # A matrix is in memory as trits of a byte, in parts and as a whole, and as it is written.
        most = max((3 * math.prod(each.shape) + each.n_bytes for each in tensors), default=0)
        notes = template_notes(source.metadata)
        return Plan(planned, {request.out: n_bytes}, most + 4 * 4 * PIECE_WEIGHTS, n_bytes, notes)

    @override
    def write(self, request: Request, progress: Progress) -> Result:
        """See ExportTarget.write. It is exact, or refused."""
        with open_ternary(request.source) as source:
            content = _content(source, request.more.get("format", "i2_s"), request.more.get("head", "keep"))
            write_gguf(request.out, *content, progress)
        return Result([request.out], None)


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
    opened = of_file(source) if isinstance(source, ModelFile) else of_checkpoint(source, vocabulary)
    write_gguf(target, *_content(opened, format, head), progress)


def _content(source: TernarySource, format: Format, head: Head) -> tuple[Metadata, list[Tensor]]:
    """Metadata and tensors of the file to write."""
    tensors = [_tensor(source, tensor, format, head) for tensor in source.tensors]
    return {**source.metadata, "general.file_type": _FILE_TYPES[format]}, tensors


def _tensor(source: TernarySource, tensor: SourceTensor, format: Format, head: Head) -> Tensor:
    if isinstance(tensor, TernaryTensor):
        return _ternary(tensor, format)
    if tensor.name == source.output:
        return _head(tensor, head)
    return Tensor(tensor.name, tensor.type, tensor.shape, tensor.pieces)


def _ternary(tensor: TernaryTensor, format: Format) -> Tensor:
    name, shape, kind = tensor.name, tensor.shape, GGMLType[format.upper()]
    if shape[-1] % kind.block_elements:
        raise UnsupportedModel(
            f"tensor {name}: {format} needs rows of a multiple of {kind.block_elements} inputs: found {shape[-1]}"
        )
    return Tensor(name, kind, shape, lambda: [PACK[kind](name, tensor.matrix())])


def _head(tensor: StoredTensor, head: Head) -> Tensor:
    """The output matrix in the format that is wanted."""
    name, kind, shape = tensor.name, tensor.type, tensor.shape
    wanted = {"keep": kind, "q6_k": GGMLType.Q6_K, "f16": GGMLType.F16}[head]
    if wanted == kind:
        return Tensor(name, kind, shape, tensor.pieces)
    if shape[-1] % wanted.block_elements:
        raise UnsupportedModel(
            f"tensor {name}: {head} needs rows of a multiple of {wanted.block_elements} inputs: found {shape[-1]}; use "
            f"--head keep or f16"
        )
    return Tensor(name, wanted, shape, lambda: (_written(name, wanted, piece) for piece in tensor.floats()))


def _written(name: str, type: GGMLType, weights: NDArray[np.float32]) -> Bytes:
    """The bytes of some rows. Raises UnsupportedModel for weights that the type cannot hold."""
    try:
        return quantize(type, weights)
    except ShapeError as error:
        raise UnsupportedModel(f"tensor {name}: {error}") from error
