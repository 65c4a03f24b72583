"""How many tokens a pass verifies where the engine drafts, by the policy of speculation and the kernels' times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgeinfer.exporters.auto.candidates import Subject, uniform
from edgeinfer.exporters.auto.speed import Speeds
from edgeinfer.models.gguf import GGMLType
from edgeinfer.speculation.acceptance import AcceptanceTable
from edgeinfer.speculation.calibration import SIZES
from edgeinfer.speculation.cost import MAX_TOKENS, CostCurve, CostModel
from edgeinfer.speculation.throughput import best_chain

_UNIFORM = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


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
