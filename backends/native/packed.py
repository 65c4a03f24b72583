"""Packed weights in a file of their own, which a session maps instead of packing.

Layout: 16 bytes magic, u64 length of the header, the header in JSON, zeros to a multiple of 4096, the packed weights as
the decoder has them in memory. The header names the source (size, modification time, SHA-256), the version of the
packed layout and the bits of a ternary weight; a file that does not fit them is refused.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, get_args

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import ModelFileError, ModelNotFound
from edgeinfer.files import written_whole
from edgeinfer.types import TernaryBits

MAGIC = b"edgeinfer-packed"
LAYOUT = 4  # to be raised whenever matrix.h or the order of the weights changes
SUFFIX = ".packed"
_ALIGNMENT = 4096


@dataclass(frozen=True)
class Source:
    """The model file that packed weights were made from. mtime is in nanoseconds."""

    size: int
    mtime: int
    sha256: str


@dataclass(frozen=True)
class Header:
    """What a packed file says of itself. n_bytes: of the packed weights."""

    layout: int
    n_bytes: int
    ternary_bits: TernaryBits
    source: Source


def packed_path(model: Path) -> Path:
    """Where the packed weights of a model file are looked for: beside it."""
    return model.with_name(model.name + SUFFIX)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_packed(target: Path, model: Path, weights: NDArray[np.uint8], ternary_bits: TernaryBits) -> None:
    """Write packed weights atomically: the target is whole or untouched, whatever happens."""
    stat = model.stat()
    header = Header(LAYOUT, weights.nbytes, ternary_bits, Source(stat.st_size, stat.st_mtime_ns, sha256_of(model)))
    text = json.dumps(asdict(header)).encode()
    start = MAGIC + struct.pack("<Q", len(text)) + text
    with written_whole(target) as file:
        file.write(start + bytes(-len(start) % _ALIGNMENT))
        file.write(weights.data)
    _read_in_huge_pages(target)


def map_packed(path: Path, model: Path, n_bytes: int, ternary_bits: TernaryBits) -> NDArray[np.uint8]:
    """The packed weights of a file, mapped read-only; pages are shared between processes.

    n_bytes, ternary_bits: as wanted. The source is recognised by size and modification time, or else by its SHA-256.
    Raises ModelNotFound, ModelFileError with the reason and the command that mends it.
    """
    header, start = read_header(path)
    remedy = f"pack it again: edgeinfer pack {model}"
    stat = model.stat()
    if (stat.st_size, stat.st_mtime_ns) != (header.source.size, header.source.mtime):
        if stat.st_size != header.source.size or sha256_of(model) != header.source.sha256:
            raise ModelFileError(f"{path}: stale, {model} has changed since it was packed; {remedy}")
    if header.ternary_bits != ternary_bits:
        raise ModelFileError(
            f"{path}: ternary weights take {header.ternary_bits} bits there, {ternary_bits} are wanted; {remedy} "
            f"--ternary-bits {ternary_bits}"
        )
    if header.n_bytes != n_bytes or path.stat().st_size != start + n_bytes:
        raise ModelFileError(
            f"{path}: {n_bytes} bytes of weights wanted, {path.stat().st_size - start} found; {remedy}"
        )
    with path.open("rb") as file:
        return np.frombuffer(_mapped(file), dtype=np.uint8, offset=start)


def _mapped(file: BinaryIO) -> mmap.mmap:
    """A whole file, read-only, in huge pages where what is read of it from now on can be: a token reads all of it."""
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def _read_in_huge_pages(path: Path) -> None:
    """Read a file that was just written once more: what writing left in memory stays in small pages until then."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError), path.open("rb") as file:  # it is whole, whatever becomes of this
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            np.frombuffer(_mapped(file), dtype=np.uint8)[:: mmap.PAGESIZE].max()


def read_header(path: Path) -> tuple[Header, int]:
    """The header of a packed file, and the byte at which the weights begin.

    Raises ModelNotFound, and ModelFileError, also for a file of another version.
    """
    try:
        with path.open("rb") as file:
            magic, length = file.read(len(MAGIC)), file.read(8)
            if magic != MAGIC or len(length) != 8 or struct.unpack("<Q", length)[0] > 1 << 16:
                raise ModelFileError(f"{path}: not a file of packed weights")
            text = file.read(struct.unpack("<Q", length)[0])
    except FileNotFoundError as error:
        raise ModelNotFound(f"{path}: no such file") from error
    try:
        fields = json.loads(text)
        layout = int(fields["layout"])
        if layout != LAYOUT:
            raise ModelFileError(
                f"{path}: packed layout {layout}, this version reads {LAYOUT}; pack it again: edgeinfer pack "
                f"{str(path).removesuffix(SUFFIX)}"
            )
        bits = get_args(TernaryBits)[get_args(TernaryBits).index(fields["ternary_bits"])]
        header = Header(layout, int(fields["n_bytes"]), bits, Source(**fields["source"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ModelFileError(f"{path}: broken header of packed weights") from error
    return header, (len(MAGIC) + 8 + len(text) + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
