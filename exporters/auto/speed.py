"""Seconds of products by format, and how busy other programs keep the machine while they are timed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from edgeinfer.backends.native import _core
from edgeinfer.backends.native.machine import best_isa, build_id
from edgeinfer.common.other_work import Clock, LoadMeter, MachineClock
from edgeinfer.exporters.auto.candidates import Subject, uniform
from edgeinfer.models.gguf import GGMLType
from edgeinfer.record_cache import read_record, record_folder, record_name, write_record
from edgeinfer.speculation.acceptance import AcceptanceTable
from edgeinfer.speculation.calibration import SIZES
from edgeinfer.speculation.cost import MAX_TOKENS, CostCurve, CostModel
from edgeinfer.speculation.throughput import best_chain

_WEIGHTS = 32 << 20  # of a matrix at most
_BYTES = 32 << 20  # of matrices that follow one another, so that each comes from memory
_ROUNDS = 5
_FILL = 0x55  # scales that are usual numbers
MOST_LOAD = 0.2  # cores that others use, above which times are those of a busy machine
_VERSION = 2
_UNIFORM = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


class Times(NamedTuple):
    """Seconds of a product in each format, and how many cores others used meanwhile."""

    seconds: Mapping[GGMLType, float]
    load: float


class Speeds:
    """Seconds of products with matrices of some shapes, kept on disk by machine and build. n_threads: of a pass.

    What was measured on a busy machine is measured again the next time, and the smaller times are kept.
    """

    def __init__(self, n_threads: int, isa: str | None = None) -> None:
        self._n_threads, self._isa = n_threads, isa or best_isa()
        self._known: dict[tuple[tuple[int, int], int, GGMLType], float] = {}

    def of(self, subject: Subject, type: GGMLType, n: int) -> float:
        """Seconds that a tensor takes in a pass of n tokens; of experts those that n tokens probably want."""
        if not subject.n_used:
            return 0.0
        return self._of(subject, subject.formats, n)[type]

    def alone(self, subject: Subject, type: GGMLType, n: int) -> float:
        """The same without measuring other formats."""
        return self._of(subject, (type,), n)[type] if subject.n_used else 0.0

    def _of(self, subject: Subject, formats: Sequence[GGMLType], n: int) -> dict[GGMLType, float]:
        n_wanted, n_each = expected_experts(subject.n_matrices, subject.n_used, n)
        found = self.matrix(subject.shape, formats, n_each)
        return {type: n_wanted * seconds for type, seconds in found.items()}

    def matrix(self, shape: tuple[int, int], formats: Sequence[GGMLType], n: int) -> dict[GGMLType, float]:
        """Seconds of a product with n tokens in each format."""
        missing = [type for type in formats if (shape, n, type) not in self._known]
        if missing:
            key = record_name("auto", _VERSION, build_id(), self._isa, self._n_threads, shape, sorted(formats), n)
            times = times_of(read_record(record_folder("formats"), key), formats)
            if times is None or times.load > MOST_LOAD:
                found = measure(shape, formats, n, self._n_threads, self._isa)
                times = found if times is None else lower(times, found)
                write_record(record_folder("formats"), key, record_of(times))
            self._known |= {(shape, n, type): seconds for type, seconds in times.seconds.items()}
        return {type: self._known[shape, n, type] for type in formats}


def times_of(record: Any, formats: Sequence[GGMLType]) -> Times | None:
    """What a record says of these formats, None where it is none."""
    try:
        times = Times({type: float(record["seconds"][type.name]) for type in formats}, float(record["load"]))
    except (KeyError, TypeError, ValueError):
        return None
    return times if all(0 < each < math.inf for each in times.seconds.values()) and times.load >= 0 else None


def record_of(times: Times) -> dict[str, Any]:
    """See times_of."""
    return {"seconds": {type.name: seconds for type, seconds in times.seconds.items()}, "load": times.load}


def lower(some: Times, others: Times) -> Times:
    """The smaller time of each format: other programs make a product slower, never faster. All formats are in both."""
    least = {type: min(seconds, others.seconds[type]) for type, seconds in some.seconds.items()}
    return Times(least, min(some.load, others.load))


def expected_experts(n_matrices: int, n_used: int, n: int) -> tuple[float, int]:
    """How many experts n tokens want, if they choose independently, and how many tokens each of these has."""
    if n_matrices <= 1:
        return 1.0, n
    n_wanted = n_matrices * (1 - (1 - n_used / n_matrices) ** n)
    return n_wanted, max(1, round(n * n_used / n_wanted))


def measure(
    shape: tuple[int, int],
    formats: Sequence[GGMLType],
    n: int,
    n_threads: int,
    isa: str,
    clock: Clock = MachineClock(),  # noqa: B008
) -> Times:
    """Seconds of a product with a matrix of that shape, the least of some rounds, which take the formats in turn."""
    best = dict.fromkeys(formats, math.inf)
    n_out, n_in = shape
    part = min(n_out, max(1, _WEIGHTS // n_in // 16) * 16)  # of a large matrix
    matrices = {type: _made_up((part, n_in), type) for type in formats}
    meter = LoadMeter(clock)
    for _ in range(_ROUNDS):
        for type, group in matrices.items():
            best[type] = min(best[type], _core.time_products(group, isa, n_threads, n) / len(group))
    return Times({type: seconds * n_out / part for type, seconds in best.items()}, meter.load())


def _made_up(shape: tuple[int, int], type: GGMLType) -> list[_core.PackedMatrix]:
    n_bytes = type.n_bytes(math.prod(shape))
    source = np.full(n_bytes, _FILL, dtype=np.uint8)
    matrix = [_core.PackedMatrix(int(type), *shape, source) for _ in range(max(1, _BYTES // n_bytes))]
    return matrix


def drafted_tokens(subjects: Sequence[Subject], n_bytes: float, speeds: Speeds) -> int:
    """Tokens of the passes with the most expected tokens a millisecond, for the usual acceptance and free drafts.

    Passes are those of the largest uniform format that fits into n_bytes, or of the smallest one.
    """
    types = _fitting(subjects, n_bytes)
    seconds = {n: sum(speeds.alone(subject, types[subject.name], n) for subject in subjects) for n in SIZES}
    return best_pass(seconds)


def best_pass(seconds: Mapping[int, float]) -> int:
    """The same from the seconds of passes by number of tokens, at least 2."""
    verify_ms = CostModel(CostCurve(0, seconds, 0, {})).milliseconds(0)
    return 1 + best_chain(AcceptanceTable().acceptance_rate, 0.0, verify_ms, MAX_TOKENS - 1)[0]


def _fitting(subjects: Sequence[Subject], n_bytes: float) -> dict[str, GGMLType]:
    mixes = [uniform(subjects, GGMLType[name]) for name in _UNIFORM]
    sizes = [sum(subject.n_bytes(types[subject.name]) for subject in subjects) for types in mixes]
    return mixes[max((i for i, size in enumerate(sizes) if size <= n_bytes), default=0)]
