"""A memory cgroup with a limit, for processes that are to run out of memory."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class MemoryGroup:
    """A new group below that of this process, of cgroup version 1 or 2. limit: bytes; it is removed on exit.

    Under version 2 this process goes into another new group first, as groups with processes cannot give memory to
    groups below them: run it in one of its own (`systemd-run --user --scope -p Delegate=yes`). Raises SystemExit.
    """

    def __init__(self, limit: int) -> None:
        self._is_v1 = V1.is_dir()
        own = _own_group("memory" if self._is_v1 else "")
        self.path = (V1 if self._is_v1 else V2) / own.lstrip("/") / f"edgeinfer-{os.getpid()}"
        try:
            if not self._is_v1:
                _make_room_below(self.path.parent)
            self.path.mkdir()
            (self.path / ("memory.limit_in_bytes" if self._is_v1 else "memory.max")).write_text(str(limit))
        except OSError as error:
            raise SystemExit(f"{self.path}: a memory cgroup is needed, and may not be made: {error}") from error

    def enter(self) -> None:
        """Move the calling process into it."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def peak(self) -> int:
        """Most bytes that it held, page cache among them."""
        return int((self.path / ("memory.max_usage_in_bytes" if self._is_v1 else "memory.peak")).read_text())

    def remove(self) -> None:
        """When its processes have ended."""
        for _ in range(50):
            with suppress(OSError):
                self.path.rmdir()
                return
            time.sleep(0.1)


def _own_group(controller: str) -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    raise SystemExit("this system has no memory cgroups")


def _make_room_below(group: Path) -> None:
    """Let groups below this one of version 2 have limits of memory."""
    if "memory" in (group / "cgroup.subtree_control").read_text().split():
        return
    leaf = group / "edgeinfer-rest"
    leaf.mkdir(exist_ok=True)
    (leaf / "cgroup.procs").write_text(str(os.getpid()))
    (group / "cgroup.subtree_control").write_text("+memory")
