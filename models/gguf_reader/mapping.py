"""A file, mapped; and what is said where there is none."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

from edgeinfer.errors import InvalidGGUF, ModelFileError, ModelNotFound


def map_file(path: Path) -> mmap.mmap:
    """The whole file, read-only. Raises ModelNotFound, InvalidGGUF, ModelFileError."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):  # opening a pipe would wait for ever
            raise ModelNotFound(f"{path}: {_what_is_there(path, mode)}; give a .gguf file")
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise InvalidGGUF(path, "magic", 0, "the file is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelNotFound(f"{path}: {_why_missing(path)}") from None
    except (OSError, OverflowError) as error:
        raise ModelFileError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except ValueError as error:  # a NUL in the path
        raise ModelNotFound(f"{str(path)!r}: no such file: {error}") from None


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


def release_pages(mapping: mmap.mmap, start: int, stop: int) -> None:
    """Drop the whole pages of start..stop; the pages at the edges may hold a neighbour that is in use."""
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    n_bytes = stop // mmap.PAGESIZE * mmap.PAGESIZE - first
    if n_bytes > 0 and hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED, first, n_bytes)
