"""Ternary matrices as the stream of an engine, and back.

A beat is what the engine takes in a cycle: the indices of R rows and T tables. Index (r, t) has n_bits of its encoding
from bit n_bits * (r * T + t) on, bit 0 being the lowest of byte 0. Beats follow each other tile after tile within a
step of T * G inputs, step after step::

    for step: for tile: beat    row = tile * R + r,  input = (step * T + t) * G + j,  j = 0..G-1

Inputs and rows past the matrix have weight 0. The stream is then dealt to the ports, LANE_BYTES in turn: port p has
bytes [16 p, 16 p + 16) of each 16 * n_ports.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import ShapeError
from edgeinfer.hls.geometry import LANE_BYTES, Encoding, Geometry

Trits = NDArray[np.int8]
Bytes = NDArray[np.uint8]

_PIECE_BYTES = 2 << 20  # of trits that are packed at once: they stay in a cache


def pack(trits: Trits, geometry: Geometry) -> Bytes:
    """The stream of a matrix, uint8 (stream_bytes,). trits: int8 (n_out, n_in). Raises ShapeError for other numbers."""
    n_out, n_in = trits.shape
    stream = np.zeros(geometry.stream_bytes(n_out, n_in), dtype=np.uint8)
    n_steps, n_tiles = geometry.n_steps(n_in), geometry.n_tiles(n_out)
    beats = stream[: n_steps * n_tiles * geometry.beat_bytes].reshape(n_steps, n_tiles, geometry.beat_bytes)
    at_once = max(1, _PIECE_BYTES // max(1, n_in * geometry.rows))
    for tile in range(0, n_tiles, at_once):
        piece = trits[tile * geometry.rows : (tile + at_once) * geometry.rows]
        beats[:, tile : tile + at_once] = _beats(piece, geometry)
    return stream


def unpack(stream: Bytes, n_out: int, n_in: int, geometry: Geometry) -> Trits:
    """The trits (n_out, n_in) of `pack`.

    Raises ShapeError for another size, for an index that no weights have, and for padding that is not 0.
    """
    if stream.size != geometry.stream_bytes(n_out, n_in):
        raise ShapeError(
            f"({n_out}, {n_in}) must take {geometry.stream_bytes(n_out, n_in)} bytes: found {stream.size}; the file is "
            f"cut short or of another matrix or geometry"
        )
    n_steps, n_tiles = geometry.n_steps(n_in), geometry.n_tiles(n_out)
    n_bytes = n_steps * n_tiles * geometry.beat_bytes
    if stream[n_bytes:].any():
        raise ShapeError("bytes past the last beat must be 0: found others; the file is damaged")
    beats = stream[:n_bytes].reshape(n_steps, n_tiles, geometry.beat_bytes)
    trits = np.empty((n_tiles * geometry.rows, n_steps * geometry.step_inputs), dtype=np.int8)
    at_once = max(1, _PIECE_BYTES // max(1, n_steps * geometry.step_inputs * geometry.rows))
    for tile in range(0, n_tiles, at_once):
        piece = trits[tile * geometry.rows : (tile + at_once) * geometry.rows]
        piece[:] = _trits(beats[:, tile : tile + at_once], geometry)
    if trits[n_out:].any() or trits[:, n_in:].any():
        raise ShapeError("weights past the matrix must be 0: found others; the file is damaged or of another matrix")
    return np.ascontiguousarray(trits[:n_out, :n_in])


def to_ports(stream: Bytes, geometry: Geometry) -> Bytes:
    """What each port reads, (n_ports, bytes), of a stream of `pack`."""
    lanes = stream.reshape(-1, geometry.n_ports, LANE_BYTES)
    return np.ascontiguousarray(lanes.transpose(1, 0, 2)).reshape(geometry.n_ports, -1)


def from_ports(ports: Bytes, geometry: Geometry) -> Bytes:
    """The stream of what each port reads, (n_ports, bytes)."""
    lanes = ports.reshape(geometry.n_ports, -1, LANE_BYTES)
    return np.ascontiguousarray(lanes.transpose(1, 0, 2)).reshape(-1)


def _beats(trits: Trits, geometry: Geometry) -> Bytes:
    """Beats (n_steps, n_tiles, beat_bytes) of some rows, (n_rows, n_in): whole tiles, unless they are the last."""
    n_rows, n_in = trits.shape
    if trits.size and (trits.min() < -1 or trits.max() > 1):
        raise ShapeError(f"trits must be -1, 0 or 1: found {trits.min()}..{trits.max()}; this matrix is not ternary")
    code, n_tiles, n_steps = geometry.code, geometry.n_tiles(n_rows), geometry.n_steps(n_in)
    padded = np.zeros((n_tiles * geometry.rows, n_steps * geometry.step_inputs), dtype=np.int8)
    padded[:n_rows, :n_in] = trits
    digits = padded.reshape(-1).view(np.uint8)
    indices = digits[code.n_trits - 1 :: code.n_trits].copy()  # modulo 256, where -1 is 255, until `zero` is added
    for j in range(code.n_trits - 2, -1, -1):
        indices *= np.uint8(3)
        indices += digits[j :: code.n_trits]
    indices += np.uint8(code.zero)
    by_row = indices.reshape(n_tiles, geometry.rows, n_steps, geometry.tables)
    by_beat = np.ascontiguousarray(by_row.transpose(2, 0, 1, 3))
    return _DENSE[code.n_bits](by_beat.reshape(-1)).reshape(n_steps, n_tiles, geometry.beat_bytes)


def _trits(beats: Bytes, geometry: Geometry) -> Trits:
    """Trits (n_tiles * R, n_steps * step_inputs) of beats (n_steps, n_tiles, beat_bytes)."""
    code, (n_steps, n_tiles) = geometry.code, beats.shape[:2]
    indices = _SPARSE[code.n_bits](np.ascontiguousarray(beats).reshape(-1))
    if indices.size and indices.max() >= code.n_entries:
        raise ShapeError(
            f"{geometry.encoding} has indices of 0 to {code.n_entries - 1}: found {indices.max()}; the file is damaged "
            f"or of another encoding"
        )
    by_beat = indices.reshape(n_steps, n_tiles, geometry.rows, geometry.tables)
    by_row = np.ascontiguousarray(by_beat.transpose(1, 2, 0, 3)).reshape(-1)
    return _digits(code).take(by_row, axis=0).reshape(n_tiles * geometry.rows, -1)


def _digits(code: Encoding) -> Trits:
    """The trits of each index, (n_entries, n_trits)."""
    powers = 3 ** np.arange(code.n_trits)
    return (np.arange(code.n_entries)[:, None] // powers % 3 - 1).astype(np.int8)


# ---- indices of fewer than 8 bits ------------------------------------------------------------------------------------
# Words of several indices, a byte each, whose fields are pushed together in pairs; and the same way back.


def _as_they_are(indices: Bytes) -> Bytes:
    return indices


def _dense_5(indices: Bytes) -> Bytes:
    """Five bytes of each eight indices."""
    x = indices.view("<u8")
    x = x & _word(0x001F001F001F001F) | x >> _word(3) & _word(0x03E003E003E003E0)
    x = x & _word(0x000003FF000003FF) | x >> _word(6) & _word(0x000FFC00000FFC00)
    x = x & _word(0x00000000000FFFFF) | x >> _word(12) & _word(0x000000FFFFF00000)
    return np.ascontiguousarray(x.view(np.uint8).reshape(-1, 8)[:, :5])


def _sparse_5(data: Bytes) -> Bytes:
    words = np.zeros((data.size // 5, 8), dtype=np.uint8)
    words[:, :5] = data.reshape(-1, 5)
    x = words.view("<u8")
    x = x & _word(0x00000000000FFFFF) | (x & _word(0x000000FFFFF00000)) << _word(12)
    x = x & _word(0x000003FF000003FF) | (x & _word(0x000FFC00000FFC00)) << _word(6)
    x = x & _word(0x001F001F001F001F) | (x & _word(0x03E003E003E003E0)) << _word(3)
    return x.view(np.uint8).reshape(-1)


def _dense_2(indices: Bytes) -> Bytes:
    """A byte of each four indices."""
    x = indices.view("<u4")
    x = x & np.uint32(0x00030003) | x >> np.uint32(6) & np.uint32(0x000C000C)
    return (x & np.uint32(0x0F) | x >> np.uint32(12) & np.uint32(0xF0)).astype(np.uint8)


def _sparse_2(data: Bytes) -> Bytes:
    x = data.astype("<u4")
    x = x & np.uint32(0x0F) | (x & np.uint32(0xF0)) << np.uint32(12)
    x = x & np.uint32(0x00030003) | (x & np.uint32(0x000C000C)) << np.uint32(6)
    return x.view(np.uint8)


def _word(value: int) -> np.uint64:
    return np.uint64(value)


_DENSE = {8: _as_they_are, 5: _dense_5, 2: _dense_2}
_SPARSE = {8: _as_they_are, 5: _sparse_5, 2: _sparse_2}
