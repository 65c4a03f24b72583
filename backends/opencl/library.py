"""The library pyopencl, what devices there are, and its errors as edgeinfer's; no other file imports it."""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

from edgeinfer.common.errors import BackendLost, BackendUnavailable, InvalidArgument
from edgeinfer.common.files import cache_folder
from edgeinfer.common.signal_handlers import is_from_handler

DeviceKind = Literal["gpu", "accelerator", "cpu", "other"]
_PREFERENCE: tuple[DeviceKind, ...] = ("gpu", "accelerator", "other", "cpu")
_KINDS: dict[str, DeviceKind] = {"GPU": "gpu", "ACCELERATOR": "accelerator", "CPU": "cpu"}
_VARIABLE = "EDGEINFER_OPENCL_DEVICE"

INTEGER_DOT = "cl_khr_integer_dot_product"
# Those that matter to such work: packed dot products, arithmetic in half floats, sums across a subgroup.
_NOTED_EXTENSIONS = (INTEGER_DOT, "cl_khr_fp16", "cl_khr_subgroups", "cl_intel_subgroups", "cl_qcom_dot_product8")
_NO_DRIVER = (
    "no OpenCL driver (ICD) is installed: install the one of the graphics card's maker, or PoCL for the CPU "
    "(Debian and Ubuntu: apt-get install pocl-opencl-icd)"
)


@dataclass(frozen=True)
class DeviceInfo:
    """What a device says of itself. index: its number here, by platform and in the order of the driver.

    memory_bytes: all it has, used or not; OpenCL does not say what is free.  max_buffer_bytes: of one allocation.
    """

    index: int
    name: str
    kind: DeviceKind
    platform: str
    version: str
    driver_version: str
    compute_units: int
    memory_bytes: int
    max_buffer_bytes: int
    local_memory_bytes: int
    max_work_group: int
    shares_host_memory: bool
    extensions: tuple[str, ...]  # of _NOTED_EXTENSIONS

    @property
    def has_integer_dot(self) -> bool:
        """Whether it has packed dot products of 8-bit integers."""
        return INTEGER_DOT in self.extensions


@functools.cache
def open_library() -> Any:
    """The module pyopencl. Raises BackendUnavailable if it is missing or cannot be loaded."""
    try:
        _do_without_caches()
        return importlib.import_module("pyopencl")
    except ModuleNotFoundError as error:
        raise BackendUnavailable(f"OpenCL needs pyopencl ({error}): pip install 'edgeinfer[opencl]'") from error
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        if is_from_handler(error):
            raise
        raise BackendUnavailable(f"pyopencl cannot be loaded: {error}; install it anew") from error


def _do_without_caches() -> None:
    """Where the user has no folder for caches: pyopencl fails for want of one, and PoCL has no device."""
    folder = cache_folder()
    with suppress(OSError):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return
    os.environ.setdefault("PYOPENCL_NO_CACHE", "1")
    with suppress(OSError):
        if "POCL_CACHE_DIR" not in os.environ:
            os.environ["POCL_CACHE_DIR"] = tempfile.mkdtemp(prefix="edgeinfer-")
            atexit.register(shutil.rmtree, os.environ["POCL_CACHE_DIR"], ignore_errors=True)


def list_devices() -> list[DeviceInfo]:
    """All devices of all platforms, at least one. Raises BackendUnavailable, with what to install."""
    return [_describe(index, handle) for index, handle in enumerate(_handles())]


def choose_device(index: int | None = None) -> DeviceInfo:
    """The device of that index; None is the one that EDGEINFER_OPENCL_DEVICE names, else a GPU before a CPU.

    Raises BackendUnavailable, and InvalidArgument for an index that no device has.
    """
    found = list_devices()
    if index is None:
        index = _wanted_index()
    if index is None:
        return min(found, key=lambda info: _PREFERENCE.index(info.kind))
    if not 0 <= index < len(found):
        names = ", ".join(f"{info.index}: {info.name}" for info in found)
        raise InvalidArgument(f"there is no OpenCL device {index}; there are {names}")
    return found[index]


def handle_of(info: DeviceInfo) -> Any:
    """pyopencl's device. Raises BackendUnavailable if it has gone."""
    handles = _handles()
    if info.index >= len(handles):
        raise BackendUnavailable(f"OpenCL device {info.index}, {info.name}, has gone")
    return handles[info.index]


@contextmanager
def errors_translated(what: str) -> Iterator[None]:
    """Within, errors of OpenCL become BackendLost; see `lost`."""
    cl = open_library()
    try:
        yield
    except cl.Error as error:
        raise lost(what, error) from error


def lost(what: str, error: Any) -> BackendLost:
    """What an error of OpenCL is here: what failed, why, and what to do."""
    return BackendLost(f"OpenCL: {what} failed: {_explanation(open_library(), error)}")


def _explanation(cl: Any, error: Any) -> str:
    status = cl.status_code
    memory = (status.OUT_OF_HOST_MEMORY, status.OUT_OF_RESOURCES, status.MEM_OBJECT_ALLOCATION_FAILURE)
    text = " ".join(str(error).split())
    if error.code in (*memory, status.INVALID_BUFFER_SIZE):
        return f"{text}; the device is out of memory: use a smaller model or context (-c), or another device"
    if error.code in (status.BUILD_PROGRAM_FAILURE, status.COMPILE_PROGRAM_FAILURE, status.COMPILER_NOT_AVAILABLE):
        return f"{text[:2000]}; the driver cannot compile this kernel: update it, or use another device"
    return f"{text}; the device is lost or its driver broken: use another device, or the CPU"


def _wanted_index() -> int | None:
    wanted = os.environ.get(_VARIABLE)
    if not wanted:
        return None
    if not wanted.isdigit():
        raise InvalidArgument(f"{_VARIABLE} must be the number of a device, see `edgeinfer devices`: found {wanted!r}")
    return int(wanted)


def _handles() -> list[Any]:
    """pyopencl's devices. Raises BackendUnavailable where there is none."""
    cl = open_library()
    try:
        platforms = cl.get_platforms()
    except cl.Error as error:
        reason = _NO_DRIVER if error.code == cl.status_code.PLATFORM_NOT_FOUND_KHR else _explanation(cl, error)
        raise BackendUnavailable(reason) from error
    handles: list[Any] = []
    refusals: list[str] = []
    for platform in platforms:
        try:
            handles += platform.get_devices()
        except cl.Error as error:  # a driver without its hardware
            refusals.append(f"{platform.name}: {' '.join(str(error).split())}")
    if not handles:
        raise BackendUnavailable("; ".join([*refusals, "no OpenCL device was found"]) if platforms else _NO_DRIVER)
    return handles


def _describe(index: int, handle: Any) -> DeviceInfo:
    kinds = open_library().device_type
    kind: DeviceKind = next((kind for name, kind in _KINDS.items() if handle.type & getattr(kinds, name)), "other")
    with errors_translated(f"asking device {index} what it is"):
        extensions = handle.extensions.split()
        return DeviceInfo(
            index=index,
            name=" ".join(handle.name.split()),
            kind=kind,
            platform=" ".join(handle.platform.name.split()),
            version=" ".join(handle.version.split()),
            driver_version=" ".join(handle.driver_version.split()),
            compute_units=handle.max_compute_units,
            memory_bytes=handle.global_mem_size,
            max_buffer_bytes=handle.max_mem_alloc_size,
            local_memory_bytes=handle.local_mem_size,
            max_work_group=handle.max_work_group_size,
            shares_host_memory=bool(handle.host_unified_memory),
            extensions=tuple(name for name in _NOTED_EXTENSIONS if name in extensions),
        )
