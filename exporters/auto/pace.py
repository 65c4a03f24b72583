"""What a search says of itself while it measures: how much is done, and the seconds that are left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from edgeinfer.exporters.request import Told, untold


class Pace:
    """Tells how many of some measurements are done.

    weights: what each of them takes, over the others.  of: what they are of, such as "tensors".  clock: in seconds.
    """

    def __init__(
        self,
        stage: str,
        of: str,
        weights: Sequence[float],
        told: Told = untold,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stage, self._of, self._weights, self._told, self._clock = stage, of, weights, told, clock
        self._n_done = 0
        self._began = clock()
        self._seconds = self._measured = 0.0  # of what was measured now, and its weight

    def done(self, was_known: bool = False) -> None:
        """One more is done.  was_known: an earlier search has measured it, so that it took no time."""
        now = self._clock()
        if not was_known:
            self._seconds += now - self._began
            self._measured += self._weights[self._n_done]
        self._began = now
        self._n_done += 1
        n = len(self._weights)
        what = f"{self._stage}: {self._n_done} of {n} {self._of}"
        left = self.seconds_left()
        self._told(what if left is None else f"{what}, {left:.0f} s left", self._n_done / n)

    def seconds_left(self) -> float | None:
        """For what is not done, as if nothing of it were known; None where nothing was measured, or nothing is left."""
        left = sum(self._weights[self._n_done :])
        return self._seconds * left / self._measured if self._measured and left else None
