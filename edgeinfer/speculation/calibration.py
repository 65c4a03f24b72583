"""Calibration: the cost curve of a session is measured once for each machine and model, and kept on disk."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from numpy.typing import ArrayLike

from edgeinfer.common.other_work import MOST_SHARE, LoadMeter, MachineClock
from edgeinfer.common.types import LogitsRows, Output
from edgeinfer.models import ModelSizes
from edgeinfer.models.gguf import ModelFile
from edgeinfer.record_cache import read_record, record_folder, record_key, write_record
from edgeinfer.speculation.cost import MAX_RATIO_OF_TWO, MAX_TOKENS, CostCurve, CostModel

SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
SIZES_FAR = (1, 4, 8, 16)
FAR = 256  # tokens of context for the second measurement, where there is time to fill it
_CHUNK = 32
SMALL, ROUNDS = 8, 4  # sizes up to SMALL, which most drafts need, are measured ROUNDS times
_FORMAT = 2


class TimedSession(Protocol):
    """The part of a session that calibration uses."""

    n_ctx: int
    n_batch: int

    @property
    def spec(self) -> ModelSizes:
        """Sizes of the model."""
        ...

    @property
    def n_past(self) -> int:
        """Number of committed tokens."""
        ...

    def forward(self, tokens: Sequence[int], *, logits: LogitsRows = "last") -> Output:
        """See Session.forward."""
        ...

    def commit(self, path: ArrayLike) -> None:
        """See Session.commit."""
        ...

    def truncate(self, n_past: int) -> int:
        """See Session.truncate."""
        ...


def measure_costs(session: TimedSession, budget_seconds: float) -> CostCurve:
    """The cost curve of a session, which must be empty and is empty again afterwards.

    Sizes that the budget has no time for are left out, the largest first; one token is always measured.
    """
    max_tokens = min(session.n_ctx, session.n_batch)
    sizes = [size for size in SIZES if size <= max_tokens]
    small = [size for size in sizes if size <= SMALL]
    started = time.perf_counter()
    # Scattered over the vocabulary. numpy's generators would stay in memory, 3 MB, for these alone.
    tokens = [i * 2_654_435_761 % session.spec.n_vocab for i in range(1, max(sizes) + 1)]
    near: dict[int, float] = {}
    try:
        session.forward(tokens[:1])  # warm-up
        time_passes(session, tokens, small * ROUNDS, started + 0.7 * budget_seconds, near)
        time_passes(session, tokens, sizes[len(small) :] * 2, started + 0.8 * budget_seconds, near)
        n_far = fill(session, tokens, min(FAR, session.n_ctx - max(sizes)), started + 0.9 * budget_seconds)
        far: dict[int, float] = {}
        if n_far:
            again = [size for size in SIZES_FAR if size in near and n_far + size <= session.n_ctx]
            time_passes(session, tokens, again * ROUNDS, started + budget_seconds, far)
    finally:
        session.truncate(0)
    return CostCurve(0, monotonic(near), n_far, monotonic(far))


def monotonic(seconds: Mapping[int, float]) -> dict[int, float]:
    """Without outliers: no size costs more than a larger one."""
    return {size: min(of for larger, of in seconds.items() if larger >= size) for size in seconds}


def time_passes(
    session: TimedSession,
    tokens: Sequence[int],
    sizes: Sequence[int],
    deadline: float,
    seconds: dict[int, float],
    waited: Callable[[int], float] = lambda size: 0.0,
) -> None:
    """Time passes of these sizes one after the other until the deadline; seconds: the fastest of each size.

    waited: seconds of the last pass that do not count; its argument is the size.
    """
    for size in sizes:
        expected = seconds.get(size) or 2.0 * max(seconds.values(), default=0.0)
        started = time.perf_counter()
        if seconds and started + expected > deadline:
            return
        session.forward(tokens[:size], logits="all")
        elapsed = time.perf_counter() - started - waited(size)
        session.commit(())
        seconds[size] = min(elapsed, seconds.get(size, elapsed))


def fill(session: TimedSession, tokens: Sequence[int], n: int, deadline: float) -> int:
    """Commit up to n tokens until the deadline; returns their number."""
    longest = 0.0
    while session.n_past + _CHUNK <= n and len(tokens) >= _CHUNK and time.perf_counter() + longest < deadline:
        started = time.perf_counter()
        session.forward(tokens[:_CHUNK], logits=())
        session.commit(range(_CHUNK))
        longest = max(longest, time.perf_counter() - started)
    return session.n_past


# ---- On disk ---------------------------------------------------------------------------------------------------------


def cost_key(file: ModelFile, *facts: object) -> str:
    """Name of a curve: a hash of everything that the cost depends on. facts: CPU, instruction set, threads, build."""
    return record_key(file, _FORMAT, *facts)


def default_folder() -> Path | None:
    """Where curves are kept, None where the user has no cache folder."""
    return record_folder("costs")


def cached_costs(
    key: str,
    measure: Callable[[], CostCurve],
    max_ratio: float = MAX_RATIO_OF_TWO,
    make: Callable[[CostCurve, Callable[[CostCurve], None]], CostModel] = CostModel,
) -> CostModel:
    """The cost model of that key: from disk, or measured now and kept there.

    max_ratio: of the cost of two tokens to that of one. A measurement above it is used, but not kept; nor is one while
    other processes worked, and what passes make of it.  make: the model of a curve and of what keeps it.
    """
    folder = default_folder()
    curve = load_curve(key, folder)
    if curve is None:
        others = LoadMeter(MachineClock())
        curve = measure()
        if others.load() > MOST_SHARE:  # the next load measures again
            folder = None
        elif curve.near.get(2, 0.0) <= max_ratio * curve.near[1]:
            save_curve(key, curve, folder)
    return make(curve, lambda corrected: save_curve(key, corrected, folder))


def load_curve(key: str, folder: Path | None) -> CostCurve | None:
    """The curve of that key, None if there is none or the file is not as `save_curve` writes it."""
    record = read_record(folder, key)
    try:
        near, far = (_seconds(record[name]) for name in ("near", "far"))
        n_near, n_far = int(record["n_near"]), int(record["n_far"])
        unions, union_seconds = _seconds(record.get("unions", {})), float(record.get("union_seconds", 0.0))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    if 1 not in near or not set(far) <= set(near) or not 0 <= n_near <= n_far or (far and n_near == n_far):
        return None
    if not 0.0 <= union_seconds < math.inf or any(not 0.5 <= union <= n + 0.5 for n, union in unions.items()):
        return None
    return CostCurve(n_near, near, n_far, far, unions, union_seconds)


def save_curve(key: str, curve: CostCurve, folder: Path | None) -> None:
    """Write a curve atomically. Where nothing can be written, it is measured again at the next load."""
    record = {"n_near": curve.n_near, "near": curve.near, "n_far": curve.n_far, "far": curve.far}
    if curve.unions:
        record |= {"unions": curve.unions, "union_seconds": curve.union_seconds}
    write_record(folder, key, record)


def _seconds(record: Mapping[str, object]) -> dict[int, float]:
    """Seconds, or unions, by number of tokens from a JSON object. Raises ValueError, TypeError."""
    seconds = {int(size): float(value) for size, value in record.items()}  # type: ignore[arg-type]
    for size, value in seconds.items():
        if not 1 <= size <= MAX_TOKENS or not math.isfinite(value) or not 0.0 < value < 1e4:
            raise ValueError(f"{size} tokens in {value} s")
    return seconds
