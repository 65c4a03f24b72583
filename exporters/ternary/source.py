"""Ternary models as they are read: by the names of GGUF, whatever they come from.

The matrices of layers are trits with scales; everything else is bytes in the type that holds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgeinfer.exporters.gguf.writer import Metadata
from edgeinfer.exporters.virtual_file import VirtualModelFile, VirtualTensor
from edgeinfer.models.formats import dequantize
from edgeinfer.models.formats.ternary_matrix import TernaryMatrix
from edgeinfer.models.gguf import GGMLType, ModelFile

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

PIECE_WEIGHTS = 8 << 20  # are in memory as float32 at once


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is taken as it is, read some rows at a time."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    stored: Callable[[int, int], Bytes]  # the bytes of rows first..last-1; a vector is one row
    release: Callable[[], None] = lambda: None  # gives back what reading keeps in memory

    @property
    def n_rows(self) -> int:
        """Rows in all."""
        return math.prod(self.shape[:-1])

    def data(self) -> Bytes:
        """All bytes."""
        return self.stored(0, self.n_rows)

    def pieces(self) -> Iterator[Bytes]:
        """All bytes, some rows at a time."""
        for first, last in self._runs():
            yield self.stored(first, last)
            self.release()

    def floats(self) -> Iterator[Floats]:
        """The weights of a matrix, some rows at a time. Raises UnsupportedModel for a type that is not known."""
        for first, last in self._runs():
            yield dequantize(self.type, self.stored(first, last), (last - first, self.shape[-1]))
            self.release()

    def _runs(self) -> Iterator[tuple[int, int]]:
        n_rows = max(1, PIECE_WEIGHTS // self.shape[-1])
        return ((first, min(self.n_rows, first + n_rows)) for first in range(0, self.n_rows, n_rows))


@dataclass(frozen=True)
class TernaryTensor:
    """A matrix (n_out, n_in) of a layer.

    Raises UnsupportedModel for one that is not ternary.
    """

    name: str
    found: GGMLType | None  # what it is stored as, None where GGUF has no such type
    shape: tuple[int, ...]
    matrix: Callable[[], TernaryMatrix]  # reads it


SourceTensor: TypeAlias = StoredTensor | TernaryTensor


@dataclass(frozen=True)
class TernarySource:
    """A model with ternary matrices."""

    path: Path
    metadata: Metadata  # the keys of a GGUF file, without those that follow from how it is written
    output: str  # the name of the output matrix, which is that of the embeddings where a model has only one
    tensors: Sequence[SourceTensor]  # in the order of a file

    def as_model_file(self) -> AbstractContextManager[ModelFile]:
        """A model file of this metadata, whose tensors are read from the source; ternary matrices are F32 in it."""
        return VirtualModelFile.of(self.path, self.metadata, map(_virtual, self.tensors))


def _virtual(tensor: SourceTensor) -> VirtualTensor:
    if isinstance(tensor, StoredTensor):
        return VirtualTensor(tensor.name, tensor.type, tensor.shape, partial(_stored_bytes, tensor))
    return VirtualTensor(tensor.name, GGMLType.F32, tensor.shape, partial(_weight_bytes, tensor))


def _stored_bytes(tensor: StoredTensor, first: int, last: int) -> Bytes:
    row_bytes = tensor.type.n_bytes(math.prod(tensor.shape)) // tensor.n_rows
    rows = first // row_bytes, min(tensor.n_rows, -(-last // row_bytes))
    start = rows[0] * row_bytes
    return tensor.stored(*rows)[first - start : last - start]


def _weight_bytes(tensor: TernaryTensor, first: int, last: int) -> Bytes:
    return tensor.matrix().weights().reshape(-1).view(np.uint8)[first:last]
