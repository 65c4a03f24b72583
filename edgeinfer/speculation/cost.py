"""What a forward pass of n tokens costs: measured once for each machine and model, kept on disk, followed online.

The curve decides everything about speculation on a CPU, and it is another one on each: on one instruction set four
tokens cost 1.1 times as much as one, on another 1.9 times.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from edgeinfer.models import ModelSizes
from edgeinfer.models.gguf import ModelFile
from edgeinfer.record_cache import read_record, record_folder, record_key, write_record
from edgeinfer.types import LogitsRows, Output

MAX_TOKENS = 32  # of a batch whose cost is known
DEFAULT_DRAFT_MAX = MAX_TOKENS - 1
SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
_SIZES_FAR = (1, 4, 8, 16)
_FAR = 256  # tokens of context for the second measurement, where there is time to fill it
_CHUNK = 32
_FEW, _ROUNDS = 8, 4
_FORMAT = 2

# One observation moves the whole curve, and its own point, by this power of what came over what was expected.
_DRIFT_RATE, _POINT_RATE = 0.1, 0.05
_LARGEST_RATIO = 1.5  # a hiccup counts as no more
_CONTEXT_STEP = 32  # tokens of context after which the curve is made anew
_ENOUGH = 64  # passes, to know better than the measurement did
DOUBTFUL = 1.5  # passes of one token that two may cost; they take 1.1 to 1.4 where nothing disturbs


@dataclass(frozen=True)
class CostCurve:
    """Seconds of forward passes with all logits.

    near, far: seconds by number of tokens, behind contexts of n_near and n_far tokens. far may be empty.
    """

    n_near: int
    near: Mapping[int, float]
    n_far: int
    far: Mapping[int, float]


class TimedSession(Protocol):
    """What of a session is timed."""

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
    """The cost curve of a session, which must be empty and is left so.

    Sizes that the budget has no time for are left out, the largest first; one token is always measured.
    """
    room = min(session.n_ctx, session.n_batch)
    sizes = [size for size in SIZES if size <= room]
    few = [size for size in sizes if size <= _FEW]  # what most drafts need, so it is measured most often
    started = time.perf_counter()
    tokens = np.random.default_rng(1).integers(0, session.spec.n_vocab, max(sizes)).tolist()
    near: dict[int, float] = {}
    try:
        session.forward(tokens[:1])  # touches what is touched once
        _time(session, tokens, few * _ROUNDS, started + 0.7 * budget_seconds, near)
        _time(session, tokens, sizes[len(few) :] * 2, started + 0.8 * budget_seconds, near)
        n_far = _fill(session, tokens, min(_FAR, session.n_ctx - max(sizes)), started + 0.9 * budget_seconds)
        far: dict[int, float] = {}
        if n_far:
            again = [size for size in _SIZES_FAR if size in near and n_far + size <= session.n_ctx]
            _time(session, tokens, again * _ROUNDS, started + budget_seconds, far)
    finally:
        session.truncate(0)
    return CostCurve(0, _rising(near), n_far, _rising(far))


def _rising(seconds: Mapping[int, float]) -> dict[int, float]:
    """Without the hiccups: a size that took longer than a larger one did."""
    return {size: min(of for larger, of in seconds.items() if larger >= size) for size in seconds}


def _time(
    session: TimedSession, tokens: Sequence[int], sizes: Sequence[int], deadline: float, seconds: dict[int, float]
) -> None:
    """Time passes of these sizes one after the other, as long as there is time; seconds: the fastest of each size."""
    for size in sizes:
        expected = seconds.get(size) or 2.0 * max(seconds.values(), default=0.0)
        started = time.perf_counter()
        if seconds and started + expected > deadline:
            return
        session.forward(tokens[:size], logits="all")
        elapsed = time.perf_counter() - started
        session.commit(())
        seconds[size] = min(elapsed, seconds.get(size, elapsed))


def _fill(session: TimedSession, tokens: Sequence[int], n: int, deadline: float) -> int:
    """Commit up to n tokens, as far as there is time; gives their number."""
    longest = 0.0
    while session.n_past + _CHUNK <= n and len(tokens) >= _CHUNK and time.perf_counter() + longest < deadline:
        started = time.perf_counter()
        session.forward(tokens[:_CHUNK], logits=())
        session.commit(range(_CHUNK))
        longest = max(longest, time.perf_counter() - started)
    return session.n_past


class CostModel:
    """Milliseconds of a forward pass by number of tokens and length of the context, as they are now.

    keep: is given the curve as it was found to be, when this is closed after enough passes to say.
    """

    def __init__(self, curve: CostCurve, keep: Callable[[CostCurve], None] | None = None) -> None:
        self._curve = curve
        self._keep = keep
        self._n_observed = self._longest = 0
        sizes = sorted(curve.near)
        self._base = _at_all_sizes(sizes, [curve.near[size] for size in sizes])
        self._slope = [0.0] * (MAX_TOKENS + 1)  # milliseconds a token of context
        if curve.far:
            sizes = sorted(curve.far)
            far = [curve.far[size] - curve.near[size] for size in sizes]
            slopes = _at_all_sizes(sizes, [max(0.0, extra) / (curve.n_far - curve.n_near) for extra in far])
            self._slope = slopes
        self._point = [1.0] * (MAX_TOKENS + 1)
        self._drift = 1.0
        self._at = -_CONTEXT_STEP
        self._now: list[float] = []

    def milliseconds(self, n_past: int) -> list[float]:
        """(MAX_TOKENS + 1,): entry n for n tokens behind n_past; entry 0 is 0. The list changes with the next call."""
        if not self._at <= n_past < self._at + _CONTEXT_STEP:
            self._at = n_past - n_past % _CONTEXT_STEP
            self._make()
        return self._now

    def chain_ms(self, n: int, n_past: int) -> float:
        """Milliseconds of a chain of any length."""
        now = self.milliseconds(n_past)
        return now[n] if n <= MAX_TOKENS else now[MAX_TOKENS] * n / MAX_TOKENS

    def observe(self, n: int, n_past: int, milliseconds: float) -> None:
        """A pass of n tokens took that long."""
        if not 1 <= n <= MAX_TOKENS:
            return
        self._n_observed += 1
        self._longest = max(self._longest, n)
        now = self.milliseconds(n_past)
        ratio = min(max(milliseconds / now[n], 1 / _LARGEST_RATIO), _LARGEST_RATIO)
        self._drift *= ratio**_DRIFT_RATE
        self._point[n] *= ratio**_POINT_RATE
        now[n] *= ratio**_POINT_RATE
        if not 0.95 < self._drift < 1.05:  # in steps: a new list each time would cost more than it tells
            self._point = [point * self._drift for point in self._point]
            self._drift = 1.0
            self._make()

    @property
    def is_doubtful(self) -> bool:
        """Whether a second token adds so much that the measurement may have been disturbed."""
        now = self._now or self.milliseconds(0)
        return now[2] > DOUBTFUL * now[1]

    def correct(self, n: int, n_past: int, milliseconds: float) -> None:
        """A pass of n tokens took no longer than that, whatever was believed.

        Those with more tokens than any that was seen so far are taken to be as much faster than was believed.
        """
        now = self.milliseconds(n_past)
        if milliseconds < now[n]:
            last = MAX_TOKENS if n > self._longest else n
            for size in range(n, last + 1):
                expected = now[size] * milliseconds / now[n]
                self._point[size] = expected / (self._base[size] + self._slope[size] * self._at)
            self._make()
        self._longest = max(self._longest, n)

    def close(self) -> None:
        """Give the curve to be kept: what was measured while the machine was busy does not stay."""
        curve = self._curve
        if self._keep is not None and self._n_observed >= _ENOUGH:
            near, far = (
                {n: 1e-3 * self._drift * of_n for n, of_n in enumerate(self._behind(n_past)) if n}
                for n_past in (curve.n_near, curve.n_far)
            )
            self._keep(replace(curve, near=near, far=far if curve.far else {}))

    def _make(self) -> None:
        self._now = self._behind(self._at)

    def _behind(self, n_past: int) -> list[float]:
        """(MAX_TOKENS + 1,) milliseconds behind a context."""
        base, slope, point = self._base, self._slope, self._point
        now = [(base[n] + slope[n] * n_past) * point[n] for n in range(MAX_TOKENS + 1)]
        for n in range(MAX_TOKENS - 1, 1, -1):  # a longer pass could be made in its place
            now[n] = min(now[n], now[n + 1])
        for n in range(2, MAX_TOKENS + 1):  # or two shorter ones
            now[n] = min(now[n], min(now[part] + now[n - part] for part in range(1, n // 2 + 1)))
        return now


def _at_all_sizes(sizes: Sequence[int], seconds: Sequence[float]) -> list[float]:
    """(MAX_TOKENS + 1,) milliseconds: straight lines between what was measured, the last one drawn on; entry 0 is 0.

    One size alone is taken to cost as much for each further token.
    """
    n = np.arange(MAX_TOKENS + 1)
    values = np.interp(n, sizes, seconds)
    last, before = (sizes[-1], sizes[-2]) if len(sizes) > 1 else (sizes[-1], 0)
    first = seconds[-2] if len(sizes) > 1 else 0.0
    rise = max(0.0, seconds[-1] - first) / (last - before)
    values = np.where(n > last, seconds[-1] + (n - last) * rise, values)
    values[0] = 0.0
    return [float(1e3 * value) for value in values]


# ---- On disk ---------------------------------------------------------------------------------------------------------


def cost_key(file: ModelFile, *facts: object) -> str:
    """Name of a curve: of everything that the cost depends on. facts: CPU, instruction set, threads, build."""
    return record_key(file, _FORMAT, *facts)


def default_folder() -> Path | None:
    """Where curves are kept, None where the user has no folder for caches."""
    return record_folder("costs")


def load_curve(key: str, folder: Path | None) -> CostCurve | None:
    """The curve of that name, None if there is none or the file is not as `save_curve` writes it."""
    record = read_record(folder, key)
    try:
        near, far = (_seconds(record[name]) for name in ("near", "far"))
        n_near, n_far = int(record["n_near"]), int(record["n_far"])
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    if 1 not in near or not set(far) <= set(near) or not 0 <= n_near <= n_far or (far and n_near == n_far):
        return None
    return CostCurve(n_near, near, n_far, far)


def cached_costs(key: str, measure: Callable[[], CostCurve], max_ratio: float = DOUBTFUL) -> CostModel:
    """The costs of that name: as they were kept, or measured now and kept.

    of_two: what two may cost at most, in passes of one; what was measured is else not kept.
    """
    folder = default_folder()
    curve = load_curve(key, folder)
    if curve is None:
        curve = measure()
        if curve.near.get(2, 0.0) <= max_ratio * curve.near[1]:  # else the next load measures again
            save_curve(key, curve, folder)
    return CostModel(curve, lambda followed: save_curve(key, followed, folder))


def save_curve(key: str, curve: CostCurve, folder: Path | None) -> None:
    """Keep a curve, whole or not at all. Where nothing can be written, it is measured again the next time."""
    write_record(folder, key, {"n_near": curve.n_near, "near": curve.near, "n_far": curve.n_far, "far": curve.far})


def _seconds(record: Mapping[str, object]) -> dict[int, float]:
    """Seconds by number of tokens from a JSON object. Raises ValueError, TypeError."""
    seconds = {int(size): float(value) for size, value in record.items()}  # type: ignore[arg-type]
    for size, value in seconds.items():
        if not 1 <= size <= MAX_TOKENS or not math.isfinite(value) or not 0.0 < value < 1e4:
            raise ValueError(f"{size} tokens in {value} s")
    return seconds
