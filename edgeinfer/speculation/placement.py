"""The devices beside the CPU that draft models can run on, by name.

A kind of devices is a function in `_KINDS` that lists them.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from edgeinfer.common import devices
from edgeinfer.common.errors import BackendUnavailable, InvalidArgument
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device, MemoryPlan
from edgeinfer.models import ModelSpec
from edgeinfer.models.gguf import ModelFile

if TYPE_CHECKING:
    from edgeinfer.backends.onnx import ProviderInfo
    from edgeinfer.backends.opencl import DeviceInfo


class DraftBackend(Protocol):
    """The backend of a device: a Backend, or one for heads."""

    def plan(self, model: ModelFile, spec: Any, settings: LoadSettings) -> MemoryPlan:
        """See Backend.plan."""
        ...

    def load(self, model: ModelFile, spec: Any, plan: MemoryPlan, device: Device) -> Any:
        """See Backend.load."""
        ...


@dataclass(frozen=True)
class DraftDevice:
    """A device that draft models can run on, beside the CPU of the target.

    name: as `--draft-device` takes it; a GPU is gpu:N too.  title: for messages.  facts: what the cost of a pass
    depends on besides the model.  n_cores: CPU cores that it uses; 0 for a device of its own.  shares_memory: it uses
    the main memory.  head_backend: makes the backend for heads of a target, None where they do not run.
    """

    name: str
    title: str
    is_gpu: bool
    backend: DraftBackend
    facts: tuple[object, ...]
    n_cores: int
    shares_memory: bool
    head_backend: Callable[[ModelFile, ModelSpec], DraftBackend] | None = None

    def is_independent(self, n_threads: int) -> bool:
        """Whether it can work at the same time as a target with that many threads, without sharing cores with it."""
        return not self.n_cores or self.n_cores + n_threads <= devices.physical_cores()


Listing: TypeAlias = tuple[list[tuple[DraftDevice, str | None]], str | None]
"""All devices of a kind, each with the reason if it cannot be used; and the reason if there is none."""


def check_name(name: str) -> None:
    """Raises InvalidArgument unless `--draft-device` takes this name, whether or not there is such a device."""
    if not re.fullmatch(rf"auto|cpu|gpu(:[0-9]{{1,3}})?|({'|'.join(_KINDS)}):[0-9]{{1,3}}", name):
        names = ", ".join(["auto", "cpu", "gpu", "gpu:N", *(f"{kind}:N" for kind in _KINDS)])
        raise InvalidArgument(f"a draft device is one of {names}, see `edgeinfer devices`: found {name!r:.80}")


def devices_named(name: str) -> list[DraftDevice]:
    """The devices beside the CPU that a name means: for "auto" all GPUs that work, for "cpu" none, else that one.

    Queries the drivers, which may take seconds. Raises BackendUnavailable with the reason where that one is missing or
    does not work, and InvalidArgument as `check_name`.
    """
    check_name(name)
    if name == "cpu":
        return []
    listings = {kind: list_all() for kind, list_all in _KINDS.items()}
    found = [each for listed, _ in listings.values() for each in listed]
    gpus = [each for each in found if each[0].is_gpu]
    if name == "auto":
        return [device for device, reason in gpus if reason is None]
    kind, _, number = name.partition(":")
    of_kind = gpus if kind == "gpu" else listings[kind][0]
    if int(number or 0) >= len(of_kind):
        why_none = "; ".join(reason for _, reason in listings.values() if reason is not None)
        there = ", ".join(f"{device.name}, {device.title}" for device, _ in found)
        raise BackendUnavailable(f"there is no such device; {f'there is {there}' if there else why_none}")
    device, reason = of_kind[int(number or 0)]
    if reason is not None:
        raise BackendUnavailable(f"{device.title} cannot be used: {reason}")
    return [device]


def names_of(infos: Sequence[DeviceInfo]) -> list[str]:
    """What `--draft-device` calls these, which are all OpenCL devices: gpu:N, or opencl:N where it is none."""
    gpus = [info.index for info in infos if info.kind == "gpu"]
    return [f"gpu:{gpus.index(info.index)}" if info.kind == "gpu" else f"opencl:{info.index}" for info in infos]


def names_of_providers(infos: Sequence[ProviderInfo]) -> list[str]:
    """What `--draft-device` calls these, which are all providers of ONNX Runtime."""
    return [f"onnx:{i}" for i in range(len(infos))]


def _opencl() -> Listing:
    if importlib.util.find_spec("pyopencl") is None:
        return [], "OpenCL needs pyopencl: pip install 'edgeinfer[opencl]'"
    from edgeinfer.backends.opencl import OpenCLBackend, OpenCLHeadBackend
    from edgeinfer.backends.opencl.probe import probe_devices

    def device(info: DeviceInfo) -> DraftDevice:
        return DraftDevice(
            name=f"opencl:{info.index}",
            title=f"{info.name} (OpenCL)",
            is_gpu=info.kind == "gpu",
            backend=OpenCLBackend(info),
            facts=("opencl", info.name, info.platform, info.driver_version, info.compute_units),
            n_cores=info.compute_units if info.kind == "cpu" else 0,
            shares_memory=info.shares_host_memory,
            head_backend=partial(OpenCLHeadBackend, info),
        )

    found, why_none = probe_devices()
    return [(device(info), reason) for info, reason in found], why_none


def _onnx() -> Listing:
    if any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxruntime")):
        return [], "ONNX Runtime needs onnx and onnxruntime: pip install 'edgeinfer[onnx]'"
    from edgeinfer.backends.onnx import OnnxBackend, OnnxHeadBackend
    from edgeinfer.backends.onnx.probe import probe_providers

    found, why_none = probe_providers()
    names = names_of_providers([info for info, _ in found])

    def device(name: str, info: ProviderInfo) -> DraftDevice:
        return DraftDevice(
            name=name,
            title=f"{info.name} (ONNX Runtime)",
            is_gpu=any(kind == "gpu" for kind, _ in info.devices) and not info.is_cpu,
            backend=OnnxBackend(info),
            facts=("onnx", info),
            n_cores=devices.default_n_threads() if info.is_cpu else 0,
            shares_memory=info.is_cpu,
            head_backend=partial(OnnxHeadBackend, info),
        )

    return [(device(name, info), reason) for name, (info, reason) in zip(names, found, strict=True)], why_none


_KINDS: dict[str, Callable[[], Listing]] = {"opencl": _opencl, "onnx": _onnx}
