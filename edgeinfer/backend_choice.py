"""Which backend runs a model file, and the memory plan that it gives."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from edgeinfer import devices
from edgeinfer.arguments import MAX_INT32, check_choice, check_integer
from edgeinfer.backends.base import Backend, ExpertBackend, Model, Progress
from edgeinfer.errors import BackendCrashed, BackendUnavailable, InvalidArgument, UnsupportedModel, warn
from edgeinfer.load_options import BackendName, LoadOptions, TernaryChoice
from edgeinfer.memory.plan import plan_within
from edgeinfer.models import ModelSizes
from edgeinfer.models.gguf import TERNARY_TYPES, ModelFile
from edgeinfer.offload.cache_size import AUTO, largest_cache, parse, resolve
from edgeinfer.offload.file_experts import has_experts
from edgeinfer.offload.size_search import CacheSizeSearch, load_search, search_key
from edgeinfer.types import Device, MemoryPlan

DEFAULT_N_CTX = 4096  # at most, where the caller says nothing
_BACKENDS = {
    "native": ("edgeinfer.backends.native", "NativeBackend"),
    "reference": ("edgeinfer.backends.reference", "ReferenceBackend"),
    "llama.cpp": ("edgeinfer.backends.llama_cpp", "LlamaCppBackend"),
    "opencl": ("edgeinfer.backends.opencl", "OpenCLBackend"),
    "onnx": ("edgeinfer.backends.onnx", "OnnxBackend"),
}


@dataclass(frozen=True)
class PlannedModel:
    """A model file, the backend that will run it, and what that backend has read and planned.

    spec: what the backend's `read_spec` gave.  device: with the number of threads that was planned for.
    """

    file: ModelFile
    backend: Backend
    spec: ModelSizes
    plan: MemoryPlan
    device: Device

    def load(self, progress: Progress | None = None) -> Model:
        """The model that was planned; closed by the caller."""
        return self.backend.load(self.file, self.spec, self.plan, self.device, progress)


def plan_model(file: ModelFile, options: LoadOptions) -> PlannedModel:
    """The backend and the plan that `edgeinfer.load` would take for a file, without loading it. Errors as there."""
    try:
        return _planned_on(open_backend(options.backend, options.ternary_bits, options.verify), file, options)
    except UnsupportedModel as error:
        if options.backend != "auto":
            raise
        return _planned_on_llama_cpp(file, options, error)


def open_backend(name: BackendName, ternary_bits: TernaryChoice = "auto", verify: bool = False) -> Backend:
    """The backend of that name; "auto" is native, or with a warning reference where native does not run here.

    ternary_bits, verify: of the native backend; the others hold ternary weights in their own way, and map no files.
    Raises BackendUnavailable, InvalidArgument.
    """
    check_choice("backend", name, ("auto", *_BACKENDS))
    if name == "auto":
        try:
            return open_backend("native", ternary_bits, verify)
        except BackendUnavailable as error:
            warn(f"{error}; using the numpy reference, which is far slower")
            return open_backend("reference")
    module, attribute = _BACKENDS[name]
    try:
        options = {"ternary_bits": ternary_bits, "verify": verify} if name == "native" else {}
        backend: Backend = getattr(importlib.import_module(module), attribute)(**options)
    except (ImportError, AttributeError) as error:
        raise BackendUnavailable(f"the {name} backend is not usable: {error}") from error
    return backend


def _planned_on(backend: Backend, file: ModelFile, options: LoadOptions) -> PlannedModel:
    """The plan of one backend. Raises UnsupportedModel, BudgetExceeded."""
    spec = backend.read_spec(file)
    n_ctx = min(spec.n_ctx_train, DEFAULT_N_CTX) if options.n_ctx is None else options.n_ctx
    n_ctx = check_integer("n_ctx", n_ctx, 1, MAX_INT32)  # what a file says may be outside too
    device = Device(devices.default_n_threads() if options.n_threads is None else options.n_threads)
    budget_bytes = devices.available_memory()

    def plan_of(backend: Backend) -> Callable[[int], MemoryPlan]:
        if isinstance(backend, ExpertBackend) and has_experts(file):
            return _plan_with_cache(backend, file, spec, options, device.n_threads, budget_bytes)
        return lambda n_ctx: backend.plan(file, spec, n_ctx, options.n_batch, device.n_threads, options.cache_type)

    if parse(options.expert_cache) != AUTO and has_experts(file) and not isinstance(backend, ExpertBackend):
        raise InvalidArgument(
            f'expert_cache must be "auto" with the {backend.name} backend, which has no cache of experts: found '
            f"{options.expert_cache!r:.80}; only native has one"
        )
    is_ternary = not TERNARY_TYPES.isdisjoint(info.type for info in file.tensors.values())
    if backend.name == "native" and options.ternary_bits == "auto" and is_ternary:
        # The plan below measures which bits are faster. A model that fits with neither is refused before that.
        plan_within(file.path, plan_of(open_backend("native", "1.6")), n_ctx, budget_bytes)
    plan = plan_within(file.path, plan_of(backend), n_ctx, budget_bytes)
    return PlannedModel(file, backend, spec, plan, device)


def _plan_with_cache(
    backend: ExpertBackend, file: ModelFile, spec: ModelSizes, options: LoadOptions, n_threads: int, budget_bytes: int
) -> Callable[[int], MemoryPlan]:
    """Plans of a model with experts by n_ctx, with the expert cache that the options ask for."""
    request, sizes = parse(options.expert_cache), backend.expert_sizes(file, spec)
    search = load_search(search_key(file, n_threads)) if request == AUTO else CacheSizeSearch()

    def plan(n_ctx: int) -> MemoryPlan:
        arguments = (file, spec, n_ctx, options.n_batch, n_threads, options.cache_type)
        whole = backend.plan(*arguments)
        if request == AUTO and whole.use.total <= budget_bytes:
            return whole
        others = backend.plan(*arguments, sizes.least).use.total - sizes.least  # with the tables of a cache
        measured = search.next_size(sizes.least, largest_cache(sizes, budget_bytes, others))
        n_bytes = resolve(request, sizes, budget_bytes, others, measured)
        if n_bytes is None:
            return whole
        found = backend.plan(*arguments, n_bytes)
        while request == AUTO and n_bytes > sizes.least and (over := found.use.total - budget_bytes) > 0:
            n_bytes = max(n_bytes - max(over, n_bytes // 32), sizes.least)  # memory comes in large pages
            found = backend.plan(*arguments, n_bytes)
        return found

    return plan


def _planned_on_llama_cpp(file: ModelFile, options: LoadOptions, refused: UnsupportedModel) -> PlannedModel:
    """The plan of llama.cpp, with a warning, for a model that native refused."""
    try:
        planned = _planned_on(open_backend("llama.cpp"), file, options)
    except BackendCrashed as error:
        raise BackendCrashed(f"{refused}; {error}") from error
    except (BackendUnavailable, UnsupportedModel) as error:
        raise UnsupportedModel(f"{refused}; {error}") from error
    warn(
        f"{refused}; using llama.cpp instead, which does not keep the promise of the same bits: its logits, and now "
        "and then a text, change with the size of batches"
    )
    return planned
