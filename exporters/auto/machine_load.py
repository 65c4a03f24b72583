"""How busy other programs keep the machine while something is timed."""

from __future__ import annotations

import time
from typing import Protocol

from edgeinfer import devices


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


class MachineClock:
    """The clocks of this machine, see Clock."""

    def now(self) -> float:
        """See Clock.now."""
        return time.perf_counter()

    def own(self) -> float:
        """See Clock.own."""
        return time.process_time()

    def all(self) -> float:
        """See Clock.all."""
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
