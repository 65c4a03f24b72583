"""A file that is mapped while it is read; and what is said where there is none."""

from __future__ import annotations

import mmap
import os
import stat
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from edgeinfer.errors import EdgeInferError, InvalidGGUF, ModelFileError, ModelNotFound

AROUND = 2 << 20  # bytes around a page that the system maps together with it at most: those of a huge page


class MappedFile:
    """A file that stays open, and is mapped while somebody wants to look at its bytes."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.size = os.fstat(descriptor).st_size
        self._descriptor: int | None = descriptor
        self._mapping: mmap.mmap | None = None
        self._finalizer = weakref.finalize(self, os.close, descriptor)

    @property
    def descriptor(self) -> int:
        """Of the open file. Raises EdgeInferError once closed."""
        if self._descriptor is None:
            raise EdgeInferError(f"{self.path}: this model file is closed")
        return self._descriptor

    @property
    def mapping(self) -> mmap.mmap:
        """The whole file, read-only, mapped now if it is not. Raises EdgeInferError once closed, ModelFileError."""
        if self._mapping is None:
            try:
                self._mapping = mmap.mmap(self.descriptor, self.size, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:  # ValueError: it is smaller by now
                raise ModelFileError(f"{self.path}: cannot be mapped: {error}") from error
        return self._mapping

    def read(self, first: int, last: int) -> bytes:
        """A copy of bytes first..last-1, read without a mapping. Raises ModelFileError, EdgeInferError once closed."""
        pieces = []
        while first < last:
            try:
                piece = read_at(self.descriptor, last - first, first)
            except OSError as error:
                raise ModelFileError(f"{self.path}: bytes {first}..{last} cannot be read: {error.strerror}") from error
            if not piece:
                raise ModelFileError(f"{self.path}: was {self.size} bytes when it was opened, and ends at {first} now")
            pieces.append(piece)
            first += len(piece)
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
        first = max(0, first - AROUND) // mmap.PAGESIZE * mmap.PAGESIZE
        n_bytes = min(last + AROUND, self.size) - first
        if self._mapping is not None and n_bytes > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED, first, n_bytes)

    def unmap(self) -> None:
        """End the mapping, or where somebody still looks at it, drop its pages. It is mapped again when wanted."""
        if self._mapping is None:
            return
        try:
            self._mapping.close()
        except BufferError:
            self.release(0, -(-self.size // mmap.PAGESIZE) * mmap.PAGESIZE)
        else:
            self._mapping = None

    def close(self) -> None:
        """Close the file. What looks at the mapping keeps that alive."""
        self.unmap()
        self._mapping = self._descriptor = None
        self._finalizer()


def read_at(descriptor: int, n_bytes: int, offset: int) -> bytes:
    """Up to n_bytes of a file from an offset on. One thread at a time, where the system has no pread."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, n_bytes, offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.read(descriptor, n_bytes)


def open_file(path: Path) -> MappedFile:
    """A file, not mapped yet. Raises ModelNotFound, InvalidGGUF, ModelFileError."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):  # opening a pipe would wait for ever
            raise ModelNotFound(f"{path}: {_what_is_there(path, mode)}; give a .gguf file")
        file = MappedFile(path, os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)))
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
