"""What a forward pass of n tokens costs: the verify cost, as a curve over n that is corrected by each pass.

The curve decides how much to draft, and differs between machines: four tokens cost 1.1 times as much as one with one
instruction set, and 1.9 times with another. edgeinfer.speculation.calibration measures it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from operator import le

import numpy as np

from edgeinfer.common.settings import DEFAULT_DRAFT_MAX

MAX_TOKENS = DEFAULT_DRAFT_MAX + 1  # of a batch whose cost is known

_CONTEXT_STEP = 32  # tokens of context after which the curve is computed anew
_MIN_PASSES = 64  # observed, before the curve is worth keeping
MAX_RATIO_OF_TWO = 1.5  # cost of two tokens over one, above which a measurement is suspect; 1.1 to 1.4 is usual
# Passes that tell how a size is now: its last _OWN of the last _RECENT; of all sizes, the last _COMMON tell the load.
_RECENT, _OWN, _COMMON = 64, 5, 24
_TOGETHER = 4  # passes of one token that are looked at together: a pass drives this code out of the caches
_ENOUGH = 3  # passes of a size after which it is known better than by the calibration
_LEAST_CHANGE = 0.03  # of a cost, that is worth a new list
_MOST_AT_ONCE = 1.5  # what a pass that is slow while others are not counts as at most


@dataclass(frozen=True)
class CostCurve:
    """Seconds of forward passes with all logits, as measured.

    Of a model with experts also: unions: bytes of the experts that n tokens needed in these passes, each expert once,
    over those of one token.
    """

    n_near: int
    # near, far: seconds by number of tokens, after contexts of n_near and n_far tokens; far may be empty
    near: Mapping[int, float]
    n_far: int
    far: Mapping[int, float]
    unions: Mapping[int, float] = field(default_factory=dict)
    union_seconds: float = 0.0  # what as many experts as those of one token cost


class CostModel:
    """Milliseconds of a forward pass by number of tokens and length of the context, as they are now.

    c(n) = load(n) f(n) (m(n) + slope(n) n_past). m, slope: as calibrated.  f: what passes on a quiet machine have shown
    the calibration to be wrong by. Other work only adds time, so f follows the faster passes at once, and slower ones
    hardly.  load: how much slower passes are now than that: those of this size, else those of all sizes.

    Sizes that were never passed are taken from the calibration as far as that fits between the sizes that were: c never
    falls with n, and two passes can do the work of one. What is kept is the curve without load.

    keep: called by `close` with that curve, if enough passes were observed.
    """

    def __init__(self, curve: CostCurve, keep: Callable[[CostCurve], None] | None = None) -> None:
        self._curve = curve
        self._keep = keep
        self._n_observed = 0
        sizes = sorted(curve.near)
        self._calibrated = _interpolated(sizes, [curve.near[size] for size in sizes])
        self._slope = [0.0] * (MAX_TOKENS + 1)  # milliseconds per token of context
        if curve.far:
            sizes = sorted(curve.far)
            added = [curve.far[size] - curve.near[size] for size in sizes]
            self._slope = _interpolated(sizes, [max(0.0, each) / (curve.n_far - curve.n_near) for each in added])
        self._known: dict[int, float] = {}  # f of sizes that were passed often enough
        self._factors = [1.0] * (MAX_TOKENS + 1)  # f of all
        self._recent: deque[tuple[int, float]] = deque(maxlen=_RECENT)  # size, and time over that without load
        self._own: dict[int, list[float]] = {}  # of these, the last of each size
        self._n_recent = [0] * (MAX_TOKENS + 1)  # of these, by size
        self._load = 1.0
        self._waiting: list[tuple[int, int, float, bool]] = []  # arguments of `observe`
        self._added = [0.0] * (MAX_TOKENS + 1)  # milliseconds beside the curve
        self._n_context, self._is_stale = 0, True  # that _now is for, and whether it must be computed anew
        self._now: list[float] = []

    def milliseconds(self, n_past: int) -> list[float]:
        """(MAX_TOKENS + 1,): entry n for n tokens after n_past; entry 0 is 0. The list changes with the next call."""
        if self._is_stale or not self._n_context <= n_past < self._n_context + _CONTEXT_STEP:
            self._n_context = n_past - n_past % _CONTEXT_STEP
            self._update()
        return self._now

    def chain_ms(self, n: int, n_past: int) -> float:
        """Milliseconds of a chain of any length."""
        now = self.milliseconds(n_past)
        return now[n] if n <= MAX_TOKENS else now[MAX_TOKENS] * n / MAX_TOKENS

    def observe(self, n: int, n_past: int, milliseconds: float, is_disturbed: bool = False) -> None:
        """Correct the curve by a pass of n tokens that took that long. is_disturbed: other work ran meanwhile."""
        if not 1 <= n <= MAX_TOKENS:
            return
        self._waiting.append((n, n_past, milliseconds, is_disturbed))
        if n > 1 or len(self._waiting) == _TOGETHER:
            self._observe_waiting()

    def _observe_waiting(self) -> None:
        """Observe the passes of one token that wait for more of them, and what came after them."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            self._observe_one(*each)

    def _observe_one(self, n: int, n_past: int, milliseconds: float, is_disturbed: bool) -> None:
        self._n_observed += not is_disturbed
        before = self._load_of(n)
        self._add(n, self._ratio(n, n_past, milliseconds))
        if len(self._own[n]) >= _ENOUGH:
            self._learn_factor(n, is_disturbed)
        load = _median([*(ratio for _, ratio in islice(reversed(self._recent), _COMMON)), *[self._load] * _OWN])
        if abs(load / self._load - 1.0) > _LEAST_CHANGE:
            self._load = load
            self._is_stale = True
        elif abs(self._load_of(n) / before - 1.0) > _LEAST_CHANGE:
            self._is_stale = True

    def _learn_factor(self, n: int, is_disturbed: bool) -> None:
        """Learn f of a size from its last passes, and from those of others whether all of the calibration was slow."""
        usual = _median(self._own[n])
        if usual < 1.0 - _LEAST_CHANGE:
            slowest = max(map(_median, self._own.values()))
            if slowest < 1.0 - _LEAST_CHANGE:
                self._calibrated = [slowest * each for each in self._calibrated]
                self._slope = [slowest * each for each in self._slope]
                self._rescale([1.0 / slowest] * (MAX_TOKENS + 1))
            else:
                self._set_factor(n, self._factors[n] * usual**0.5)
        elif usual > 1.0 + _LEAST_CHANGE and not is_disturbed and self._others_are_quiet(n):
            self._set_factor(n, self._factors[n] * min(usual, _MOST_AT_ONCE) ** 0.25)
        elif n not in self._known:
            self._set_factor(n, self._factors[n])

    def _others_are_quiet(self, n: int) -> bool:
        """Whether recent passes of other sizes were as fast as ever."""
        ratios = [ratio for size, ratio in islice(reversed(self._recent), _COMMON) if size != n]
        return len(ratios) >= _ENOUGH and max(ratios) < 1.0 + 2 * _LEAST_CHANGE

    @property
    def may_be_padded(self) -> bool:
        """Whether a pass with dummy tokens tells what a longer one costs, for little."""
        return True

    @property
    def is_doubtful(self) -> bool:
        """Whether a second token costs so much that the calibration may have been disturbed."""
        now = self.milliseconds(self._n_context)
        return now[2] > MAX_RATIO_OF_TWO * now[1]

    def correct(self, n: int, n_past: int, milliseconds: float) -> None:
        """Lower the curve to a pass of n tokens that took less than it says, and with it what was never passed."""
        ratio = self._ratio(n, n_past, milliseconds)
        if ratio < 1.0:
            self._set_factor(n, self._factors[n] * ratio)

    def close(self) -> None:
        """Hand the curve without load to `keep`."""
        self._observe_waiting()
        if self._keep is not None and self._n_observed >= _MIN_PASSES:
            self._keep(self._corrected())

    def _corrected(self) -> CostCurve:
        """The curve as passes on a quiet machine were."""
        curve = self._curve
        near, far = (
            {n: 1e-3 * (self._without_load(n, n_past) + self._added[n]) for n in range(1, MAX_TOKENS + 1)}
            for n_past in (curve.n_near, curve.n_far)
        )
        return replace(curve, near=near, far=far if curve.far else {})

    # ---- Sizes without load ------------------------------------------------------------------------------------------

    def _without_load(self, n: int, n_past: int) -> float:
        """Milliseconds of a pass on a quiet machine, without what is beside the curve."""
        return self._factors[n] * (self._calibrated[n] + self._slope[n] * max(n_past - self._curve.n_near, 0))

    def _ratio(self, n: int, n_past: int, milliseconds: float) -> float:
        """What a pass took over what it takes without load."""
        expected = self._without_load(n, n_past)
        return max(milliseconds - self._added[n], 0.05 * expected) / expected

    def _set_factor(self, n: int, factor: float) -> None:
        """Learn f of one size, and from it that of others; what was noted of passes is in terms of f."""
        before = self._factors
        self._known[n] = factor
        self._factors = self._all_factors()
        changes = [old / new for old, new in zip(before, self._factors, strict=True)]
        if any(abs(change - 1.0) > 1e-9 for change in changes):
            self._rescale(changes)

    def _rescale(self, changes: Sequence[float]) -> None:
        """Say what was noted of passes in terms of a curve that has changed. changes: old over new, by size."""
        self._note((size, ratio * changes[size]) for size, ratio in self._recent)
        self._is_stale = True

    def _all_factors(self) -> list[float]:
        """f of every size, from those that are known."""
        calibrated, known = self._calibrated, sorted(self._known)
        values = [self._known[n] * calibrated[n] for n in known]
        values = _isotonic(values, [1.0] * len(values))
        costs = list(calibrated)
        first, last = known[0], known[-1]
        for n in range(1, first):
            costs[n] = min(calibrated[n], values[0])
        for n in range(last, MAX_TOKENS + 1):
            costs[n] = max(values[-1], calibrated[n] * values[-1] / calibrated[last])
        for (a, of_a), (b, of_b) in pairwise(zip(known, values, strict=True)):
            for n in range(a, b):  # as calibrated, where that is between its neighbours
                if n == a or not of_a <= calibrated[n] <= of_b:
                    costs[n] = of_a + (of_b - of_a) * (n - a) / (b - a)
        costs = _bounded(costs)
        return [1.0] + [cost / calibrated[n] for n, cost in enumerate(costs) if n]

    # ---- Load --------------------------------------------------------------------------------------------------------

    def _note(self, passes: Iterable[tuple[int, float]]) -> None:
        """Make these, size and time over that without load, the recent passes: the oldest are forgotten."""
        passes = list(passes)  # of the recent ones, usually
        self._recent.clear()
        self._own = {}
        self._n_recent = [0] * (MAX_TOKENS + 1)
        for size, ratio in passes:
            self._add(size, ratio)

    def _add(self, n: int, ratio: float) -> None:
        """Note one more pass; the oldest is forgotten where there are enough."""
        if len(self._recent) == _RECENT:
            size, _ = self._recent.popleft()
            own = self._own[size]
            self._n_recent[size] -= 1
            if self._n_recent[size] < len(own):
                own.pop()  # it was one of them, and the oldest
                if not own:
                    del self._own[size]
        self._recent.append((n, ratio))
        self._n_recent[n] += 1
        own = self._own.setdefault(n, [])
        own.insert(0, ratio)
        del own[_OWN:]

    def _load_of(self, n: int) -> float:
        """How much slower passes of n tokens are now than without load: the median of the last, as far as there are."""
        own = self._own.get(n)
        return _median([*own, *[self._load] * (_OWN - len(own))]) if own else self._load

    def _update(self) -> None:
        self._now, self._is_stale = self._after(self._n_context), False

    def _after(self, n_past: int) -> list[float]:
        """(MAX_TOKENS + 1,) milliseconds after a context."""
        loads, weights = [self._load] * (MAX_TOKENS + 1), [1.0] * MAX_TOKENS
        n_more = max(n_past - self._curve.n_near, 0)
        for n, own in self._own.items():
            loads[n], weights[n - 1] = self._load_of(n), 1.0 + len(own)
        parts = zip(loads, self._factors, self._calibrated, self._slope, self._added, strict=True)
        costs = [load * factor * (near + slope * n_more) + added for load, factor, near, slope, added in parts]
        return _bounded([0.0, *_isotonic(costs[1:], weights)])


def _median(values: Sequence[float]) -> float:
    """As statistics.median, which takes longer: this runs after every pass."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _bounded(costs: Sequence[float]) -> list[float]:
    """(MAX_TOKENS + 1,) costs, none above that of a longer pass, which can be made in its place, or of two shorter."""
    now = list(costs)
    for n in range(MAX_TOKENS - 1, 1, -1):
        now[n] = min(now[n], now[n + 1])
    rate = now[1]  # the least for each token, of all sizes up to here
    for n in range(2, MAX_TOKENS + 1):
        least = now[n]
        if least > n * rate:  # else no two parts can be less
            for part in range(1, n // 2 + 1):  # a plain loop: this runs beside passes
                both = now[part] + now[n - part]
                if both < least:
                    least = both
            now[n] = least
        rate = min(rate, least / n)
    return now


def _isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest values that do not fall, by weighted least squares: neighbours that fall become their mean."""
    if all(map(le, values, islice(values, 1, None))):
        return list(values)
    blocks: list[tuple[float, float, int]] = []  # mean, weight, number
    for value, weight in zip(values, weights, strict=True):
        mean, total, n = value, weight, 1
        while blocks and blocks[-1][0] > mean:
            of_last, weight_of_last, n_of_last = blocks.pop()
            mean = (mean * total + of_last * weight_of_last) / (total + weight_of_last)
            total, n = total + weight_of_last, n + n_of_last
        blocks.append((mean, total, n))
    return [mean for mean, _, n in blocks for _ in range(n)]


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
