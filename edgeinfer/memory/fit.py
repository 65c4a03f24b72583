"""Fits the settings of a load into a limit of memory: reduces some, in a fixed order. Pure: plans are numbers.

The least useful is reduced first: less is kept of finished texts, fewer texts run at once, draft tables shrink, a draft
model or a head is left out, the expert cache shrinks, and last the batch. None of them changes the output. Once the
plan fits, what was reduced before the last step grows again as far as there is room. What a caller would notice, such
as a shorter context or a smaller cache type, is only proposed or listed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

from edgeinfer.common.errors import BudgetExceeded
from edgeinfer.common.settings import LoadSettings
from edgeinfer.memory.budget import Ledger

DraftPlaces: TypeAlias = Literal["all", "cpu", "own memory", "none"]
LEAST_BATCH = 16  # tokens of a pass: with fewer the weights are read so often that a prompt takes several times as long
S = TypeVar("S", bound=LoadSettings)


@dataclass(frozen=True)
class FitSettings(LoadSettings):
    """The settings of a load, and how far those of its drafters are reduced."""

    # draft tables of 1 / 2**tables of their full size, each at least as large as is of use; None for no such drafters
    tables: int | None = 0
    # where a draft model or a head may run: everywhere, on the CPU and on devices with memory of their own, only on
    # these, or nowhere
    places: DraftPlaces = "all"


class ReducibleSetting(Protocol):
    """A setting that a load can reduce."""

    def least(self, settings: S) -> S:
        """The settings with the least of it that a load can run with."""
        ...

    def best(self, settings: S, fitting: Fitting[S]) -> S:
        """The settings with as much of it as fits. They fit with the least of it."""
        ...


class Fitting(Generic[S]):
    """Plans against a limit. ledger_of: the plan of settings; may raise BudgetExceeded for a device's own memory."""

    def __init__(self, ledger_of: Callable[[S], Ledger], limit: int) -> None:
        self.ledger_of = ledger_of
        self.limit = limit

    def over(self, settings: S) -> float:
        """Bytes above the limit, negative for what is left; infinite where a device has no room."""
        try:
            return self.ledger_of(settings).peak - self.limit
        except BudgetExceeded:
            return float("inf")

    def fits(self, settings: S) -> bool:
        """Whether they keep to the limit."""
        return self.over(settings) <= 0


@dataclass(frozen=True)
class SteppedSetting:
    """A setting with a few values, the best one first."""

    field: str  # of the settings
    values: Sequence[Any]

    def least(self, settings: S) -> S:
        """See ReducibleSetting."""
        return self._with(settings, self.values[-1])

    def best(self, settings: S, fitting: Fitting[S]) -> S:
        """See ReducibleSetting."""
        each = (self._with(settings, value) for value in self.values)
        return next(one for one in each if one == self.least(settings) or fitting.fits(one))

    def _with(self, settings: S, value: Any) -> S:
        return replace(settings, **{self.field: value})


def fewer_texts(n_texts: int) -> SteppedSetting:
    """Texts that run at once, halved down to one."""
    values = [n_texts]
    while values[-1] > 1:
        values.append(values[-1] // 2)
    return SteppedSetting("parallel", values)


def smaller_batches(n_batch: int) -> SteppedSetting:
    """The batch, halved down to the least."""
    values = [n_batch]
    while values[-1] > LEAST_BATCH:
        values.append(max(values[-1] // 2, LEAST_BATCH))
    return SteppedSetting("n_batch", values)


def least_settings(requested: S, reducible: Sequence[ReducibleSetting]) -> S:
    """The settings with the least of everything."""
    for setting in reducible:
        requested = setting.least(requested)
    return requested


def fit(requested: S, reducible: Sequence[ReducibleSetting], fitting: Fitting[S]) -> S | None:
    """The settings to load with, those requested if they fit; None where not even the least of everything does.

    reducible: in the order in which they are reduced.
    """
    if fitting.fits(requested):
        return requested
    settings = requested
    for n, setting in enumerate(reducible, start=1):
        settings = setting.least(settings)
        if fitting.fits(settings):
            for turned in reversed(reducible[:n]):
                settings = turned.best(settings, fitting)
            return settings
    return None


def fit_context(settings: S, sizes: Sequence[int], fitting: Fitting[S]) -> S | None:
    """The settings with the most positions that fit, of these in rising order; None where none do."""
    found, too_many = -1, len(sizes)
    while too_many - found > 1:  # more positions never take fewer bytes
        middle = (found + too_many) // 2
        if fitting.fits(replace(settings, n_ctx=sizes[middle])):
            found = middle
        else:
            too_many = middle
    return None if found < 0 else replace(settings, n_ctx=sizes[found])


def largest_n_ctx(settings: S, fitting: Fitting[S]) -> int:
    """Largest number of positions up to those of the settings that fits, 0 if there is none.

    Rounded down to a multiple of 64 where that leaves any.
    """
    found = fit_context(settings, range(1, settings.n_ctx + 1), fitting)
    n_ctx = 0 if found is None else found.n_ctx
    return n_ctx - n_ctx % 64 if n_ctx >= 64 else n_ctx
