"""Model files that are not on disk: the metadata lies in a temporary folder, tensors are made when they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

from edgeinfer.common.files import temporary_folder
from edgeinfer.exporters.gguf.skeleton import write_skeleton
from edgeinfer.exporters.gguf.writer import Metadata, Tensor, layout, write_gguf
from edgeinfer.exporters.source import Bytes, GgufSource, Source, SourceTensor, named_as
from edgeinfer.models.formats import quantize
from edgeinfer.models.gguf import FilePlace, GGMLType, MakeBytes, ModelFile


class VirtualTensor(NamedTuple):
    """A tensor that a file does not have."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]  # in numpy's order
    make: MakeBytes  # gives its bytes first..last-1, whole rows
    place: FilePlace | None = None  # where the same bytes lie in a file, None where they do not


class VirtualModelFile(ModelFile):
    """A model file that takes no disk but for its metadata; it is gone with the `with` block that made it.

    Errors within the block name what the user named in place of the temporary file.
    """

    @classmethod
    @contextmanager
    def of(cls, named: Path, metadata: Metadata, tensors: Iterable[VirtualTensor]) -> Iterator[Self]:
        """A file of these keys and tensors. named: what the user named.

        Raises OSError, and what opening a model file raises.
        """
        with cls._written(named, lambda path: write_gguf(path, metadata, [])) as file:
            for tensor in tensors:
                file.define(*tensor)
            yield file

    @classmethod
    @contextmanager
    def without_matrices(cls, named: Path, metadata: Metadata, tensors: Sequence[Tensor]) -> Iterator[Self]:
        """A file with these tensors, whose matrices are holes: for plans, which read none of them.

        Raises what `of` raises.
        """
        with cls._written(named, lambda path: write_skeleton(path, layout(metadata, tensors), tensors)) as file:
            yield file

    @classmethod
    @contextmanager
    def _written(cls, named: Path, write: Callable[[Path], None]) -> Iterator[Self]:
        with temporary_folder() as folder:
            path = folder / f"{named.name}.gguf"
            write(path)
            with named_as(path, named), cls.open(path) as file:
                yield file


@contextmanager
def model_file_of(source: Source) -> Iterator[ModelFile]:
    """A source as a model file: its own, or one of its metadata whose tensors are read from the source."""
    if isinstance(source, GgufSource):
        yield source.file
        return
    with VirtualModelFile.of(source.path, source.metadata, map(virtual_tensor, source.tensors)) as file:
        yield file


def virtual_tensor(tensor: SourceTensor) -> VirtualTensor:
    """A tensor of a source in the type that holds its weights without loss."""
    return VirtualTensor(tensor.name, tensor.type, tensor.shape, partial(_made, tensor), tensor.place)


def _made(tensor: SourceTensor, first: int, last: int) -> Bytes:
    """Bytes first..last-1 of a tensor, made of the rows that they are in."""
    row_bytes = tensor.type.n_bytes(tensor.n_in)
    rows = first // row_bytes, -(-last // row_bytes)
    data = tensor.stored(*rows) if tensor.stored is not None else quantize(tensor.type, tensor.rows(*rows))
    start = rows[0] * row_bytes
    return data.reshape(-1)[first - start : last - start]
