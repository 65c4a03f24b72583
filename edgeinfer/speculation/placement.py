"""Which devices a draft model can run on: from a name to what makes sessions there.

A kind of devices is a function that lists them, in `_KINDS`. To the rest of the program a device is a `DraftDevice`.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from edgeinfer import devices
from edgeinfer.errors import BackendUnavailable, InvalidArgument
from edgeinfer.models import ModelSpec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.speculation.cost import MAX_TOKENS, CostModel, TimedSession, cached_costs, cost_key, measure_costs
from edgeinfer.speculation.drafters.base import CostlyDrafter
from edgeinfer.speculation.drafters.device_drafting import DeviceDrafting
from edgeinfer.speculation.drafters.overlapped import overlapped
from edgeinfer.speculation.drafters.watchdog import Watchdog, watched
from edgeinfer.types import Device, LogitsRows, MemoryPlan, Output

if TYPE_CHECKING:
    from edgeinfer.backends.onnx import ProviderInfo
    from edgeinfer.backends.opencl import DeviceInfo

_OPENING_SECONDS = 120.0  # that a device may take to take a model in, before it counts as hanging
_CALIBRATION_SECONDS = 0.6


class DraftBackend(Protocol):
    """What makes sessions on a device: a Backend, or one of heads."""

    def plan(self, model: ModelFile, spec: Any, n_ctx: int, n_batch: int = ..., n_threads: int = ...) -> MemoryPlan:
        """See Backend.plan."""
        ...

    def load(self, model: ModelFile, spec: Any, plan: MemoryPlan, device: Device) -> Any:
        """See Backend.load."""
        ...


@dataclass(frozen=True)
class DraftDevice:
    """A device that draft models can run on, beside the CPU of the target.

    name: as `--draft-device` takes it; a GPU is gpu:N too.  title: what it is.  backend: makes sessions there.  facts:
    what the cost of a pass depends on besides the model.  n_cores: of the CPU, that it works with; 0 for a device of
    its own.  shares_memory: what it holds lies in the memory of the machine.  of_heads: the backend of heads beside a
    target, None where they do not run.
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
        """Whether it can work while a target with that many threads does, and neither waits for the other's cores."""
        return not self.n_cores or self.n_cores + n_threads <= devices.physical_cores()


@dataclass(frozen=True)
class DeviceLevels:
    """How a session's device makes drafts by itself.

    make: that many levels behind a token, in one call.  width: nodes of a level.
    """

    make: Callable[[int, int], object]
    width: int


@dataclass(frozen=True)
class DraftSource:
    """A draft model or a head that is to be opened somewhere.

    spec: of the model, or of the head's decoder.  make: its drafter, from its session, the costs of its passes, and the
    chains that it makes by itself.  timed: its session as measure_costs knows sessions.  levels: those that its session
    makes by itself, None where it makes none.
    """

    file: ModelFile
    spec: ModelSpec
    make: Callable[[Any, CostModel, DeviceDrafting[Any] | None], CostlyDrafter]
    timed: Callable[[Any], TimedSession]
    levels: Callable[[Any], DeviceLevels | None]


Listing: TypeAlias = tuple[list[tuple[DraftDevice, str | None]], str | None]
"""All devices of a kind, each with the reason why it cannot be used, if so; and why there is none, if so."""


def check_name(name: str) -> None:
    """Raises InvalidArgument where this is no name that `--draft-device` takes, whatever devices there are."""
    if not re.fullmatch(rf"auto|cpu|gpu(:[0-9]{{1,3}})?|({'|'.join(_KINDS)}):[0-9]{{1,3}}", name):
        names = ", ".join(["auto", "cpu", "gpu", "gpu:N", *(f"{kind}:N" for kind in _KINDS)])
        raise InvalidArgument(f"a draft device is one of {names}, see `edgeinfer devices`: found {name!r:.80}")


def devices_named(name: str) -> list[DraftDevice]:
    """The devices that a name may mean, beside the CPU: for "auto" all GPUs that work, for "cpu" none, else that one.

    Asks the drivers, which may take seconds. Raises BackendUnavailable, with the reason, where that one is not there or
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


def open_on_device(
    place: DraftDevice, draft: DraftSource, plan: MemoryPlan, n_threads: int
) -> tuple[CostlyDrafter, CostModel]:
    """A draft model or a head on a device, and what its passes cost there. n_threads: of the target.

    It drafts ahead where the device is apart from the target's cores, and is given up where it hangs. Raises
    BackendLost and what the backend raises.
    """

    def open_session() -> tuple[Any, CostModel, DeviceDrafting[Any] | None]:
        session = place.backend.load(draft.file, draft.spec, plan, Device(n_threads))
        timed = draft.timed(session)
        facts = *place.facts, plan.n_ctx < MAX_TOKENS
        try:
            timed.forward([0])  # it works, and what takes time once has taken it
            timed.commit(())
            costs = cached_costs(cost_key(draft.file, *facts), lambda: measure_costs(timed, _CALIBRATION_SECONDS))
            return session, costs, _device_drafting_of(draft, session, *place.facts)
        except BaseException:
            session.close()
            raise

    opener = Watchdog("opening", place.title, least_seconds=_OPENING_SECONDS)
    try:
        session, costs, device_drafting = opener.run(open_session)
    finally:
        opener.close()
    try:
        drafter = draft.make(session, costs, device_drafting)
    except BaseException:
        session.close()
        raise
    is_independent = place.is_independent(n_threads)
    return overlapped(drafter, place.title) if is_independent else watched(drafter, place.title), costs


class _ByLevels:
    """A session as measure_costs knows it, whose passes of n tokens are drafts of n levels that its device makes."""

    def __init__(self, timed: TimedSession, levels: DeviceLevels) -> None:
        self._timed, self._levels = timed, levels
        self.spec = timed.spec
        self.n_ctx = self.n_batch = timed.n_ctx // levels.width  # a level is a pass of its own
        self.commit = timed.commit
        self.truncate = timed.truncate

    @property
    def n_past(self) -> int:
        return self._timed.n_past

    def forward(self, tokens: Sequence[int], *, logits: LogitsRows = "last") -> Output:
        if logits == ():  # only the cache is to be filled
            return self._timed.forward(tokens, logits=logits)
        self._levels.make(tokens[0], len(tokens))
        return Output(np.empty((0, self.spec.n_vocab), dtype=np.float32))


def _device_drafting_of(draft: DraftSource, session: Any, *facts: object) -> DeviceDrafting[Any] | None:
    """The drafts that a session makes by itself, their costs from disk or measured now; None where it makes none."""
    levels = draft.levels(session)
    if levels is None:
        return None
    timed = _ByLevels(draft.timed(session), levels)
    key = cost_key(draft.file, *facts, timed.n_ctx < MAX_TOKENS, "levels", levels.width)
    max_ratio = 2.0 + levels.width  # one level passes one row, two a level more; what takes longer was disturbed
    costs = cached_costs(key, lambda: measure_costs(timed, _CALIBRATION_SECONDS), max_ratio=max_ratio)
    return DeviceDrafting(session, costs)


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
