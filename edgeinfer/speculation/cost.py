"""What a forward pass of n tokens costs: the verify cost, as a curve over n that is corrected by each pass.

The curve decides how much to draft, and differs between machines: four tokens cost 1.1 times as much as one with one
instruction set, and 1.9 times with another. edgeinfer.speculation.calibration measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from edgeinfer.settings import DEFAULT_DRAFT_MAX

MAX_TOKENS = DEFAULT_DRAFT_MAX + 1  # of a batch whose cost is known

# One observation scales the whole curve, and its own point, by this power of measured over expected time.
_DRIFT_RATE, _POINT_RATE = 0.1, 0.05
_MAX_RATIO = 1.5  # an outlier counts as no more
_CONTEXT_STEP = 32  # tokens of context after which the curve is computed anew
_MIN_PASSES = 64  # observed, before the curve is worth keeping
MAX_RATIO_OF_TWO = 1.5  # cost of two tokens over one, above which a measurement is suspect; 1.1 to 1.4 is usual


@dataclass(frozen=True)
class CostCurve:
    """Seconds of forward passes with all logits, as measured.

    near, far: seconds by number of tokens, after contexts of n_near and n_far tokens. far may be empty.

    Of a model with experts also: unions: bytes of the experts that n tokens wanted in these passes, each expert once,
    over those of one token.  union_seconds: what as many experts as those of one token cost.
    """

    n_near: int
    near: Mapping[int, float]
    n_far: int
    far: Mapping[int, float]
    unions: Mapping[int, float] = field(default_factory=dict)
    union_seconds: float = 0.0


class CostModel:
    """Milliseconds of a forward pass by number of tokens and length of the context, as they are now.

    keep: called by `close` with the corrected curve, if enough passes were observed.
    """

    def __init__(self, curve: CostCurve, keep: Callable[[CostCurve], None] | None = None) -> None:
        self._curve = curve
        self._keep = keep
        self._n_observed = self._longest = 0
        sizes = sorted(curve.near)
        self._base = _interpolated(sizes, [curve.near[size] for size in sizes])
        self._slope = [0.0] * (MAX_TOKENS + 1)  # milliseconds per token of context
        if curve.far:
            sizes = sorted(curve.far)
            added = [curve.far[size] - curve.near[size] for size in sizes]
            self._slope = _interpolated(sizes, [max(0.0, each) / (curve.n_far - curve.n_near) for each in added])
        self._point = [1.0] * (MAX_TOKENS + 1)  # correction factors
        self._drift = 1.0
        self._added = [0.0] * (MAX_TOKENS + 1)  # milliseconds beside the corrected curve
        self._n_context = -_CONTEXT_STEP  # that _now is for
        self._now: list[float] = []

    def milliseconds(self, n_past: int) -> list[float]:
        """(MAX_TOKENS + 1,): entry n for n tokens after n_past; entry 0 is 0. The list changes with the next call."""
        if not self._n_context <= n_past < self._n_context + _CONTEXT_STEP:
            self._n_context = n_past - n_past % _CONTEXT_STEP
            self._update()
        return self._now

    def chain_ms(self, n: int, n_past: int) -> float:
        """Milliseconds of a chain of any length."""
        now = self.milliseconds(n_past)
        return now[n] if n <= MAX_TOKENS else now[MAX_TOKENS] * n / MAX_TOKENS

    def observe(self, n: int, n_past: int, milliseconds: float) -> None:
        """Correct the curve by a pass of n tokens that took that long."""
        if not 1 <= n <= MAX_TOKENS:
            return
        self._n_observed += 1
        self._longest = max(self._longest, n)
        now = self.milliseconds(n_past)
        ratio = min(max(milliseconds / now[n], 1 / _MAX_RATIO), _MAX_RATIO)
        self._drift *= ratio**_DRIFT_RATE
        self._point[n] *= ratio**_POINT_RATE
        now[n] *= ratio**_POINT_RATE
        if not 0.95 < self._drift < 1.05:  # in steps, as a new list each time would cost more than it tells
            self._point = [point * self._drift for point in self._point]
            self._drift = 1.0
            self._update()

    @property
    def may_be_padded(self) -> bool:
        """Whether a pass with dummy tokens tells what a longer one costs, for little."""
        return True

    @property
    def is_doubtful(self) -> bool:
        """Whether a second token costs so much that the calibration may have been disturbed."""
        now = self._now or self.milliseconds(0)
        return now[2] > MAX_RATIO_OF_TWO * now[1]

    def correct(self, n: int, n_past: int, milliseconds: float) -> None:
        """Lower the curve to a pass of n tokens that took less than it says.

        Sizes beyond the largest one that was observed are lowered by the same factor.
        """
        now = self.milliseconds(n_past)
        if milliseconds < now[n]:
            last = MAX_TOKENS if n > self._longest else n
            for size in range(n, last + 1):
                expected = now[size] * milliseconds / now[n] - self._added[size]
                if expected > 0.0:
                    self._point[size] = expected / (self._base[size] + self._slope[size] * self._n_context)
            self._update()
        self._longest = max(self._longest, n)

    def close(self) -> None:
        """Hand the corrected curve to `keep`: one measured while the machine was busy does not last."""
        if self._keep is not None and self._n_observed >= _MIN_PASSES:
            self._keep(self._corrected())

    def _corrected(self) -> CostCurve:
        """The curve as the passes were."""
        curve = self._curve
        near, far = (
            {n: 1e-3 * self._drift * of_n for n, of_n in enumerate(self._after(n_past)) if n}
            for n_past in (curve.n_near, curve.n_far)
        )
        return replace(curve, near=near, far=far if curve.far else {})

    def _update(self) -> None:
        self._now = self._after(self._n_context)

    def _after(self, n_past: int) -> list[float]:
        """(MAX_TOKENS + 1,) milliseconds after a context."""
        base, slope, point, added = self._base, self._slope, self._point, self._added
        now = [(base[n] + slope[n] * n_past) * point[n] + added[n] for n in range(MAX_TOKENS + 1)]
        for n in range(MAX_TOKENS - 1, 1, -1):  # a longer pass can be made in its place
            now[n] = min(now[n], now[n + 1])
        for n in range(2, MAX_TOKENS + 1):  # or two shorter ones
            now[n] = min(now[n], min(now[part] + now[n - part] for part in range(1, n // 2 + 1)))
        return now


def _interpolated(sizes: Sequence[int], seconds: Sequence[float]) -> list[float]:
    """(MAX_TOKENS + 1,) milliseconds: linear between the measured sizes and beyond the last one; entry 0 is 0.

    With a single size, each further token is taken to cost the same.
    """
    n = np.arange(MAX_TOKENS + 1)
    values = np.interp(n, sizes, seconds)
    last, before = (sizes[-1], sizes[-2]) if len(sizes) > 1 else (sizes[-1], 0)
    first = seconds[-2] if len(sizes) > 1 else 0.0
    rise = max(0.0, seconds[-1] - first) / (last - before)
    values = np.where(n > last, seconds[-1] + (n - last) * rise, values)
    values[0] = 0.0
    return [float(1e3 * value) for value in values]
