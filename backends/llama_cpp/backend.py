"""The Backend: sizes, the memory plan, loading."""

from __future__ import annotations

import os
import weakref
from dataclasses import asdict, replace
from typing import Any

from edgeinfer.backends.base import Progress
from edgeinfer.backends.llama_cpp.loading import Wanted, crashed, load, sizes_of, uses_extra_buffers
from edgeinfer.backends.llama_cpp.process import Ended, Process
from edgeinfer.backends.llama_cpp.session import LlamaCppModel
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device, MemoryPlan, MemoryUse
from edgeinfer.models import ModelSizes
from edgeinfer.models.gguf import ModelFile

MAX_N_CTX = 1 << 22  # llama.cpp fills some 60 bytes a position, before it knows whether the cache fits
_MOST_MEASURED = 1 << 20  # positions; what more of them take is computed from these two contexts
_MEASURED = 1 << 15, 1 << 16


class LlamaCppBackend:
    """Runs models with llama.cpp on the CPU. Raises BackendUnavailable where llama-cpp-python is missing.

    llama.cpp is in a process of its own, one for each loaded model. Where it ends that, BackendCrashed is raised, and
    BackendLost in a session. A spec is not looked at, and may be None: llama.cpp reads the sizes of a model itself.
    What it logs goes to the logger "edgeinfer.backends.llama_cpp" as DEBUG.
    """

    name = "llama.cpp"

    def __init__(self) -> None:
        self._process: Process | None = Process()  # for the next call: without weights
        self._described: tuple[weakref.ref[ModelFile], ModelSizes] | None = None  # by that process

    @property
    def process_ids(self) -> tuple[int, ...]:
        """See HasProcesses: that of the next model, without weights."""
        return () if self._process is None else (self._process.pid,)

    def read_spec(self, model: ModelFile) -> ModelSizes:
        """Sizes of a model as llama.cpp reads them. Raises UnsupportedModel if it does not know the model.

        The file is described to llama.cpp without loading weights: 0.1 s to 0.3 s.
        """
        return self._describe(model)

    def plan(self, model: ModelFile, spec: ModelSizes | None, settings: LoadSettings) -> MemoryPlan:
        """Bytes that llama.cpp itself would take, to 0.01 MiB; its vocabulary, some 10 to 60 MB, is not counted, nor
        its process, some 60 MB.

        A tied embedding counts twice: llama.cpp keeps a second, repacked copy of some. For large contexts it is what
        two smaller ones lead to; `load` refuses those above MAX_N_CTX. Raises UnsupportedModel, and InvalidArgument for
        an n_ctx on which llama.cpp would end its process.
        """
        if settings.cache_type not in ("f16", "q8_0"):
            raise InvalidArgument(
                f"llama.cpp has no KV cache of {settings.cache_type}: use f16 or q8_0, or the native backend"
            )
        n_ctx, settings = settings.n_ctx, settings.with_batch()
        _check_positions(model, n_ctx)
        if n_ctx > _MOST_MEASURED:
            first, second = (self.plan(model, spec, replace(settings, n_ctx=n)).use for n in _MEASURED)
            return MemoryPlan(settings, _extrapolated(first, second, n_ctx))
        self._describe(model)
        reply = self._ask(model, "while it planned the memory", "plan", asdict(settings))
        weights, kv_cache, activations = reply["bytes"]
        tied = None if "output.weight" in model.tensors else model.tensors.get("token_embd.weight")
        use = MemoryUse(weights + (tied.n_bytes if tied else 0), kv_cache, activations)
        return MemoryPlan(settings, use)

    def load(
        self,
        model: ModelFile,
        spec: ModelSizes | None,
        plan: MemoryPlan,
        device: Device,
        progress: Progress | None = None,
    ) -> LlamaCppModel:
        """Load a model; the device's isa is not looked at, llama.cpp was compiled for one. The file may be closed then.

        Where llama.cpp crashes with extra buffers (AMX, repacked weights) they are left out, with a RuntimeWarning.
        Raises UnsupportedModel, with what llama.cpp says, BudgetExceeded if memory is too short, and BackendCrashed.
        """
        _check_n_ctx(model, plan.n_ctx)
        process, self._process, self._described = self._process or Process(), None, None
        path, name = _names(model)
        settings = replace(plan.settings.with_batch(), n_threads=device.n_threads)
        wanted = Wanted(path, name, settings, uses_extra_buffers(process.build))
        loaded = LlamaCppModel(load(wanted, process, progress), model.watches())
        if progress is not None:
            progress(1.0)
        return loaded

    def _describe(self, model: ModelFile) -> ModelSizes:
        """Have the process read the model without weights, unless it did so last."""
        if self._described is not None and self._described[0]() is model and self._process is not None:
            return self._described[1]
        self._process = self._process or Process()
        extra_buffers = uses_extra_buffers(self._process.build)
        reply = self._ask(model, "while it read the file", "describe", *_names(model), extra_buffers)
        self._described = weakref.ref(model), sizes_of(reply)
        return self._described[1]

    def _ask(self, model: ModelFile, when: str, what: str, *options: object) -> dict[str, Any]:
        """A reply of the process. Raises BackendCrashed; the next call then starts another one."""
        assert self._process is not None
        try:
            return self._process.ask(what, *options)
        except Ended as end:
            self._process.close()
            self._process = self._described = None
            raise crashed(model.paths[0], when, end) from end


def _names(model: ModelFile) -> tuple[str, str]:
    """Of the file: where it is for a process in any folder, and what messages call it."""
    name = os.fsdecode(model.paths[0])
    return os.path.abspath(name), name


def _extrapolated(first: MemoryUse, second: MemoryUse, n_ctx: int) -> MemoryUse:
    """What a context takes if memory grows as between those of _MEASURED positions."""
    step = _MEASURED[1] - _MEASURED[0]

    def at(a: int, b: int) -> int:
        return a + (b - a) * (n_ctx - _MEASURED[0]) // step

    return MemoryUse(first.weights, at(first.kv_cache, second.kv_cache), at(first.activations, second.activations))


def _check_n_ctx(model: ModelFile, n_ctx: int) -> None:
    """Raises InvalidArgument for a context that llama.cpp cannot be asked for."""
    _check_positions(model, n_ctx)
    if n_ctx > MAX_N_CTX:
        raise InvalidArgument(
            f"n_ctx must be at most {MAX_N_CTX} in llama.cpp, its table of the cache's cells must stay small: found "
            f"{n_ctx}"
        )


def _check_positions(model: ModelFile, n_ctx: int) -> None:
    """Raises InvalidArgument for more positions than a model has learned: llama.cpp would end its process."""
    learned = model.tensors.get("position_embd.weight")
    if learned is not None and n_ctx > learned.shape[0]:
        raise InvalidArgument(
            f"n_ctx must be at most {learned.shape[0]} in llama.cpp, the model has learned that many positions: found "
            f"{n_ctx}"
        )
