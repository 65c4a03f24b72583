"""Which backend runs a model file, and the memory plans that it gives."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from edgeinfer.backends.base import Backend, ExpertBackend, Model, Progress
from edgeinfer.common import devices
from edgeinfer.common.arguments import MAX_INT32, check_choice, check_integer
from edgeinfer.common.errors import (
    BackendCrashed,
    BackendUnavailable,
    BudgetExceeded,
    InvalidArgument,
    UnsupportedModel,
    warn,
)
from edgeinfer.common.settings import DEFAULT_PARALLEL, LoadSettings
from edgeinfer.common.types import Device, ExpertSizes, MemoryPlan
from edgeinfer.loading.options import BackendName, LoadOptions, TernaryChoice
from edgeinfer.models import ModelSizes
from edgeinfer.models.gguf import TERNARY_TYPES, ModelFile
from edgeinfer.offload.cache_size import AUTO, parse, requested_bytes
from edgeinfer.offload.file_experts import has_experts

DEFAULT_N_CTX = 4096  # at most, where the caller says nothing
_BACKENDS = {
    "native": ("edgeinfer.backends.native", "NativeBackend"),
    "reference": ("edgeinfer.backends.reference", "ReferenceBackend"),
    "llama.cpp": ("edgeinfer.backends.llama_cpp", "LlamaCppBackend"),
    "opencl": ("edgeinfer.backends.opencl", "OpenCLBackend"),
    "onnx": ("edgeinfer.backends.onnx", "OnnxBackend"),
    "fpga-sim": ("edgeinfer.backends.fpga_sim", "FpgaSimBackend"),
}


@dataclass(frozen=True)
class PlannedModel:
    """A model file, the backend that will run it, and what that backend has read and planned."""

    file: ModelFile
    backend: Backend
    spec: ModelSizes  # what the backend's `read_spec` gave
    plan: MemoryPlan
    device: Device  # with the number of threads that was planned for

    def load(self, progress: Progress | None = None) -> Model:
        """The model that was planned; closed by the caller."""
        return self.backend.load(self.file, self.spec, self.plan, self.device, progress)


@dataclass(frozen=True)
class Target:
    """A model file and the backend that will run it, before it is known how much memory it may take."""

    file: ModelFile
    backend: Backend
    spec: ModelSizes
    device: Device
    requested: LoadSettings  # the settings to load with if there is room
    sizes: ExpertSizes | None  # of experts, None where they cannot be read from disk
    # the same with plans that measure nothing and are no larger, for ternary models whose bits are measured
    rough: Target | None = None
    _plans: dict[LoadSettings, MemoryPlan] = field(default_factory=dict, repr=False, compare=False)

    def planned(self, settings: LoadSettings) -> PlannedModel:
        """The model with these settings."""
        asked = settings.of_model
        if asked not in self._plans:
            self._plans[asked] = self.backend.plan(self.file, self.spec, asked)
        return PlannedModel(self.file, self.backend, self.spec, self._plans[asked], self.device)


def choose_target(file: ModelFile, options: LoadOptions) -> Target:
    """The backend that `edgeinfer.load` takes for a file. Errors as there."""
    try:
        return _target_on(_backend_for(options), file, options)
    except UnsupportedModel as error:
        if options.backend != "auto":
            raise
        return _target_on_llama_cpp(file, options, error)


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
    return _opened(name, {"ternary_bits": ternary_bits, "verify": verify} if name == "native" else {})


def _backend_for(options: LoadOptions) -> Backend:
    """The backend that a caller asks for. Raises as open_backend, and BadBoardFolder."""
    if options.backend == "fpga-sim":
        return _opened("fpga-sim", {"folder": options.fpga_folder})
    return open_backend(options.backend, options.ternary_bits, options.verify)


def _opened(name: str, options: Mapping[str, object]) -> Backend:
    module, attribute = _BACKENDS[name]
    try:
        backend: Backend = getattr(importlib.import_module(module), attribute)(**options)
    except (ImportError, AttributeError) as error:
        raise BackendUnavailable(f"the {name} backend is not usable: {error}") from error
    return backend


def _target_on(backend: Backend, file: ModelFile, options: LoadOptions) -> Target:
    """A model on one backend. Raises UnsupportedModel, InvalidArgument."""
    spec = backend.read_spec(file)
    n_ctx = min(spec.n_ctx_train, DEFAULT_N_CTX) if options.n_ctx is None else options.n_ctx
    n_ctx = check_integer("n_ctx", n_ctx, 1, MAX_INT32)  # what a file says may be outside too
    device = Device(devices.default_n_threads() if options.n_threads is None else options.n_threads)
    request, sizes, expert_cache = parse(options.expert_cache), None, None
    if has_experts(file):
        if isinstance(backend, ExpertBackend):
            sizes = backend.expert_sizes(file, spec)
            expert_cache = requested_bytes(request, sizes)
        elif request != AUTO:
            raise InvalidArgument(
                f'expert_cache must be "auto" with the {backend.name} backend, which has no cache of experts: found '
                f"{options.expert_cache!r:.80}; only native has one"
            )
    is_ternary = not TERNARY_TYPES.isdisjoint(info.type for info in file.tensors.values())
    is_measured = backend.name == "native" and options.ternary_bits == "auto" and is_ternary
    more: dict[str, object] = {
        "n_threads": device.n_threads,
        "expert_cache": expert_cache,
        "draft": options.drafter_names(),
    }
    more |= _sharing(backend, options)
    requested = LoadSettings.of(options, n_ctx, **more).with_batch()
    target = Target(file, backend, spec, device, requested, sizes)
    if is_measured:
        target = replace(target, rough=replace(target, backend=open_backend("native", "1.6"), _plans={}))
    with suppress(BudgetExceeded):  # of a device; it is said later, with what would fit
        (target.rough or target).planned(requested)  # what the backend does not run is refused now
    return target


def _sharing(backend: Backend, options: LoadOptions) -> dict[str, object]:
    """How many texts a backend runs at once; with a warning where its model has one session, and more are asked for."""
    if backend.name == "native":
        return {"parallel": options.parallel or DEFAULT_PARALLEL}
    if options.parallel is not None and options.parallel > 1:
        warn(f"texts run one after the other: the {backend.name} backend has one session, not {options.parallel}")
    return {"parallel": 1, "cache_ram": None}


def _target_on_llama_cpp(file: ModelFile, options: LoadOptions, refused: UnsupportedModel) -> Target:
    """The model on llama.cpp, with a warning, where native refused it."""
    try:
        target = _target_on(open_backend("llama.cpp"), file, options)
    except BackendCrashed as error:
        raise BackendCrashed(f"{refused}; {error}") from error
    except (BackendUnavailable, UnsupportedModel) as error:
        raise UnsupportedModel(f"{refused}; {error}") from error
    warn(
        f"{refused}; using llama.cpp instead, which does not keep the promise of the same bits: its logits, and now "
        "and then a text, change with the size of batches"
    )
    return target
