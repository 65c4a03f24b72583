"""A simulated engine: products with their cycles."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import InvalidArgument, ShapeError, SimulationError
from edgeinfer.hls.compiler import load_library
from edgeinfer.hls.geometry import Geometry, accumulator_bits
from edgeinfer.hls.packing import Bytes
from edgeinfer.hls.simulation.build import Parameters, library
from edgeinfer.hls.stalls import Stalls

_X = ctypes.c_void_p
_HUNG, _ASSERTION = -1, -2
_PATIENCE = 8  # how much longer than with the stalls that are to be expected a product may take


class _Stalls(ctypes.Structure):
    """`ei_stalls` of driver.cpp."""

    _fields_ = [
        ("seeds", ctypes.c_uint64 * 3),
        ("stalls", ctypes.c_double * 3),
        ("length", ctypes.c_int64),
        ("patience", ctypes.c_int64),
    ]


class Engine:
    """A Verilog engine for matrices of up to (max_out, max_in). It has one state: use it in one thread at a time.

    Raises BackendUnavailable where Verilator is missing. The first one of its kind compiles for some seconds.
    """

    def __init__(self, geometry: Geometry, max_in: int, max_out: int) -> None:
        if max_in < 1 or max_out < 1:
            raise InvalidArgument(f"sizes must be 1 or more: found {max_in} inputs and {max_out} outputs")
        self.geometry, self.max_in, self.max_out = geometry, max_in, max_out
        steps, tiles = geometry.n_steps(max_in), geometry.n_tiles(max_out)
        acc_bits = accumulator_bits(max(max_in, geometry.step_inputs))
        self.parameters = Parameters(geometry, acc_bits, steps, tiles)
        self._library = _opened(library(self.parameters))
        self._engine = ctypes.c_void_p(self._library.ei_engine_new())

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self._library.ei_engine_delete(self._engine)

    @property
    def handle(self) -> int:
        """The engine as C code takes it."""
        return self._engine.value or 0

    @property
    def product_function(self) -> int:
        """Address of `int64_t ei_engine_product(void* engine, x, n_in, stream, n_out, y)` of driver.cpp."""
        return ctypes.cast(self._library.ei_engine_product, ctypes.c_void_p).value or 0

    def product(
        self, x: NDArray[np.int8], stream: Bytes, n_out: int, stalls: Stalls | None = None
    ) -> tuple[NDArray[np.int32], list[int]]:
        """(y, cycles): y int32 (n, n_out), and the cycles of each row from its start to its last result.

        x: int8 (n, n_in). stream: of `packing.pack`. Raises ShapeError for a stream of another size,
        SimulationError where the engine hangs or an assertion in it fails.
        """
        x = np.ascontiguousarray(x, dtype=np.int8)
        self._check(x, stream, n_out)
        stream = np.ascontiguousarray(stream)
        y = np.empty((len(x), n_out), dtype=np.int32)
        return y, [self._product(x[i], stream, y[i], stalls) for i in range(len(x))]

    def _product(self, x: NDArray[np.int8], stream: Bytes, y: NDArray[np.int32], stalls: Stalls | None) -> int:
        arguments = (self._engine, x.ctypes.data, x.size, stream.ctypes.data, y.size, y.ctypes.data)
        if stalls is None:
            cycles = self._library.ei_engine_product(*arguments)
        else:
            patience = round(_PATIENCE / (1 - max(stalls.shares)))
            seeds, shares = (ctypes.c_uint64 * 3)(*stalls.seeds), (ctypes.c_double * 3)(*stalls.shares)
            record = _Stalls(seeds, shares, stalls.length, patience)
            cycles = self._library.ei_engine_product_stalled(*arguments, ctypes.byref(record))
        if cycles in (_HUNG, _ASSERTION):
            why = "an assertion in the Verilog failed" if cycles == _ASSERTION else "the engine hangs"
            raise SimulationError(f"({y.size}, {x.size}) on {self.geometry}: {why}; this is a fault of the engine")
        return int(cycles)

    def _check(self, x: NDArray[np.int8], stream: Bytes, n_out: int) -> None:
        if x.ndim != 2 or not 1 <= x.shape[1] <= self.max_in or not 1 <= n_out <= self.max_out:
            raise ShapeError(
                f"the engine is made for (n, 1..{self.max_in}) activations and 1..{self.max_out} outputs: "
                f"found {x.shape} and {n_out}"
            )
        n_bytes = self.geometry.stream_bytes(n_out, x.shape[1])
        if stream.dtype != np.uint8 or stream.shape != (n_bytes,):
            raise ShapeError(
                f"({n_out}, {x.shape[1]}) must have a stream of {n_bytes} bytes: found {stream.dtype} {stream.shape}; "
                f"it is cut short or of another matrix or geometry"
            )


def _opened(path: Path) -> ctypes.CDLL:
    """The library with the types of its functions."""
    opened = load_library(path)
    sizes = (ctypes.c_void_p, _X, ctypes.c_int32, _X, ctypes.c_int32, _X)
    opened.ei_engine_new.restype = ctypes.c_void_p
    opened.ei_engine_delete.argtypes = (ctypes.c_void_p,)
    opened.ei_engine_product.argtypes = sizes
    opened.ei_engine_product_stalled.argtypes = (*sizes, ctypes.POINTER(_Stalls))
    opened.ei_engine_product.restype = opened.ei_engine_product_stalled.restype = ctypes.c_int64
    return opened
