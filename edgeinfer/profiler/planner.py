"""Plans of one model file for any settings, without loading it; nothing is refused for being too large."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from edgeinfer import devices
from edgeinfer.backend_choice import DEFAULT_N_CTX, PlannedModel, open_backend
from edgeinfer.backends.base import Backend, ExpertBackend
from edgeinfer.errors import UnsupportedModel, warn
from edgeinfer.load_ledger import ledger_of, process_of
from edgeinfer.load_options import LoadOptions
from edgeinfer.memory.budget import Ledger
from edgeinfer.memory.process import Process
from edgeinfer.models import ModelSizes
from edgeinfer.models.draft_head import HeadSpec, is_draft_head
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer
from edgeinfer.offload.cache_size import parse
from edgeinfer.offload.file_experts import has_experts
from edgeinfer.speculation.plan import DraftPlan, plan_drafters
from edgeinfer.types import CacheType, Device, ExpertSizes, MemoryPlan

_ALL = 1 << 62  # bytes: what is planned is not refused


@dataclass(frozen=True)
class Settings:
    """How a model is loaded, as far as memory and speed depend on it.

    draft: "auto", "none", or what LoadOptions.drafter_names gives.  expert_cache: bytes, None for all in memory.
    """

    n_ctx: int
    cache_type: CacheType = "f16"
    draft: str | tuple[str, ...] = "auto"
    expert_cache: int | None = None
    n_batch: int = 512


@dataclass(frozen=True)
class Drafters:
    """What drafts beside a model.

    names: of drafters, those without a model first.  weight_bytes: of the draft model or the head, which each draft
    token reads; 0 without one.  acceptance_rate: of a head, where its file says it.  dropped: those that cannot be
    used, with the reason.
    """

    names: tuple[str, ...] = ()
    weight_bytes: int = 0
    acceptance_rate: float | None = None
    is_head: bool = False
    dropped: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Planned:
    """A plan of a model with its drafters, and every byte of it."""

    plan: MemoryPlan
    ledger: Ledger
    drafters: Drafters


class Planner:
    """Plans of a file on one backend. What the process takes by itself is measured at the first."""

    def __init__(self, file: ModelFile, options: LoadOptions) -> None:
        if is_draft_head(file):
            raise UnsupportedModel(f"{file.path}: a draft head, which drafts for a model: profile that one with -md")
        self.file = file
        self.n_tokens = Tokenizer.size_in(file)
        self.n_threads = options.n_threads or devices.default_n_threads()
        self.backend, self.spec = _backend_of(file, options)
        self._process: Process | None = None
        self._known: dict[Settings, Planned] = {}

    @property
    def is_native(self) -> bool:
        """Whether the native engine runs the model."""
        return self.backend.name == "native"

    @property
    def experts(self) -> ExpertSizes | None:
        """What the experts take, None for a model without any, or a backend without a cache of them."""
        if not has_experts(self.file) or not isinstance(self.backend, ExpertBackend):
            return None
        return self.backend.expert_sizes(self.file, self.spec)

    def settings(self, options: LoadOptions) -> Settings:
        """The settings that options ask for; what is left to the model is all experts, and at most 4096 positions."""
        n_ctx = options.n_ctx or min(self.spec.n_ctx_train, DEFAULT_N_CTX)
        request, sizes = parse(options.expert_cache), self.experts
        n_bytes = request.n_bytes
        if sizes is not None and request.share is not None:
            n_bytes = int(sizes.total * request.share)
        if sizes is None or (n_bytes is not None and n_bytes >= sizes.total):
            n_bytes = None
        return Settings(n_ctx, options.cache_type, options.drafter_names(), n_bytes, options.n_batch)

    def planned(self, settings: Settings) -> Planned:
        """The plan for settings. Raises InvalidArgument for a cache that the model cannot have."""
        if settings not in self._known:
            self._known[settings] = self._plan(settings)
        return self._known[settings]

    def _plan(self, settings: Settings) -> Planned:
        arguments = (self.file, self.spec, settings.n_ctx, settings.n_batch, self.n_threads, settings.cache_type)
        if settings.expert_cache is not None and isinstance(self.backend, ExpertBackend):
            plan = self.backend.plan(*arguments, settings.expert_cache)
        else:
            plan = self.backend.plan(*arguments)
        drafts = self._plan_drafters(settings, plan)
        try:
            if drafts is not None:
                plan = replace(plan, use=replace(plan.use, drafters=drafts.n_bytes))
            planned = PlannedModel(self.file, self.backend, self.spec, plan, Device(self.n_threads))
            self._process = self._process or process_of(planned, drafts)
            return Planned(plan, ledger_of(planned, drafts, self._process), _drafters_of(drafts))
        finally:
            if drafts is not None:
                drafts.close()

    def _plan_drafters(self, settings: Settings, plan: MemoryPlan) -> DraftPlan | None:
        if settings.draft == "none" or not self.is_native:
            return None
        return plan_drafters(settings.draft, self.file, self.n_tokens, plan, self.n_threads, _ALL, "cpu")


def _drafters_of(drafts: DraftPlan | None) -> Drafters:
    """What is to be known of the drafters when their file is closed."""
    if drafts is None:
        return Drafters()
    if drafts.file is None or drafts.plan is None:
        return Drafters(drafts.free, dropped=dict(drafts.dropped))
    is_head = isinstance(drafts.spec, HeadSpec)
    rate = drafts.spec.acceptance_rate if isinstance(drafts.spec, HeadSpec) else None
    names = (*drafts.free, "head" if is_head else "model")
    return Drafters(names, drafts.plan.use.weights, rate, is_head, dict(drafts.dropped))


def _backend_of(file: ModelFile, options: LoadOptions) -> tuple[Backend, ModelSizes]:
    """What runs a file, and what it read of it; llama.cpp with a warning where native does not run the model."""
    backend = open_backend(options.backend, options.ternary_bits)
    try:
        spec = backend.read_spec(file)
        backend.plan(file, spec, 1)
        return backend, spec
    except UnsupportedModel as error:
        if options.backend != "auto":
            raise
        with suppress(UnsupportedModel):
            backend = open_backend("llama.cpp")
            spec = backend.read_spec(file)
            warn(f"{error}; this is the plan of llama.cpp")
            return backend, spec
        raise


def contexts_up_to(n_ctx_train: int, finest: int, least: int = 512) -> Sequence[int]:
    """Numbers of positions to choose from: `finest` steps a doubling, the last one what the model has learned."""
    found, size = [], least
    while size < n_ctx_train:
        found += [size + step * size // finest for step in range(finest) if size + step * size // finest < n_ctx_train]
        size *= 2
    return [*found, n_ctx_train]
