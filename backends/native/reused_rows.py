"""Memory for logits that one pass after the other uses."""

from __future__ import annotations

import mmap
import weakref

import numpy as np
from numpy.typing import NDArray


class ReusedRows:
    """Memory for up to n_rows rows of logits, which are those of the next pass once nobody has any of them any more.

    A verify pass has up to 20 MB of them. Taken anew each time, the allocator would keep twice as much, and a step of a
    small model would spend a twentieth on page faults; so it is memory of its own, of which only what passes write to
    is there. n_blocks: where somebody has the rows of the last pass until the next one is over, two take turns.
    """

    def __init__(self, n_rows: int, n_logits: int, n_blocks: int = 1) -> None:
        self._n_rows = n_rows
        self._n_logits = n_logits
        self._n_blocks = n_blocks
        # Memory, and the array of which all rows were views that a pass got in it; the one used longest ago first.
        self._blocks: list[tuple[mmap.mmap, weakref.ref[NDArray[np.float32]]]] = []

    def take(self, n: int) -> NDArray[np.float32]:
        """(n, n_logits) for the next pass. Memory that somebody still has logits in is left to them.

        More than n_rows are memory of their own.
        """
        if n > self._n_rows:
            return np.empty((n, self._n_logits), dtype=np.float32)
        free = next((block for block in self._blocks if block[1]() is None), None)
        if free is not None:
            self._blocks.remove(free)
            memory = free[0]
        else:
            memory = mmap.mmap(-1, self._n_rows * self._n_logits * 4, access=mmap.ACCESS_COPY)
            del self._blocks[: max(0, len(self._blocks) + 1 - self._n_blocks)]
        array = np.frombuffer(memory, dtype=np.float32)
        self._blocks.append((memory, weakref.ref(array)))  # views keep it alive, whatever they were made of
        return array[: n * self._n_logits].reshape(n, self._n_logits)

    def drop(self) -> None:
        """Give the memory back once nobody has logits in it."""
        self._blocks.clear()
