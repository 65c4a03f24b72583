"""C simulation: the C++ of the kernels run on this machine, bit for bit what synthesis is given."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import EdgeInferError, InvalidArgument, ShapeError
from edgeinfer.hls.compiler import FOLDER, Headers, build_library, build_program, vendor_headers
from edgeinfer.hls.geometry import Geometry
from edgeinfer.hls.packing import Bytes

__all__ = ["CSimulation", "Headers", "build_library", "build_program", "engine_macros", "vendor_headers"]


def engine_macros(geometry: Geometry, max_in: int, max_out: int) -> dict[str, object]:
    """What `ei_config.hpp` reads, for matrices of up to (max_out, max_in)."""
    return {
        "EI_TRITS": geometry.code.n_trits,
        "EI_ROWS": geometry.rows,
        "EI_TABLES": geometry.tables,
        "EI_PORTS": geometry.n_ports,
        "EI_GEOMETRY_HASH": f"0x{geometry.hash()}ULL",
        "EI_MAX_IN": max_in,
        "EI_MAX_OUT": max_out,
    }


class CSimulation:
    """The kernels of one geometry, compiled with g++ or clang++.

    max_in, max_out: of the matrices that it multiplies. Raises BackendUnavailable, see compiler.py.
    """

    def __init__(
        self,
        geometry: Geometry,
        max_in: int = 6912,
        max_out: int = 13824,
        headers: Headers = Headers.OWN,
        flags: Sequence[str] = (),
    ) -> None:
        self.geometry, self.max_in, self.max_out = geometry, max_in, max_out
        sources = [FOLDER / "tb" / "csim_library.cpp"]
        self._library = ctypes.CDLL(
            str(build_library(sources, headers, engine_macros(geometry, max_in, max_out), flags))
        )
        self._library.ei_csim_error.restype = ctypes.c_char_p
        self._library.ei_csim_geometry.restype = ctypes.c_uint64

    @property
    def hash(self) -> str:
        """The geometry hash that the hardware gives its host."""
        return f"{self._library.ei_csim_geometry():016x}"

    def product(self, stream: Bytes, x: NDArray[np.int8], n_out: int) -> NDArray[np.int32]:
        """W x, (n_out,). stream: of W, as `packing.pack` gives it. x: (n_in,).

        Raises ShapeError for a stream of another size, InvalidArgument for a matrix that is too large.
        """
        self._check(stream, n_out, x.size)
        y = np.empty(n_out, dtype=np.int32)
        x = np.ascontiguousarray(x, dtype=np.int8)
        self._call("ei_csim_product", x, np.ascontiguousarray(stream), n_out, x.size, y)
        return y

    def _check(self, stream: Bytes, n_out: int, n_in: int) -> None:
        if n_in > self.max_in or n_out > self.max_out:
            raise InvalidArgument(
                f"this engine takes matrices of up to ({self.max_out}, {self.max_in}): found ({n_out}, {n_in}); give "
                f"a larger max_in or max_out"
            )
        wanted = self.geometry.stream_bytes(n_out, n_in)
        if stream.size != wanted:
            raise ShapeError(f"({n_out}, {n_in}) must take {wanted} bytes of weights: found {stream.size}")

    def _call(self, name: str, *arguments: NDArray[np.generic] | int | float) -> None:
        given = [
            each.ctypes.data_as(ctypes.c_void_p)
            if isinstance(each, np.ndarray)
            else ctypes.c_float(each)
            if isinstance(each, float)
            else each
            for each in arguments
        ]
        if getattr(self._library, name)(*given):
            raise EdgeInferError(f"the C simulation failed: {self._library.ei_csim_error().decode()}")
