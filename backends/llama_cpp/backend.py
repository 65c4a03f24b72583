"""The Backend: sizes, the memory plan, loading."""

from __future__ import annotations

import weakref

from edgeinfer.backends.base import Progress
from edgeinfer.backends.llama_cpp.context import Context
from edgeinfer.backends.llama_cpp.library import open_library
from edgeinfer.backends.llama_cpp.model import Model
from edgeinfer.backends.llama_cpp.session import LlamaCppSession
from edgeinfer.backends.llama_cpp.worker import Worker
from edgeinfer.errors import InvalidArgument
from edgeinfer.gguf import ModelFile
from edgeinfer.models import ModelSizes
from edgeinfer.types import CacheType, Device, MemoryPlan, MemoryUse

MAX_N_CTX = 1 << 22  # llama.cpp fills some 60 bytes a position, before it knows whether the cache fits
_MOST_MEASURED = 1 << 20  # positions; what more of them take is computed from these two contexts
_MEASURED = 1 << 15, 1 << 16


class LlamaCppBackend:
    """Runs models with llama.cpp on the CPU. Raises BackendUnavailable where llama-cpp-python is missing.

    A spec is not looked at, and may be None: llama.cpp reads the sizes of a model itself. What it logs goes to the
    logger "edgeinfer.backends.llama_cpp" as DEBUG, for all users of llama.cpp in this process.
    """

    name = "llama.cpp"

    def __init__(self) -> None:
        self._library = open_library()
        self._described: tuple[weakref.ref[ModelFile], Model] | None = None  # without weights, for the next plan

    def read_spec(self, model: ModelFile) -> ModelSizes:
        """Sizes of a model as llama.cpp reads them. Raises UnsupportedModel if it does not know the model.

        The file is described to llama.cpp without loading weights: 0.1 s to 0.3 s.
        """
        with Worker() as worker:
            return worker.call(self._describe, model).sizes

    def plan(
        self,
        model: ModelFile,
        spec: ModelSizes | None,
        n_ctx: int,
        n_batch: int = 512,
        n_threads: int = 1,
        cache_type: CacheType = "f16",
    ) -> MemoryPlan:
        """Bytes that llama.cpp itself would take, to 0.01 MiB; its vocabulary, some 10 to 60 MB, is not counted.

        A tied embedding counts twice: llama.cpp keeps a second, repacked copy of some. For large contexts it is what
        two smaller ones lead to; `load` refuses those above MAX_N_CTX. Raises UnsupportedModel, and InvalidArgument for
        an n_ctx on which llama.cpp would end the process.
        """
        if n_ctx > _MOST_MEASURED:
            _check_positions(model, n_ctx)
            first, second = (self.plan(model, spec, n, n_batch, n_threads, cache_type).use for n in _MEASURED)
            return MemoryPlan(n_ctx, min(n_batch, n_ctx), _extrapolated(first, second, n_ctx), cache_type)
        _check_positions(model, n_ctx)
        n_batch = min(n_batch, n_ctx)
        with Worker() as worker:

            def use() -> MemoryUse:
                described = self._describe(model)
                context = Context(described, n_ctx, n_batch, n_threads, cache_type, worker.flag)
                context.close()
                tied = None if "output.weight" in model.tensors else model.tensors.get("token_embd.weight")
                n_bytes = described.n_bytes + (tied.n_bytes if tied else 0)
                return MemoryUse(n_bytes, context.kv_bytes, context.activation_bytes)

            return MemoryPlan(n_ctx, n_batch, worker.call(use), cache_type)

    def load(
        self,
        model: ModelFile,
        spec: ModelSizes | None,
        plan: MemoryPlan,
        device: Device,
        progress: Progress | None = None,
    ) -> LlamaCppSession:
        """Load a model; the device's isa is not looked at, llama.cpp was compiled for one. The file may be closed then.

        Raises UnsupportedModel, with what llama.cpp says, and BudgetExceeded if memory is too short.
        """
        _check_n_ctx(model, plan.n_ctx)
        self._described = None
        worker = Worker()
        share = 0.0

        def is_to_go_on(done: float, _: object) -> bool:
            nonlocal share
            share = done
            return not worker.is_stopped

        def open_context() -> Context:
            loaded = Model(self._library, model.paths[0], is_to_go_on)
            n_batch = min(plan.n_batch, plan.n_ctx)
            return Context(loaded, plan.n_ctx, n_batch, device.n_threads, plan.cache_type, worker.flag)

        def report() -> None:
            if progress is not None:
                progress(min(share, 0.99))

        try:
            session = LlamaCppSession(worker.call(open_context, meanwhile=report), plan.n_ctx, worker)
        except BaseException:
            worker.close()
            raise
        if progress is not None:
            progress(1.0)
        return session

    def _describe(self, model: ModelFile) -> Model:
        """The model without weights; that of the file that was asked for last is kept."""
        if self._described is not None and self._described[0]() is model:
            return self._described[1]
        described = Model(self._library, model.paths[0])
        self._described = weakref.ref(model), described
        return described


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
    """Raises InvalidArgument for more positions than a model has learned: llama.cpp would end the process."""
    learned = model.tensors.get("position_embd.weight")
    if learned is not None and n_ctx > learned.shape[0]:
        raise InvalidArgument(
            f"n_ctx must be at most {learned.shape[0]} in llama.cpp, the model has learned that many positions: found "
            f"{n_ctx}"
        )
