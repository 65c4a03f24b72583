"""The ledger of a model that is to be loaded, from its plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from edgeinfer.backend_choice import PlannedModel
from edgeinfer.memory.budget import Item, Ledger, ledger
from edgeinfer.memory.process import Process

if TYPE_CHECKING:
    from edgeinfer.speculation.plan import DraftPlan


def ledger_of(planned: PlannedModel, drafters: DraftPlan | None, process: Process) -> Ledger:
    """What loading a planned model with these drafters will make the process take. Pure: loads and measures nothing.

    process: of `measure_process`, once for all plans that are compared.
    """
    return ledger(_items(planned, drafters, process))


def _items(planned: PlannedModel, drafters: DraftPlan | None, process: Process) -> Iterator[Item]:
    use = planned.plan.use
    yield Item("process", process.planned)
    yield Item("weights", use.weights)
    yield Item("KV cache", use.kv_cache)
    yield Item("activations", use.activations)
    for part, n_bytes in () if drafters is None else drafters.parts.items():
        yield Item("drafters", n_bytes, detail=part)
    yield Item("experts", use.experts)
    yield Item("expert device", use.expert_device)
