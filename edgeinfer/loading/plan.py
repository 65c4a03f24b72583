"""The plan of a load within a limit of memory: model, drafters, device for experts, and what is reduced to fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from edgeinfer.common.arguments import human_bytes
from edgeinfer.common.errors import UnsupportedModel, warn
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import ExpertSizes
from edgeinfer.experimental.expert_device import DeviceExpertsPlan, plan_device_experts, with_device_experts
from edgeinfer.loading.backend_choice import PlannedModel, Target, choose_target
from edgeinfer.loading.ledger import ledger_of, process_of
from edgeinfer.loading.options import LoadOptions
from edgeinfer.memory.budget import Ledger
from edgeinfer.memory.fit import (
    DraftPlaces,
    FitSettings,
    Fitting,
    ReducibleSetting,
    S,
    SteppedSetting,
    fewer_texts,
    fit,
    least_settings,
    smaller_batches,
)
from edgeinfer.memory.limit import Limit, limit_of, parse_budget
from edgeinfer.memory.process import Process
from edgeinfer.memory.refusal import FileSizes, refusal
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer
from edgeinfer.offload.cache_size import AUTO, fitting_bytes, largest_cache, parse
from edgeinfer.offload.size_search import CacheSizeSearch, load_search, search_key

if TYPE_CHECKING:
    from edgeinfer.speculation.plan import DraftChoice, DraftPlan

Draft: TypeAlias = str | tuple[str, ...]  # of LoadSettings
_HALVINGS = 5  # of cache_ram, before nothing of finished texts is kept beyond what running ones leave
_CHANGING = ("llama.cpp",)  # backends whose text depends on the batch: theirs is never made smaller


@dataclass(frozen=True)
class LoadPlan:
    """A load that fits."""

    model: PlannedModel
    drafters: DraftPlan | None  # None where nothing drafts
    device_experts: DeviceExpertsPlan | None  # None without a device for experts
    ledger: Ledger
    limit: Limit  # of memory
    # requested, settings: what was to be loaded, and what will be
    requested: FitSettings
    settings: FitSettings
    steps: Sequence[str]  # what was reduced to fit, in words
    dropped: Mapping[str, str]  # drafters that cannot be used, with the reason

    @property
    def room(self) -> int | None:
        """Bytes that a budget leaves when all is loaded, None without a budget."""
        return self.limit.n_bytes - self.ledger.planned if self.limit.is_asked else None

    def tell(self) -> None:
        """Warn of what was reduced to fit."""
        if self.drafters is None:
            warn_of_dropped(self.dropped)
        if self.steps:
            warn(f"not enough memory, {self.limit}; reduced: {'; '.join(self.steps)}")

    def close(self) -> None:
        """Close the files of drafters."""
        if self.drafters is not None and self.drafters.file is not None:
            self.drafters.file.close()


def plan_load(file: ModelFile, options: LoadOptions) -> LoadPlan:
    """What `edgeinfer.load` will do, without loading anything; closed by the caller. Errors as there."""
    n_tokens = Tokenizer.size_in(file)  # first: no backend helps where there is no vocabulary
    target = choose_target(file, options)
    if n_tokens > target.spec.n_vocab:
        raise UnsupportedModel(f"{file.path}: {n_tokens} tokens, but embeddings for {target.spec.n_vocab} only")
    planner = Planner(target, lambda draft: _find_drafters(target, options, draft, n_tokens))
    try:
        plan = _Load(planner, options).plan()
    except BaseException:
        planner.close()
        raise
    if plan.drafters is None or plan.drafters.file is None:
        planner.close()
    return plan


def warn_of_dropped(dropped: Mapping[str, str]) -> None:
    """Warn of drafters that cannot be used, by name, with the reason."""
    for name, reason in dropped.items():
        warn(f"drafting goes on without {name}: {reason}")


def plan_model(file: ModelFile, options: LoadOptions) -> PlannedModel:
    """The backend and the plan that `edgeinfer.load` takes for a file without drafters. Errors as there."""
    return plan_without_drafters(file, options).model


def plan_without_drafters(file: ModelFile, options: LoadOptions) -> LoadPlan:
    """What `edgeinfer.load` would do without drafters; warns of what was reduced to fit. Errors as there."""
    plan = _Load(Planner(choose_target(file, options), lambda draft: None), options).plan()
    plan.tell()
    return plan


def plan_beside(file: ModelFile, options: LoadOptions, first: LoadPlan) -> PlannedModel:
    """The same as plan_model, for a model that is loaded while the first one is there, within the limit of both."""
    left = first.limit.n_bytes - (first.ledger.peak - first.ledger.of("process"))
    return plan_model(file, replace(options, budget=max(1, left)))


def _find_drafters(target: Target, options: LoadOptions, draft: Draft, n_tokens: int) -> DraftChoice | None:
    """What can draft beside a model, None where nothing is to be drafted. n_tokens: of the vocabulary."""
    if draft == "none" or not options.draft_max:
        if options.draft_memory is not None:
            warn(f"answers are not kept in {options.draft_memory}: nothing is to be drafted")
        return None
    if target.backend.name != "native":
        if draft != "auto" or options.draft_memory is not None:
            warn(f"nothing is drafted: with the {target.backend.name} backend that costs time, or changes the text")
        return None
    from edgeinfer.speculation.plan import find_drafters

    requested = (target.rough or target).planned(target.requested).plan
    n_threads = target.device.n_threads
    memory = None if options.draft_memory is None else Path(options.draft_memory)
    device, most = options.draft_device, options.draft_max
    return find_drafters(draft, target.file, n_tokens, requested, n_threads, device, most, memory)


@dataclass(frozen=True)
class Planned:
    """A plan for some settings, and every byte of it."""

    model: PlannedModel
    drafters: DraftPlan | None  # None where nothing drafts
    ledger: Ledger


class Planner:
    """Plans of a model on its backend for any settings; nothing is refused for being too large. Closed by the caller.

    find: what can draft, opened, by LoadSettings.draft; None for nothing.
    """

    def __init__(self, target: Target, find: Callable[[Draft], DraftChoice | None]) -> None:
        self.target = target
        self._find = find
        self._choices: dict[Draft, DraftChoice | None] = {}
        self._known: dict[tuple[object, ...], Planned] = {}

    @cached_property
    def process(self) -> Process:
        """What the process takes, as it is measured at first."""
        return process_of(self.target, self.choice(self.target.requested))

    def choice(self, settings: LoadSettings) -> DraftChoice | None:
        """What can draft. Raises as `find`."""
        if settings.draft not in self._choices:
            self._choices[settings.draft] = self._find(settings.draft)
        return self._choices[settings.draft]

    def planned(
        self, settings: LoadSettings, tables: int | None = 0, places: DraftPlaces = "all", is_rough: bool = False
    ) -> Planned:
        """The plan for settings. Raises InvalidArgument for a cache that the model cannot have.

        tables, places: see FitSettings.  is_rough: as Target.rough plans.
        """
        key = settings, tables, places, is_rough
        if key not in self._known:
            target = self.target.rough if is_rough else self.target
            assert target is not None
            model, choice = target.planned(settings), self.choice(settings)
            found = None if choice is None else choice.plan(model.plan, tables, places)
            if found is not None and not found.tables and found.file is None:
                found = None
            self._known[key] = Planned(model, found, ledger_of(model, found, self.process))
        return self._known[key]

    def close(self) -> None:
        """Close the files of draft models and heads."""
        for choice in self._choices.values():
            if choice is not None:
                choice.close()


class _Load:
    """The plan of one load."""

    def __init__(self, planner: Planner, options: LoadOptions) -> None:
        self._planner, self._options = planner, options
        self._target = target = planner.target
        self._choice = planner.choice(target.requested)
        self._limit = limit_of(parse_budget(options.budget), planner.process.resident, target.device.n_threads)
        self._requested = FitSettings(**vars(target.requested))

    def plan(self) -> LoadPlan:
        """Raises BudgetExceeded, and what plan_device_experts raises."""
        if self._target.rough is not None:
            self._settled(is_rough=True)  # refuses what cannot fit before anything is measured
        settings = self._settled()
        planned = self._planned(settings)
        model, drafters = planned.model, planned.drafters
        device_experts = plan_device_experts(model, self._options, self._limit.n_bytes - planned.ledger.peak)
        if device_experts is not None:
            model = with_device_experts(model, device_experts)
        use = replace(model.plan.use, drafters=0 if drafters is None else drafters.n_bytes)
        model = replace(model, plan=replace(model.plan, use=use))
        ledger = ledger_of(model, drafters, self._planner.process)
        steps = tuple(_steps(self._target, self._choice, self._requested, settings))
        if self._options.parallel is not None and settings.n_texts < self._requested.n_texts:
            steps = (f"{settings.n_texts} texts at once rather than {self._options.parallel}", *steps)
        dropped = {} if self._choice is None else self._choice.dropped
        return LoadPlan(model, drafters, device_experts, ledger, self._limit, self._requested, settings, steps, dropped)

    @cached_property
    def _reducible(self) -> Sequence[ReducibleSetting]:
        """The settings that can be reduced, the least useful first."""
        target, choice = self._target, self._choice
        reducible: list[ReducibleSetting] = []
        if n_bytes := target.requested.cache_ram_bytes:
            values = (target.requested.cache_ram, *(n_bytes >> i for i in range(1, _HALVINGS)), None)
            reducible.append(SteppedSetting("cache_ram", values))
        reducible.append(fewer_texts(target.requested.n_texts))
        if choice is not None:
            reducible += [
                SteppedSetting("tables", choice.table_steps(target.requested.n_ctx)),
                SteppedSetting("places", choice.place_steps()),
            ]
        if target.sizes is not None and target.requested.expert_cache != target.sizes.least:
            reducible.append(_reducible_cache(target, target.sizes, self._options))
        if target.backend.name not in _CHANGING:
            reducible.append(smaller_batches(target.requested.n_batch))
        return reducible

    def _settled(self, is_rough: bool = False) -> FitSettings:
        fitting = Fitting[FitSettings](lambda of: self._planned(of, is_rough).ledger, self._limit.n_bytes)
        settings = fit(self._requested, self._reducible, fitting)
        if settings is not None:
            return settings
        raise refusal(
            _sizes_of(self._target.file), least_settings(self._requested, self._reducible), fitting, self._limit
        )

    def _planned(self, settings: FitSettings, is_rough: bool = False) -> Planned:
        return self._planner.planned(settings, settings.tables, settings.places, is_rough)


@dataclass(frozen=True)
class ReducibleCache:
    """The expert cache: what was requested, None for all experts, or what there is room for."""

    sizes: ExpertSizes
    requested: int | None
    # bytes that measurements ask for, by the largest size that there is room for; None where nothing does
    measured: Callable[[int], int | None]

    def least(self, settings: S) -> S:
        """See ReducibleSetting."""
        return replace(settings, expert_cache=self.sizes.least)

    def best(self, settings: S, fitting: Fitting[S]) -> S:
        """See ReducibleSetting."""
        requested, least = replace(settings, expert_cache=self.requested), self.least(settings)
        if fitting.fits(requested):
            return requested
        others = int(fitting.over(least)) + fitting.limit - self.sizes.least  # with the tables of a cache
        largest = largest_cache(self.sizes, fitting.limit, others)
        n_bytes = fitting_bytes(self.sizes, self.requested, largest, self.measured(largest))
        found = replace(settings, expert_cache=n_bytes)
        while n_bytes > self.sizes.least and (over := fitting.over(found)) > 0:
            n_bytes = max(n_bytes - max(int(over), n_bytes // 32), self.sizes.least)  # memory comes in large pages
            found = replace(settings, expert_cache=n_bytes)
        return found


def _reducible_cache(target: Target, sizes: ExpertSizes, options: LoadOptions) -> ReducibleCache:
    """The expert cache of a model, whose size auto takes from earlier runs."""
    is_auto = parse(options.expert_cache) == AUTO
    search = load_search(search_key(target.file, target.device.n_threads)) if is_auto else CacheSizeSearch()
    return ReducibleCache(sizes, target.requested.expert_cache, lambda largest: search.next_size(sizes.least, largest))


def _sizes_of(file: ModelFile) -> FileSizes:
    """Of all matrices of a file; what else it holds has no smaller quantisation."""
    matrices = [info for info in file.tensors.values() if len(info.shape) > 1]
    n_weights = sum(math.prod(info.shape) for info in matrices)
    return FileSizes(file.path, file.n_bytes, sum(info.n_bytes for info in matrices), n_weights)


# ---- what was reduced, in words --------------------------------------------------------------------------------------


def _steps(target: Target, choice: DraftChoice | None, requested: FitSettings, settings: FitSettings) -> Iterator[str]:
    """What the settings have less of than was requested."""
    if choice is not None:
        yield from _draft_steps(choice, requested, settings)
    if settings.expert_cache is not None and settings.expert_cache != requested.expert_cache:
        assert target.sizes is not None
        asked = target.sizes.total if requested.expert_cache is None else requested.expert_cache
        rather = f"all experts, {human_bytes(asked)}" if requested.expert_cache is None else human_bytes(asked)
        yield f"an expert cache of {human_bytes(settings.expert_cache)} rather than {rather}"
    if settings.cache_ram_bytes != requested.cache_ram_bytes:
        kept = human_bytes(settings.cache_ram_bytes) if settings.cache_ram_bytes else "nothing"
        yield f"{kept} rather than {human_bytes(requested.cache_ram_bytes)} for what finished texts leave"
    if settings.n_batch != requested.n_batch:
        yield f"batches of {settings.n_batch} tokens rather than {requested.n_batch}, so prompts take longer"


def _draft_steps(choice: DraftChoice, requested: FitSettings, settings: FitSettings) -> Iterator[str]:
    """The same of drafters."""
    n_ctx = requested.n_ctx
    if settings.tables is None and choice.model_free:
        least = choice.table_bytes(n_ctx, choice.table_steps(n_ctx)[-2])
        yield f"no {' and '.join(choice.model_free)} drafts, which need {human_bytes(least)} to be of use"
    elif settings.tables != requested.tables:
        tables = [human_bytes(choice.table_bytes(n_ctx, each.tables)) for each in (settings, requested)]
        yield f"draft tables of {tables[0]} rather than {tables[1]}"
    if choice.file is not None and settings.places != requested.places:
        what = "draft head" if choice.file_name == "head" else "draft model"
        where = {"cpu": " on devices that use main memory", "own memory": " on the CPU", "none": ""}[settings.places]
        yield f"no {what}{where} ({choice.file.path.name})"
