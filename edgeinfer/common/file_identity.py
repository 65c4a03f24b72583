"""Whether a file is still what it was when it was opened."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple, Protocol

from edgeinfer.common.errors import ModelFileChanged


class FileIdentity(NamedTuple):
    """What changes with a file's bytes: a write sets both times, and of the two a program can only set `mtime_ns`."""

    device: int
    inode: int
    n_bytes: int
    mtime_ns: int
    ctime_ns: int


def identity_of(stat: os.stat_result) -> FileIdentity:
    """The identity of a file with this status."""
    return FileIdentity(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


class FileWatch:
    """An open file that must stay as it is.

    Another file that gets its name (by renaming) is none of its business: the one that is open lives on.
    descriptor: taken over, and closed with this object.
    """

    def __init__(self, path: Path, descriptor: int, known: os.stat_result | None = None) -> None:
        self.path = path
        self.descriptor = descriptor
        self.close = weakref.finalize(self, os.close, descriptor)
        self.close.atexit = False  # threads may use it until the process is gone
        self._known = os.fstat(descriptor) if known is None else known
        self._identity = identity_of(self._known)
        self._is_named = self._has_name()

    @property
    def size(self) -> int:
        """Bytes of the file when it was opened."""
        return self._identity.n_bytes

    def check(self) -> None:
        """Raises ModelFileChanged if anybody has written to the file since it was opened."""
        stat = os.fstat(self.descriptor)
        if identity_of(stat) != self._identity and not self._has_moved(stat):
            raise changed(self.path, self._identity, identity_of(stat))

    def check_name(self) -> None:
        """Raises ModelFileChanged if the name leads to another file by now."""
        if not self._has_name():
            raise ModelFileChanged(f"{self.path}: is another file than the one that was opened; {_REMEDY}")

    def twin(self) -> FileWatch:
        """The same file with a descriptor of its own, and what it was when this one was opened."""
        return FileWatch(self.path, os.dup(self.descriptor), self._known)

    def _has_moved(self, stat: os.stat_result) -> bool:
        """Whether only names or rights have changed, which sets the time of change too; then that is known."""
        before, now = self._identity, identity_of(stat)
        if now._replace(ctime_ns=before.ctime_ns) != before:
            return False
        had_name, self._is_named = self._is_named, self._has_name()
        explained = had_name != self._is_named or _names_and_rights(stat) != _names_and_rights(self._known)
        if explained:
            self._known, self._identity = stat, now
        return explained

    def _has_name(self) -> bool:
        with suppress(OSError, ValueError):
            found = self.path.stat()
            return (found.st_dev, found.st_ino) == (self._identity.device, self._identity.inode)
        return False


class Sources:
    """Files that others are made of, by name: none may be written to, replaced or removed meanwhile. Raises OSError."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._known = {path: identity_of(path.stat()) for path in paths}

    def check(self) -> None:
        """Raises ModelFileChanged if one of them is not what it was."""
        for path, before in self._known.items():
            try:
                now = identity_of(path.stat())
            except OSError:
                raise changed(path, before, None) from None
            if now != before:
                raise changed(path, before, now)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Within, no file is given its name if a source has changed, and other errors that may come of that are it."""
        self.check()
        begin_reading(self)
        try:
            yield
        except Exception:
            self.check()
            raise
        finally:
            end_reading(self)


class Checked(Protocol):
    """What others may be made of."""

    def check(self) -> None:
        """Raises ModelFileChanged if it has changed."""


_BEING_READ: ContextVar[tuple[Checked, ...]] = ContextVar("being read", default=())


def begin_reading(source: Checked) -> None:
    """What this thread writes until end_reading may be made of a source."""
    _BEING_READ.set((*_BEING_READ.get(), source))


def end_reading(source: Checked) -> None:
    """See begin_reading."""
    _BEING_READ.set(tuple(other for other in _BEING_READ.get() if other is not source))


def check_sources() -> None:
    """Called before what was written gets its name: raises ModelFileChanged if what it was made of has changed."""
    for source in _BEING_READ.get():
        source.check()


_REMEDY = "load it again, or begin again; replace files in use by renaming (mv), not by writing into them (cp)"


def changed(path: Path, before: FileIdentity, now: FileIdentity | None) -> ModelFileChanged:
    """The error for a file that has become another one. now: None where it is gone."""
    if now is None:
        how = "was removed"
    elif now.n_bytes < before.n_bytes:
        how = f"was {before.n_bytes} bytes when it was opened, and ends at {now.n_bytes} now"
    elif now.inode != before.inode or now.device != before.device:
        how = "was replaced"
    else:
        how = f"was written to ({before.n_bytes} bytes then, {now.n_bytes} now)"
    return ModelFileChanged(f"{path}: the file has changed while it was in use: it {how}; {_REMEDY}")


def _names_and_rights(stat: os.stat_result) -> tuple[int, int, int, int]:
    return stat.st_nlink, stat.st_mode, stat.st_uid, stat.st_gid
