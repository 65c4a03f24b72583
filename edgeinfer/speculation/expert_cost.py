"""What a pass of n tokens costs with experts: it depends on how many different ones the tokens want, and on how many of
these are read from disk first. Both are learnt from the passes.

c(n) = curve(n) + union_ms (U(n) - U_curve(n)) + wait_ms (m + m_more (U(n) - 1)): U is the expected union of n tokens in
units of one token's experts, U_curve that of the passes which the curve was measured with, m the share of one token's
experts that is not in memory, m_more that of what further tokens want beyond these, and wait_ms what passes waited for
as many experts as one token wants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from edgeinfer.common.overriding import override
from edgeinfer.speculation.cost import MAX_RATIO_OF_TWO, MAX_TOKENS, CostCurve, CostModel
from edgeinfer.speculation.expert_passes import ExpertPasses, PassExperts

_UNION_RATE, _POINT_RATE = 0.05, 0.1  # weight of a pass for the unions of all sizes, and for that of its own
_DECAY = 0.97  # of what was missing and waited for, with each pass
_LEAST_MISSING = 1.0  # in tokens' experts, before the waits of passes tell more than the speed of the disk
_STEP = 0.05  # of the cost of one token: a smaller change is not worth a new list
_LEAST_SHARE = 0.2  # of the time of a pass without its waits: no correction leaves less


class ExpertCostModel(CostModel):
    """See CostModel. passes: of the model; each is looked at when it is observed, before another one runs."""

    def __init__(self, curve: CostCurve, passes: ExpertPasses, keep: Callable[[CostCurve], None] | None = None) -> None:
        super().__init__(curve, keep)
        self._passes = passes
        self._of_curve = _unions(curve)
        self._unions = list(self._of_curve)
        self._union_ms = 1e3 * curve.union_seconds
        self._missing = self._waited_ms = self._wait_ms = 0.0  # decayed sums, and their ratio
        self._of_one = 0.0, 0.0  # passes of one token: missing, wanted; decayed sums
        self._of_more = 0.0, 0.0  # what further tokens wanted beyond one: the same

    def union(self, n: int) -> float:
        """Expected experts of n tokens, each once, in units of one token's."""
        return self._unions[n]

    @property
    def wait_ms(self) -> float:
        """Milliseconds that passes wait for as many missing experts as one token wants."""
        return self._wait_ms

    @property
    def missing_share(self) -> float:
        """Of the experts that one token wants."""
        missing, wanted = self._of_one
        return missing / wanted if wanted else 0.0

    @property
    def missing_share_of_more(self) -> float:
        """Of those that further tokens want beyond the experts of the first."""
        missing, wanted = self._of_more
        return min(missing / wanted, 1.0) if wanted else self.missing_share

    @property
    @override
    def may_be_padded(self) -> bool:
        """See CostModel: dummy tokens would evict experts."""
        return not self._passes.is_cached

    @property
    @override
    def is_doubtful(self) -> bool:
        now = self.milliseconds(self._n_context)
        return now[2] > MAX_RATIO_OF_TWO * max(1.0, self._unions[2]) * now[1]

    def without_waits(self, n: int, n_past: int) -> float:
        """Milliseconds of a pass of n tokens whose experts are all in memory."""
        return max(self.milliseconds(n_past)[n] - self._expected_wait(n), 0.0)

    @override
    def observe(self, n: int, n_past: int, milliseconds: float, is_disturbed: bool = False) -> None:
        if n == 1 and not self._passes.is_cached:  # always the same experts, and no waits: nothing more to learn
            super().observe(n, n_past, milliseconds, is_disturbed)
        elif 1 <= n <= MAX_TOKENS:
            seen = self._passes.last()
            super().observe(n, n_past, self._usual(n, n_past, seen, milliseconds), is_disturbed)
            self._learn(n, seen)

    @override
    def correct(self, n: int, n_past: int, milliseconds: float) -> None:
        super().correct(n, n_past, self._usual(n, n_past, self._passes.last(), milliseconds))

    def _usual(self, n: int, n_past: int, seen: PassExperts, milliseconds: float) -> float:
        """What a pass would have taken that wanted as many experts, and waited for as many, as is usual."""
        wait = self._expected_wait(n)
        usual = milliseconds - seen.waited_ms - self._union_ms * (seen.union - self._unions[n])
        return max(usual, _LEAST_SHARE * (self.milliseconds(n_past)[n] - wait), 0.0) + wait

    def _expected_wait(self, n: int) -> float:
        return self._wait_ms * (self.missing_share + self.missing_share_of_more * max(self._unions[n] - 1.0, 0.0))

    def _learn(self, n: int, seen: PassExperts) -> None:
        if n > 1 and self._unions[n] > 1.0:
            ratio = (seen.union - 1.0) / (self._unions[n] - 1.0)
            of_all = 1.0 + _UNION_RATE * (min(ratio, 2.0) - 1.0)
            self._unions = [min(1.0 + (union - 1.0) * of_all, max(m, 1)) for m, union in enumerate(self._unions)]
            self._unions[n] += _POINT_RATE * (seen.union - self._unions[n])
        if self._passes.is_cached:
            self._learn_waits(n, seen)
        now = self.milliseconds(self._n_context)
        if any(abs(self._added_to(m) - self._added[m]) > _STEP * now[m] for m in (1, 2, 8)):
            self._added = [self._added_to(m) for m in range(MAX_TOKENS + 1)]
            self._update()

    def _learn_waits(self, n: int, seen: PassExperts) -> None:
        self._missing = _DECAY * self._missing + seen.missing
        self._waited_ms = _DECAY * self._waited_ms + seen.waited_ms
        if self._missing >= _LEAST_MISSING:
            self._wait_ms = self._waited_ms / self._missing
        elif not self._wait_ms:
            self._wait_ms = self._passes.disk_ms
        if n == 1:
            self._of_one = _decayed(self._of_one, seen.missing, seen.union)
        elif self._of_one[1]:
            self._of_more = _decayed(self._of_more, max(seen.missing - self.missing_share, 0.0), seen.union - 1.0)

    def _added_to(self, n: int) -> float:
        """Milliseconds beside the curve; a pass never costs less than a share of it."""
        if not n:
            return 0.0
        of_curve = self._load_of(n) * self._without_load(n, self._n_context)
        of_union = self._union_ms * (self._unions[n] - self._of_curve[n])
        return max(of_union, (_LEAST_SHARE - 1.0) * of_curve) + self._expected_wait(n)

    @override
    def _corrected(self) -> CostCurve:
        """See CostModel: without what was waited for, which the next load will learn again."""
        kept, self._added = (
            self._added,
            [added - self._expected_wait(n) if n else 0.0 for n, added in enumerate(self._added)],
        )
        curve = super()._corrected()
        self._added = kept
        return replace(curve, unions={n: union for n, union in enumerate(self._unions) if n})


def _decayed(sums: tuple[float, float], missing: float, wanted: float) -> tuple[float, float]:
    return _DECAY * sums[0] + missing, _DECAY * sums[1] + wanted


def _unions(curve: CostCurve) -> list[float]:
    """(MAX_TOKENS + 1,) linear between the measured sizes, and as the last two beyond; n tokens where there is none."""
    sizes = sorted(curve.unions)
    if len(sizes) < 2:
        return [float(max(n, 1)) for n in range(MAX_TOKENS + 1)]
    n, unions = np.arange(MAX_TOKENS + 1), [curve.unions[size] for size in sizes]
    rise = max(0.0, unions[-1] - unions[-2]) / (sizes[-1] - sizes[-2])
    values = np.where(n > sizes[-1], unions[-1] + (n - sizes[-1]) * rise, np.interp(n, sizes, unions))
    return [float(value) for value in values]
