"""Calibration of models with experts: passes over tokens of a text, and what of their time depends on the experts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from edgeinfer.speculation.calibration import (
    FAR,
    ROUNDS,
    SIZES,
    SIZES_FAR,
    SMALL,
    TimedSession,
    fill,
    monotonic,
    time_passes,
)
from edgeinfer.speculation.cost import CostCurve
from edgeinfer.speculation.expert_passes import ExpertPasses

_ALIKE_SIZES = (4, 8)  # of passes in which all tokens are the same, and so need the same experts
_FIRST = 8  # token of the text: what a text begins with is not typical of it


def measure_expert_costs(
    session: TimedSession, passes: ExpertPasses, tokens: Sequence[int], budget_seconds: float
) -> CostCurve:
    """The cost curve of a session with experts, which must be empty and is empty again afterwards.

    tokens: of a text.  What is waited for the disk does not count. With an expert cache only sizes that need few
    experts are measured, so that it is not filled with those of this text. Sizes that the budget has no time for are
    left out, the largest first; one token is always measured.
    """
    most = min(session.n_ctx, session.n_batch, SMALL if passes.is_cached else max(SIZES))
    sizes = [size for size in SIZES if size <= most]
    timed = _Timed(session, passes, tokens[_FIRST:] if len(tokens) >= 2 * max(SIZES) else _filled(tokens))
    started = time.perf_counter()
    near: dict[int, float] = {}
    alike: dict[int, float] = {}
    try:
        session.forward(timed.tokens[:1])  # warm-up
        small = [size for size in sizes if size <= SMALL] * ROUNDS
        # With a cache all passes of a size in a row: the first one reads what the others then find in memory.
        timed.run(sorted(small) if passes.is_cached else small, started + 0.5 * budget_seconds, near)
        again = [size for size in _ALIKE_SIZES if size in near]
        timed.of_one_token().run(again * ROUNDS, started + 0.65 * budget_seconds, alike)
        timed.run([size for size in sizes if size > SMALL] * 2, started + 0.8 * budget_seconds, near)
        unions = dict(timed.unions)
        n_far = 0 if passes.is_cached else timed.fill(started + 0.9 * budget_seconds, max(sizes))
        far: dict[int, float] = {}
        if n_far:
            again = [size for size in SIZES_FAR if size in near and n_far + size <= session.n_ctx]
            timed.run(again * ROUNDS, started + budget_seconds, far)
    finally:
        session.truncate(0)
    return CostCurve(0, monotonic(near), n_far, monotonic(far), unions, _union_seconds(near, alike, unions, passes))


class _Timed:
    """Passes over the first of these tokens. unions: of the last pass of each size."""

    def __init__(self, session: TimedSession, passes: ExpertPasses, tokens: Sequence[int]) -> None:
        self._session, self._passes, self.tokens = session, passes, tokens
        self.unions: dict[int, float] = {}

    def of_one_token(self) -> _Timed:
        """The same where all tokens are the first one."""
        return _Timed(self._session, self._passes, [self.tokens[0]] * max(_ALIKE_SIZES))

    def run(self, sizes: Sequence[int], deadline: float, seconds: dict[int, float]) -> None:
        """See time_passes."""
        time_passes(self._session, self.tokens, sizes, deadline, seconds, self._waited)

    def fill(self, deadline: float, room: int) -> int:
        """Commit tokens until the deadline, and leave room for some; gives how many."""
        return fill(self._session, self.tokens, min(FAR, self._session.n_ctx - room), deadline)

    def _waited(self, size: int) -> float:
        seen = self._passes.last()
        self.unions[size] = seen.union
        return 1e-3 * seen.waited_ms


def _union_seconds(
    near: Mapping[int, float], alike: Mapping[int, float], unions: Mapping[int, float], passes: ExpertPasses
) -> float:
    """What as many experts as one token's cost: how much faster passes are that need no more than these.

    It is near their share of the bytes that one token reads, whatever was measured while the machine was busy.
    """
    likely = passes.byte_share * near[1]
    pairs = [(near[size] - alike[size], unions[size] - 1.0) for size in alike]
    weight = sum(more * more for _, more in pairs)
    seconds = sum(time * more for time, more in pairs) / weight if weight else likely
    return min(max(seconds, likely / 2.0), 2.0 * likely, near[1])


def _filled(tokens: Sequence[int]) -> list[int]:
    """A text that is too short, as often as it takes."""
    return (list(tokens or [0]) * (2 * max(SIZES)))[: 2 * max(SIZES)]
