"""Strict GGUF reader: every number of the file is checked against the file before it is used.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian: magic, version,
n_tensors, n_kv; n_kv times (key, type, value); n_tensors times (name, dimensions, type, offset); padding; the bytes of
the tensors. The file is mapped while it is read, and memory is never allocated by a declared length alone.

If another program writes to the file meanwhile, the next access raises ModelFileChanged, and so do `check` and the end
of a `with` block. What such a program has cut off is read as zeros until then, see fault_guard.h.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.arguments import check_file_name
from edgeinfer.common.errors import EdgeInferError
from edgeinfer.common.file_identity import FileWatch, begin_reading, end_reading
from edgeinfer.common.one_process import OfOneProcess
from edgeinfer.models.gguf_reader.header import (
    DEFAULT_ALIGNMENT,
)
from edgeinfer.models.gguf_reader.mapping import MappedFile
from edgeinfer.models.gguf_reader.parts import Part, read_all_parts, read_part
from edgeinfer.models.gguf_reader.types import I2_S_TAIL_BYTES, TERNARY_TYPES, GGMLType, MetadataValue, TensorInfo

__all__ = [
    "DEFAULT_ALIGNMENT",
    "I2_S_TAIL_BYTES",
    "TERNARY_TYPES",
    "FilePlace",
    "GGMLType",
    "MakeBytes",
    "MetadataValue",
    "ModelFile",
    "TensorInfo",
]

MakeBytes: TypeAlias = Callable[[int, int], NDArray[np.uint8]]  # of bytes first..last-1, whole rows


class FilePlace(NamedTuple):
    """Where the bytes of a tensor lie in a file. The descriptor belongs to who opened the file, and ends with that."""

    path: Path
    descriptor: int
    offset: int  # of the first byte


class ModelFile(OfOneProcess):
    """A GGUF model in one file or several parts; a context manager.

    What the thread writes within a `with` block does not get its name where the model has changed meanwhile.
    path: the file that was named.  paths: the files of the model in order, one unless it is split.  metadata: of the
    first file. Arrays are Strings or Numbers, which behave as lists; a float may be NaN or infinite. Invalid UTF-8
    becomes U+FFFD in a text, and "surrogateescape" in an array of texts, with a RuntimeWarning.
    """

    def __init__(self, path: Path, parts: list[Part]) -> None:
        self.path = path
        self.paths = tuple(part.path for part in parts)
        self.n_bytes = sum(part.file.size for part in parts)
        self.metadata: Mapping[str, MetadataValue] = MappingProxyType(parts[0].metadata)
        self._tensors = {name: info for part in parts for name, info in part.tensors.items()}
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(self._tensors)
        self._made: dict[str, MakeBytes] = {}
        self._places: dict[str, FilePlace | None] = {}
        self._files = [part.file for part in parts]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open and check a model; for a split model, name any of its files.

        Raises ModelNotFound, InvalidGGUF, InvalidArgument.
        """
        path = check_file_name("path", path)
        return cls(path, read_all_parts(path, read_part(path)))

    def data(self, name: str, first: int = 0, last: int | None = None) -> NDArray[np.uint8]:
        """Bytes first..last-1 of a tensor, (n_bytes,), read-only and without a copy, except for tensors of `define`.

        Raises KeyError; ModelFileChanged if the file has changed since it was opened; EdgeInferError once closed.
        """
        info = self.tensors[name]
        last = info.n_bytes if last is None else last
        if name in self._made:
            return self._made[name](first, last)
        return self._file(info.part).bytes()[info.offset + first : info.offset + last]

    def check(self) -> None:
        """Raises ModelFileChanged if a file of the model has changed since it was opened.

        To be called when what data() gave was used. Raises EdgeInferError once closed.
        """
        for part in range(len(self.paths)):
            self._file(part).check()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Within, the files must stay as they are: ModelFileChanged at the end, or in place of an error, if not."""
        try:
            yield
        except Exception:
            self.check()
            raise
        self.check()

    def watches(self) -> list[FileWatch]:
        """Of all files of the model, which live on when this one is closed. Raises EdgeInferError once closed."""
        return [self._file(part).watch.twin() for part in range(len(self.paths))]

    def descriptor(self, part: int) -> int:
        """Of the open file of a part. Raises EdgeInferError once closed."""
        return self._file(part).descriptor

    def size(self, part: int) -> int:
        """Bytes of a file of the model when it was opened. Raises EdgeInferError once closed."""
        return self._file(part).size

    def read(self, part: int, first: int, last: int) -> bytes:
        """A copy of bytes first..last-1 of a file of the model, read without mapping it.

        Raises ModelFileError where the file is shorter by now, EdgeInferError once closed.
        """
        return self._file(part).read(first, last)

    def prefetch(self, part: int, runs: Iterable[tuple[int, int]]) -> None:
        """Let the system read bytes first..last-1 of a file, for each such run: together, and ahead of their use."""
        self._file(part).prefetch(runs)

    def define(
        self, name: str, type: GGMLType, shape: tuple[int, ...], make: MakeBytes, place: FilePlace | None = None
    ) -> None:
        """Add a tensor that the file lacks.

        make: called with the bytes first and last each time that some are read.  place: where the same bytes lie in
        another file, None where they do not.
        """
        n_bytes = math.prod(shape) // type.block_elements * type.block_bytes
        self._tensors[name] = TensorInfo(name, shape, type, 0, n_bytes, 0)
        self._made[name] = make
        self._places[name] = place

    def makes(self, name: str) -> bool:
        """Whether a tensor was added by define: what is read of it takes memory of its own."""
        return name in self._made

    def place(self, name: str) -> FilePlace | None:
        """Where the bytes of a tensor lie in a file, one after the other; None for one that is made.

        Raises KeyError, EdgeInferError once closed.
        """
        if name in self._made:
            return self._places[name]
        info = self.tensors[name]
        return FilePlace(self.paths[info.part], self.descriptor(info.part), info.offset)

    def release(self, name: str, first: int = 0, last: int | None = None) -> None:
        """Let the system take back the memory that reading bytes first..last-1 of a tensor took.

        Reading them again is sound but slower.
        """
        if name in self._made:
            return
        info = self.tensors[name]
        stop = info.offset + (info.n_bytes if last is None else last)
        self._file(info.part).release(info.offset + first, stop)

    def unmap(self) -> None:
        """End the mapping of all files, which are mapped again when data() is called.

        Where arrays from data() are alive, it stays without memory for what nobody reads.
        """
        for file in self._files:
            file.unmap()

    def close(self) -> None:
        """Close the file. Arrays from data() stay valid: the mapping is released with the last of them."""
        files, self._files = self._files, []
        for file in files:
            file.close()

    def _file(self, part: int) -> MappedFile:
        if not self._files:
            raise EdgeInferError(f"{self.path}: this model file is closed")
        return self._files[part]

    def __enter__(self) -> Self:
        begin_reading(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        end_reading(self)
        try:
            # Whatever else went wrong in a file that somebody has changed came of that.
            if self._files and (error is None or isinstance(error, Exception)):
                self.check()
        finally:
            self.close()
