"""Opens a draft model or a head on a device beside the CPU, behind a watchdog."""

from __future__ import annotations

from typing import Any

from edgeinfer.common.types import Device, MemoryPlan
from edgeinfer.speculation.calibration import cached_costs, cost_key, measure_costs
from edgeinfer.speculation.cost import MAX_TOKENS, CostModel
from edgeinfer.speculation.draft_source import DraftSource, TimedLevels
from edgeinfer.speculation.drafters.base import CostlyDrafter
from edgeinfer.speculation.drafters.device_drafting import DeviceDrafting
from edgeinfer.speculation.drafters.overlapped import overlapped
from edgeinfer.speculation.drafters.watchdog import Watchdog, watched
from edgeinfer.speculation.placement import DraftDevice

_OPENING_SECONDS = 120.0  # for a device to load a model, before it counts as hanging
_CALIBRATION_SECONDS = 0.6


def open_on_device(
    place: DraftDevice, source: DraftSource, plan: MemoryPlan, n_threads: int
) -> tuple[CostlyDrafter, CostModel]:
    """The drafter on a device, and the costs of its passes. n_threads: of the target.

    Its drafts overlap with verifying where the device does not use the target's cores. Raises BackendLost where the
    device hangs, and what the backend raises.
    """
    opener = Watchdog("opening", place.title, min_timeout=_OPENING_SECONDS)
    try:
        session, costs, device_drafting = opener.run(lambda: _open_session(place, source, plan, n_threads))
    finally:
        opener.close()
    try:
        drafter = source.make(session, costs, device_drafting)
    except BaseException:
        session.model.close()
        raise
    wrap = overlapped if place.is_independent(n_threads) else watched
    return wrap(drafter, place.title), costs


def _open_session(
    place: DraftDevice, source: DraftSource, plan: MemoryPlan, n_threads: int
) -> tuple[Any, CostModel, DeviceDrafting[Any] | None]:
    model = place.backend.load(source.file, source.spec, plan, Device(n_threads))
    try:
        session = model.session()
        timed = source.timed(session)
        key = cost_key(source.file, *place.facts, plan.n_ctx < MAX_TOKENS)
        timed.forward([0])  # shows that it works, and warms up
        timed.commit(())
        costs = cached_costs(key, lambda: measure_costs(timed, _CALIBRATION_SECONDS))
        return session, costs, device_drafting_of(source, session, *place.facts)
    except BaseException:
        model.close()
        raise


def device_drafting_of(source: DraftSource, session: Any, *facts: object) -> DeviceDrafting[Any] | None:
    """The device drafting of a session, its costs from disk or measured now; None where its device does not draft."""
    levels = source.device_levels(session)
    if levels is None:
        return None
    timed = TimedLevels(source.timed(session), levels)
    key = cost_key(source.file, *facts, timed.n_ctx < MAX_TOKENS, "levels", levels.width)
    # One level runs one row, and each further level `width` rows; a larger ratio means a disturbed measurement.
    costs = cached_costs(key, lambda: measure_costs(timed, _CALIBRATION_SECONDS), max_ratio=2.0 + levels.width)
    return DeviceDrafting(session, costs)
