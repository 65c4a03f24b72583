"""Matrices in the memory of a simulated engine, which C code multiplies with by their number."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

from edgeinfer.common.errors import ShapeError
from edgeinfer.hls.compiler import build_library, load_library
from edgeinfer.hls.geometry import Geometry
from edgeinfer.hls.packing import Bytes
from edgeinfer.hls.simulation.engine import Engine

_SOURCE = Path(__file__).parent / "matrices.cpp"


class Matrices:
    """Matrices of an engine, whose products are for one thread at a time. Raises what `Engine` raises.

    product_function: address of `bool product(void* state, int32_t matrix, const int8_t* x, int32_t n, int32_t* y)`, of
    the whole matrix: x (n, n_in), y (n, n_out); false where the engine failed.  state: its first argument. Both are
    valid as long as this object is.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._library = _opened(build_library([_SOURCE]))
        state = self._library.ei_matrices_new(engine.product_function, engine.handle)
        self._state: ctypes.c_void_p | None = ctypes.c_void_p(state)
        self._streams: list[Bytes] = []

    def __del__(self) -> None:
        state: ctypes.c_void_p | None = getattr(self, "_state", None)
        self._state = None
        if state:
            self._library.ei_matrices_delete(state)

    def add(self, stream: Bytes, n_rows: int, n_in: int, first: int = 0, last: int | None = None) -> int:
        """The number of the matrix that rows first..last-1 of a stream are.

        stream: of a matrix (n_rows, n_in), see `packing.pack`; last: None for its last row. Of a part of the rows only
        the tiles that have some are kept. Raises ShapeError for a stream of another size.
        """
        last, geometry = n_rows if last is None else last, self.engine.geometry
        tiles, skipped = tiles_of(geometry, first, last)
        kept = np.ascontiguousarray(some_tiles(stream, n_rows, n_in, tiles, geometry))
        self._streams.append(kept)
        n_kept = min(n_rows, tiles.stop * geometry.rows) - tiles.start * geometry.rows
        self._library.ei_matrices_add(self._state, kept.ctypes.data, n_in, n_kept, skipped, last - first)
        return len(self._streams) - 1

    @property
    def product_function(self) -> int:
        """See the class."""
        return ctypes.cast(self._library.ei_matrices_product, ctypes.c_void_p).value or 0

    @property
    def state(self) -> int:
        """See the class."""
        return self._state.value or 0 if self._state else 0

    @property
    def n_cycles(self) -> int:
        """Cycles of all products so far."""
        return int(self._library.ei_matrices_cycles(self._state))


def tiles_of(geometry: Geometry, first: int, last: int) -> tuple[range, int]:
    """The tiles that have rows first..last-1, and how many rows of the first tile stand before them."""
    tiles = range(first // geometry.rows, geometry.n_tiles(last))
    return tiles, first - tiles.start * geometry.rows


def kept_bytes(geometry: Geometry, n_in: int, first: int, last: int) -> int:
    """Of the tiles that rows first..last-1 of a stream keep in memory."""
    tiles, _ = tiles_of(geometry, first, last)
    return geometry.n_steps(n_in) * len(tiles) * geometry.beat_bytes


def some_tiles(stream: Bytes, n_rows: int, n_in: int, tiles: range, geometry: Geometry) -> Bytes:
    """The stream with these tiles alone. stream: of a matrix (n_rows, n_in). Raises ShapeError for another size."""
    n_steps, n_tiles, beat_bytes = geometry.n_steps(n_in), geometry.n_tiles(n_rows), geometry.beat_bytes
    if stream.size != geometry.stream_bytes(n_rows, n_in):
        raise ShapeError(
            f"({n_rows}, {n_in}) must take {geometry.stream_bytes(n_rows, n_in)} bytes: found {stream.size}; the file "
            f"is cut short or of another matrix or geometry"
        )
    beats = stream[: n_steps * n_tiles * beat_bytes].reshape(n_steps, n_tiles, beat_bytes)
    return beats[:, tiles.start : tiles.stop].reshape(-1)


def _opened(path: Path) -> ctypes.CDLL:
    """The library with the types of its functions."""
    opened = load_library(path)
    opened.ei_matrices_new.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    opened.ei_matrices_new.restype = ctypes.c_void_p
    opened.ei_matrices_delete.argtypes = (ctypes.c_void_p,)
    opened.ei_matrices_delete.restype = None
    opened.ei_matrices_add.argtypes = (ctypes.c_void_p, ctypes.c_void_p, *(ctypes.c_int32,) * 4)
    opened.ei_matrices_add.restype = None
    opened.ei_matrices_cycles.argtypes = opened.ei_matrices_failure.argtypes = (ctypes.c_void_p,)
    opened.ei_matrices_cycles.restype = opened.ei_matrices_failure.restype = ctypes.c_int64
    return opened
