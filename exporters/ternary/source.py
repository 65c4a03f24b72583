"""Ternary models as they are read: by the names of GGUF, whatever they come from.

The matrices of layers are trits with scales; everything else is bytes in the type that holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgeinfer.exporters.gguf.writer import Metadata, write_gguf
from edgeinfer.files import temporary_folder
from edgeinfer.models.formats.ternary_matrix import TernaryMatrix
from edgeinfer.models.gguf import GGMLType, ModelFile

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is taken as it is. data: all of its bytes."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    data: Callable[[], Bytes]


@dataclass(frozen=True)
class TernaryTensor:
    """A matrix (n_out, n_in) of a layer. found: what it is stored as, None where GGUF has no such type.

    matrix: reads it. Raises UnsupportedModel for one that is not ternary.
    """

    name: str
    found: GGMLType | None
    shape: tuple[int, ...]
    matrix: Callable[[], TernaryMatrix]


SourceTensor: TypeAlias = StoredTensor | TernaryTensor


@dataclass(frozen=True)
class TernarySource:
    """A model with ternary matrices.

    metadata: the keys of a GGUF file, without those that follow from how it is written.  output: the name of the output
    matrix, which is that of the embeddings where a model has only one.  tensors: in the order of a file.
    """

    path: Path
    metadata: Metadata
    output: str
    tensors: Sequence[SourceTensor]

    @contextmanager
    def as_model_file(self) -> Iterator[ModelFile]:
        """A model file of this metadata, whose tensors are read from the source. It takes no disk but for metadata.

        Ternary matrices are F32 in it.
        """
        with temporary_folder() as folder:
            path = folder / f"{self.path.name}.gguf"
            write_gguf(path, self.metadata, [])
            with ModelFile.open(path) as file:
                for tensor in self.tensors:
                    if isinstance(tensor, StoredTensor):
                        file.define(tensor.name, tensor.type, tensor.shape, partial(_stored_bytes, tensor))
                    else:
                        file.define(tensor.name, GGMLType.F32, tensor.shape, partial(_weight_bytes, tensor))
                yield file


def _stored_bytes(tensor: StoredTensor, first: int, last: int) -> Bytes:
    return tensor.data()[first:last]


def _weight_bytes(tensor: TernaryTensor, first: int, last: int) -> Bytes:
    return tensor.matrix().weights().reshape(-1).view(np.uint8)[first:last]
