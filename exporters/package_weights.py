"""The GGUF file that a package takes its weights from: the source itself, or one made of it in the wanted types."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from edgeinfer.errors import ModelFileError
from edgeinfer.exporters.gguf import write_gguf
from edgeinfer.exporters.gguf_target import GgufTarget, prepare
from edgeinfer.exporters.request import Progress, Request
from edgeinfer.exporters.source import GgufSource, Source, open_source
from edgeinfer.files import folder_beside
from edgeinfer.models.formats.codes import Bytes
from edgeinfer.models.gguf import GGMLType, ModelFile


@contextmanager
def planned_weights(request: Request) -> Iterator[tuple[ModelFile, int]]:
    """The model whose weights a package of this request will have, and the bytes that a file of them takes on disk.

    Tensors have the types that they will have; those that are made first cannot be read yet. Raises as Target.plan.
    """
    with open_source(request.source) as source:
        if isinstance(source, GgufSource) and request.type is None:
            yield source.file, 0
            return
        job = prepare(source, _of_weights(request, request.out))
        with _described(source, job.types) as file:
            yield file, job.layout.n_bytes


@contextmanager
def package_weights(request: Request, progress: Progress) -> Iterator[tuple[ModelFile, Progress]]:
    """The model whose weights a package of this request has, and what it tells its own progress.

    A file that is made first lies beside the output, and is gone afterwards. Raises as Target.write.
    """
    if request.source.is_file() and request.type is None:
        with ModelFile.open(request.source) as file:
            yield file, progress
        return
    with folder_beside(request.out) as folder:
        path = folder / f"{request.out.name}.gguf"
        GgufTarget().write(_of_weights(request, path), lambda share: progress(share / 2))
        with ModelFile.open(path) as file:
            yield file, lambda share: progress(0.5 + share / 2)


def _of_weights(request: Request, out: Path) -> Request:
    return replace(request, out=out, draft=None, n_ctx=None, resume=False, check=False, more={})


@contextmanager
def _described(source: Source, types: Mapping[str, GGMLType]) -> Iterator[ModelFile]:
    """A model file of a source's metadata and of tensors that cannot be read."""

    def unmade(first: int, last: int) -> Bytes:
        raise ModelFileError(f"{source.path}: its weights are made when the export is written")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{source.path.name}.gguf"
        write_gguf(path, source.metadata, [])
        with ModelFile.open(path) as file:
            for tensor in source.tensors:
                file.define(tensor.name, types[tensor.name], tensor.shape, unmade)
            yield file
