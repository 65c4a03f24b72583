"""Cycles in which the streams of an engine stand still, to try it: drawn from a seed, the same in C++ and in Python."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import InvalidArgument

Cycles = NDArray[np.uint64]
MOST = 0.999  # of a share; at 1 a product would not end


@dataclass(frozen=True)
class Stalls:
    """Shares of cycles in which the senders of x and w do not begin to offer a beat, and the receiver takes no y.

    A beat once offered is offered until it is taken, as AXI wants it. length: of what is drawn, in cycles: streams that
    stand still for long, and then go on without a pause, find the tables of several steps filled.
    """

    x: float = 0.0
    w: float = 0.0
    y: float = 0.0
    seed: int = 0
    length: int = 1

    def __post_init__(self) -> None:
        for stream, share in zip("xwy", self.shares, strict=True):
            if not 0 <= share <= MOST:
                raise InvalidArgument(f"the share of stalls of {stream} must be 0 to {MOST}: found {share}")
        if self.length < 1:
            raise InvalidArgument(f"the length of stalls must be 1 cycle or more: found {self.length}")

    @property
    def shares(self) -> tuple[float, float, float]:
        """Of x, w and y."""
        return self.x, self.w, self.y

    @property
    def seeds(self) -> tuple[int, int, int]:
        """Of x, w and y."""
        return 3 * self.seed, 3 * self.seed + 1, 3 * self.seed + 2


def goes(seed: int, share: float, first: int, n_cycles: int, length: int = 1) -> NDArray[np.bool_]:
    """Whether the stream goes on in each of the cycles from `first` on: SplitMix64 of seed and cycle / length."""
    cycles = np.arange(first, first + n_cycles, dtype=np.uint64) // np.uint64(length)
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + cycles * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    drawn = (z ^ (z >> np.uint64(31))) >> np.uint64(32)
    return np.asarray(drawn >= np.uint64(int(share * 2**32)))
