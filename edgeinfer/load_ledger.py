"""The ledger of a model that is to be loaded, from its plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from edgeinfer.backend_choice import PlannedModel
from edgeinfer.backends.base import WarmableBackend
from edgeinfer.memory.budget import Item, Ledger, ledger
from edgeinfer.memory.process import Process, measure_process
from edgeinfer.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from edgeinfer.speculation.plan import DraftPlan


def process_of(planned: PlannedModel, drafters: DraftPlan | None) -> Process:
    """What the process takes before a load, with all that the load and the first answer import or use first.

    Code that runs for the first time brings its pages into memory. Short calls of it do so now, some ms, and no table
    of what libraries take is needed.
    """
    import tempfile  # for records on disk  # noqa: F401

    import platformdirs  # noqa: F401

    if drafters is not None:
        import edgeinfer.speculation.open  # noqa: F401
    Tokenizer.warm_up(planned.file)
    if isinstance(planned.backend, WarmableBackend):
        planned.backend.warm_up(planned.file, planned.device)
    return measure_process()


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
