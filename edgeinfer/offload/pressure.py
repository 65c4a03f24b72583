"""Memory given back while a model runs: where the machine runs short, its expert cache shrinks between two passes.

Short is: less than a floor of memory is available (MemAvailable), or tasks wait for memory in a tenth of the time
(pressure stall information, Weiner, Linux 4.20). Both are those of the machine: a control group that is nearly full, as
under a budget, is no reason. The cache grows again once the machine has had memory for some time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from edgeinfer.common import devices
from edgeinfer.common.arguments import human_bytes
from edgeinfer.common.errors import warn

_FLOOR_SHARE = 64  # of the machine's memory, one part is the floor, within these bounds
_LEAST_FLOOR, _MOST_FLOOR = 16 << 20, 512 << 20
_STALLED = 0.1  # share of the time
_EVERY = 0.5  # seconds from one look to the next
_CALM = 30.0  # seconds without shortage before the cache grows
_SHRINK, _GROW = 8, 32  # parts of the planned size: one of them is the least that is given back, and the most taken


@dataclass(frozen=True)
class MachineMemory:
    """What a machine says of its memory. available, total: bytes.  stalled: seconds since it started in which at least
    one task waited for memory; 0 where the system does not count them.
    """

    available: int
    total: int
    stalled: float = 0.0

    @property
    def floor(self) -> int:
        """Bytes that should stay available: a 64th of all, at least 16 MiB and at most 512 MiB."""
        return min(max(self.total // _FLOOR_SHARE, _LEAST_FLOOR), _MOST_FLOOR)


@runtime_checkable
class ResizableCache(Protocol):
    """An expert cache that can give memory back. n_bytes: as planned."""

    n_bytes: int

    def resize(self, n_bytes: int) -> int:
        """Use so many bytes from now on, as near as slots allow; gives how many those are."""
        ...


def machine_memory() -> MachineMemory:
    """The memory of this machine now."""
    return MachineMemory(devices.machine_available_memory(), devices.total_memory(), devices.memory_stall_seconds())


class MemoryPressure:
    """Looks at the machine's memory between passes, and resizes an expert cache by it.

    least: bytes with which a pass can run.  read, clock: for tests.
    """

    def __init__(
        self,
        cache: ResizableCache,
        least: int,
        read: Callable[[], MachineMemory] = machine_memory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache, self._least, self._read, self._clock = cache, least, read, clock
        self._looked = self._short_at = clock()
        self._stalled = read().stalled
        self.n_bytes = cache.n_bytes
        self.has_given_back = False

    def between_passes(self) -> None:
        """Give memory back if the machine is short of it now, or take some again."""
        now = self._clock()
        if (seconds := now - self._looked) < _EVERY:
            return
        memory = self._read()
        stalled = (memory.stalled - self._stalled) / seconds
        self._looked, self._stalled = now, memory.stalled
        if memory.available < memory.floor or stalled >= _STALLED:
            self._short_at = now
            self._give_back(memory)
        elif now - self._short_at >= _CALM and (room := memory.available - 2 * memory.floor) > 0:
            self._resize(min(self.n_bytes + min(self._cache.n_bytes // _GROW, room), self._cache.n_bytes))

    def _give_back(self, memory: MachineMemory) -> None:
        wanted = max(memory.floor - memory.available, self._cache.n_bytes // _SHRINK)
        before = self.n_bytes
        self._resize(self.n_bytes - wanted)
        if self.n_bytes < before and not self.has_given_back:
            self.has_given_back = True
            warn(
                f"the machine is short of memory, {human_bytes(memory.available)} are available: the expert cache "
                "gives memory back, and takes it again later; answers may take longer"
            )

    def _resize(self, n_bytes: int) -> None:
        if (n_bytes := max(n_bytes, self._least)) != self.n_bytes:
            self.n_bytes = self._cache.resize(n_bytes)
