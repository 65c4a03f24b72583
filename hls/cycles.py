"""Cycles of the Verilog engines, exactly: the cycle of the last result, that of `start` being 0.

A step goes through three stages, each a recurrence over the steps (hls/rtl has the registers behind each number)::

    loaded[s]   its activations are in the chain: T beats through a block RAM, after those before were taken
    open[s]     its tables are full: entries are written once a bank is free, one a cycle
    ended[s]    its last beat of weights was taken

For streams that are always ready and T up to 16 this is, with n steps, m tiles and L = log2 T::

    base3   T + L + 257 + (n - 1) * max(245, m) + m
    g3x5    T + L + 40 + (n - 1) * (m + 29) + m
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgeinfer.hls.geometry import Geometry
from edgeinfer.hls.stalls import Stalls, goes

ROOM = 16  # results that wait for the receiver (ei_shell)
_CHUNK = 4096  # cycles that are drawn at once
_NEVER = -(1 << 40)


@dataclass(frozen=True)
class Timing:
    """Of an engine."""

    step: int  # cycles from a step to the next one at the least, where its beats take no longer
    entries: int  # sums that a table is filled with, 0 for an engine without tables
    banks: int  # sets of tables
    latency: int  # cycles from a beat to its sums, without those of the tree of adders, log2 T

    def sums_after(self, geometry: Geometry) -> int:
        """Cycles from a beat to its sums."""
        return self.latency + geometry.tables.bit_length() - 1


TIMINGS = {"base3": Timing(245, 243, 2, 3), "g3x5": Timing(29, 27, 1, 2), "2bit": Timing(2, 0, 1, 1)}


def cycles(geometry: Geometry, n_in: int, n_out: int, stalls: Stalls | None = None) -> int:
    """Cycles of a product, of streams that are always ready, or that stand still as `stalls` says."""
    product = _Product(geometry, n_in, n_out)
    return product.ready() if stalls is None else product.stalled(stalls)


class _Filling:
    """The tables of step after step."""

    def __init__(self, timing: Timing, tables: int) -> None:
        self.timing, self.tables = timing, tables
        self.taken = self.filled = _NEVER

    def read(self, arrived: list[int]) -> int:
        """The cycle in which the activations of a step are loaded. arrived: the cycle of each beat."""
        read = self.taken
        for cycle in arrived:
            read = max(cycle, read) + 1
        return read + 3

    def open(self, loaded: int, free: int) -> int:
        """The first cycle that may take weights. free: the first cycle in which the bank is free."""
        if not self.timing.entries:
            self.taken = max(loaded, free)
            return self.taken + 2
        in_time = loaded < self.filled  # the activations are exchanged as the last entry is added
        self.taken = self.filled if in_time else max(loaded, self.filled + 1) + 1
        first = max(self.taken + 2, free) + 1
        self.filled = first + self.timing.entries - 1
        return self.filled + 2


class _Stream:
    """Cycles in which a stream goes on."""

    def __init__(self, seed: int, share: float, length: int) -> None:
        self.seed, self.share, self.length = seed, share, length
        self.next = np.empty(0, dtype=np.int64)  # of each cycle, the first one from it on that goes

    def from_(self, cycle: int) -> int:
        """The first cycle from this one on that goes."""
        while cycle >= len(self.next) or self.next[cycle] < 0:
            n = 2 * max(cycle, _CHUNK)
            going = np.where(goes(self.seed, self.share, 0, n, self.length), np.arange(n), 2 * n)
            found = np.minimum.accumulate(going[::-1])[::-1]
            self.next = np.where(found < n, found, -1)
        return int(self.next[cycle])


class _Product:
    def __init__(self, geometry: Geometry, n_in: int, n_out: int) -> None:
        self.timing = TIMINGS[geometry.encoding]
        self.n_beats = geometry.tables  # of activations, in a step
        self.n_steps, self.n_tiles = geometry.n_steps(n_in), geometry.n_tiles(n_out)
        self.latency = self.timing.sums_after(geometry)

    def ready(self) -> int:
        """Of streams that are always ready."""
        filling = _Filling(self.timing, self.n_beats)
        ended: list[int] = []
        for step in range(self.n_steps):
            first = 1 + step * self.n_beats
            loaded = filling.read(list(range(first, first + self.n_beats)))
            opened = filling.open(loaded, self._free(ended, step))
            ended.append(max(opened, self._next(ended)) + self.n_tiles - 1)
        return ended[-1] + self.latency + 3

    def stalled(self, stalls: Stalls) -> int:
        """Of streams that stand still now and then, beat by beat."""
        draws = zip(stalls.seeds, stalls.shares, strict=True)
        x, w, y = (_Stream(seed, share, stalls.length) for seed, share in draws)
        filling, arrived, beat = _Filling(self.timing, self.n_beats), 0, 0
        ended: list[int] = []
        results = _Results(self.latency, y)
        for step in range(self.n_steps):
            beats = []
            for _ in range(self.n_beats):
                arrived = x.from_(arrived + 1)
                beats.append(arrived)
            opened = max(filling.open(filling.read(beats), self._free(ended, step)), self._next(ended))
            for _ in range(self.n_tiles):
                last = step == self.n_steps - 1
                beat = max(w.from_(beat + 1), opened, results.room() if last else 0)
                if last:
                    results.add(beat)
            ended.append(beat)
        return results.taken

    def _free(self, ended: list[int], step: int) -> int:
        """The first cycle in which the bank of a step is free."""
        return ended[step - self.timing.banks] + 1 if step >= self.timing.banks else 0

    def _next(self, ended: list[int]) -> int:
        """The first cycle in which the next step may begin for the sake of the totals."""
        pause = 4 if self.n_tiles < 4 else 1
        return ended[-1] + pause if ended else 0


class _Results:
    """The queue of results and its receiver."""

    def __init__(self, latency: int, y: _Stream) -> None:
        self.latency, self.y = latency, y
        self.gone: list[int] = []  # cycles in which a result leaves the queue
        self.taken = 0

    def room(self) -> int:
        """The first cycle in which there is room for one more."""
        return self.gone[-ROOM] + 2 if len(self.gone) >= ROOM else 0

    def add(self, beat: int) -> None:
        """The result of a beat that is taken in this cycle."""
        gone = max(beat + self.latency + 2, self.gone[-1] + 1 if self.gone else 0, self.taken)
        self.gone.append(gone)
        self.taken = self.y.from_(gone + 1)
