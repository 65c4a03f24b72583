"""What a load does with less of, so that it keeps to its budget. Pure: plans are numbers, nothing is loaded.

Things are given up in a fixed order, the least useful first: draft tables become smaller, a draft model or a head is
left out, the expert cache becomes smaller, and last the batch. None of them changes the text. Where a step makes the
plan fit, what was given up before it comes back as far as there is room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias

from edgeinfer.errors import BudgetExceeded
from edgeinfer.memory.budget import Ledger
from edgeinfer.types import CacheType

DraftPlaces: TypeAlias = Literal["all", "cpu", "own memory", "none"]
LEAST_BATCH = 16  # tokens of a pass: with fewer the weights are read so often that a prompt takes several times as long
LedgerOf: TypeAlias = Callable[["LoadSettings"], Ledger]


@dataclass(frozen=True)
class LoadSettings:
    """What a load is to have.

    expert_cache: bytes, None for all experts in memory.  tables: draft tables of 1 / 2**tables of their full size, each
    at least as large as is of use; None for no such drafters.  draft: where a draft model or a head may run:
    everywhere, on the CPU and on devices with memory of their own, only on these, or nowhere.
    """

    n_ctx: int
    n_batch: int
    cache_type: CacheType = "f16"
    expert_cache: int | None = None
    tables: int | None = 0
    draft: DraftPlaces = "all"


class Knob(Protocol):
    """One setting that a load can do with less of."""

    def least(self, settings: LoadSettings) -> LoadSettings:
        """The settings with as little of it as a load can do with."""
        ...

    def best(self, settings: LoadSettings, fitting: Fitting) -> LoadSettings:
        """The settings with as much of it as fits. They fit with the least of it."""
        ...


class Fitting:
    """Plans against a limit. ledger_of: the plan of settings; may raise BudgetExceeded for a device's own memory."""

    def __init__(self, ledger_of: LedgerOf, limit: int) -> None:
        self.ledger_of = ledger_of
        self.limit = limit

    def over(self, settings: LoadSettings) -> float:
        """Bytes above the limit, negative for what is left; infinite where a device has no room."""
        try:
            return self.ledger_of(settings).peak - self.limit
        except BudgetExceeded:
            return float("inf")

    def fits(self, settings: LoadSettings) -> bool:
        """Whether they keep to the limit."""
        return self.over(settings) <= 0


@dataclass(frozen=True)
class Ladder:
    """A setting with a few values, the best one first. field: of LoadSettings."""

    field: str
    values: Sequence[Any]

    def least(self, settings: LoadSettings) -> LoadSettings:
        """See Knob."""
        return self._with(settings, self.values[-1])

    def best(self, settings: LoadSettings, fitting: Fitting) -> LoadSettings:
        """See Knob."""
        each = (self._with(settings, value) for value in self.values)
        return next(one for one in each if one == self.least(settings) or fitting.fits(one))

    def _with(self, settings: LoadSettings, value: Any) -> LoadSettings:
        return replace(settings, **{self.field: value})


def smaller_batches(n_batch: int) -> Ladder:
    """The batch, halved down to the least."""
    values = [n_batch]
    while values[-1] > LEAST_BATCH:
        values.append(max(values[-1] // 2, LEAST_BATCH))
    return Ladder("n_batch", values)


def least_settings(wanted: LoadSettings, knobs: Sequence[Knob]) -> LoadSettings:
    """The settings with the least of everything."""
    for knob in knobs:
        wanted = knob.least(wanted)
    return wanted


def settle(wanted: LoadSettings, knobs: Sequence[Knob], fitting: Fitting) -> LoadSettings | None:
    """The settings to load with, those that are wanted if they fit; None where not even the least of everything does.

    knobs: in the order in which things are given up.
    """
    if fitting.fits(wanted):
        return wanted
    settings = wanted
    for n, knob in enumerate(knobs, start=1):
        settings = knob.least(settings)
        if fitting.fits(settings):
            for turned in reversed(knobs[:n]):
                settings = turned.best(settings, fitting)
            return settings
    return None


def largest_n_ctx(settings: LoadSettings, fitting: Fitting) -> int:
    """Largest number of positions up to those of the settings that fits, 0 if there is none.

    Rounded down to a multiple of 64 where that leaves any.
    """
    fits, too_many = 0, settings.n_ctx + 1
    while too_many - fits > 1:  # more positions never take fewer bytes
        middle = (fits + too_many) // 2
        if fitting.fits(replace(settings, n_ctx=middle)):
            fits = middle
        else:
            too_many = middle
    return fits - fits % 64 if fits >= 64 else fits
