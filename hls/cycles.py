"""Cycles of the Verilog engines, exactly: from `start` to the last result, the cycle of `start` being 0."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Of an engine. step: cycles from a fill to the next one at the least."""

    step: int
    banks: int


TIMINGS = {"base3": Timing(245, 2), "g3x5": Timing(29, 1), "2bit": Timing(2, 1)}
