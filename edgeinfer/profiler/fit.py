"""The settings of a model that fit into a budget, best first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import get_args

from edgeinfer.common.errors import InvalidArgument
from edgeinfer.common.settings import CacheType, LoadSettings
from edgeinfer.memory.fit import fit_context
from edgeinfer.profiler.planner import Planned, Planner, contexts_up_to
from edgeinfer.profiler.speed import Speed

BEST = "first what leaves the text as it is, then the longest context, then expected speed"
LEAST_CONTEXT = 64  # tokens of the shortest context that is tried
_SMALL_BATCH = 128
_GAIN = 1.005  # of a step that is worth more memory
_CACHE_STEPS = 8  # sizes of an expert cache that are tried

SpeedOf = Callable[[LoadSettings, Planned], Speed]


@dataclass(frozen=True)
class Fitted:
    """Settings whose planned peak is within a budget.  changes_text: the cache type rounds keys and values."""

    settings: LoadSettings
    peak: int
    speed: Speed
    changes_text: bool

    @property
    def expected(self) -> float:
        """Expected tokens a second, with drafts if they are faster."""
        drafted = self.speed.drafted
        return max(self.speed.tokens_per_second, 0.0 if drafted is None else drafted.tokens_per_second)


def fitting(planner: Planner, wanted: LoadSettings, budget: int, speed_of: SpeedOf) -> list[Fitted]:
    """For each cache type, drafter, batch and expert cache the longest context that fits, best first.

    Best is BEST; of settings that are equal in all of it the one with the larger batch. What is no better than another
    in anything is left out.
    """
    found = []
    for settings in _choices(planner, wanted):
        longest = _longest_context(planner, settings, budget)
        if longest is not None:
            planned = planner.planned(longest)
            speed = speed_of(longest, planned)
            found.append(Fitted(longest, planned.ledger.peak, speed, longest.cache_type != "f16"))
    found.sort(key=lambda fit: (fit.changes_text, -fit.settings.n_ctx, -fit.expected, -fit.settings.n_batch))
    return [fit for i, fit in enumerate(found) if not any(_is_no_worse(other, fit) for other in found[:i])]


def by_budget(planner: Planner, wanted: LoadSettings, speed_of: SpeedOf) -> list[Fitted]:
    """With the context and the cache type that are wanted: what each larger budget gains in expected speed.

    The least memory first; whatever takes more memory is faster.
    """
    found = []
    for settings in _choices(planner, wanted):
        if settings.cache_type == wanted.cache_type:
            planned = planner.planned(settings)
            changes_text = settings.cache_type != "f16"
            found.append(Fitted(settings, planned.ledger.peak, speed_of(settings, planned), changes_text))
    found.sort(key=lambda fit: (fit.peak, -fit.expected))
    fastest = 0.0
    steps = []
    for fit in found:
        if fit.expected > fastest * _GAIN:
            fastest = fit.expected
            steps.append(fit)
    return steps


def _is_no_worse(other: Fitted, fit: Fitted) -> bool:
    """Whether another one has all that this one has: as long a context, as fast, as large a batch, as true a text."""
    if other.changes_text and other.settings.cache_type != fit.settings.cache_type:
        return False
    pairs = (
        (other.settings.n_ctx, fit.settings.n_ctx),
        (other.expected, fit.expected),
        (other.settings.n_batch, fit.settings.n_batch),
    )
    return all(theirs >= own for theirs, own in pairs)


def _choices(planner: Planner, wanted: LoadSettings) -> Iterator[LoadSettings]:
    """The settings to try, but for the context: the wanted drafters and fewer, all experts in memory and caches."""
    drafts = dict.fromkeys([wanted.draft, *(["auto"] if wanted.draft != "none" else []), "none"])
    if not planner.is_native:
        drafts = dict.fromkeys(["none"])
    for cache_type in get_args(CacheType):
        for draft in drafts:
            for n_batch in dict.fromkeys([wanted.n_batch, min(wanted.n_batch, _SMALL_BATCH)]):
                for expert_cache in _expert_caches(planner):
                    sizes = replace(wanted, n_batch=n_batch, expert_cache=expert_cache)
                    yield replace(sizes, cache_type=cache_type, draft=draft)


def _expert_caches(planner: Planner) -> Sequence[int | None]:
    sizes = planner.experts
    if sizes is None:
        return [None]
    steps = (sizes.total - sizes.least) // _CACHE_STEPS
    return [None, *(sizes.least + i * steps for i in reversed(range(_CACHE_STEPS)))]


def _longest_context(planner: Planner, settings: LoadSettings, budget: int) -> LoadSettings | None:
    """The settings with the longest context that fits, None where none does, or the model cannot have such a cache."""
    steps = contexts_up_to(planner.spec.n_ctx_train, 4 if planner.is_native else 1, LEAST_CONTEXT)
    with suppress(InvalidArgument):
        return fit_context(settings, steps, planner.fitting(budget))
    return None
