"""What an export reads: metadata and tensors as GGUF names them, whatever they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import EdgeInferError
from edgeinfer.common.overriding import override
from edgeinfer.exporters.finite import FiniteFile
from edgeinfer.exporters.gguf.writer import Metadata
from edgeinfer.models.formats import check_type, dequantize
from edgeinfer.models.gguf import FilePlace, GGMLType, ModelFile

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
ReadRows = Callable[[int, int], Floats]  # rows first..last-1
ReadBytes = Callable[[int, int], Bytes]


@dataclass(frozen=True)
class StoredBytes:
    """Reads the bytes of rows that lie one after the other in a file."""

    read: ReadBytes
    place: FilePlace

    def __call__(self, first: int, last: int) -> Bytes:
        """Those of rows first..last-1."""
        return self.read(first, last)


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of a source, read some rows at a time."""

    name: str
    shape: tuple[int, ...]  # in numpy's order
    type: GGMLType  # what holds its weights without loss
    # (last - first, n_in) float32; the rows of a tensor of three axes are those of its matrices one after the other, a
    # vector is one row
    rows: ReadRows
    # the bytes of the same rows in `type`, where the source has them; None where they are made of the rows
    stored: ReadBytes | None = None

    @property
    def place(self) -> FilePlace | None:
        """Where these bytes lie in a file as they are, None where they do not."""
        return self.stored.place if isinstance(self.stored, StoredBytes) else None

    @property
    def n_in(self) -> int:
        """Numbers in a row."""
        return self.shape[-1] if self.shape else 1

    @property
    def n_rows(self) -> int:
        """Rows in all."""
        return int(np.prod(self.shape[:-1], dtype=np.int64))


class Source(Protocol):
    """A model to export."""

    path: Path  # what the user named

    @property
    def files(self) -> Sequence[Path]:
        """What is read, for the manifest."""
        ...

    # the keys of the GGUF file, without those that follow from how it is written (general.file_type, general.alignment,
    # split.*)
    metadata: Metadata
    tensors: Sequence[SourceTensor]  # in the order in which they are written
    notes: Sequence[str]  # what the user should know about what is left out or differs, a sentence each

    def release(self, name: str) -> None:
        """Give back what reading a tensor keeps in memory; it can be read again."""
        ...


@contextmanager
def named_as(made: Path, path: Path) -> Iterator[None]:
    """Within, errors about a file that is made on the way name what the user named instead. made: that file."""
    try:
        yield
    except EdgeInferError as error:
        error.args = tuple(each.replace(str(made), str(path)) if isinstance(each, str) else each for each in error.args)
        raise


@contextmanager
def open_source(path: Path, target: Path | None = None) -> Iterator[Source]:
    """The model or the draft head of a GGUF file or of a folder of Hugging Face.

    target: the model that a head drafts for; a model does not need it. Raises ModelFileError, UnsupportedModel;
    InvalidArgument for none of a head that needs it.
    """
    if path.is_dir():
        from edgeinfer.exporters.folders import open_model_or_head  # which needs this module

        with open_model_or_head(path, target) as folder:
            yield folder
        return
    from edgeinfer.exporters.vocabulary.chat_templates import template_notes  # which needs this module

    with FiniteFile.open(path) as file:
        source = GgufSource(file)
        source.notes = template_notes(file.metadata)
        yield source


_OF_THE_FILE = ("general.alignment", "general.file_type", "split.no", "split.count", "split.tensors.count")


class GgufSource(Source):
    """The model of a GGUF file, see Source. The file stays open, and belongs to the caller."""

    def __init__(self, file: ModelFile) -> None:
        self.file = file
        self.path = file.path
        self.metadata: Metadata = {key: value for key, value in file.metadata.items() if key not in _OF_THE_FILE}
        self.tensors: Sequence[SourceTensor] = [self._tensor(name) for name in file.tensors if not file.makes(name)]
        self.notes: Sequence[str] = ()

    @property
    @override
    def files(self) -> Sequence[Path]:
        return self.file.paths

    @override
    def release(self, name: str) -> None:
        self.file.release(name)

    def _tensor(self, name: str) -> SourceTensor:
        info = self.file.tensors[name]
        stored: ReadBytes = partial(self._stored, name)
        if (place := self.file.place(name)) is not None:
            stored = StoredBytes(stored, place)
        return SourceTensor(name, info.shape, info.type, partial(self._rows, name), stored)

    def _stored(self, name: str, first: int, last: int) -> Bytes:
        info = self.file.tensors[name]
        n_in = info.shape[-1] if info.shape else 1
        row_bytes = n_in // info.type.block_elements * info.type.block_bytes
        is_end = last * n_in == info.n_elements  # I2_S has bytes after its last row
        return self.file.data(name, first * row_bytes, info.n_bytes if is_end else last * row_bytes)

    def _rows(self, name: str, first: int, last: int) -> Floats:
        info = self.file.tensors[name]
        check_type(info.type)
        n_in = info.shape[-1] if info.shape else 1
        if info.type == GGMLType.I2_S:
            return dequantize(info.type, self.file.data(name), info.shape)[first:last]
        weights = dequantize(info.type, self._stored(name, first, last), (last - first, n_in))
        self.file.release(name)
        return weights
