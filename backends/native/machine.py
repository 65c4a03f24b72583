"""Instruction sets of this build and this machine, and its measured limits."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.backends.native import _core
from edgeinfer.errors import BackendUnavailable
from edgeinfer.types import Logits


def build_id() -> str:
    """Identifies a build of the engine, for measurements that were made with it."""
    extension = Path(str(_core.__file__)).stat()
    return f"{extension.st_size}-{extension.st_mtime_ns}"


def available_isas() -> list[str]:
    """Instruction sets that this CPU and this build have, best first."""
    return _core.available_isas()


def best_isa() -> str:
    """The instruction set to use: the best one, or the one named by EDGEINFER_ISA. Raises BackendUnavailable."""
    wanted = os.environ.get("EDGEINFER_ISA")
    available = available_isas()
    if wanted and wanted not in available:
        raise BackendUnavailable(
            f"EDGEINFER_ISA={wanted}, but this CPU and this build have: {', '.join(available)}; unset it or name one"
        )
    return wanted or available[0]


def top_k(logits: Logits, k: int) -> list[tuple[int, float]]:
    """(id, probability) of about the k most probable tokens, most probable first; for drafting.

    logits: (n_vocab,) float32, n_vocab >= 1. In a large vocabulary only the best of each of 1024 groups is considered:
    about one in a hundred ids is missed, and probabilities are slightly too large. They are NaN if a logit is NaN or
    the largest is infinite.
    """
    return _core.top_k(logits, k)


@dataclass(frozen=True)
class MachineLimits:
    """What this machine can do at most, all threads together."""

    read_bytes_per_second: float
    int8_multiply_adds_per_second: float

    @classmethod
    def measure(cls, isa: str, n_threads: int, n_rounds: int = 5) -> MachineLimits:
        """Measure it, in some tenths of a second and 512 MiB of memory: the best of n_rounds >= 1."""
        return cls(*_core.measure_limits(isa, n_threads, n_rounds))
