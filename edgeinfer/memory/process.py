"""What this process takes by itself: the interpreter, the libraries, and what their code still grows by."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

THREAD_BYTES = 64 << 10  # of a thread: what it touches of its stack, and its own store of the allocator

_n_expected = 0


def expect_threads(n: int) -> None:
    """Let later plans count threads that the program starts beside those that compute, such as a server's."""
    global _n_expected
    _n_expected = n


def expected_threads() -> int:
    """Threads that the program starts beside those that compute."""
    return _n_expected


@dataclass(frozen=True)
class Process:
    """Resident bytes of the process when a load is planned, and what its libraries take at their first use."""

    resident: int  # now, all imports that a load needs being done
    growth: int  # pages of code that come with the first pass

    @property
    def planned(self) -> int:
        """Bytes of the process without a model."""
        return self.resident + self.growth


def measure_process(others: Sequence[int] = ()) -> Process:
    """What the process takes now; everything that a load imports should be there.

    others: processes that work for this one. Of those the most that they took counts: they have read the model's
    vocabulary once already, and will again.
    """
    return Process(resident_bytes() + sum(peak_bytes(pid) for pid in others), 0)


def resident_bytes(pid: int | str = "self") -> int:
    """Resident memory of a process, anonymous and of files; 0 where there is no such process."""
    return _status("VmRSS", pid)


def peak_bytes(pid: int | str = "self") -> int:
    """The most that it ever was; 0 where the system does not tell."""
    return _status("VmHWM", pid)


def _status(name: str, pid: int | str) -> int:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return _by_psutil(name, pid)
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def _by_psutil(name: str, pid: int | str) -> int:
    """The same outside of Linux."""
    import psutil  # type: ignore[import-untyped]

    try:
        info = psutil.Process(None if pid == "self" else int(pid)).memory_info()
    except psutil.Error:
        return 0
    return int(info.rss if name == "VmRSS" else getattr(info, "peak_wset", 0))
