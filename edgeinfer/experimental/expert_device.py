"""A device that computes some experts beside the CPU: its plan before anything loads, and opening it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from edgeinfer.backends.base import ExpertDeviceModel, Model
from edgeinfer.common.errors import BackendLost, InvalidArgument, UnsupportedModel
from edgeinfer.common.types import Device
from edgeinfer.experimental.device_experts import DeviceExperts, measured_seconds
from edgeinfer.experimental.device_experts_size import parse_bytes, slots_of
from edgeinfer.experimental.placement import ExpertTimes, interpolated
from edgeinfer.loading.backend_choice import PlannedModel
from edgeinfer.loading.options import LoadOptions
from edgeinfer.models import Experts, ModelSpec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.offload.usage import load_usage, usage_key

if TYPE_CHECKING:
    from edgeinfer.backends.opencl import DeviceInfo

_ROWS = (1, 4, 16, 64)  # for which times are measured
_OF_DEVICE = 0.9  # of its memory: OpenCL does not say what others use
_OF_MAIN = 15 / 16  # of what is left of main memory, where the device uses that


@runtime_checkable
class TimedBackend(Protocol):
    """A backend that measures what its experts take."""

    def expert_seconds(
        self, model: ModelFile, spec: ModelSpec, device: Device, sizes: tuple[int, ...]
    ) -> dict[int, float]:
        """Seconds of one expert with so many rows, by rows."""
        ...


@dataclass(frozen=True)
class DeviceExpertsPlan:
    """Where some experts will compute."""

    info: DeviceInfo
    title: str
    n_slots: int  # how many are there at once
    n_bytes: int  # of main memory and of the device's own

    @property
    def main_bytes(self) -> int:
        """Of main memory: none for a device with memory of its own."""
        return self.n_bytes if self.info.shares_host_memory else 0


def plan_device_experts(planned: PlannedModel, options: LoadOptions, left: int) -> DeviceExpertsPlan | None:
    """The device that the options ask for, None where they ask for none. left: bytes of main memory.

    Raises InvalidArgument for a model or a backend without it, UnsupportedModel, BackendUnavailable, BudgetExceeded.
    """
    if options.expert_device is None:
        return None
    spec = planned.spec
    if planned.backend.name != "native" or not isinstance(spec, ModelSpec):
        raise InvalidArgument(
            f"expert_device must be None with the {planned.backend.name} backend: only native computes experts on "
            "another device"
        )
    if not any(isinstance(layer.ffn, Experts) for layer in spec.layers):
        raise InvalidArgument(f"expert_device must be None: {planned.file.path} is no mixture of experts")
    info, title = device_named(options.expert_device)
    from edgeinfer.backends.opencl import expert_buffers

    buffers = expert_buffers(planned.file, spec, planned.plan.n_batch, info)
    room = int(left * _OF_MAIN if info.shares_host_memory else _OF_DEVICE * info.memory_bytes)
    n_slots = slots_of(parse_bytes(options.expert_device_bytes), buffers, room, title)
    return DeviceExpertsPlan(info, title, n_slots, buffers.total(n_slots))


def with_device_experts(planned: PlannedModel, device_experts: DeviceExpertsPlan) -> PlannedModel:
    """The plan with the main memory that the device takes."""
    use = replace(planned.plan.use, expert_device=device_experts.main_bytes)
    return replace(planned, plan=replace(planned.plan, use=use))


def open_device_experts(device_experts: DeviceExpertsPlan, planned: PlannedModel, model: Model) -> DeviceExperts:
    """Load the device, measure it and the CPU, and let it compute experts of this model. Closed before the model.

    Raises BackendLost, BackendUnavailable.
    """
    from edgeinfer.backends.opencl import OpenCLDevice, OpenCLExperts

    assert isinstance(model, ExpertDeviceModel) and isinstance(planned.backend, TimedBackend)
    spec = planned.spec
    assert isinstance(spec, ModelSpec)
    layers = {i: layer.ffn for i, layer in enumerate(spec.layers) if isinstance(layer.ffn, Experts)}
    first = next(iter(layers))
    on_device = OpenCLExperts(
        planned.file, spec, OpenCLDevice(device_experts.info), device_experts.n_slots, planned.plan.n_batch
    )
    try:
        sizes = tuple(n for n in _ROWS if n <= planned.plan.n_batch)
        on_device.upload(0, first, 0)
        gpu = measured_seconds(on_device, first, 0, layers[first].n_in, sizes)
        cpu = planned.backend.expert_seconds(planned.file, spec, planned.device, sizes)
        times = ExpertTimes(interpolated(cpu), interpolated(gpu), transfer=float("inf"))
        n_experts = {index: block.n_experts for index, block in layers.items()}
        made = DeviceExperts(on_device, device_experts.title, n_experts, times, planned.plan.expert_cache is not None)
        usage = load_usage(usage_key(planned.file), spec.n_layers, max(n_experts.values()))
        made.fill(usage.most_used([1] * spec.n_layers, device_experts.n_slots))
    except BaseException:
        with suppress(BackendLost):
            on_device.close()
        raise
    model.set_expert_device(made)
    model.pass_hook = made.watch(model.pass_hook)
    return made


def device_named(name: str) -> tuple[DeviceInfo, str]:
    """An OpenCL device by the name that expert_device takes, and its title.

    Raises BackendUnavailable where there is none, UnsupportedModel for a GPU that only ONNX Runtime knows.
    """
    from edgeinfer.speculation.placement import devices_named

    (place,) = devices_named(name)
    info = getattr(place.backend, "info", None)
    if not place.name.startswith("opencl:") or info is None:
        raise UnsupportedModel(f"experts compute on OpenCL devices only: {name} is {place.title}; name one as opencl:N")
    return info, place.title
