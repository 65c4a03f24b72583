"""Opens the drafters of a plan, calibrates them, and decides on which device a draft model runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from edgeinfer.backends.base import Session
from edgeinfer.backends.native import (
    NativeAssistantModel,
    NativeBackend,
    NativeHeadModel,
    NativeModel,
    NativeSession,
    best_isa,
    build_id,
    load_assistant,
    load_head,
)
from edgeinfer.common import devices
from edgeinfer.common.errors import BudgetExceeded, EdgeInferError, UnsupportedModel
from edgeinfer.common.signal_handlers import is_from_handler
from edgeinfer.common.types import Device, MemoryPlan
from edgeinfer.models import ModelSpec
from edgeinfer.models.draft_head import HeadSpec, is_draft_head
from edgeinfer.models.draft_vocab import storage_facts
from edgeinfer.models.gguf import ModelFile
from edgeinfer.speculation.calibration import TimedSession, cached_costs, cost_key, measure_costs
from edgeinfer.speculation.calibration_text import calibration_tokens
from edgeinfer.speculation.cost import MAX_TOKENS, CostCurve, CostModel
from edgeinfer.speculation.draft_names import OWN_BLOCK
from edgeinfer.speculation.draft_source import DraftSource, head_source, model_source
from edgeinfer.speculation.drafter_state import DrafterPlacement
from edgeinfer.speculation.drafters.answers import AnswersDrafter
from edgeinfer.speculation.drafters.base import Context, Drafter, ModelBasedDrafter
from edgeinfer.speculation.drafters.head import HeadDrafter
from edgeinfer.speculation.drafters.recycling import RecyclingDrafter
from edgeinfer.speculation.drafters.suffix import SuffixDrafter
from edgeinfer.speculation.expert_calibration import measure_expert_costs
from edgeinfer.speculation.expert_cost import ExpertCostModel
from edgeinfer.speculation.expert_forecast import ExpertForecast
from edgeinfer.speculation.expert_passes import PassesOf, experts_in
from edgeinfer.speculation.open_on_device import open_on_device
from edgeinfer.speculation.pipeline import Speculator
from edgeinfer.speculation.plan import DraftPlan, drafter_name
from edgeinfer.speculation.throughput import is_overlapping_faster

# At most, for both curves of a model together; a draft model's passes take less time.
_CALIBRATION_SECONDS, _DRAFT_CALIBRATION_SECONDS = 2.0, 0.6

_EXPERT_RATIO = 2.2  # of two tokens to one, with experts: a larger one means a disturbed measurement


def open_speculator(
    planned: DraftPlan, file: ModelFile, session: Session, plan: MemoryPlan, device: Device
) -> Speculator:
    """The planned drafters for an empty session of the target. Those that fail now are added to `planned.dropped`.

    file, plan: of the target.
    """
    seconds = _CALIBRATION_SECONDS - (0.0 if planned.file is None else _DRAFT_CALIBRATION_SECONDS)
    costs = costs_of(file, session, plan, device, seconds)
    forecast = _forecast(session)
    drafters: list[Drafter] = []
    placements: dict[str, DrafterPlacement] = {}
    if SuffixDrafter.name in planned.tables:
        drafters.append(SuffixDrafter(planned.tables[SuffixDrafter.name]))
    if AnswersDrafter.name in planned.tables:
        drafters.append(AnswersDrafter(planned.tables[AnswersDrafter.name], planned.answers))
    if RecyclingDrafter.name in planned.tables:
        drafters.append(RecyclingDrafter(planned.tables[RecyclingDrafter.name]))
    if planned.file is not None:
        name = drafter_name(planned.file, planned.spec)
        try:
            drafter, placements[name] = _open_file(planned, planned.file, file, session, device, costs)
            drafters.append(drafter)
        except (EdgeInferError, OSError) as error:
            if is_from_handler(error):
                raise
            planned.dropped[name] = str(error)
    rate = planned.spec.acceptance_rate if isinstance(planned.spec, HeadSpec) else None
    rates = {} if rate is None else {HeadDrafter.name: rate}
    if isinstance(session, NativeSession):
        session.reserve_rows(1 + min(planned.draft_max, session.n_batch - 1))
    return Speculator(session, drafters, costs, planned.n_vocab, planned.draft_max, placements, rates, forecast)


def _forecast(session: Session) -> ExpertForecast | None:
    """Which experts tokens need, for a model some of whose experts are read from disk."""
    if not isinstance(session, NativeSession) or (cache := session.model.expert_cache) is None:
        return None
    layers = experts_in(session.spec)
    return ExpertForecast(session.model, cache.presence, list(layers), max(layers.values()))


def _open_file(
    planned: DraftPlan, file: ModelFile, target: ModelFile, session: Session, device: Device, costs: CostModel
) -> tuple[Drafter, DrafterPlacement]:
    """The drafter of a draft model or a head, and where it runs."""
    spec, plan = planned.spec, planned.plan
    if isinstance(spec, ModelSpec):
        source = model_source(file, spec, target, planned.n_vocab)
        on_cpu = None if plan is None else partial(_open_model, source, spec, plan, session, device)
        return _open_placed(planned, source, on_cpu, device, costs)
    if spec is None or not isinstance(session, NativeSession):
        raise UnsupportedModel(f"{file.path}: heads draft for models of the native backend only")
    source = head_source(file, spec, planned.n_vocab, session)
    on_cpu = None if plan is None else partial(_open_head, source, spec, plan, session, device)
    return _open_placed(planned, source, on_cpu, device, costs)


def _open_placed(
    planned: DraftPlan,
    source: DraftSource,
    on_cpu: Callable[[], ModelBasedDrafter] | None,
    device: Device,
    costs: CostModel,
) -> tuple[Drafter, DrafterPlacement]:
    """The drafter on the first device that works and, unless it was named, is faster than the CPU; else on the CPU.

    Each device is closed before the next is tried.
    """
    cpu_ms = _token_ms(on_cpu) if on_cpu is not None and planned.is_auto and planned.places else None
    cpu = "the CPU" if cpu_ms is None else f"the CPU, {cpu_ms:.1f} ms a token"
    for place, plan in planned.places:
        try:
            drafter, own_costs = open_on_device(place, source, plan, device.n_threads)
        except (EdgeInferError, OSError, MemoryError) as error:
            if is_from_handler(error):
                raise
            planned.dropped[place.name] = str(error)
            continue
        own_ms = own_costs.milliseconds(0)[1]
        found = f"{place.title}, {own_ms:.1f} ms a token"
        if cpu_ms is None:
            return drafter, DrafterPlacement(found, on_cpu, place.shares_memory)
        if is_overlapping_faster(own_ms, cpu_ms, costs.milliseconds(0)):
            return drafter, DrafterPlacement(f"{found}, rather than {cpu}", on_cpu, place.shares_memory)
        drafter.close()
        cpu += f", rather than {found}"
    if on_cpu is None:
        raise BudgetExceeded(f"{source.file.path} does not fit into the memory that is left beside the model")
    return on_cpu(), DrafterPlacement(cpu)


def _token_ms(opened: Callable[[], ModelBasedDrafter]) -> float:
    """Cost of a draft token of a drafter that is opened for this and closed again."""
    drafter = opened()
    try:
        return drafter.cost(Context([0], lambda logits, text: 0, is_greedy=True))[0]
    finally:
        drafter.close()


def _open_model(
    source: DraftSource, spec: ModelSpec, plan: MemoryPlan, target: Session, device: Device
) -> ModelBasedDrafter:
    """The draft model on the CPU, with the target's threads, and all of it in memory: its file may be lost later."""
    threads = target.model.threads if isinstance(target, NativeSession) else None
    backend = NativeBackend(for_drafts=True, resident=True, threads=threads)
    model = backend.load(source.file, spec, plan, device)
    return _drafter_of(source, model, plan, device, "for drafts", *storage_facts(source.file))


def _open_head(
    source: DraftSource, spec: HeadSpec, plan: MemoryPlan, target: NativeSession, device: Device
) -> ModelBasedDrafter:
    """The head on the CPU, its weights in memory; embeddings and threads are the target's."""
    load = load_assistant if spec.reads_target else load_head
    head = load(source.file, spec, target.model, plan, device)
    # A block of the target's own file, whose costs are others than the target's.
    facts = () if is_draft_head(source.file) else (OWN_BLOCK, len(spec.draft_vocab))
    return _drafter_of(source, head, plan, device, *facts)


def _drafter_of(
    source: DraftSource,
    model: NativeModel | NativeHeadModel | NativeAssistantModel,
    plan: MemoryPlan,
    device: Device,
    *facts: object,
) -> ModelBasedDrafter:
    """The drafter of a model or a head, which is closed if that fails."""
    try:
        session = model.session()
        costs = costs_of(source.file, source.timed(session), plan, device, _DRAFT_CALIBRATION_SECONDS, *facts)
        return source.make(session, costs, None)
    except BaseException:
        model.close()
        raise


def costs_of(
    file: ModelFile, session: TimedSession, plan: MemoryPlan, device: Device, calibration_seconds: float, *facts: object
) -> CostModel:
    """The costs of a session, from disk or measured now. facts: what else they depend on."""
    of_load = _facts_of(plan, device)
    if isinstance(session, NativeSession) and experts_in(session.spec):
        return _expert_costs(file, session, calibration_seconds, *of_load, *facts)
    key = cost_key(file, *of_load, *facts)
    return cached_costs(key, lambda: measure_costs(session, calibration_seconds))


def costs_key(file: ModelFile, plan: MemoryPlan, device: Device) -> str:
    """Name of the cost curve of a model without experts that runs so; see calibration.load_curve."""
    return cost_key(file, *_facts_of(plan, device))


def _facts_of(plan: MemoryPlan, device: Device) -> tuple[object, ...]:
    """What the costs of a session depend on beside the model."""
    is_short = plan.n_ctx < MAX_TOKENS
    of_machine = (devices.cpu_name(), device.isa or best_isa(), device.n_threads, build_id())
    return *of_machine, plan.cache_type, plan.ternary_bits, is_short


def _expert_costs(file: ModelFile, session: NativeSession, calibration_seconds: float, *facts: object) -> CostModel:
    """The same for a model with experts. What watches its passes does not see those of the calibration."""
    model, passes = session.model, PassesOf(session.model)

    def measure() -> CostCurve:
        tokens = calibration_tokens(file)
        pass_hook, model.pass_hook = model.pass_hook, None
        try:
            return measure_expert_costs(session, passes, tokens, calibration_seconds)
        finally:
            model.pass_hook = pass_hook

    key = cost_key(file, *facts, "text", passes.is_cached)
    return cached_costs(key, measure, _EXPERT_RATIO, lambda curve, keep: ExpertCostModel(curve, passes, keep))
