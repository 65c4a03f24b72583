"""Weights and importance on which quantisers are compared, the same bits wherever they are made.

They come from the raw bits of PCG64 by sums, products, quotients and roots, which every NumPy computes alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from edgeinfer.models.formats import _quantize
from edgeinfer.models.gguf import GGMLType

Floats = NDArray[np.float32]
FORMATS = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
N_ROWS, N_IN = 11, 768  # rows that do not fill the lanes


def gaussian(bits: np.random.PCG64, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Sums of 12 uniform numbers, of deviation 1."""
    n = int(np.prod(shape))
    uniform = (bits.random_raw(12 * n) >> np.uint64(11)) * 2.0**-53
    return (uniform.reshape(12, n).cumsum(axis=0)[-1] - 6).reshape(shape)


def matrices() -> dict[str, Floats]:
    """Weights (N_ROWS, N_IN) of each kind."""
    bits = np.random.PCG64(37)
    shape = (N_ROWS, N_IN)
    normal, spread = gaussian(bits, shape), np.sqrt(sum(np.square(gaussian(bits, shape)) for _ in range(3)) / 3)
    powers = np.ldexp(1.0, (bits.random_raw(N_ROWS * N_IN) % np.uint64(24)).astype(int) - 12).reshape(shape)
    some_zeros = normal.copy()
    some_zeros[:, ::3] = some_zeros[2] = some_zeros[3, :256] = some_zeros[4, 256:300] = 0
    made = {
        "gaussian": 0.02 * normal,
        "heavy tails": 0.02 * normal / spread,  # Student's t with 3 degrees of freedom
        "many sizes": np.clip(normal * powers, -60000, 60000),
        "some zeros": some_zeros,
        "zeros": np.zeros(shape),
        "blocks of one number": np.repeat(normal[:, :: N_IN // 24], 32, axis=1),
        "positive": np.abs(normal),
        "negative": -np.abs(normal),
        "far from zero": normal + 5,
        "few levels": np.round(normal * 3),
        "tiny": 1e-7 * normal,
        "subnormal": 1e-39 * normal,
        "huge": np.clip(12000 * normal, -65504, 65504),
    }
    return {name: values.astype(np.float32) for name, values in made.items()}


def importances() -> dict[str, Floats | None]:
    """Importance (N_IN,) of each kind, and none."""
    bits = np.random.PCG64(38)
    squares = np.square(gaussian(bits, (N_IN,))) + 0.01
    unseen = squares.copy()
    unseen[::5] = 0
    made = {"flat": np.ones(N_IN), "squares": squares, "steep": 1e-4 * squares**4, "some columns unseen": unseen}
    return {"none": None} | {name: values.astype(np.float32) for name, values in made.items()}


def cases(format: str) -> Iterator[tuple[str, Floats, Floats | None]]:
    """(name, weights, importance) of every pair that can change the bytes."""
    for importance, columns in importances().items():
        if columns is None or format not in ("F16", "BF16", "Q8_0"):
            for name, weights in matrices().items():
                yield f"{name}, {importance}", weights, columns


def quantized(
    format: str, weights: Floats, columns: Floats | None, n_threads: int = 1, isa: str | None = None
) -> NDArray[np.uint8]:
    """The bytes of llama.cpp's search on one instruction set."""
    to = np.empty(GGMLType[format].n_bytes(weights.size), dtype=np.uint8)
    _quantize.quantize(format, "plain" if columns is None else "weighted", weights, columns, to, n_threads, isa)
    return to


def hash_of(data: NDArray[np.uint8]) -> str:
    """The first 16 digits of their SHA-256."""
    return hashlib.sha256(data).hexdigest()[:16]
