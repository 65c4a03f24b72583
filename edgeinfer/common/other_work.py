"""Whether other processes worked while something was measured."""

from __future__ import annotations

import time
from typing import Protocol

from edgeinfer.common import devices
from edgeinfer.common.overriding import override

MOST_SHARE = 0.1  # of a core that others may use while costs are measured which are to be kept

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


class Preemptions:
    """Counts how often the kernel gave this process's cores to others."""

    def __init__(self) -> None:
        self._n = self._count()

    def are_new(self) -> bool:
        """Whether there were any since the last call."""
        before, self._n = self._n, self._count()
        return self._n > before

    @staticmethod
    def _count() -> int:
        return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


class Clock(Protocol):
    """What is read when a measurement begins and ends, all in seconds."""

    def now(self) -> float:
        """Time."""
        ...

    def own(self) -> float:
        """CPU time of this process."""
        ...

    def all(self) -> float:
        """CPU time of all programs."""
        ...


class MachineClock(Clock):
    """The clocks of this machine, see Clock."""

    @override
    def now(self) -> float:
        return time.perf_counter()

    @override
    def own(self) -> float:
        return time.process_time()

    @override
    def all(self) -> float:
        return devices.busy_seconds()


class LoadMeter:
    """How many cores others use, from its making on."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = clock.now(), clock.own(), clock.all()

    def load(self) -> float:
        """Mean number of cores that others used."""
        began, own, of_all = self._began
        seconds = self._clock.now() - began
        others = (self._clock.all() - of_all) - (self._clock.own() - own)
        return max(0.0, others) / seconds if seconds > 0 else 0.0
