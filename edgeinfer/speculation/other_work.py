"""Whether other processes worked while something was measured."""

from __future__ import annotations

import os
import time

from edgeinfer.devices import busy_seconds

MOST_SHARE = 0.1  # of a core that others may use while costs are measured which are to be kept
_TICK = 0.02  # seconds of the kernel's clock that may be counted wrongly

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


class OtherWork:
    """Measures from now on how many cores other processes use."""

    def __init__(self) -> None:
        self._started, self._busy, self._own = self._clocks()

    def cores(self) -> float:
        """Cores that others used since the beginning, on average."""
        now, busy, own = self._clocks()
        others = max(0.0, (busy - self._busy) - (own - self._own) - _TICK)
        return others / max(now - self._started, _TICK)

    @staticmethod
    def _clocks() -> tuple[float, float, float]:
        """Seconds: of the clock, of all cores in use, and of these by this process."""
        own = os.times()
        return time.perf_counter(), busy_seconds(), own.user + own.system
