"""The doctor of folders for boards: every fault of the files, each with a message of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from edgeinfer.common.errors import BadBoardFolder
from edgeinfer.common.files import file_sha256
from edgeinfer.hls.files.folder import BoardFolder, GoldenVectors
from edgeinfer.hls.files.golden import products
from edgeinfer.hls.files.headers import HEADERS
from edgeinfer.hls.files.manifest import BoardTensor


def faults_of(folder: BoardFolder) -> Iterator[str]:
    """Everything that is wrong with the files of a folder that could be opened: a sentence each, none if it is whole.

    Hashes, headers, indices and padding of the weights, scales, and golden vectors, whose products are computed again
    from the weights.
    """
    yield from changed_files(folder)
    yield from header_faults(folder)
    damaged = set()
    for tensor in folder.manifest.tensors:
        try:
            folder.trits(tensor.name)
        except BadBoardFolder as error:
            damaged.add(tensor.name)
            yield str(error)
        yield from _scales(folder, tensor)
    for golden in folder.golden():
        if golden.tensor.name not in damaged:
            yield from _golden(folder, golden)


def changed_files(folder: BoardFolder) -> Iterator[str]:
    """The files whose sha256 is not that of the manifest."""
    for name, facts in sorted(folder.manifest.files.items()):
        if name in HEADERS:  # are compared line by line
            continue
        found = file_sha256(folder.path / name)
        if found != facts.sha256:
            yield (
                f"{folder.path / name}: sha256 must be {facts.sha256}: found {found}; its bytes were changed: copy it "
                "again"
            )


def check_folder(path: str | Path) -> BoardFolder:
    """The folder, if nothing is wrong with it. Raises BadBoardFolder with the first fault."""
    folder = BoardFolder.open(path)
    with suppress(StopIteration):
        raise BadBoardFolder(next(faults_of(folder)))
    return folder


def header_faults(folder: BoardFolder) -> Iterator[str]:
    """The headers that are not what the manifest says."""
    for name, text_of in HEADERS.items():
        path, wanted = folder.path / name, text_of(folder.manifest)
        found = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        if wanted == found:
            continue
        lines = zip(wanted.splitlines(), found.splitlines(), strict=False)
        number, pair = next(((n, pair) for n, pair in enumerate(lines, 1) if pair[0] != pair[1]), (0, ("", "")))
        where = f"line {number}: must be {pair[0]!r:.120}: found {pair[1]!r:.120}" if number else "last lines"
        yield f"{path}: disagrees with manifest.json, {where}; one of them was changed"


def _scales(folder: BoardFolder, tensor: BoardTensor) -> Iterator[str]:
    scales = folder.padded_scales(tensor.name)
    if not np.isfinite(scales).all():
        yield f"{folder.path}: {tensor.name}: scales must be finite numbers: found others in scales.bin"
    if scales[tensor.n_out :].any():
        yield f"{folder.path}: {tensor.name}: scales past the last row must be 0: found others in scales.bin"


def _golden(folder: BoardFolder, golden: GoldenVectors) -> Iterator[str]:
    """At most one fault of a tensor's golden vectors."""
    wanted = products(folder.trits(golden.tensor.name), golden.x)
    for vector, row in np.argwhere(wanted != golden.y)[:1]:
        yield (
            f"{folder.path}: golden vector {vector} of {golden.tensor.name}, row {row}: the weights give "
            f"{wanted[vector, row]}, the file says {golden.y[vector, row]}; a golden value or a weight was changed"
        )
