"""Tables of a folder for a board: embeddings, the output matrix and its first stage, rotations."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from edgeinfer.exporters.ternary.source import StoredTensor
from edgeinfer.hls.files.writer import BoardWriter
from edgeinfer.hls.packing import Trits
from edgeinfer.models.formats import quantize
from edgeinfer.models.gguf import GGMLType
from edgeinfer.models.spec import RopeSpec

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
_THRESHOLD = 0.7  # of the mean magnitude of a row


# ---- embeddings and output matrix ------------------------------------------------------------------------------------


def write_int8(writer: BoardWriter, file: str, name: str, tensor: StoredTensor) -> None:
    """Rows as int8, with a float32 scale each in the array `NAME_scales` after them."""
    scales: list[Floats] = []

    def pieces() -> Iterator[NDArray[np.int8]]:
        for rows in tensor.floats():
            codes, found = int8_rows(rows)
            scales.append(found)
            yield codes

    writer.add_rows(file, name, "|i1", tensor.shape, pieces())
    writer.add_array(file, f"{name}_scales", np.concatenate(scales))


def int8_rows(rows: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Codes round(w * 127 / max|w|), halves to even, and scales max|w| / 127: w is about code * scale of its row."""
    largest: Floats = np.abs(rows).max(axis=1)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest >= 1e-30)
    scaled = rows * inverse[:, None]
    return np.rint(scaled, out=scaled).astype(np.int8), largest / np.float32(127)


def write_bf16(writer: BoardWriter, file: str, name: str, tensor: StoredTensor) -> None:
    """Rows as bfloat16, rounded to nearest even, in an array of uint16."""
    pieces = (quantize(GGMLType.BF16, rows).view("<u2").reshape(rows.shape) for rows in tensor.floats())
    writer.add_rows(file, name, "<u2", tensor.shape, pieces)


def ternary_rows(tensor: StoredTensor) -> tuple[Trits, Floats]:
    """Trits int8 of the shape of a matrix, and a scale a row, that come near to it.

    A weight is 0 below 0.7 times the mean magnitude of its row; the scale is the mean of the others (Li and Liu,
    arXiv:1605.04711, section 2.2).
    """
    trits, scales = np.empty(tensor.shape, dtype=np.int8), np.empty(tensor.shape[0], dtype=np.float32)
    first = 0
    for rows in tensor.floats():
        last, magnitudes = first + len(rows), np.abs(rows)
        is_used = magnitudes > _THRESHOLD * magnitudes.mean(axis=1, dtype=np.float64, keepdims=True)
        np.multiply(np.sign(rows), is_used, out=trits[first:last], casting="unsafe")
        sums = (magnitudes * is_used).sum(axis=1, dtype=np.float64)
        scales[first:last] = sums / np.maximum(is_used.sum(axis=1), 1)
        first = last
    return trits, scales


# ---- rotations -------------------------------------------------------------------------------------------------------


def rotations(rope: RopeSpec, n_ctx: int) -> Floats:
    """(2, n_ctx, n_dims / 2): cosines, then sines, of each position's rotation, times the magnitude."""
    angles = np.arange(n_ctx)[:, None] * np.array(rope.inverse_frequencies)
    sines, cosines = sines_and_cosines(angles)
    return (np.stack([cosines, sines]) * rope.magnitude).astype(np.float32)


def sines_and_cosines(x: Doubles) -> tuple[Doubles, Doubles]:
    """Of 0 <= x < 2^20, to about 1e-15, with operations that give the same bits on every machine.

    Reduction by pi/2 in three parts (Cody and Waite, 1980), then Taylor polynomials on [-pi/4, pi/4].
    """
    n = np.rint(x * 0.6366197723675814)
    r = ((x - n * 1.57079632673412561417e00) - n * 6.07710050630396597660e-11) - n * 2.02226624879595063154e-21
    z = r * r
    sine, cosine = np.full_like(z, -1 / 1307674368000), np.full_like(z, 1 / 20922789888000)
    for factor in (1 / 6227020800, -1 / 39916800, 1 / 362880, -1 / 5040, 1 / 120, -1 / 6):
        sine = sine * z + factor
    for factor in (-1 / 87178291200, 1 / 479001600, -1 / 3628800, 1 / 40320, -1 / 720, 1 / 24, -1 / 2):
        cosine = cosine * z + factor
    sine, cosine = r + r * z * sine, 1 + z * cosine
    quarter = n.astype(np.int64) & 3
    sines = np.choose(quarter, [sine, cosine, -sine, -cosine])
    return sines, np.choose(quarter, [cosine, -sine, -cosine, sine])
