"""Instruction sets of this build and this machine, and its measured limits."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.backends.native import _core
from edgeinfer.common.errors import BackendUnavailable, warn
from edgeinfer.common.types import Logits

# What a source installation leaves out is compiled so; wheels have all.
HOW_TO_COMPILE = (
    "`EDGEINFER_SETS=all make setup` in the clone, or `EDGEINFER_SETS=all pip install .`, compiles every set"
)


def build_id() -> str:
    """Identifies a build of the engine, for measurements that were made with it."""
    extension = Path(str(_core.__file__)).stat()
    return f"{extension.st_size}-{extension.st_mtime_ns}"


def available_isas() -> list[str]:
    """Instruction sets that this CPU and this build have, best first."""
    return _core.available_isas()


def missing_isas() -> list[str]:
    """Instruction sets that this CPU has and that were not compiled into this build, best first."""
    return [name for name, is_built, is_present in _core.known_isas() if is_present and not is_built]


def best_isa() -> str:
    """The instruction set to use: the best one, or the one named by EDGEINFER_ISA. Raises BackendUnavailable."""
    wanted = os.environ.get("EDGEINFER_ISA")
    available = available_isas()
    if not wanted:
        return available[0]
    if wanted in available:
        return wanted
    offered = f"unset it, or name one of these: {', '.join(available)}"
    if wanted in missing_isas():
        raise BackendUnavailable(
            f"EDGEINFER_ISA={wanted}, which this CPU has, but which was not compiled into this build; "
            f"{HOW_TO_COMPILE}; or {offered}"
        )
    if any(wanted == name for name, _, _ in _core.known_isas()):
        raise BackendUnavailable(f"EDGEINFER_ISA={wanted}, which this CPU does not have; {offered}")
    raise BackendUnavailable(f"EDGEINFER_ISA={wanted} is no instruction set that edgeinfer knows here; {offered}")


@functools.cache
def warn_of_better_isa() -> None:
    """Say once where this CPU has a better instruction set than this build, as after a move to another CPU."""
    best = next(name for name, _, is_present in _core.known_isas() if is_present)
    if not os.environ.get("EDGEINFER_ISA") and best != best_isa():
        warn(f"edgeinfer was compiled without {best}, which this CPU has, and runs {best_isa()}; {HOW_TO_COMPILE}")


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
