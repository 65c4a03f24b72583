"""From names to a Speculator: which drafters can be used here, what they take, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from edgeinfer import devices
from edgeinfer.arguments import check_file_name
from edgeinfer.backends.base import DraftingHead, DraftingSession, HeadSession, Session
from edgeinfer.backends.head_weights import read_head_beside
from edgeinfer.backends.native import (
    NativeBackend,
    NativeHeadSession,
    NativeSession,
    best_isa,
    build_id,
    load_head,
    plan_head,
)
from edgeinfer.errors import BackendUnavailable, BudgetExceeded, EdgeInferError, InvalidArgument, UnsupportedModel
from edgeinfer.memory.plan import human_bytes
from edgeinfer.models import ModelSpec, read_spec
from edgeinfer.models.draft_head import HeadSpec, fingerprint, is_draft_head
from edgeinfer.models.gguf import ModelFile
from edgeinfer.speculation.cost import MAX_TOKENS, CostModel, TimedSession, cached_costs, cost_key, measure_costs
from edgeinfer.speculation.drafters.base import Context, CostlyDrafter, Drafter
from edgeinfer.speculation.drafters.cross_vocabulary import check_vocabulary, model_drafter
from edgeinfer.speculation.drafters.device_drafting import DeviceDrafting
from edgeinfer.speculation.drafters.head import DEFAULT_WIDTH, HeadDrafter
from edgeinfer.speculation.drafters.lookup import NgramLookup
from edgeinfer.speculation.drafters.model import ModelDrafter
from edgeinfer.speculation.drafters.recycling import RecyclingDrafter
from edgeinfer.speculation.drafters.suffix import SuffixDrafter
from edgeinfer.speculation.pipeline import DrafterPlacement, Speculator
from edgeinfer.speculation.placement import DeviceLevels, DraftDevice, DraftSource, devices_named, open_on_device
from edgeinfer.speculation.policy import beats
from edgeinfer.types import Device, LogitsRows, MemoryPlan, Output

FREE_DRAFTERS = ("suffix", "recycling")
# At most, for both curves together; a draft model's passes take less time.
_CALIBRATION_SECONDS, _DRAFT_CALIBRATION_SECONDS = 2.0, 0.6
_HEAD_BATCH = 128  # rows: prompts are read no faster with more


@dataclass
class DraftPlan:
    """Drafters that will fit, before anything is loaded.

    free: names of those without a model.  n_vocab: tokens that the target has.  n_bytes: of all of them.  dropped:
    those that cannot be used, and why.  file, spec: of the draft model or the head, None without one.  plan: of it on
    the CPU, None where it does not fit there.  places: other devices for it.  is_auto: they must beat the CPU.
    """

    free: tuple[str, ...]
    n_vocab: int
    n_bytes: int = 0
    dropped: dict[str, str] = field(default_factory=dict)
    file: ModelFile | None = None
    spec: ModelSpec | HeadSpec | None = None
    plan: MemoryPlan | None = None
    places: list[tuple[DraftDevice, MemoryPlan]] = field(default_factory=list)
    is_auto: bool = True

    def open(self, file: ModelFile, session: Session, plan: MemoryPlan, device: Device, draft_max: int) -> Speculator:
        """The drafters behind an empty session of the target with that plan. What fails now is noted in `dropped`."""
        seconds = _CALIBRATION_SECONDS - (0.0 if self.file is None else _DRAFT_CALIBRATION_SECONDS)
        costs = _costs(file, session, plan, device, seconds)
        drafters: list[Drafter] = []
        placements: dict[str, DrafterPlacement] = {}
        if "suffix" in self.free:
            drafters.append(SuffixDrafter(session.n_ctx))
        if "recycling" in self.free:
            drafters.append(RecyclingDrafter())
        if self.file is not None:
            try:
                drafter, placements[_name_of(self.file)] = self._open_file(self.file, file, session, device, costs)
                drafters.append(drafter)
            except (EdgeInferError, OSError) as error:
                self.dropped[_name_of(self.file)] = str(error)
        share = self.spec.acceptance_rate if isinstance(self.spec, HeadSpec) else None
        shares = {} if share is None else {HeadDrafter.name: share}
        return Speculator(session, drafters, costs, self.n_vocab, draft_max, placements, shares)

    def close(self) -> None:
        """Close the file of the draft model or the head."""
        if self.file is not None:
            self.file.close()

    def _open_file(
        self, file: ModelFile, target: ModelFile, session: Session, device: Device, costs: CostModel
    ) -> tuple[Drafter, DrafterPlacement]:
        if isinstance(self.spec, ModelSpec):

            def of_model(
                own: Session, costs: CostModel, device_drafting: DeviceDrafting[DraftingSession] | None
            ) -> CostlyDrafter:
                return model_drafter(own, file, target, self.n_vocab, costs, device_drafting)

            draft = DraftSource(file, self.spec, of_model, lambda own: own, _levels_of_model)
            on_cpu = None if self.plan is None else partial(_open_model, draft, self.plan, session, device)
            return self._open_placed(draft, on_cpu, device, costs)
        if self.spec is None or not isinstance(session, NativeSession):
            raise UnsupportedModel(f"{file.path}: heads draft for models of the native backend only")
        head = self.spec

        def of_head(
            own: HeadSession, costs: CostModel, device_drafting: DeviceDrafting[DraftingHead] | None
        ) -> CostlyDrafter:
            return HeadDrafter(own, head.draft_vocab, self.n_vocab, costs, head.taps, device_drafting)

        draft = DraftSource(file, head, of_head, _WithoutFeatures, _levels_of_head)
        on_cpu = None if self.plan is None else partial(_open_head, draft, self.plan, session, device)
        return self._open_placed(draft, on_cpu, device, costs)

    def _open_placed(
        self, draft: DraftSource, on_cpu: Callable[[], CostlyDrafter] | None, device: Device, costs: CostModel
    ) -> tuple[Drafter, DrafterPlacement]:
        """The draft on the first device that works and, unless it was named, is better than the CPU; else there.

        What is held on one is given back before the next is tried.
        """
        of_cpu = _milliseconds_of(on_cpu) if on_cpu is not None and self.is_auto and self.places else None
        cpu = "the CPU" if of_cpu is None else f"the CPU, {of_cpu:.1f} ms a token"
        for place, plan in self.places:
            try:
                drafter, own_costs = open_on_device(place, draft, plan, device.n_threads)
            except (EdgeInferError, OSError, MemoryError) as error:
                self.dropped[place.name] = str(error)
                continue
            own = own_costs.milliseconds(0)[1]
            where = f"{place.title}, {own:.1f} ms a token"
            if of_cpu is None:
                return drafter, DrafterPlacement(where, on_cpu, place.shares_memory)
            if beats(own, of_cpu, costs.milliseconds(0)):
                return drafter, DrafterPlacement(f"{where}, rather than {cpu}", on_cpu, place.shares_memory)
            drafter.close()
            cpu += f", rather than {where}"
        if on_cpu is None:
            raise BudgetExceeded(f"{draft.file.path} does not fit into the memory that is left beside the model")
        return on_cpu(), DrafterPlacement(cpu)


def drafters_named(draft: str | Sequence[str]) -> tuple[tuple[str, ...], Path | None]:
    """(names of free drafters, file of a draft model or a head) that `draft` means.

    "auto": all free ones; the name of one: that one; a file: all free ones and it. A sequence: what it names. Raises
    InvalidArgument for two files.
    """
    if draft == "auto":
        return FREE_DRAFTERS, None
    if isinstance(draft, str):
        draft = (draft,) if draft in FREE_DRAFTERS else (*FREE_DRAFTERS, draft)
    files = [one for one in draft if one not in FREE_DRAFTERS]
    if len(files) > 1:
        raise InvalidArgument(f"only one draft model or head can draft: found {', '.join(files)}; leave one out")
    return tuple(name for name in FREE_DRAFTERS if name in draft), check_file_name("draft", files[0]) if files else None


def plan_drafters(
    draft: str | Sequence[str],
    target: ModelFile,
    n_vocab: int,
    plan: MemoryPlan,
    n_threads: int,
    budget_bytes: int,
    draft_device: str = "auto",
) -> DraftPlan:
    """What of the drafters can be used beside a target with that plan. Opens the file of the draft model or the head.

    "auto" has the head that this package brings for the target, if there is one. draft_device: where a draft model is
    to be; see edgeinfer.speculation.placement.
    """
    free, path = drafters_named(draft)
    if draft == "auto":
        path = head_beside(target, heads_folder())
    sizes = {"suffix": SuffixDrafter.memory(plan.n_ctx), "recycling": RecyclingDrafter.memory()}
    planned = DraftPlan((), n_vocab, is_auto=draft_device == "auto")
    left = budget_bytes - plan.use.total
    for name in free:
        if sizes[name] <= left - planned.n_bytes:
            planned.free += (name,)
            planned.n_bytes += sizes[name]
        else:
            planned.dropped[name] = f"needs {human_bytes(sizes[name])}, {human_bytes(left - planned.n_bytes)} are left"
    if path is None and draft_device not in ("auto", "cpu"):
        planned.dropped[draft_device] = "there is no draft model (-md) to run there"
    if path is not None:
        try:
            file = ModelFile.open(path)
        except (EdgeInferError, OSError) as error:
            planned.dropped["model"] = str(error)
            return planned
        try:
            _plan_file(planned, file, target, plan, n_threads, left, draft_device)
        except BaseException as error:
            file.close()
            if not isinstance(error, (EdgeInferError, OSError)):
                raise
            planned.dropped[_name_of(file)] = str(error)
    return planned


def heads_folder() -> Path:
    """Where the heads lie that this package brings: <fingerprint of the target>.gguf."""
    return Path(__file__).parents[1] / "heads"


def head_beside(target: ModelFile, folder: Path) -> Path | None:
    """The head for a model in a folder of heads, None if there is none."""
    if not any(folder.glob("*.gguf")):
        return None
    path = folder / f"{fingerprint(target)}.gguf"
    return path if path.exists() else None


def _name_of(file: ModelFile) -> str:
    """Name of the drafter that a file is for."""
    return HeadDrafter.name if is_draft_head(file) else ModelDrafter.name


def _plan_file(
    planned: DraftPlan,
    file: ModelFile,
    target: ModelFile,
    plan: MemoryPlan,
    n_threads: int,
    left: int,
    draft_device: str,
) -> None:
    """Add a draft model or a head to the plan. Raises EdgeInferError where it cannot be used."""
    left -= planned.n_bytes
    spec: ModelSpec | HeadSpec
    if is_draft_head(file):
        spec = read_head_beside(file, target, read_spec(target))
        own = plan_head(file, spec, plan.n_ctx, min(plan.n_batch, _HEAD_BATCH), n_threads)
        n_rows = 0 if spec.features is None else spec.features.n_rows
        kept = HeadDrafter.memory(plan.n_ctx, plan.n_batch, spec.decoder.n_embd, planned.n_vocab, n_rows)
        if draft_device != "auto":  # so little work is done on the CPU before another device is reached
            _plan_places(planned, file, spec, plan, left - kept, draft_device, beside=target)
    else:
        spec = read_spec(file)
        check_vocabulary(file, target, planned.n_vocab)
        own = NativeBackend(for_drafts=True).plan(file, spec, plan.n_ctx, plan.n_batch, n_threads)
        kept = NgramLookup.memory()
        _plan_places(planned, file, spec, plan, left, draft_device)
    n_bytes = own.use.total + kept
    if n_bytes > left and not planned.places:
        raise BudgetExceeded(
            f"{file.path} needs {human_bytes(n_bytes)}, beside the model {human_bytes(left)} are left: use a smaller "
            "one, or a smaller context (-c)"
        )
    planned.file, planned.spec, planned.plan = file, spec, own if n_bytes <= left else None
    elsewhere = [there.use.total + kept for place, there in planned.places if place.shares_memory]
    planned.n_bytes += max([n_bytes if n_bytes <= left else 0, *elsewhere])


def _plan_places(
    planned: DraftPlan,
    file: ModelFile,
    spec: ModelSpec,
    plan: MemoryPlan,
    left: int,
    draft_device: str,
    beside: ModelFile | None = None,
) -> None:
    """Add the devices beside the CPU on which a draft fits, and why not the others, to the plan.

    spec: of a draft model, or of the decoder of a head beside that target.
    """
    try:
        found = devices_named(draft_device)
    except BackendUnavailable as error:
        planned.dropped[draft_device] = str(error)
        return
    for place in found:
        try:
            place = place if beside is None else _for_heads(place, beside)
            own = place.backend.plan(file, spec, plan.n_ctx, plan.n_batch)
            if place.shares_memory and own.use.total > left:
                raise BudgetExceeded(f"{human_bytes(own.use.total)} are needed, {human_bytes(left)} are left")
        except EdgeInferError as error:
            planned.dropped[place.name] = str(error)
        else:
            planned.places.append((place, own))


def _for_heads(place: DraftDevice, target: ModelFile) -> DraftDevice:
    """The device with the backend of heads beside a target. Raises UnsupportedModel."""
    if place.head_backend is None:
        raise UnsupportedModel(f"draft heads do not run on {place.title}")
    return replace(place, backend=place.head_backend(target, read_spec(target)))


def _open_model(draft: DraftSource, plan: MemoryPlan, target: Session, device: Device) -> CostlyDrafter:
    """The draft model on the CPU, all of it in memory: a file that is lost later does no harm."""
    threads = target.model.threads if isinstance(target, NativeSession) else None
    backend = NativeBackend(for_drafts=True, resident=True, threads=threads)
    session = backend.load(draft.file, draft.spec, plan, device).session()
    return _made(draft, session, plan, device, "for drafts")


def _open_head(draft: DraftSource, plan: MemoryPlan, target: NativeSession, device: Device) -> CostlyDrafter:
    """The head on the CPU, whose weights are in memory; embeddings are read where the target has them."""
    return _made(draft, load_head(draft.file, draft.spec, target.model, plan, device).session(), plan, device)


def _made(
    draft: DraftSource, session: NativeSession | NativeHeadSession, plan: MemoryPlan, device: Device, *facts: str
) -> CostlyDrafter:
    """The drafter of a session, which is closed if that fails."""
    try:
        costs = _costs(draft.file, draft.timed(session), plan, device, _DRAFT_CALIBRATION_SECONDS, *facts)
        return draft.make(session, costs, None)
    except BaseException:
        session.close()
        raise


def _milliseconds_of(opened: Callable[[], CostlyDrafter]) -> float:
    """Of a drafted token."""
    drafter = opened()
    try:
        return drafter.cost(Context([0], lambda logits, text: 0, is_greedy=True))[0]
    finally:
        drafter.close()


class _WithoutFeatures:
    """A head as measure_costs knows sessions: its tokens come with features of ones."""

    def __init__(self, head: HeadSession) -> None:
        self._head = head
        self.spec = head.spec.decoder
        self.n_ctx = head.n_ctx
        self.n_batch = head.n_batch
        self.commit = head.commit
        self.truncate = head.truncate

    @property
    def n_past(self) -> int:
        return self._head.n_past

    def forward(self, tokens: Sequence[int], *, logits: LogitsRows = "last") -> Output:
        return self._head.forward(tokens, np.ones((len(tokens), self._head.spec.n_embd), np.float32), logits=logits)


def _levels_of_model(session: Session) -> DeviceLevels | None:
    """Chains, where the session's device makes drafts by itself."""
    if not isinstance(session, DraftingSession):
        return None
    return DeviceLevels(lambda token, n_levels: session.draft([token], n_levels), 1)


def _levels_of_head(head: HeadSession) -> DeviceLevels | None:
    """Trees, where the head's device makes drafts by itself; behind a feature of ones."""
    if not isinstance(head, DraftingHead) or head.n_batch < DEFAULT_WIDTH:
        return None
    ones = np.ones((1, head.spec.n_embd), np.float32)
    return DeviceLevels(lambda token, n_levels: head.draft([token], ones, n_levels, DEFAULT_WIDTH), DEFAULT_WIDTH)


def _costs(
    file: ModelFile, session: TimedSession, plan: MemoryPlan, device: Device, calibration_seconds: float, *facts: str
) -> CostModel:
    """The costs of a session, from disk or measured now. facts: what else they depend on."""
    isa = device.isa or best_isa()
    is_short = plan.n_ctx < MAX_TOKENS
    of_plan = (plan.cache_type, plan.ternary_bits, is_short)
    key = cost_key(file, devices.cpu_name(), isa, device.n_threads, build_id(), *of_plan, *facts)
    return cached_costs(key, lambda: measure_costs(session, calibration_seconds))
