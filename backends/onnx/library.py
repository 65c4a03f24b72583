"""The library onnxruntime, its execution providers, and its errors as edgeinfer's; no other file imports it."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from edgeinfer.common.errors import BackendLost, BackendUnavailable, InvalidArgument, UnsupportedModel
from edgeinfer.common.signal_handlers import is_from_handler

Style = Literal["contrib", "plain"]
"""Operators of a graph: those of ONNX Runtime where they are faster, or those of the ONNX standard alone."""

CPU = "CPUExecutionProvider"
# In the order of preference. Each has MatMulNBits and GroupQueryAttention; the others compile plain graphs.
_CONTRIB = (
    "CUDAExecutionProvider",
    "DmlExecutionProvider",
    "WebGpuExecutionProvider",
    CPU,
)
_REMOTE = ("AzureExecutionProvider",)  # it sends what it runs away
# Where a provider's buffers can be bound. With any other the cache lies in the memory of the CPU.
_MEMORIES = {CPU: "cpu", "CUDAExecutionProvider": "cuda", "DmlExecutionProvider": "dml"}
_VARIABLE = "EDGEINFER_ONNX_PROVIDER"
_ENDING = "ExecutionProvider"


@dataclass(frozen=True)
class ProviderInfo:
    """An execution provider of the installed onnxruntime, and the devices that it names.

    name: without its ending "ExecutionProvider", as it is chosen by.  devices: (kind, maker) of each.  version: of
    onnxruntime.
    """

    name: str
    devices: tuple[tuple[str, str], ...]
    style: Style
    version: str = ""

    @property
    def full_name(self) -> str:
        """As onnxruntime has it."""
        return self.name + _ENDING

    @property
    def memory(self) -> str:
        """The memory that its buffers lie in, as onnxruntime names devices."""
        return _MEMORIES.get(self.full_name, "cpu")

    @property
    def is_cpu(self) -> bool:
        """Whether it computes on the CPU's own cores."""
        return self.full_name == CPU


@functools.cache
def open_library() -> Any:
    """The module onnxruntime. Raises BackendUnavailable if it is missing or cannot be loaded."""
    with _imports_explained("onnxruntime"):
        library = importlib.import_module("onnxruntime")
        library.disable_telemetry_events()
        library.set_default_logger_severity(4)  # its errors come as exceptions
    return library


@functools.cache
def open_onnx() -> Any:
    """The module onnx, which makes and checks models. Raises BackendUnavailable as above."""
    with _imports_explained("onnx"):
        onnx = importlib.import_module("onnx")
        importlib.import_module("onnx.checker")
        importlib.import_module("onnx.helper")
    return onnx


@contextmanager
def _imports_explained(name: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise BackendUnavailable(
            f"ONNX needs the packages onnx and onnxruntime ({error}): pip install 'edgeinfer[onnx]'"
        ) from error
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        if is_from_handler(error):
            raise
        raise BackendUnavailable(f"{name} cannot be loaded: {error}; install it anew") from error


def library_version() -> str:
    """Version of onnxruntime. Raises BackendUnavailable."""
    return str(open_library().__version__)


def list_providers() -> list[ProviderInfo]:
    """All providers that compute on this machine, at least the CPU's, best first. Raises BackendUnavailable."""
    library = open_library()
    devices: dict[str, list[tuple[str, str]]] = {}
    for found in library.get_ep_devices():
        kind = str(found.device.type).rpartition(".")[2].lower()
        devices.setdefault(found.ep_name, []).append((kind, " ".join(str(found.device.vendor).split())))
    names = [name for name in library.get_available_providers() if name not in _REMOTE]
    order = {name: place for place, name in enumerate(_CONTRIB)}
    names.sort(key=lambda name: order.get(name, len(order)))
    return [
        ProviderInfo(
            name.removesuffix(_ENDING),
            tuple(devices.get(name, ())),
            "contrib" if name in order else "plain",
            library_version(),
        )
        for name in names
    ]


def choose_provider(name: str | None = None) -> ProviderInfo:
    """The provider of that name, with or without its ending; None is the one that EDGEINFER_ONNX_PROVIDER names.

    Without either the first of `list_providers`. Raises BackendUnavailable, InvalidArgument for one that is not there.
    """
    found = list_providers()
    wanted = name or os.environ.get(_VARIABLE)
    if not wanted:
        return found[0]
    for info in found:
        if info.name.lower() == wanted.lower().removesuffix(_ENDING.lower()):
            return info
    names = ", ".join(info.name for info in found)
    raise InvalidArgument(f"this onnxruntime has no execution provider {wanted!r:.80}; it has {names}")


@contextmanager
def errors_translated(what: str, load: bool = False) -> Iterator[None]:
    """Within, errors of onnxruntime become BackendLost, or UnsupportedModel where a graph is loaded."""
    try:
        yield
    except Exception as error:
        if is_from_handler(error):
            raise
        text = " ".join(str(error).split())[:600]
        if load:
            raise UnsupportedModel(f"ONNX Runtime: {what} failed: {text}; use another provider or backend") from error
        raise BackendLost(
            f"ONNX Runtime: {what} failed: {text}; use another execution provider ({_VARIABLE}), or the native backend"
        ) from error
