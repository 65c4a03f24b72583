"""A clock on which no machine is slow: it goes on by as much at each look, and by what a test lets pass."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from edgeinfer.speculation.expert_calibration import _Timed

LOOK, CALIBRATION_LOOK = 1e-6, 0.02  # seconds; of the latter a calibration sees at most some hundreds
# Modules that measure what drafters and passes take, and when a device counts as hanging.
_MEASURING = ("pipeline", "drafter_state", *(f"drafters.{name}" for name in ("model", "head", "joint", "watchdog")))


class SteadyClock:
    """Seconds since its making."""

    def __init__(self, look: float = LOOK) -> None:
        self._look, self._now, self._lock = look, 0.0, threading.Lock()

    def now(self) -> float:
        """Seconds; a look takes time itself, so that nothing takes none."""
        self.sleep(self._look)
        return self._now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        with self._lock:
            self._now += seconds

    def as_module(self) -> Any:
        """In place of the module `time`."""
        return SimpleNamespace(perf_counter=self.now, monotonic=self.now)


@contextmanager
def steady_machine() -> Iterator[None]:
    """Within, passes and drafts take next to nothing, all of them as much, and no other program takes the cores.

    What is drafted, what a calibration has time for, which device counts as hanging and which texts share a pass
    depends on what is measured.
    """

    def waited(timed: _Timed, size: int) -> float:
        of_disk(timed, size)
        return 0.0  # the clock does not see it

    clock, of_disk = SteadyClock(), _Timed._waited
    with pytest.MonkeyPatch.context() as patch:
        for name in _MEASURING:
            patch.setattr(f"edgeinfer.speculation.{name}.perf_counter", clock.now)
        for name in ("calibration", "expert_calibration"):
            patch.setattr(f"edgeinfer.speculation.{name}.time", SteadyClock(CALIBRATION_LOOK).as_module())
        for name in ("scheduler", "sequence"):
            patch.setattr(f"edgeinfer.scheduling.{name}.time", clock.as_module())
        patch.setattr(_Timed, "_waited", waited)
        patch.setattr("edgeinfer.common.other_work.Preemptions.are_new", lambda self: False)
        yield
