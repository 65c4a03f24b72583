"""Times that say whether other processes had the cores meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable

_LEAST_BUSY = 0.75  # of the threads' time must be spent at work


class Busy:
    """Times passes, and how much of the time the threads were at work."""

    def __init__(self, n_threads: int) -> None:
        self._n_threads = n_threads
        self._elapsed = self._at_work = 0.0

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds that it takes, in which all threads should be at work."""
        started, at_work = time.perf_counter(), time.process_time()
        work()
        elapsed = time.perf_counter() - started
        self._at_work += time.process_time() - at_work
        self._elapsed += elapsed
        return elapsed

    @property
    def was_disturbed(self) -> bool:
        """Whether other processes had the cores for so long that the times say little."""
        return self._at_work < _LEAST_BUSY * self._n_threads * self._elapsed
