"""Packed weights in a file of their own, which is mapped at load instead of packing.

Layout: 16 bytes magic, u64 length of the header, the header in JSON, zeros to a multiple of 4096, the packed weights as
the decoder has them in memory; of a model with experts, zeros to a multiple of 4096 and the records of all experts
(experts/layout.h). The header has the version of the packed layout, the bits of a ternary weight, the SHA-256 of the
packed weights and records, and for each file of the model its size, its SHA-256 and a hash of samples. Names and times
do not count: a model may be moved with its pack. Each load compares sizes and samples; with `verify` all bytes.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import shlex
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias, cast, get_args

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.devices import available_memory
from edgeinfer.common.errors import BadPack
from edgeinfer.common.files import written_whole
from edgeinfer.common.settings import TernaryBits
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.gguf_reader.mapping import MappedFile

Write: TypeAlias = Callable[[NDArray[np.uint8]], None]

MAGIC = b"edgeinfer-packed"
LAYOUT = 7  # to be raised whenever matrix.h, the order of the weights or what is sampled changes
SUFFIX = ".packed"
_ALIGNMENT = 4096
_MAX_HEADER_BYTES = 1 << 20
_MAX_BYTES = 1 << 60  # of a file
_HASHED_AT_ONCE, _READ_AT_ONCE = 64 << 20, 1 << 20
# Samples of a model: around the edges of tensors, and spread evenly over each file. So many places at most are read,
# which takes milliseconds also where no byte of the file is in memory yet.
_MAX_EDGES, _EVEN_PLACES, _SAMPLE_BYTES = 512, 64, 4096


@dataclass(frozen=True)
class SourceFile:
    """A file of the model that packed weights were made from. samples: hash of the header and of some of the rest."""

    size: int
    samples: str
    sha256: str


@dataclass(frozen=True)
class Header:
    """What a packed file says of itself. n_bytes: of the packed weights.  n_expert_bytes: of the records of experts.

    sha256: of both.  sources: the model's files.
    """

    layout: int
    n_bytes: int
    n_expert_bytes: int
    ternary_bits: TernaryBits
    sha256: str
    sources: tuple[SourceFile, ...]


class Packed(NamedTuple):
    """What a packed file holds, mapped. records: of all experts.  weights_at, records_at: their first bytes in it."""

    file: MappedFile
    weights: NDArray[np.uint8]
    records: NDArray[np.uint8]
    weights_at: int
    records_at: int


def packed_path(model: Path) -> Path:
    """Where the packed weights of a model are looked for: beside its file, the first one of a split model."""
    return model.with_name(model.name + SUFFIX)


def sha256_of(*contents: NDArray[np.uint8]) -> str:
    """SHA-256 of bytes, in hex."""
    digest = hashlib.sha256()
    for each in contents:
        for first in range(0, len(each), _HASHED_AT_ONCE):
            digest.update(each[first : first + _HASHED_AT_ONCE].data)
    return digest.hexdigest()


def sha256_of_file(model: ModelFile, part: int) -> str:
    """SHA-256 of all bytes of a file of the model, in hex. Raises ModelFileError."""
    digest = hashlib.sha256()
    _feed(digest.update, model, part, 0, model.size(part))
    return digest.hexdigest()


def _feed(update: Callable[[bytes], None], model: ModelFile, part: int, first: int, last: int) -> None:
    """Give bytes first..last-1 of a file to a hash, a few at a time."""
    for at in range(first, last, _READ_AT_ONCE):
        update(model.read(part, at, min(last, at + _READ_AT_ONCE)))


def write_packed(
    target: Path,
    model: ModelFile,
    weights: NDArray[np.uint8],
    ternary_bits: TernaryBits,
    n_expert_bytes: int = 0,
    write_experts: Callable[[Write], None] | None = None,
) -> None:
    """Write packed weights atomically: the target is whole or untouched, whatever happens.

    write_experts: gives the records of all experts, n_expert_bytes in all, to the function that it is called with.
    """
    sources = tuple(
        SourceFile(model.size(part), samples_of(model, part), sha256_of_file(model, part))
        for part in range(len(model.paths))
    )
    header = Header(LAYOUT, weights.nbytes, n_expert_bytes, ternary_bits, "0" * 64, sources)
    digest = hashlib.sha256()

    def write(contents: NDArray[np.uint8]) -> None:
        digest.update(contents.data)
        file.write(contents.data)

    with written_whole(target) as file:
        file.write(_start_of(header))
        write(weights)
        if write_experts is not None:
            file.write(bytes(-weights.nbytes % _ALIGNMENT))
            write_experts(write)
        file.seek(0)
        file.write(_start_of(replace(header, sha256=digest.hexdigest())))
        model.check()
    _read_in_huge_pages(target)


def map_packed(
    path: Path,
    model: ModelFile,
    n_bytes: int,
    ternary_bits: TernaryBits,
    verify: bool = False,
    n_expert_bytes: int = 0,
) -> Packed:
    """The packed weights of a file, mapped read-only; pages are shared between processes.

    n_bytes, n_expert_bytes, ternary_bits: as wanted.  verify: all bytes of the model and of the weights are read and
    compared. Raises BadPack with the reason and the command that mends it.
    """
    with _opened(path) as file:
        opened = MappedFile(path, os.dup(file.fileno()))
        header, start = _read_header(path, file)
        _check_sources(path, header.sources, model)
        if header.ternary_bits != ternary_bits:
            raise BadPack(
                f"{path}: ternary weights take {header.ternary_bits} bits there, {ternary_bits} are wanted; "
                f"{_remedy(path)} --ternary-bits {ternary_bits}"
            )
        found = opened.size - start
        wanted = n_bytes if not n_expert_bytes else _aligned(n_bytes) + n_expert_bytes
        if (header.n_bytes, header.n_expert_bytes) != (n_bytes, n_expert_bytes) or found != wanted:
            raise BadPack(f"{path}: {wanted} bytes of weights wanted, {max(0, found)} found; {_remedy(path)}")
    mapped = opened.bytes(on_huge_pages=True)
    records_at = start + wanted - n_expert_bytes
    weights, records = mapped[start : start + n_bytes], mapped[records_at : records_at + n_expert_bytes]
    packed = Packed(opened, weights, records, start, records_at)
    if verify:
        _verify(path, header, model, packed)
    opened.check()
    return packed


def verify_packed(path: Path, model: ModelFile) -> None:
    """Raises BadPack unless all bytes of the model and of its packed weights are those that were packed."""
    header = read_header(path)
    map_packed(path, model, header.n_bytes, header.ternary_bits, True, header.n_expert_bytes)


def read_header(path: Path) -> Header:
    """The header of a packed file. Raises BadPack, also for a file of another version."""
    with _opened(path) as file:
        return _read_header(path, file)[0]


def samples_of(model: ModelFile, part: int) -> str:
    """Hash of a file's header, of the edges of its tensors and of places spread over all of it, in hex."""
    n_bytes = model.size(part)
    tensors = [info for info in model.tensors.values() if info.part == part and info.offset]
    header_end = min((info.offset for info in tensors), default=n_bytes)
    edges = {edge for info in tensors for edge in (info.offset, info.offset + info.n_bytes)}
    n_edges = max(1, _MAX_EDGES // len(model.paths))
    n_even = max(1, _EVEN_PLACES // len(model.paths))
    places = {*_thinned(sorted(edges), n_edges), *(n_bytes * i // n_even for i in range(n_even)), n_bytes}
    # What is read together is one run: the bytes on both sides of a place, which two tensors share.
    runs = [(0, header_end)]
    for place in sorted(places):
        first, last = max(0, place - _SAMPLE_BYTES // 2), min(n_bytes, place + _SAMPLE_BYTES // 2)
        if first <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(runs[-1][1], last))
        else:
            runs.append((first, last))
    model.prefetch(part, runs)
    digest = hashlib.blake2b(digest_size=32)
    for first, last in runs:
        digest.update(struct.pack("<QQ", first, last))
        _feed(digest.update, model, part, first, last)
    return digest.hexdigest()


def _thinned(values: list[int], most: int) -> list[int]:
    """At most so many of the values, evenly spread, the first and the last among them."""
    if len(values) <= most:
        return values
    return [values[i * (len(values) - 1) // max(1, most - 1)] for i in range(most)]


def _check_sources(path: Path, sources: tuple[SourceFile, ...], model: ModelFile) -> None:
    """Raises BadPack if sizes or samples of the model's files are not those that were packed."""
    stale = f"has changed since it was packed; {_remedy(path)}"
    if len(sources) != len(model.paths):
        raise BadPack(
            f"{path}: stale, {model.path} is split into {len(model.paths)} files, {len(sources)} were packed; "
            f"{_remedy(path)}"
        )
    for part, (name, source) in enumerate(zip(model.paths, sources, strict=True)):
        if model.size(part) != source.size or samples_of(model, part) != source.samples:
            raise BadPack(f"{path}: stale, {name} {stale}")


def _verify(path: Path, header: Header, model: ModelFile, packed: Packed) -> None:
    """Raises BadPack unless all bytes of model and weights are those that were packed."""
    for part, (name, source) in enumerate(zip(model.paths, header.sources, strict=True)):
        if sha256_of_file(model, part) != source.sha256:
            raise BadPack(f"{path}: {name} is not what was packed, its SHA-256 differs; {_remedy(path)}")
    if sha256_of(packed.weights, packed.records) != header.sha256:
        raise BadPack(f"{path}: damaged, the SHA-256 of its weights is not that of its header; {_remedy(path)}")


def _remedy(path: Path) -> str:
    return f"pack it again: edgeinfer pack {shlex.quote(str(path).removesuffix(SUFFIX))}"


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A packed file, open for reading. Raises BadPack for what is no file, such as a pipe, without waiting for it."""
    try:
        _check_regular(path, path.stat().st_mode)
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadPack(f"{path}: cannot be read: {reason}; remove it, or {_remedy(path)}") from error
    with os.fdopen(descriptor, "rb") as file:
        _check_regular(path, os.fstat(descriptor).st_mode)
        yield file


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise BadPack(f"{path}: is {what}, and no packed weights; remove it")


def _read_in_huge_pages(path: Path) -> None:
    """Read a file that was just written once more: what writing left in memory stays in small pages until then.

    Not one that does not fit into memory, which experts may be read from piece by piece.
    """
    if hasattr(os, "posix_fadvise") and path.stat().st_size < available_memory():
        with suppress(OSError), path.open("rb") as file:  # it is whole, whatever becomes of this
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            MappedFile(path, os.dup(file.fileno())).bytes(on_huge_pages=True)[:: mmap.PAGESIZE].max()


def _aligned(n_bytes: int) -> int:
    return (n_bytes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


# ---- the header ------------------------------------------------------------------------------------------------------


def _start_of(header: Header) -> bytes:
    """What a file has before the weights; its length depends on no hash."""
    text = json.dumps(asdict(header)).encode()
    start = MAGIC + struct.pack("<Q", len(text)) + text
    return start + bytes(-len(start) % _ALIGNMENT)


def _read_header(path: Path, file: BinaryIO) -> tuple[Header, int]:
    """The header, and the byte at which the weights begin. Raises BadPack."""
    try:
        magic, length = file.read(len(MAGIC)), file.read(8)
        n_bytes = struct.unpack("<Q", length)[0] if len(length) == 8 else _MAX_HEADER_BYTES + 1
        if magic != MAGIC or n_bytes > _MAX_HEADER_BYTES:
            raise BadPack(f"{path}: not a file of packed weights; remove it, or {_remedy(path)}")
        text = file.read(n_bytes)
    except OSError as error:
        raise BadPack(f"{path}: cannot be read: {error.strerror}; {_remedy(path)}") from error
    try:
        fields = json.loads(text.decode(), object_pairs_hook=_without_repeated, parse_constant=_refused)
        layout = _integer(fields["layout"])
        if layout != LAYOUT:
            raise BadPack(f"{path}: packed layout {layout}, this version reads {LAYOUT}; {_remedy(path)}")
        header = _header(fields)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadPack(f"{path}: broken header of packed weights; {_remedy(path)}") from error
    return header, _aligned(len(MAGIC) + 8 + len(text))


def _header(fields: dict[str, Any]) -> Header:
    """The header in JSON's values. Raises ValueError, KeyError, TypeError."""
    bits = get_args(TernaryBits)[get_args(TernaryBits).index(fields["ternary_bits"])]
    sources = tuple(
        SourceFile(_integer(each["size"]), _hash(each["samples"]), _hash(each["sha256"]))
        for each in cast(list[dict[str, Any]], fields["sources"])
    )
    n_bytes, n_expert_bytes = _integer(fields["n_bytes"]), _integer(fields["n_expert_bytes"])
    return Header(LAYOUT, n_bytes, n_expert_bytes, bits, _hash(fields["sha256"]), sources)


def _integer(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_BYTES:
        raise ValueError("no number of bytes, and no version")
    return value


def _hash(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
        raise ValueError("no hash of 32 bytes in hex")
    return value


def _without_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key comes twice")
    return dict(pairs)


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")
