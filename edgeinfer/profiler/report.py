"""`edgeinfer.profile`: all that can be said of a model before it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from edgeinfer.common.arguments import check_flag, check_integer, shown
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.sizes import parse_amount
from edgeinfer.common.types import ExpertSizes
from edgeinfer.constraints.memory import first_bytes
from edgeinfer.library.local import default_model
from edgeinfer.library.names import find_model
from edgeinfer.loading.options import FileName, LoadKeywords, LoadOptions
from edgeinfer.memory.budget import Ledger
from edgeinfer.models import ModelSpec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.profiler.fit import BEST, Fitted, by_budget, fitting
from edgeinfer.profiler.hits import HitRate, hit_rates, shares_of
from edgeinfer.profiler.machine import Machine, Wishes, described, measure_disk, this_machine
from edgeinfer.profiler.passes import Passes, Work, expected_passes, trial_times
from edgeinfer.profiler.planner import Planned, Planner, contexts_up_to
from edgeinfer.profiler.speed import Speed, SpeedModel

if TYPE_CHECKING:
    from edgeinfer.profiler.verify import Verification

PROMPT_TOKENS = 512  # of the prompt whose first token is waited for, where the caller does not say
_COST_SIZES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class AtContext:
    """Memory and expected speed with a context of so many positions."""

    ledger: Ledger
    n_ctx: int
    speed: Speed  # at the end of a full one, for a prompt as long


@dataclass(frozen=True)
class AtCache:
    """Memory and expected speed with an expert cache."""

    expert_cache: int
    share: float  # of the bytes of all experts
    peak: int
    speed: Speed


@dataclass(frozen=True)
class Profile:
    """What `edgeinfer.profile` found. Sizes are in bytes; all that is not named as measured is planned or expected."""

    path: Path
    backend: str
    n_ctx_train: int
    settings: LoadSettings  # those of `ledger` and `speed`
    machine: Machine
    budget: int  # the memory of the machine, or what was given
    planned: Planned
    speed: Speed  # with a short context
    speeds: SpeedModel  # expected for any settings
    # contexts, caches: memory and speed with other contexts and expert caches
    contexts: Sequence[AtContext]
    caches: Sequence[AtCache] = ()
    budgets: Sequence[Fitted] = ()  # for some contexts, what more memory gains in speed
    fit_budget: int | None = None
    fit: Sequence[Fitted] | None = None  # settings that fit into `fit_budget`, best first
    first_constraint: int = 0  # what the first schema, grammar or tool takes beside the ledger
    # what was measured, None where that was not asked for
    verification: Verification | None = None

    @property
    def ledger(self) -> Ledger:
        """Every byte, by purpose."""
        return self.planned.ledger

    @property
    def passes(self) -> Passes:
        """Expected times of passes."""
        return self.speeds.passes

    @property
    def fits(self) -> bool:
        """Whether the planned peak is within the budget."""
        return self.ledger.peak <= self.budget

    @property
    def costs(self) -> dict[int, float]:
        """c(n) with a short context."""
        one = self.passes.seconds(1, 0)
        return {n: self.passes.seconds(n, 0) / one for n in _COST_SIZES}

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "model": str(self.path),
            "backend": self.backend,
            "n_ctx_train": self.n_ctx_train,
            "settings": asdict(self.settings),
            "machine": asdict(self.machine),
            "budget": self.budget,
            "fits": self.fits,
            "ledger": self.ledger.as_json(),
            "first_constraint": self.first_constraint,
            "drafters": asdict(self.planned.drafters),
            "expected": {
                "origin": self.passes.origin,
                "is_disturbed": self.passes.is_disturbed,
                "costs": self.costs,
                "speed": asdict(self.speed),
            },
            "contexts": [_at_context(row) for row in self.contexts],
            "expert_caches": [asdict(row) for row in self.caches],
            "budgets": [_fitting(row) for row in self.budgets],
            "fit_budget": self.fit_budget,
            "best_is": BEST,
            "fit": None if self.fit is None else [_fitting(row) for row in self.fit],
            "verification": None if self.verification is None else self.verification.as_dict(),
        }


def profile(
    path: FileName | None = None,
    options: LoadOptions | None = None,
    *,
    memory: str | int | None = None,
    bandwidth: str | float | None = None,
    compute: str | float | None = None,
    disk: str | float | None = None,
    fit: str | int | None = None,
    prompt_tokens: int = PROMPT_TOKENS,
    check: bool = False,
    **keywords: Unpack[LoadKeywords],
) -> Profile:
    """What a model will take and how fast it will be, from the header of its file: it need not fit here.

    path, options, keywords: what would be loaded, and how, as for `load`.  memory: of the machine, in bytes or as text
    ("4GiB"); None is what is free here.  bandwidth, compute, disk: of another machine, in bytes, multiply-adds of 8-bit
    integers and bytes a second, as numbers or text ("50GB/s", "300G"); None is as measured here, once.
    fit: also list the settings that fit into so much memory.
    prompt_tokens: of the prompt whose first token is waited for.  check: load it in a process of its own, fill the
    context, and compare; the model must fit then, and the speeds be those of this machine.
    Raises ModelFileError and what derives from it, InvalidArgument, and with check what `load` raises.
    """
    if not isinstance(options, LoadOptions | None):
        raise InvalidArgument(f"options must be LoadOptions: found {shown(options)}")
    options = replace(LoadOptions() if options is None else options, **keywords)
    check_integer("prompt_tokens", prompt_tokens, 1)
    check_flag("check", check)
    rates = (("bandwidth", bandwidth), ("compute", compute), ("disk", disk))
    wishes = Wishes(_bytes("memory", memory), *(parse_amount(name, value) for name, value in rates))
    fit_budget = _bytes("fit", fit)
    if check and any(rate is not None for rate in (bandwidth, compute, disk)):
        raise InvalidArgument("check measures this machine: leave out bandwidth, compute and disk of another one")
    place = default_model() if path is None else find_model(path)
    with ModelFile.open(place) as file, closing(Planner(file, options)) as planner:
        found = _Profiler(planner, wishes, prompt_tokens).profile(fit_budget)
    if check:
        from edgeinfer.profiler.verify import verified

        found = replace(found, verification=verified(found, options))
    return found


class _Profiler:
    def __init__(self, planner: Planner, wishes: Wishes, prompt_tokens: int) -> None:
        file = planner.file
        self._planner = planner
        self._settings = settings = planner.requested
        self._planned = planned = planner.planned(settings)
        self._prompt_tokens = prompt_tokens
        self._sizes = planner.experts
        spec, plan = planner.spec, planned.plan
        times = None
        if planner.is_native and isinstance(spec, ModelSpec):
            times = trial_times(file, spec, plan, planner.n_threads)
        is_elsewhere = wishes.bandwidth is not None or wishes.compute is not None
        here = this_machine(planner.n_threads, needs_limits=times is None or is_elsewhere)
        if self._sizes is not None and wishes.disk is None:
            here = replace(here, disk_bytes_per_second=measure_disk(file.paths[0]))
        self._machine = described(here, wishes)
        passes = expected_passes(file, spec, plan, times, here, self._machine)
        hits = None if self._sizes is None else hit_rates(file, self._sizes, planner.n_threads)
        work = Work.of(file, spec, plan)
        self._speeds = SpeedModel(passes, work, self._machine, hits)

    def profile(self, fit_budget: int | None) -> Profile:
        """All of it.  fit_budget: None for no list of what fits."""
        planner, budget = self._planner, self._machine.memory_bytes
        found = None
        if fit_budget is not None:
            found = fitting(planner, self._settings, fit_budget, self._speed_of)
        return Profile(
            planner.file.path,
            planner.backend,
            planner.spec.n_ctx_train,
            self._settings,
            self._machine,
            budget,
            self._planned,
            self._speed_of(self._settings, self._planned),
            self._speeds,
            self._contexts(),
            [] if self._sizes is None else list(self._caches(self._sizes)),
            self._budgets(),
            fit_budget,
            found,
            first_bytes(planner.spec.n_vocab),
        )

    def _speed_of(
        self, settings: LoadSettings, planned: Planned, n_past: int = 0, n_prompt: int | None = None
    ) -> Speed:
        n_prompt = min(self._prompt_tokens, settings.n_ctx) if n_prompt is None else n_prompt
        return self._speeds.speed(settings, planned, n_past, n_prompt)

    def _contexts(self) -> list[AtContext]:
        """Memory by context, up to what the model has learned or was asked for."""
        most = max(self._planner.spec.n_ctx_train, self._settings.n_ctx)
        rows = []
        for n_ctx in sorted({*contexts_up_to(most, 1), self._settings.n_ctx}):
            settings = replace(self._settings, n_ctx=n_ctx)
            with suppress(InvalidArgument):  # llama.cpp has limits of its own
                planned = self._planner.planned(settings)
                rows.append(AtContext(planned.ledger, n_ctx, self._speed_of(settings, planned, n_ctx, n_ctx)))
        return rows

    def _budgets(self) -> list[Fitted]:
        """What more memory gains, for the context that was asked for and others."""
        planner, settings = self._planner, self._settings
        most = planner.spec.n_ctx_train
        others = {n_ctx for n_ctx in (most // 64, most // 8, most) if n_ctx >= 256} if planner.is_native else set()
        found = []
        for n_ctx in sorted({settings.n_ctx, *others}):
            found += by_budget(planner, replace(settings, n_ctx=n_ctx), self._half_full)
        return found

    def _half_full(self, settings: LoadSettings, planned: Planned) -> Speed:
        """The speed in the middle of a context."""
        return self._speed_of(settings, planned, settings.n_ctx // 2)

    def _caches(self, sizes: ExpertSizes) -> list[AtCache]:
        rows = []
        for n_bytes in shares_of(sizes):
            settings = replace(self._settings, expert_cache=n_bytes)
            planned = self._planner.planned(settings)
            speed = self._speed_of(settings, planned)
            rows.append(AtCache(n_bytes, n_bytes / sizes.total, planned.ledger.peak, speed))
        settings = replace(self._settings, expert_cache=None)
        planned = self._planner.planned(settings)
        speed = replace(self._speed_of(settings, planned), hit_rate=HitRate(1.0, "all"))
        return [*rows, AtCache(sizes.total, 1.0, planned.ledger.peak, speed)]


def _bytes(name: str, value: object) -> int | None:
    found = parse_amount(name, value)
    return None if found is None else int(found)


def _at_context(row: AtContext) -> dict[str, Any]:
    return {"n_ctx": row.n_ctx, "ledger": row.ledger.as_json(), "speed": asdict(row.speed)}


def _fitting(row: Fitted) -> dict[str, Any]:
    return asdict(row) | {"expected_tokens_per_second": row.expected}
