"""A folder of files of one user, up to a size: which is written whole or not at all, and shared by processes.

Who writes holds a lock of the folder, so that a file with the name of a partial one is of a process that was killed.
Readers need none: a file has its name when it is whole, and one that is open can be read when it has lost its name.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

_PARTIAL = ".partial-"
_LOCK = ".lock"
_LOCK_SECONDS = 2.0  # after which what another process holds is not waited for any more
_RECOUNT = 64  # files that are written before the folder is counted again: other processes write too


class Kept(NamedTuple):
    """A file of the folder."""

    name: str
    n_bytes: int
    used_ns: int  # when it was last of use


class SizedFolder:
    """A folder whose files take up to most_bytes together; those that were used longest ago make room for others.

    It is made with the first file. Methods raise OSError: PermissionError for a folder of another user.
    """

    def __init__(self, path: Path, most_bytes: int) -> None:
        self.path, self.most_bytes = path, most_bytes
        self._n_bytes = 0  # as counted, and when: the folder's time after that
        self._counted_ns = -1
        self._n_written = 0
        self._is_checked = False

    def open(self, name: str) -> int | None:
        """The descriptor of a file that can be read, None where there is none of this user."""
        if not self._is_there():
            return None
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        try:
            descriptor = os.open(self.path / name, flags)
        except OSError:
            return None
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and _is_mine(found):
            return descriptor
        os.close(descriptor)
        return None

    def has(self, name: str, n_bytes: int) -> bool:
        """Whether there is a file of so many bytes."""
        if not self._is_there():
            return False
        try:
            return os.lstat(self.path / name).st_size == n_bytes
        except OSError:
            return False

    def touch(self, name: str, n_bytes: int, used_ns: int) -> bool:
        """Note that a file was of use; whether there is one of so many bytes."""
        if not self.has(name, n_bytes):
            return False
        try:
            os.utime(self.path / name, ns=(used_ns, used_ns))
        except FileNotFoundError:
            return False
        except OSError:  # in a folder that can only be read
            return True
        return True

    def remove(self, name: str) -> None:
        """Remove a file that is of no use."""
        with suppress(OSError):
            os.unlink(self.path / name)

    def write(self, name: str, n_bytes: int, used_ns: int, fill: Callable[[BinaryIO], None]) -> bool:
        """Write a file of n_bytes as a whole; False where it has no room, or another process holds the folder.

        What `fill` raises is raised, and nothing is left behind.
        """
        if n_bytes > self.most_bytes:
            return False
        self._make()
        with _locked(self.path / _LOCK) as is_mine:
            if not is_mine:
                return False
            self._make_room(n_bytes)
            partial = self.path / f"{_PARTIAL}{os.urandom(8).hex()}"
            try:
                with os.fdopen(os.open(partial, _NEW, 0o600), "wb") as file:
                    fill(file)
                os.utime(partial, ns=(used_ns, used_ns))
                with suppress(FileNotFoundError):
                    self._n_bytes -= os.lstat(self.path / name).st_size
                os.replace(partial, self.path / name)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
            self._n_bytes += n_bytes
            self._n_written += 1
            self._counted_ns = os.stat(self.path).st_mtime_ns
        return True

    def files(self) -> list[Kept]:
        """All files, the one that was used longest ago first."""
        if not self._is_there():
            return []
        found = []
        for entry in os.scandir(self.path):
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if not entry.name.startswith(".") and stat.S_ISREG(status.st_mode):
                    found.append(Kept(entry.name, status.st_size, status.st_mtime_ns))
        return sorted(found, key=lambda file: (file.used_ns, file.name))

    def clear(self) -> int:
        """Remove all files; gives how many bytes they had."""
        if not self._is_there():
            return 0
        n_bytes = 0
        with _locked(self.path / _LOCK):
            self._remove_partial()
            for file in self.files():
                os.unlink(self.path / file.name)
                n_bytes += file.n_bytes
        self._counted_ns = -1
        return n_bytes

    def check(self) -> None:
        """Raises PermissionError for a folder of another user, NotADirectoryError where it is none."""
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "Expected a folder", str(self.path))
        if not _is_mine(found):
            raise PermissionError(errno.EPERM, "This folder is another user's", str(self.path))
        if os.name == "posix" and stat.S_IMODE(found.st_mode) & 0o077:
            os.chmod(self.path, 0o700)

    def _is_there(self) -> bool:
        """Whether there is a folder. Raises as `check`, once."""
        if not self._is_checked:
            self.check()
            self._is_checked = self.path.is_dir()
        return self._is_checked

    def _make(self) -> None:
        if not self._is_there() or not self.path.is_dir():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            self._is_checked = False
            self._is_there()

    def _make_room(self, n_bytes: int) -> None:
        """Remove files until so many bytes have room. With the lock."""
        is_known = os.stat(self.path).st_mtime_ns == self._counted_ns and self._n_written % _RECOUNT
        if is_known and self._n_bytes + n_bytes <= self.most_bytes:
            return
        self._remove_partial()
        files = self.files()
        self._n_bytes = sum(file.n_bytes for file in files)
        for file in files:
            if self._n_bytes + n_bytes <= self.most_bytes:
                break
            os.unlink(self.path / file.name)
            self._n_bytes -= file.n_bytes

    def _remove_partial(self) -> None:
        """Remove what processes that were killed have left. With the lock."""
        for entry in os.scandir(self.path):
            if entry.name.startswith(_PARTIAL):
                self.remove(entry.name)


_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def _is_mine(found: os.stat_result) -> bool:
    return os.name != "posix" or found.st_uid == os.getuid()


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold a lock of this user's processes; whether it could be had in time. Raises OSError where none can be."""
    try:
        import fcntl
    except ImportError:
        raise OSError(errno.ENOTSUP, "This system locks no files", str(path)) from None
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        end = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    yield False
                    return
                time.sleep(0.01)
            else:
                yield True
                return
    finally:
        os.close(descriptor)
