"""Products of a ternary matrix and int8 activations on an OpenCL device, from the two-bit format of ternary/packing.py.

Three ways, all exact: multiply-add of unpacked codes ("plain"), packed dot products of 8-bit integers ("dot", where the
device has cl_khr_integer_dot_product), and tables of sums of four in local memory ("lookup", after T-MAC, Wei et al.,
arXiv:2407.00088). Which is fastest depends on the device and is measured on it once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.opencl.device import Kernel, OpenCLDevice
from edgeinfer.common.errors import InvalidArgument, ShapeError
from edgeinfer.models.formats.ternary_packing import LINE_BYTES, ROWS, TWO_BIT_INPUTS, Bytes, Scales, packed_shape

Way = Literal["plain", "dot", "lookup"]

_SOURCES = ("dot.cl", "ternary.cl")
_SCALE_BYTES = 4 * ROWS
_TOKENS = 4  # passed through a line of weights once it is read
_MEASURED_SHAPE = (2560, 2560)
_MEASURED_ROUNDS = 3


class TernaryMatrix:
    """A matrix of trits on a device. packed: row groups of `pack_two_bit`, (n_groups, bytes of a group).

    way: how products are made; None is the fastest one on this device. Raises ShapeError, BackendLost, and
    InvalidArgument for a way that the device lacks.
    """

    def __init__(self, device: OpenCLDevice, packed: Bytes, n_out: int, n_in: int, way: Way | None = None) -> None:
        shape = packed_shape(n_out, n_in, TWO_BIT_INPUTS)
        if packed.dtype != np.uint8 or packed.shape != shape:
            raise ShapeError(
                f"({n_out}, {n_in}) must be packed as uint8 {shape}: found {packed.dtype} {packed.shape}; it is cut "
                "short or of another matrix"
            )
        self.shape = (n_out, n_in)
        self.way = fastest_way(device) if way is None else way
        self._device = device
        self._n_lines = (shape[1] - _SCALE_BYTES) // LINE_BYTES
        self._kernels = _kernels(device, self.way)
        self._scales: Scales = packed[:, :_SCALE_BYTES].copy().view("<f4").astype(np.float32).reshape(-1)[:n_out]
        self._lines = device.upload(packed[:, _SCALE_BYTES:])

    def integers(self, activations: NDArray[np.int8]) -> NDArray[np.int32]:
        """Trits times activations, (n, n_out). activations: (n, n_in). Raises ShapeError, BackendLost."""
        n_out, n_in = self.shape
        if activations.ndim != 2 or activations.shape[1] != n_in or activations.dtype != np.int8:
            raise ShapeError(f"activations must be int8 (n, {n_in}): found {activations.dtype} {activations.shape}")
        n = len(activations)
        if not n:
            return np.empty((0, n_out), dtype=np.int32)
        padded = np.zeros((n, self._n_lines * TWO_BIT_INPUTS), dtype=np.int8)
        padded[:, :n_in] = activations
        out = self._device.buffer(4 * n * n_out)
        codes, sums = self._device.upload(padded), self._device.upload(activations.sum(axis=1, dtype=np.int32))
        if self.way == "lookup":
            (kernel,), width = self._kernels, _lookup_width(self._device)
            self._device.run(kernel, [n_out, n], [ROWS * width, 1], self._lines, codes, out, n_out, self._n_lines)
        else:
            kernel, per_item = (self._kernels[0], 1) if n == 1 else (self._kernels[1], _TOKENS)
            slices = _slices(self._device)
            items = [n_out, slices, -(-n // per_item)]
            self._device.run(kernel, items, [ROWS, slices, 1], self._lines, codes, sums, out, n_out, self._n_lines, n)
        return self._device.read(out, np.empty((n, n_out), dtype=np.int32))

    def product(self, activations: NDArray[np.int8], scales: NDArray[np.float32]) -> NDArray[np.float32]:
        """(n, n_out): the matrix times each row of activations (n, n_in), times the scale of that row (n,)."""
        if scales.shape != activations.shape[:1]:
            raise ShapeError(f"scales must be {activations.shape[:1]}, one a row of activations: found {scales.shape}")
        return self.integers(activations).astype(np.float32) * self._scales * scales[:, None].astype(np.float32)


def available_ways(device: OpenCLDevice) -> tuple[Way, ...]:
    """Ways to make products that the device has."""
    return tuple(way for way in get_args(Way) if way != "dot" or device.has_integer_dot)


def fastest_way(device: OpenCLDevice) -> Way:
    """The fastest way on this device for one token; measured once on a random matrix, in some hundredths of a second.

    The device remembers it. Raises BackendLost.
    """
    if "ternary" not in device.measured:
        seconds = measure_ways(device)
        device.measured["ternary"] = min(seconds, key=seconds.__getitem__)
    return next(way for way in get_args(Way) if way == device.measured["ternary"])


def measure_ways(device: OpenCLDevice, n: int = 1, shape: tuple[int, int] = _MEASURED_SHAPE) -> dict[Way, float]:
    """Seconds of one product of each way, with n tokens and a matrix of that shape: the fastest of some rounds."""
    rng = np.random.default_rng(1)
    packed = rng.integers(0, 256, packed_shape(*shape, TWO_BIT_INPUTS), dtype=np.uint8)
    packed &= ~(packed & packed >> 1 & np.uint8(0x55))  # no code of 3
    activations = rng.integers(-127, 128, (n, shape[1]), dtype=np.int8)
    seconds: dict[Way, float] = {}
    for way in available_ways(device):
        matrix = TernaryMatrix(device, packed, *shape, way)
        matrix.integers(activations)  # compiles, on some drivers
        for _ in range(_MEASURED_ROUNDS):
            started = time.perf_counter()
            matrix.integers(activations)
            elapsed = time.perf_counter() - started
            seconds[way] = min(elapsed, seconds.get(way, elapsed))
    return seconds


def _kernels(device: OpenCLDevice, way: Way) -> Sequence[Kernel]:
    """One for "lookup"; for the others one for a single token and one for _TOKENS of them."""
    if way not in available_ways(device):
        known = ", ".join(available_ways(device))
        raise InvalidArgument(f"ternary products on {device.info.name} can be made by {known}: found {way!r:.80}")
    defines = {"SLICES": _slices(device), "WIDTH": _lookup_width(device)}
    if way == "lookup":
        return (device.kernel("lookup", _SOURCES, defines | {"TOKENS": 1}),)
    defines |= {"INTEGER_DOT": int(way == "dot")}
    return tuple(device.kernel("multiply", _SOURCES, defines | {"TOKENS": n}) for n in (1, _TOKENS))


def _slices(device: OpenCLDevice) -> int:
    """Work-items that share a row: on a CPU one, elsewhere as many as make groups of 128."""
    return 1 if device.is_cpu else max(1, min(128, device.info.max_work_group) // ROWS)


def _lookup_width(device: OpenCLDevice) -> int:
    """Tiles of 16 rows that share a table: groups of 256."""
    return max(1, min(256, device.info.max_work_group) // ROWS)
