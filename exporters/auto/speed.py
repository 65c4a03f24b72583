"""What a product with a matrix costs in each format, measured with the native kernels on made-up matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from edgeinfer.backends.native import _core
from edgeinfer.backends.native.machine import best_isa, build_id
from edgeinfer.exporters.auto.candidates import Subject
from edgeinfer.models.gguf import GGMLType
from edgeinfer.record_cache import read_record, record_folder, record_name, write_record

_WEIGHTS = 32 << 20  # of a matrix at most
_BYTES = 32 << 20  # of matrices that follow one another, so that each comes from memory
_ROUNDS = 5
_FILL = 0x55  # scales that are usual numbers


class Speeds:
    """Seconds of products with matrices of some shapes, kept on disk by machine and build. n_threads: of a pass."""

    def __init__(self, n_threads: int, isa: str | None = None) -> None:
        self._n_threads, self._isa = n_threads, isa or best_isa()
        self._known: dict[tuple[tuple[int, int], int, GGMLType], float] = {}

    def of(self, subject: Subject, type: GGMLType, n: int) -> float:
        """Seconds that a tensor takes in a pass of n tokens; of experts those that n tokens probably want."""
        if not subject.n_used:
            return 0.0
        n_wanted, n_each = expected_experts(subject.n_matrices, subject.n_used, n)
        return n_wanted * self.matrix(subject.shape, subject.formats, n_each)[type]

    def matrix(self, shape: tuple[int, int], formats: Sequence[GGMLType], n: int) -> dict[GGMLType, float]:
        """Seconds of a product with n tokens in each format."""
        missing = [type for type in formats if (shape, n, type) not in self._known]
        if missing:
            key = record_name("auto", build_id(), self._isa, self._n_threads, shape, sorted(formats), n)
            record = read_record(record_folder("formats"), key)
            if not isinstance(record, dict) or set(record) != {type.name for type in formats}:
                found = measure(shape, formats, n, self._n_threads, self._isa)
                record = {type.name: seconds for type, seconds in found.items()}
                write_record(record_folder("formats"), key, record)
            self._known |= {(shape, n, type): float(record[type.name]) for type in formats}
        return {type: self._known[shape, n, type] for type in formats}


def expected_experts(n_matrices: int, n_used: int, n: int) -> tuple[float, int]:
    """How many experts n tokens want, if they choose independently, and how many tokens each of these has."""
    if n_matrices <= 1:
        return 1.0, n
    n_wanted = n_matrices * (1 - (1 - n_used / n_matrices) ** n)
    return n_wanted, max(1, round(n * n_used / n_wanted))


def measure(
    shape: tuple[int, int], formats: Sequence[GGMLType], n: int, n_threads: int, isa: str
) -> dict[GGMLType, float]:
    """Seconds of a product with a matrix of that shape, the least of some rounds, which take the formats in turn."""
    best = dict.fromkeys(formats, math.inf)
    n_out, n_in = shape
    part = min(n_out, max(1, _WEIGHTS // n_in // 16) * 16)  # of a large matrix
    matrices = {type: _made_up((part, n_in), type) for type in formats}
    for _ in range(_ROUNDS):
        for type, group in matrices.items():
            best[type] = min(best[type], _core.time_products(group, isa, n_threads, n) / len(group))
    return {type: seconds * n_out / part for type, seconds in best.items()}


def _made_up(shape: tuple[int, int], type: GGMLType) -> list[_core.PackedMatrix]:
    n_bytes = type.n_bytes(math.prod(shape))
    source = np.full(n_bytes, _FILL, dtype=np.uint8)
    matrix = [_core.PackedMatrix(int(type), *shape, source) for _ in range(max(1, _BYTES // n_bytes))]
    return matrix
