"""The ledger of a model that is to be loaded, from its plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from edgeinfer.backends.base import HasProcesses, MeasurableBackend
from edgeinfer.common.files import cache_folder
from edgeinfer.loading.backend_choice import PlannedModel, Target
from edgeinfer.memory.budget import Item, Ledger, ledger
from edgeinfer.memory.process import THREAD_BYTES, Process, expected_threads, measure_process
from edgeinfer.models.tokenizer import Tokenizer
from edgeinfer.sampling import SamplingParams, sample

if TYPE_CHECKING:
    from edgeinfer.speculation.plan import DraftChoice, DraftPlan

_FLOAT = 4
# Of a request: the words of its text, pieces of the answer, code that runs for the first time; and each token as a
# number that several lists have.
_REQUEST_BYTES, _TEXT_BYTES, _TOKEN_BYTES = 2 << 20, 128 << 10, 128  # _TEXT_BYTES: of one more text that runs
# Rows of logits: of the prompt, of a pass and of the one before, and where logits are changed two copies. A draw from
# all of a flat distribution takes 12 bytes a token beside them (see sampler.cpp), three rows more. Two are for gaps
# that the allocator has between those that come and go.
_ROWS = 10
_ROWS_OF_TEXT = 3  # of each further text that runs: of its prompt, of a pass and of the one before


def process_of(planned: PlannedModel | Target, drafters: DraftPlan | DraftChoice | None) -> Process:
    """What the process takes before a load, with all that the load and the first answer import or use first.

    Code that runs for the first time brings its pages into memory. Short calls of it do so now, some ms, so that they
    are measured, and no table of what libraries take is needed.
    """
    import tempfile  # noqa: F401  # for records on disk

    cache_folder()
    if planned.file.metadata.get("tokenizer.chat_template") is not None:
        import edgeinfer.models.chat_template  # noqa: F401
    if drafters is not None:
        import edgeinfer.speculation.open  # noqa: F401
    Tokenizer.warm_up(planned.file)
    if isinstance(planned.backend, MeasurableBackend):
        planned.backend.warm_up(planned.file, planned.device)
    _run_sampling()
    give_back_freed()
    others = planned.backend.process_ids if isinstance(planned.backend, HasProcesses) else ()
    return measure_process(others)


def _run_sampling() -> None:
    """Run the code of sampling and of drafters' arithmetic in numpy."""
    for temperature in (0.0, 1.0):
        sample(np.zeros(64, np.float32), SamplingParams(temperature=temperature, seed=0), 0)
    table = np.full((4, 3), -1, np.int32)
    table[1] = [1, 2, 3]
    table[[0, 2]] = table[np.flatnonzero(np.diff(table[:, 0]) > 1)]
    first, second = np.split(np.sort(np.concatenate(list(table))), [6])
    assert np.isfinite(second.astype(np.float32)).all() and not np.array_equal(first, second)


def give_back_freed() -> None:
    """Of what was freed, the allocator keeps much, and nothing that comes later would use all of it."""
    with suppress(ImportError):  # a machine that native does not run on has other backends
        from edgeinfer.backends.native import _core

        _core.give_back_freed()


def ledger_of(planned: PlannedModel, drafters: DraftPlan | None, process: Process) -> Ledger:
    """What loading a planned model with these drafters will make the process take. Pure: loads and measures nothing.

    process: of `process_of`, once for all plans that are compared.
    """
    items = list(_items(planned, drafters, process))
    # What is filled later leaves room while weights are read and passes are timed.
    later = ("KV cache", "window", "recurrent state", "activations", "sampling")
    room = sum(item.planned for item in items if item.purpose in later or item.detail in ("caches", "features"))
    return ledger(items, max(0, _loading(planned, drafters) - room))


def _items(planned: PlannedModel, drafters: DraftPlan | None, process: Process) -> Iterator[Item]:
    use = planned.plan.use
    held, more = Tokenizer.memory(planned.file)
    yield Item("process", process.planned - held)
    yield Item("vocabulary", held + more)
    yield Item("weights", use.weights - use.mapped)
    yield Item("mapped weights", use.mapped, is_mapped=True)
    yield Item("KV cache", use.kv_cache - use.windows - use.states)
    yield Item("window", use.windows)
    yield Item("recurrent state", use.states)
    yield Item("activations", use.activations)
    for part, n_bytes in () if drafters is None else drafters.parts.items():
        yield Item("drafters", n_bytes, detail=part)
    yield Item("experts", use.experts - use.mapped_experts)
    yield Item("experts", use.mapped_experts, is_mapped=True, detail="mapped")
    yield Item("expert device", use.expert_device)
    yield Item("threads", (planned.device.n_threads - 1 + expected_threads()) * THREAD_BYTES)
    yield Item("sampling", sampling_bytes(planned, drafters))


def sampling_bytes(planned: PlannedModel, drafters: DraftPlan | None) -> int:
    """Logits, what a draw takes, and texts as Python's objects."""
    n_rows = _ROWS if drafters is None else _ROWS + _most_nodes(planned, drafters)
    plan = planned.plan
    n_rows += _ROWS_OF_TEXT * (plan.n_sequences - 1)
    n_bytes = _REQUEST_BYTES + (plan.n_sequences - 1) * _TEXT_BYTES + _TOKEN_BYTES * plan.n_positions
    return n_rows * _FLOAT * planned.spec.n_vocab + n_bytes


def _most_nodes(planned: PlannedModel, drafters: DraftPlan) -> int:
    """Draft tokens that one pass verifies at most."""
    return min(drafters.draft_max, planned.plan.n_batch - 1)


def _loading(planned: PlannedModel, drafters: DraftPlan | None) -> int:
    """The most that is held beside weights while the model is loaded or passes are timed."""
    source = _source_bytes(planned)
    if drafters is None:
        return source
    from edgeinfer.speculation.cost import MAX_TOKENS

    return max(source, MAX_TOKENS * _FLOAT * planned.spec.n_vocab)


def _source_bytes(planned: PlannedModel) -> int:
    """The most of the file that is in memory beside the weights: all of it where a backend here says nothing else."""
    if isinstance(planned.backend, MeasurableBackend):
        return planned.backend.source_bytes
    if isinstance(planned.backend, HasProcesses):  # whose own process maps the weights themselves
        return 0
    return sum(info.n_bytes for info in planned.file.tensors.values())
