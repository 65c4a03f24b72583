"""A file that is mapped while it is read; and what is said where there is none."""

from __future__ import annotations

import builtins
import errno
import mmap
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import EdgeInferError, InvalidGGUF, ModelFileError, ModelNotFound
from edgeinfer.common.file_identity import FileWatch
from edgeinfer.models.gguf_reader import _mapped as _native

AROUND = 2 << 20  # bytes around a page that the system maps together with it at most: those of a huge page


class MappedFile:
    """A file that stays open, and is mapped while somebody wants to look at its bytes.

    It must stay as it is: each access checks that, and `check` does so for what was read of the mapping since. Where
    another program cuts the file meanwhile, its last bytes are read as zeros until then.
    descriptor: taken over, and closed with this object.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.size = os.fstat(descriptor).st_size
        self._watch: FileWatch | None = FileWatch(path, descriptor)
        self._mapping: _Mapping | None = None
        self._was_lost = False

    @property
    def watch(self) -> FileWatch:
        """Of the open file. Raises EdgeInferError once closed."""
        if self._watch is None:
            raise EdgeInferError(f"{self.path}: this model file is closed")
        return self._watch

    @property
    def descriptor(self) -> int:
        """Of the open file. Raises EdgeInferError once closed."""
        return self.watch.descriptor

    def bytes(self, on_huge_pages: bool = False) -> NDArray[np.uint8]:
        """The whole file, (n_bytes,), read-only, mapped now if it is not.

        on_huge_pages: where the system can, for what is read again and again.
        Raises EdgeInferError once closed, ModelFileError.
        """
        self.check()
        if self._mapping is None:
            try:
                self._mapping = _mapped(self.descriptor, self.size, on_huge_pages)
            except (OSError, ValueError) as error:  # ValueError: it is smaller by now
                raise ModelFileError(f"{self.path}: cannot be mapped: {error}") from error
        return self._mapping.bytes

    def check(self) -> None:
        """Raises ModelFileChanged if the file has changed since it was opened, ModelFileError if it cannot be read."""
        self.watch.check()
        if self._was_lost or (self._mapping is not None and self._mapping.is_lost):
            raise ModelFileError(f"{self.path}: cannot be read: {os.strerror(errno.EIO)}; load it again")

    def read(self, first: int, last: int) -> builtins.bytes:
        """A copy of bytes first..last-1, read without a mapping.

        Raises ModelFileError, ModelFileChanged if the file has changed since it was opened, EdgeInferError once closed.
        """
        pieces = []
        while first < last:
            try:
                piece = read_at(self.descriptor, last - first, first)
            except OSError as error:
                raise ModelFileError(f"{self.path}: bytes {first}..{last} cannot be read: {error.strerror}") from error
            if not piece:
                self.check()
                raise ModelFileError(f"{self.path}: was {self.size} bytes when it was opened, and ends at {first} now")
            pieces.append(piece)
            first += len(piece)
        self.check()
        return b"".join(pieces)

    def prefetch(self, runs: Iterable[tuple[int, int]]) -> None:
        """Let the system read bytes first..last-1, for each such run: together, and ahead of their use."""
        if hasattr(os, "posix_fadvise"):
            for first, last in runs:
                if first >= last:  # of no bytes the system would make all behind first
                    continue
                with suppress(OSError):  # where it does not help it does no harm
                    os.posix_fadvise(self.descriptor, first, last - first, os.POSIX_FADV_WILLNEED)

    def release(self, first: int, last: int) -> None:
        """Drop the pages of bytes first..last-1, and those around them that came along when they were read.

        Who reads bytes of the latter meanwhile gets them again.
        """
        if self._mapping is not None:
            self._mapping.drop(max(0, first - AROUND), last + AROUND)

    def unmap(self) -> None:
        """End the mapping, or where somebody still looks at it, drop its pages. It is mapped again when wanted."""
        if self._mapping is None:
            return
        self._was_lost = self._was_lost or self._mapping.is_lost
        self.release(0, -(-self.size // mmap.PAGESIZE) * mmap.PAGESIZE)
        self._mapping = None

    def close(self) -> None:
        """Close the file. What looks at the mapping keeps that alive."""
        self.unmap()
        if self._watch is not None:
            self._watch.close()
        self._watch = None


class _Mapping(Protocol):
    """A whole file, read-only; unmapped with the last view of its bytes."""

    @property
    def bytes(self) -> NDArray[np.uint8]: ...

    @property
    def is_lost(self) -> bool: ...

    def drop(self, first: int, last: int) -> None: ...


class _PlainMapping:
    """Where the system has no signal for a page that is gone."""

    is_lost = False

    def __init__(self, descriptor: int, n_bytes: int) -> None:
        self.bytes: NDArray[np.uint8] = np.frombuffer(mmap.mmap(descriptor, n_bytes, access=mmap.ACCESS_READ), np.uint8)

    def drop(self, first: int, last: int) -> None:
        """Nothing: the system takes pages back by itself."""


def _mapped(descriptor: int, n_bytes: int, on_huge_pages: bool) -> _Mapping:
    guarded = getattr(_native, "GuardedMapping", None)
    found: _Mapping = (
        _PlainMapping(descriptor, n_bytes) if guarded is None else guarded(descriptor, n_bytes, on_huge_pages)
    )
    return found


def read_at(descriptor: int, n_bytes: int, offset: int) -> bytes:
    """Up to n_bytes of a file from an offset on. One thread at a time, where the system has no pread."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, n_bytes, offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.read(descriptor, n_bytes)


def map_file(path: Path) -> MappedFile:
    """A regular file, open and not mapped yet. Raises OSError."""
    return MappedFile(path, os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)))


def open_file(path: Path) -> MappedFile:
    """A model file, not mapped yet. Raises ModelNotFound, InvalidGGUF, ModelFileError."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):  # opening a pipe would wait for ever
            raise ModelNotFound(f"{path}: {_what_is_there(path, mode)}; give a .gguf file")
        file = map_file(path)
    except FileNotFoundError:
        raise ModelNotFound(f"{path}: {_why_missing(path)}") from None
    except (OSError, OverflowError) as error:
        raise ModelFileError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except ValueError as error:  # a NUL in the path
        raise ModelNotFound(f"{str(path)!r}: no such file: {error}") from None
    if not file.size:
        raise InvalidGGUF(path, "magic", 0, "the file is empty")
    return file


def _what_is_there(path: Path, mode: int) -> str:
    return f"is a folder with {_models_in(path)}" if stat.S_ISDIR(mode) else "is not a regular file"


def _why_missing(path: Path) -> str:
    if path.is_symlink():
        return f"is a link to {os.readlink(path)}, which does not exist"
    if not path.parent.is_dir():
        return f"no such file: there is no folder {path.parent}"
    return f"no such file; its folder has {_models_in(path.parent)}"


def _models_in(folder: Path) -> str:
    names = sorted(folder.glob("*.gguf"))  # leaves out what may not be read
    more = f" and {len(names) - 5} more .gguf files" if len(names) > 5 else ""
    return ", ".join(path.name for path in names[:5]) + more if names else "no .gguf files"
