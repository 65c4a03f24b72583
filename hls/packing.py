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

from edgeinfer.errors import ShapeError
from edgeinfer.hls.geometry import LANE_BYTES, Geometry

Trits = NDArray[np.int8]
Bytes = NDArray[np.uint8]


def pack(trits: Trits, geometry: Geometry) -> Bytes:
    """The stream of a matrix, uint8 (stream_bytes,). trits: int8 (n_out, n_in). Raises ShapeError for other numbers."""
    n_out, n_in = trits.shape
    beats = np.empty((geometry.n_steps(n_in), geometry.n_tiles(n_out), geometry.beat_bytes), dtype=np.uint8)
    for step in range(len(beats)):
        first = step * geometry.step_inputs
        beats[step] = _beats_of_step(trits[:, first : first + geometry.step_inputs], geometry)
    stream = np.zeros(geometry.stream_bytes(n_out, n_in), dtype=np.uint8)
    stream[: beats.size] = beats.reshape(-1)
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
    for step in range(n_steps):
        first = step * geometry.step_inputs
        trits[:, first : first + geometry.step_inputs] = _trits_of_step(beats[step], geometry)
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


def _beats_of_step(trits: Trits, geometry: Geometry) -> Bytes:
    """Beats (n_tiles, beat_bytes) of one step. trits: (n_out, up to step_inputs)."""
    code, n_out = geometry.code, len(trits)
    if trits.size and (trits.min() < -1 or trits.max() > 1):
        raise ShapeError(f"trits must be -1, 0 or 1: found {trits.min()}..{trits.max()}; this matrix is not ternary")
    n_rows = geometry.n_tiles(n_out) * geometry.rows
    digits = np.ones((n_rows, geometry.step_inputs), dtype=np.uint8)
    digits[:n_out, : trits.shape[1]] = (trits + np.int8(1)).view(np.uint8)
    powers = (3 ** np.arange(code.n_trits)).astype(np.uint8)
    indices: Bytes = (digits.reshape(n_rows, geometry.tables, code.n_trits) * powers).sum(axis=2, dtype=np.uint8)
    tiles = indices.reshape(-1, geometry.rows * geometry.tables)
    if code.n_bits == 8:
        return tiles
    bits = np.unpackbits(tiles[:, :, None], axis=2, bitorder="little")[:, :, : code.n_bits]
    return np.packbits(bits.reshape(len(tiles), -1), axis=1, bitorder="little")


def _trits_of_step(beats: Bytes, geometry: Geometry) -> Trits:
    """Trits (n_tiles * R, step_inputs) of the beats (n_tiles, beat_bytes) of one step."""
    code = geometry.code
    indices = beats
    if code.n_bits != 8:
        bits = np.unpackbits(beats, axis=1, bitorder="little").reshape(len(beats), -1, code.n_bits)
        indices = np.packbits(bits, axis=2, bitorder="little")[:, :, 0]
    if indices.size and indices.max() >= code.n_entries:
        raise ShapeError(
            f"{geometry.encoding} has indices of 0 to {code.n_entries - 1}: found {indices.max()}; the file is damaged "
            f"or of another encoding"
        )
    powers = (3 ** np.arange(code.n_trits)).astype(np.uint8)
    digits = indices.reshape(-1, geometry.tables, 1) // powers % 3
    return digits.reshape(len(digits), -1).view(np.int8) - np.int8(1)
