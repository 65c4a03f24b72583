"""Plans of one model file for any settings, without loading it; nothing is refused for being too large."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import ExpertSizes, MemoryPlan
from edgeinfer.loading import plan
from edgeinfer.loading.backend_choice import choose_target
from edgeinfer.loading.options import LoadOptions
from edgeinfer.memory.budget import Ledger
from edgeinfer.memory.fit import Fitting
from edgeinfer.models import Experts, ModelSizes, ModelSpec
from edgeinfer.models.draft_head import HeadSpec, is_draft_head
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer
from edgeinfer.speculation.draft_names import OWN_BLOCK, drafters_named
from edgeinfer.speculation.plan import DraftChoice, DraftPlan, find_drafters


@dataclass(frozen=True)
class Drafters:
    """What drafts beside a model."""

    names: tuple[str, ...] = ()  # of drafters, those without a model first
    weight_bytes: int = 0  # of the draft model or the head, that each draft token reads; 0 without one
    acceptance_rate: float | None = None  # of a head, where its file says it
    is_head: bool = False
    dropped: dict[str, str] = field(default_factory=dict)  # those that cannot be used, with the reason


@dataclass(frozen=True)
class Planned:
    """A plan of a model with its drafters, and every byte of it."""

    plan: MemoryPlan
    ledger: Ledger
    drafters: Drafters


class Planner:
    """Plans of a file on the backend that would load it. What the process takes is measured at the first; closed.

    requested: what would be loaded; its batch may be larger than its context, as other contexts are planned with it.
    """

    def __init__(self, file: ModelFile, options: LoadOptions) -> None:
        if is_draft_head(file):
            raise UnsupportedModel(f"{file.path}: a draft head, which drafts for a model: profile that one with -md")
        self.file = file
        self._n_tokens = Tokenizer.size_in(file)
        self._target = choose_target(file, options)
        self._draft_max = options.draft_max
        self._plans = plan.Planner(self._target, self._find)
        self.requested = replace(self._target.requested, n_batch=options.n_batch)

    @property
    def backend(self) -> str:
        """Name of the backend."""
        return self._target.backend.name

    @property
    def is_native(self) -> bool:
        """Whether the native engine runs the model."""
        return self.backend == "native"

    @property
    def spec(self) -> ModelSizes:
        """What the backend read of the file."""
        return self._target.spec

    @property
    def n_threads(self) -> int:
        """Threads that a pass is planned for."""
        return self._target.device.n_threads

    @property
    def experts(self) -> ExpertSizes | None:
        """What the experts take, None for a model without any, or a backend without a cache of them."""
        return self._target.sizes

    def planned(self, settings: LoadSettings) -> Planned:
        """The plan for settings. Raises InvalidArgument for a cache that the model cannot have."""
        planned = self._plans.planned(settings)
        return Planned(planned.model.plan, planned.ledger, _drafters_of(planned.drafters))

    def fitting(self, budget: int) -> Fitting[LoadSettings]:
        """Plans against a budget."""
        return Fitting(lambda settings: self.planned(settings).ledger, budget)

    def close(self) -> None:
        """Close the files of draft models and heads."""
        self._plans.close()

    def _find(self, draft: str | tuple[str, ...]) -> DraftChoice | None:
        """What can draft, opened; None where nothing may. An engine only warns of a file that it goes on without.

        Raises ModelFileError for a file that is no model, or that cannot draft here.
        """
        if draft == "none":
            return None
        named = None if draft == "auto" else drafters_named(draft)[1]
        if named not in (None, OWN_BLOCK):
            ModelFile.open(named).close()
        if not self._draft_max or not self.is_native:
            return None
        requested = self._target.planned(self._target.requested).plan
        found = find_drafters(draft, self.file, self._n_tokens, requested, self.n_threads, "cpu", self._draft_max)
        if named is not None and found.dropped:
            found.close()
            raise UnsupportedModel(f"{named} cannot draft for this model: {'; '.join(found.dropped.values())}")
        return found


def _drafters_of(drafts: DraftPlan | None) -> Drafters:
    """What the speed depends on, and what is said of the drafters."""
    if drafts is None:
        return Drafters()
    free = tuple(drafts.tables)
    if drafts.file is None or drafts.plan is None:
        return Drafters(free, dropped=dict(drafts.dropped))
    is_head = isinstance(drafts.spec, HeadSpec)
    rate = drafts.spec.acceptance_rate if isinstance(drafts.spec, HeadSpec) else None
    names = (*free, "head" if is_head else "model")
    n_bytes = _bytes_of_token(drafts.plan, drafts.spec) - _unread_output(drafts.file, drafts.spec)
    return Drafters(names, n_bytes, rate, is_head, dict(drafts.dropped))


def _unread_output(file: ModelFile, spec: ModelSpec | HeadSpec | None) -> int:
    """Bytes of an output matrix whose clusters a draft token does not look at."""
    if not isinstance(spec, HeadSpec) or spec.clusters is None or not isinstance(spec.decoder.output, str):
        return 0
    n_bytes, clusters = file.tensors[spec.decoder.output].n_bytes, spec.clusters
    return n_bytes * (clusters.n_clusters - clusters.n_used) // clusters.n_clusters


def _bytes_of_token(plan: MemoryPlan, spec: ModelSpec | HeadSpec | None) -> int:
    """Weights that a draft token reads: of experts those that it uses."""
    layers = () if spec is None else (spec.decoder if isinstance(spec, HeadSpec) else spec).layers
    shares = [layer.ffn.share_used("down") for layer in layers if isinstance(layer.ffn, Experts)]
    return plan.use.weights + int(plan.use.experts * sum(shares) / max(1, len(shares)))


def contexts_up_to(n_ctx_train: int, finest: int, least: int = 512) -> Sequence[int]:
    """Numbers of positions to choose from: `finest` steps a doubling, the last one what the model has learned."""
    found, size = [], least
    while size < n_ctx_train:
        found += [size + step * size // finest for step in range(finest) if size + step * size // finest < n_ctx_train]
        size *= 2
    return [*found, n_ctx_train]
