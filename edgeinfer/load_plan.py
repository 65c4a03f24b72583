"""What a load will take and what it does without: the model, its drafters and a device, within one limit of memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from edgeinfer.arguments import human_bytes
from edgeinfer.backend_choice import PlannedModel, Target, choose_target
from edgeinfer.errors import UnsupportedModel, warn
from edgeinfer.expert_device import TierPlan, plan_tier, with_tier
from edgeinfer.load_ledger import ledger_of, process_of
from edgeinfer.load_options import LoadOptions
from edgeinfer.memory.budget import Ledger
from edgeinfer.memory.limit import Limit, limit_of, parse_budget
from edgeinfer.memory.planner import Fitting, Knob, Ladder, LoadSettings, least_settings, settle, smaller_batches
from edgeinfer.memory.refusal import FileSizes, refusal
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer
from edgeinfer.offload.cache_size import AUTO, fitting_bytes, largest_cache, parse
from edgeinfer.offload.size_search import CacheSizeSearch, load_search, search_key
from edgeinfer.types import ExpertSizes

if TYPE_CHECKING:
    from edgeinfer.speculation.plan import DraftChoice, DraftPlan

_CHANGING = ("llama.cpp",)  # backends whose text depends on the batch: theirs is never made smaller


@dataclass(frozen=True)
class LoadPlan:
    """A load that fits.

    drafters: None where nothing drafts.  tier: None without a device for experts.  limit: of memory.  wanted, settings:
    what was to be loaded, and what will be.  steps: what is done without, in words.  dropped: drafters that cannot be
    used, with the reason.
    """

    model: PlannedModel
    drafters: DraftPlan | None
    tier: TierPlan | None
    ledger: Ledger
    limit: Limit
    wanted: LoadSettings
    settings: LoadSettings
    steps: Sequence[str]
    dropped: Mapping[str, str]

    def tell(self) -> None:
        """Warn of what is done without."""
        if self.drafters is None:
            warn_of_dropped(self.dropped)
        if self.steps:
            warn(f"{self.limit}, which is too little for all of it: loading with {'; '.join(self.steps)}")

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
    choice = _find_drafters(target, options, n_tokens)
    try:
        plan = _Planner(target, choice, options).plan()
    except BaseException:
        if choice is not None:
            choice.close()
        raise
    if choice is not None and (plan.drafters is None or plan.drafters.file is None):
        choice.close()
    return plan


def warn_of_dropped(dropped: Mapping[str, str]) -> None:
    """Warn of drafters that cannot be used, by name, with the reason."""
    for name, reason in dropped.items():
        warn(f"drafting goes on without {name}: {reason}")


def plan_model(file: ModelFile, options: LoadOptions) -> PlannedModel:
    """The backend and the plan that `edgeinfer.load` takes for a file without drafters. Errors as there."""
    return plan_without_drafters(file, options).model


def plan_without_drafters(file: ModelFile, options: LoadOptions) -> LoadPlan:
    """What `edgeinfer.load` would do with nothing that drafts; tells what is done without. Errors as there."""
    plan = _Planner(choose_target(file, options), None, options).plan()
    plan.tell()
    return plan


def plan_beside(file: ModelFile, options: LoadOptions, first: LoadPlan) -> PlannedModel:
    """The same as plan_model, for a model that is loaded while the first one is there, within the limit of both."""
    left = first.limit.n_bytes - (first.ledger.peak - first.ledger.of("process"))
    return plan_model(file, replace(options, budget=max(1, left)))


def _find_drafters(target: Target, options: LoadOptions, n_tokens: int) -> DraftChoice | None:
    """What can draft beside a model, None where nothing is to be drafted. n_tokens: of the vocabulary."""
    draft = options.drafter_names()
    if draft == "none" or not options.draft_max:
        return None
    if target.backend.name != "native":
        if draft != "auto":
            warn(f"nothing is drafted: with the {target.backend.name} backend that costs time, or changes the text")
        return None
    from edgeinfer.speculation.plan import find_drafters

    wanted = (target.rough or target).planned(target.wanted).plan
    n_threads = target.device.n_threads
    return find_drafters(draft, target.file, n_tokens, wanted, n_threads, options.draft_device, options.draft_max)


class _Planner:
    """The plan of one load. choice: what can draft, None for nothing."""

    def __init__(self, target: Target, choice: DraftChoice | None, options: LoadOptions) -> None:
        self._target, self._choice, self._options = target, choice, options
        self._process = process_of(target, choice)
        n_threads = target.device.n_threads
        self._limit = limit_of(parse_budget(options.budget), self._process.resident, n_threads)

    def plan(self) -> LoadPlan:
        """Raises BudgetExceeded, and what plan_tier raises."""
        target, options = self._target, self._options
        if target.rough is not None:
            self._settled(target.rough)  # refuses what cannot fit before anything is measured
        settings = self._settled(target)
        model, drafters = target.planned(settings), self._drafters(target, settings)
        tier = plan_tier(model, options, self._limit.n_bytes - self._ledger(target, settings).peak)
        if tier is not None:
            model = with_tier(model, tier)
        use = replace(model.plan.use, drafters=0 if drafters is None else drafters.n_bytes)
        model = replace(model, plan=replace(model.plan, use=use))
        ledger = ledger_of(model, drafters, self._process)
        steps = tuple(_steps(target, self._choice, settings))
        dropped = {} if self._choice is None else self._choice.dropped
        return LoadPlan(model, drafters, tier, ledger, self._limit, target.wanted, settings, steps, dropped)

    @cached_property
    def _knobs(self) -> Sequence[Knob]:
        """What can be done with less of, the least useful first."""
        target, choice = self._target, self._choice
        knobs: list[Knob] = []
        if choice is not None:
            knobs += [Ladder("tables", choice.table_steps(target.wanted.n_ctx)), Ladder("draft", choice.place_steps())]
        if target.sizes is not None and target.wanted.expert_cache != target.sizes.least:
            knobs.append(_cache_knob(target, target.sizes, self._options))
        if target.backend.name not in _CHANGING:
            knobs.append(smaller_batches(target.wanted.n_batch))
        return knobs

    def _settled(self, target: Target) -> LoadSettings:
        fitting = Fitting(lambda settings: self._ledger(target, settings), self._limit.n_bytes)
        settings = settle(target.wanted, self._knobs, fitting)
        if settings is not None:
            return settings
        raise refusal(_sizes_of(target.file), least_settings(target.wanted, self._knobs), fitting, self._limit)

    def _ledger(self, target: Target, settings: LoadSettings) -> Ledger:
        return ledger_of(target.planned(settings), self._drafters(target, settings), self._process)

    def _drafters(self, target: Target, settings: LoadSettings) -> DraftPlan | None:
        if self._choice is None:
            return None
        found = self._choice.plan(target.planned(settings).plan, settings)
        return found if found.tables or found.file is not None else None


@dataclass(frozen=True)
class CacheKnob:
    """The expert cache: what is wanted, None for all experts, or what there is room for.

    measured: bytes that measurements ask for, by the largest size that there is room for; None where nothing does.
    """

    sizes: ExpertSizes
    wanted: int | None
    measured: Callable[[int], int | None]

    def least(self, settings: LoadSettings) -> LoadSettings:
        """See Knob."""
        return replace(settings, expert_cache=self.sizes.least)

    def best(self, settings: LoadSettings, fitting: Fitting) -> LoadSettings:
        """See Knob."""
        wanted, least = replace(settings, expert_cache=self.wanted), self.least(settings)
        if fitting.fits(wanted):
            return wanted
        others = int(fitting.over(least)) + fitting.limit - self.sizes.least  # with the tables of a cache
        largest = largest_cache(self.sizes, fitting.limit, others)
        n_bytes = fitting_bytes(self.sizes, self.wanted, largest, self.measured(largest))
        found = replace(settings, expert_cache=n_bytes)
        while n_bytes > self.sizes.least and (over := fitting.over(found)) > 0:
            n_bytes = max(n_bytes - max(int(over), n_bytes // 32), self.sizes.least)  # memory comes in large pages
            found = replace(settings, expert_cache=n_bytes)
        return found


def _cache_knob(target: Target, sizes: ExpertSizes, options: LoadOptions) -> CacheKnob:
    """The expert cache of a model, whose size auto takes from earlier runs."""
    is_auto = parse(options.expert_cache) == AUTO
    search = load_search(search_key(target.file, target.device.n_threads)) if is_auto else CacheSizeSearch()
    return CacheKnob(sizes, target.wanted.expert_cache, lambda largest: search.next_size(sizes.least, largest))


def _sizes_of(file: ModelFile) -> FileSizes:
    """Of all matrices of a file; what else it holds has no smaller quantisation."""
    matrices = [info for info in file.tensors.values() if len(info.shape) > 1]
    n_weights = sum(math.prod(info.shape) for info in matrices)
    return FileSizes(file.path, file.n_bytes, sum(info.n_bytes for info in matrices), n_weights)


# ---- what is done without, in words ----------------------------------------------------------------------------------


def _steps(target: Target, choice: DraftChoice | None, settings: LoadSettings) -> Iterator[str]:
    """What the settings have less of than is wanted."""
    wanted = target.wanted
    if choice is not None:
        yield from _draft_steps(choice, wanted, settings)
    if settings.expert_cache is not None and settings.expert_cache != wanted.expert_cache:
        assert target.sizes is not None
        asked = target.sizes.total if wanted.expert_cache is None else wanted.expert_cache
        rather = f"all experts, {human_bytes(asked)}" if wanted.expert_cache is None else human_bytes(asked)
        yield f"an expert cache of {human_bytes(settings.expert_cache)} rather than {rather}"
    if settings.n_batch != wanted.n_batch:
        yield f"batches of {settings.n_batch} tokens rather than {wanted.n_batch}, so prompts take longer"


def _draft_steps(choice: DraftChoice, wanted: LoadSettings, settings: LoadSettings) -> Iterator[str]:
    """The same of drafters."""
    n_ctx = wanted.n_ctx
    if settings.tables is None and choice.free:
        least = choice.table_bytes(n_ctx, choice.table_steps(n_ctx)[-2])
        yield f"no {' and '.join(choice.free)} drafts, which need {human_bytes(least)} to be of use"
    elif settings.tables != wanted.tables:
        tables = [human_bytes(choice.table_bytes(n_ctx, each.tables)) for each in (settings, wanted)]
        yield f"draft tables of {tables[0]} rather than {tables[1]}"
    if choice.file is not None and settings.draft != wanted.draft:
        what = "draft head" if choice.file_name == "head" else "draft model"
        where = {"cpu": " on devices that use main memory", "own memory": " on the CPU", "none": ""}[settings.draft]
        yield f"no {what}{where}" if choice.is_shipped else f"no {what}{where} ({choice.file.path.name})"
