"""A device in use: its context and queue, programs, buffers that are counted, and kernels that run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.opencl.library import DeviceInfo, errors_translated, handle_of, lost, open_library
from edgeinfer.common.errors import BackendLost

Buffer = Any  # pyopencl.Buffer
_Number = TypeVar("_Number", bound=np.generic)

_SOURCES = Path(__file__).parent
_NUMBERS = {int: np.int32, float: np.float32}


@dataclass
class Kernel:
    """A compiled kernel; handle is pyopencl's. is_typed: it was told what its numbers are, so that calls are quick."""

    name: str
    handle: Any
    is_typed: bool = False


class OpenCLDevice:
    """A context and an in-order queue on one device, so that what is enqueued later sees what was done before.

    Whatever fails raises BackendLost. has_integer_dot: whether packed dot products are used; by default where the
    device has them, its compiler knows them and their sums are right.  measured: the fastest way to do something, by
    its name.  n_allocated: bytes of all buffers ever made.
    """

    def __init__(self, info: DeviceInfo, has_integer_dot: bool | None = None) -> None:
        self.info = info
        self.measured: dict[str, str] = {}
        self.n_allocated = 0
        self._writes: list[Any] = []  # that may still read from the host's memory
        self._cl = open_library()
        self._programs: dict[tuple[str, ...], Any] = {}
        with errors_translated(f"opening device {info.index}, {info.name},"):
            self._context = self._cl.Context([handle_of(info)])
            self._queue = self._cl.CommandQueue(self._context)
        self.has_integer_dot = self._dots_are_usable() if has_integer_dot is None else has_integer_dot

    @property
    def is_cpu(self) -> bool:
        """Whether work-items of a group run one after the other, so that wide groups only cost."""
        return self.info.kind == "cpu"

    def kernel(self, name: str, sources: Sequence[str], defines: Mapping[str, int] | None = None) -> Kernel:
        """A kernel of these files of this folder, taken as one text behind these macros. Built once."""
        macros = {"INTEGER_DOT": int(self.has_integer_dot)} | dict(defines or {})
        key = (*sources, *(f"-D{name}={value}" for name, value in sorted(macros.items())))
        if key not in self._programs:
            text = "\n".join((_SOURCES / source).read_text() for source in sources)
            self._programs[key] = self._build(text, key[len(sources) :], what=", ".join(sources))
        with errors_translated(f"making kernel {name}"):
            return Kernel(name, self._cl.Kernel(self._programs[key], name))

    def buffer(self, n_bytes: int) -> Buffer:
        """Memory of the device, not initialised; at least 4 bytes."""
        n_bytes = max(4, n_bytes)
        with errors_translated(f"allocating {n_bytes} bytes"):
            buffer = self._cl.Buffer(self._context, self._cl.mem_flags.READ_WRITE, n_bytes)
        self.n_allocated += n_bytes
        return buffer

    def upload(self, array: NDArray[Any]) -> Buffer:
        """A buffer of its own with what the array holds."""
        buffer = self.buffer(array.nbytes)
        self.write(buffer, array)
        return buffer

    def write(self, buffer: Buffer, array: NDArray[Any], at: int = 0) -> None:
        """Enqueue the copy of an array, which must not change until the next `read` or `finish`, from byte `at` on."""
        if array.nbytes:
            with errors_translated(f"writing {array.nbytes} bytes"):
                whole = np.ascontiguousarray(array)
                copy = self._cl.enqueue_copy(self._queue, buffer, whole, dst_offset=at, is_blocking=False)
            self._writes.append(copy)  # it holds the array

    def read(self, buffer: Buffer, out: NDArray[_Number]) -> NDArray[_Number]:
        """Fill a contiguous array from the beginning of a buffer, when all that was enqueued is done."""
        if out.nbytes:
            with errors_translated(f"reading {out.nbytes} bytes"):
                self._cl.enqueue_copy(self._queue, out, buffer, is_blocking=True)
            self._writes.clear()
        return out

    def run(self, kernel: Kernel, items: Sequence[int], group: Sequence[int], *arguments: object) -> None:
        """Enqueue a kernel. items: work-items by dimension, rounded up to whole groups.  group: those of a group.

        Integers are passed as 32 bits, floats as float32; which argument is which must not change.
        """
        whole = tuple([-(-n // size) * size for n, size in zip(items, group, strict=True)])
        try:  # hundreds of times for a token: without the context manager
            if not kernel.is_typed:
                kernel.handle.set_scalar_arg_dtypes([_NUMBERS.get(type(each)) for each in arguments])
                kernel.is_typed = True
            kernel.handle(self._queue, whole, tuple(group), *arguments)
        except self._cl.Error as error:
            raise lost(f"running kernel {kernel.name}", error) from error

    def flush(self) -> None:
        """Have the device begin with what was enqueued."""
        with errors_translated("handing work to the device"):
            self._queue.flush()

    def finish(self) -> None:
        """Wait until all that was enqueued is done."""
        with errors_translated("waiting for the device"):
            self._queue.finish()
        self._writes.clear()

    def _dots_are_usable(self) -> bool:
        """Whether the packed dot products that the device says it has build and give the right sums."""
        self.has_integer_dot = self.info.has_integer_dot
        try:
            return self.has_integer_dot and _sums_are_right(self)
        except BackendLost:
            return False

    def _build(self, text: str, options: Sequence[str], what: str) -> Any:
        with errors_translated(f"building {what}"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what compilers remark on kernels that they accept
            newest = ["-cl-std=CL3.0"] if self.info.has_integer_dot else []  # older C may lack packed dot products
            return self._cl.Program(self._context, text).build(options=[*options, *newest], cache_dir=False)


def check_device(info: DeviceInfo) -> str | None:
    """Why a device cannot be used: what it says when a small kernel is built and run on it. None where it can."""
    try:
        is_right = _sums_are_right(OpenCLDevice(info))
    except BackendLost as error:
        return str(error)
    return (
        None
        if is_right
        else "it calculates wrong: the sums of a small kernel are not what they must be; update its driver"
    )


def _sums_are_right(device: OpenCLDevice) -> bool:
    """Whether dot products of bytes are right on a device. Raises BackendLost."""
    kernel = device.kernel("dot_products", ["dot.cl", "check.cl"])
    codes = np.arange(256, dtype=np.uint32) * np.uint32(0x01020305) & np.uint32(0x7F7F7F7F)
    numbers = np.arange(256, dtype=np.uint32) * np.uint32(0x9E3779B1)
    out = device.buffer(codes.nbytes)
    device.run(kernel, [len(codes)], [16], device.upload(codes), device.upload(numbers), out)
    found = device.read(out, np.empty(len(codes), dtype=np.int32))
    expected = (codes.view(np.uint8).astype(np.int32) * numbers.view(np.int8)).reshape(-1, 4).sum(axis=1)
    return np.array_equal(found, expected)
