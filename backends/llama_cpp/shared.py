"""Memory that the host and the process of llama.cpp both see: what stops a pass, and the logits."""

from __future__ import annotations

import mmap
import os
import re
import tempfile
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.types import Logits

Writable: TypeAlias = bytearray | mmap.mmap

_SHARE_AT = 8  # byte of the share in the first page; the flag is at 0, and a zero behind it


class SharedMemory:
    """A page with a flag and a share, and behind it an array. It is in no folder, and ends with its last process.

    flag: two bytes, a C string that is not empty once llama.cpp is to stop.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = above_stdio(_anonymous_file("edgeinfer")) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, mmap.PAGESIZE)
        self.flag: Writable = mmap.mmap(self.fd, mmap.PAGESIZE)
        self._share: NDArray[np.float64] = np.frombuffer(self.flag, np.float64, 1, _SHARE_AT)
        self._array: NDArray[np.float32] = np.empty(0, dtype=np.float32)
        self._room = 0

    @property
    def share(self) -> float:
        """What of a model is loaded, 0..1."""
        return float(self._share[0])

    @share.setter
    def share(self, share: float) -> None:
        self._share[0] = share

    def reserve(self, n: int, at_most: int) -> None:
        """Have room for n float32 in the array; give back what is beyond `at_most`. By the host, between two passes."""
        if n > self._room or self._room > at_most:
            self._room = n
            os.ftruncate(self.fd, mmap.PAGESIZE + 4 * n)

    def array(self, shape: tuple[int, int]) -> Logits:
        """The array, as float32 of that shape; there must be room for it."""
        n = shape[0] * shape[1]
        if n > len(self._array):
            self._array = np.frombuffer(mmap.mmap(self.fd, 4 * n, offset=mmap.PAGESIZE), np.float32)
        return self._array[:n].reshape(shape)

    def close(self) -> None:
        """Give the memory back, once nobody looks at it; the flag is then one that nobody else sees."""
        self._array = np.empty(0, dtype=np.float32)
        self.flag = bytearray(mmap.PAGESIZE)
        self._share = np.frombuffer(self.flag, np.float64, 1, _SHARE_AT)
        os.close(self.fd)


class Words:
    """What a process writes to its stdout and stderr: a file without a name, of which the end is read."""

    MAX_BYTES = 1 << 16

    def __init__(self) -> None:
        import fcntl

        self.fd = above_stdio(_anonymous_file("edgeinfer-words"))
        fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) | os.O_APPEND)

    def last_line(self) -> str:
        """The last line with something in it, at most 300 characters; empty if there is none.

        Of the file of a source at its start, the name alone is given.
        """
        size = os.fstat(self.fd).st_size
        text = os.pread(self.fd, self.MAX_BYTES, max(0, size - self.MAX_BYTES)).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return re.sub(r"^/\S*/(?=[^/\s]+:\d+: )", "", lines[-1])[:300] if lines else ""

    @classmethod
    def forget_old(cls, fd: int) -> None:
        """Empty such a file, of this process's own, where it has become long."""
        if os.fstat(fd).st_size > cls.MAX_BYTES:
            os.ftruncate(fd, 0)

    def close(self) -> None:
        """Forget them."""
        os.close(self.fd)


def above_stdio(fd: int) -> int:
    """A descriptor that is none of 0, 1 and 2, which a host that has closed those may get; closes the one given."""
    import fcntl

    if fd > 2:
        return fd
    moved: int = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return moved


def _anonymous_file(name: str) -> int:
    """Descriptor of a file in memory, or where the system has none of that kind of a deleted one."""
    if hasattr(os, "memfd_create"):
        try:
            return os.memfd_create(name)
        except OSError:  # forbidden, or an old kernel
            pass
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
