"""C simulation: the C++ of the kernels run on this machine, bit for bit what synthesis is given."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import BadBoardFolder, EdgeInferError, InvalidArgument, ShapeError
from edgeinfer.hls.compiler import FOLDER, Headers, build_library, build_program, load_library, vendor_headers
from edgeinfer.hls.files.folder import BoardFolder
from edgeinfer.hls.files.integrity import header_faults
from edgeinfer.hls.geometry import Geometry
from edgeinfer.hls.packing import Bytes, to_ports

__all__ = ["CSimulation", "Headers", "build_bench", "build_kernels", "build_library", "build_program", "vendor_headers"]

Floats = NDArray[np.float32]
_MOST_PORTS, _DONE, _WRONG_GEOMETRY = 4, 1, 2  # of ei_linear_axi.hpp


def engine_macros(geometry: Geometry, max_in: int, max_out: int) -> dict[str, object]:
    """What `ei_config.hpp` reads, for matrices of up to (max_out, max_in)."""
    return {
        "EI_TRITS": geometry.code.n_trits,
        "EI_ROWS": geometry.rows,
        "EI_TABLES": geometry.tables,
        "EI_PORTS": geometry.n_ports,
        "EI_GEOMETRY_HASH": f'"{geometry.hash()}"',
        "EI_MAX_INPUTS": max_in,
        "EI_MAX_OUTPUTS": max_out,
    }


def build_kernels(
    geometry: Geometry, max_in: int, max_out: int, headers: Headers = Headers.OWN, flags: Sequence[str] = ()
) -> Path:
    """The library that CSimulation loads."""
    source = FOLDER / "tb" / "csim_library.cpp"
    return build_library([source], headers, engine_macros(geometry, max_in, max_out), flags)


def build_bench(folder: BoardFolder, headers: Headers = Headers.OWN, flags: Sequence[str] = ()) -> Path:
    """The test bench `tb/tb_tlmm.cpp`, a program for that folder; see there for its arguments.

    Raises BadBoardFolder where a header is not what the manifest says, and what build_program raises.
    """
    for fault in header_faults(folder):  # it becomes part of a program: nothing of somebody else's may stand in it
        raise BadBoardFolder(fault)
    # The header's own hash names the build, as a folder may be written again.
    digest = hashlib.sha256((folder.path / "edgeinfer_model.h").read_bytes()).hexdigest()
    defines = {"EI_MODEL_HEADER": 1, "EI_MODEL_HEADER_SHA256": digest}
    sources = [FOLDER / "tb" / "tb_tlmm.cpp", FOLDER / "src" / "ei_tlmm_top.cpp"]
    return build_program(sources, headers, defines, [f"-I{folder.path}", *flags])


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
        self._library = load_library(build_kernels(geometry, max_in, max_out, headers, flags))
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

    def linear(self, stream: Bytes, scales: Floats, x: Floats, geometry_hash: str = "") -> Floats:
        """(n_tokens, n_out): what `arithmetic.linear` gives, by the memory ports of `ei_linear_axi`.

        stream: of the matrix. scales: (n_out,). x: (n_tokens, n_in). geometry_hash: of the stream, this engine's when
        empty. Raises BadBoardFolder where the engine refuses it, and what `product` raises.
        """
        if self.geometry.n_ports > _MOST_PORTS:
            raise InvalidArgument(f"ei_linear_axi has 1 to {_MOST_PORTS} ports: found {self.geometry.n_ports}")
        (n_tokens, n_in), n_out = x.shape, scales.size
        self._check(stream, n_out, n_in)
        ports, y = to_ports(stream, self.geometry), np.empty((n_tokens, n_out), dtype=np.float32)
        given = ctypes.c_uint64(int(geometry_hash or self.hash, 16))
        status = np.zeros(1, dtype=np.uint32)
        sizes = (n_tokens, n_in, n_out)
        size = ctypes.c_size_t(ports.shape[1])
        self._call("ei_csim_linear", _floats(x), ports, size, _floats(scales), *sizes, given, y, status)
        if status[0] == _WRONG_GEOMETRY:
            raise BadBoardFolder(
                f"the weights are packed for geometry {geometry_hash}, and the engine is of {self.hash}: export the "
                f"model for {self.geometry}, or load another engine"
            )
        if status[0] != _DONE:
            raise InvalidArgument(f"ei_linear_axi must take ({n_out}, {n_in}): it ended with status {status[0]}")
        return y

    def norm(self, x: Floats, weight: Floats, epsilon: float) -> tuple[NDArray[np.int8], Floats]:
        """Of x (n_tokens, n), `arithmetic.quantise` of `arithmetic.rms_norm`, by `ei_norm_top`. weight: (n,)."""
        if x.shape[1] > self.max_in or weight.shape != x.shape[1:]:
            raise ShapeError(
                f"rows of up to {self.max_in} and a weight alike are wanted: found {x.shape}, {weight.shape}"
            )
        q, scales = np.empty(x.shape, dtype=np.int8), np.empty(len(x), dtype=np.float32)
        self._call("ei_csim_norm", _floats(x), _floats(weight), ctypes.c_float(epsilon), *x.shape, q, scales)
        return q, scales

    def _check(self, stream: Bytes, n_out: int, n_in: int) -> None:
        if not (1 <= n_in <= self.max_in and 1 <= n_out <= self.max_out):
            raise InvalidArgument(
                f"this engine takes matrices of (1, 1) to ({self.max_out}, {self.max_in}): found ({n_out}, {n_in}); "
                f"give a larger max_in or max_out"
            )
        wanted = self.geometry.stream_bytes(n_out, n_in)
        if stream.size != wanted:
            raise ShapeError(f"({n_out}, {n_in}) must take {wanted} bytes of weights: found {stream.size}")

    def _call(self, name: str, *arguments: Any) -> None:
        given = [each.ctypes.data_as(ctypes.c_void_p) if isinstance(each, np.ndarray) else each for each in arguments]
        if getattr(self._library, name)(*given):
            raise EdgeInferError(f"the C simulation failed: {self._library.ei_csim_error().decode()}")


def _floats(values: NDArray[np.floating[Any]]) -> Floats:
    return np.ascontiguousarray(values, dtype=np.float32)
