"""Whether experts are read ahead, and how many: Fate (Fang et al., arXiv:2502.12224), as far as it is measured to help.

A layer's router applied to the input of the layer before tells which experts will probably be needed. To read them then
hides the wait for the disk, but a wrong guess costs a read and a place in the cache. So reading ahead begins switched
off, is tried in short windows beside windows without it, and stays only where passes are faster with it. What all
trials together may lose is bounded by a ledger.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

LEVELS = (0.0, 0.625, 1.0)  # share of the experts of a token that is read ahead; k = 5 of 8 is wrong less often
WINDOW = 4  # passes
BUSY = 0.85  # share of the time in which the disk reads without prefetch; above it, more reads cannot be hidden
WAITS = 0.03  # share of the time that is waited for the disk; below it there is nothing to gain
PRECISION = 0.5  # useful reads over all; a layer below it is left out
GAIN = 0.02  # a higher level must be faster by this share
LOSS = 0.01  # share of all time that trials may lose
_LOSS_PASSES = 1.0  # or this many passes, while there were few
_FEWEST_PAIRS, _MOST_PAIRS = 4, 24  # of windows in a trial
_FIRST_REST, _LONGEST_REST = 8, 128  # windows between trials, doubled after each that changes nothing
_FORGET = 0.8  # of counts, from one window to the next
_LEAST_ISSUED = 8.0  # reads ahead before their precision says something
_LEFT_OUT = 64  # windows until a layer is tried again
_LEAST_PREDICTED = 32  # experts of a layer before their precision says something


@dataclass(frozen=True)
class WindowStats:
    """What an expert cache did in the passes of a window."""

    # issued, useful: by layer, experts that were read ahead, and those of them that were needed
    issued: Sequence[int]
    useful: Sequence[int]
    # waited_share, busy_share: of the time, in which passes waited for the disk, and in which it read
    waited_share: float
    busy_share: float


@dataclass
class _Trial:
    """Windows of two levels in turns: lower, higher, higher, lower, and so on."""

    lower: int
    higher: int
    times: dict[int, list[float]] = field(default_factory=dict)

    def level(self) -> int:
        """Of the next window."""
        n = sum(map(len, self.times.values()))
        return self.higher if n % 4 in (1, 2) else self.lower

    def add(self, level: int, seconds: float) -> None:
        """A window's mean seconds a pass."""
        self.times.setdefault(level, []).append(seconds)

    def gain(self) -> tuple[float, float, int]:
        """By which share the higher level is faster, the standard error of that, and the number of pairs."""
        lower, higher = self.times.get(self.lower, []), self.times.get(self.higher, [])
        pairs = list(zip(lower, higher, strict=False))
        if len(pairs) < 2:
            return 0.0, math.inf, len(pairs)
        mean = statistics.fmean(slow for slow, _ in pairs) or 1.0
        gains = [(slow - fast) / mean for slow, fast in pairs]
        return statistics.fmean(gains), statistics.stdev(gains) / math.sqrt(len(gains)), len(pairs)


class PrefetchControl:
    """How many experts of each layer are read ahead. It gets the time of each pass, and for each window what the
    cache did; the same figures always give the same answers.

    n_used: experts of a token in a layer.  level: of LEVELS, 0 for off.
    """

    def __init__(self, n_layers: int, n_used: int) -> None:
        self.level = 0
        self._n_used = n_used
        self._seconds: list[float] = []  # of the passes of this window
        self._trial: _Trial | None = None
        self._kept_level = 0  # outside of trials
        self._rest = self._rest_left = _FIRST_REST
        self._plain: deque[float] = deque(maxlen=4)  # seconds a pass without prefetch, of the last such windows
        self._plain_busy = self._plain_waits = 0.0
        self._total = self._balance = 0.0
        self._goes_up = True  # of the two neighbours of a level in the middle, which is tried next
        self._issued, self._useful = [0.0] * n_layers, [0.0] * n_layers
        self._left_out = [0] * n_layers  # windows for which a layer is not read ahead
        self._is_guessed = [False] * n_layers  # layers whose predictions are wrong more often than right

    @property
    def amounts(self) -> list[int]:
        """By layer, how many experts are to be read ahead in the next passes."""
        n = math.ceil(LEVELS[self.level] * self._n_used)
        return [0 if left or guess else n for left, guess in zip(self._left_out, self._is_guessed, strict=True)]

    def tell_predictions(self, counts: Sequence[tuple[int, int]]) -> None:
        """Take into account, by layer, how many experts were predicted so far, and how many of them were needed.

        A layer in which most predictions are wrong is not read ahead, and need not be tried.
        """
        self._is_guessed = [n >= _LEAST_PREDICTED and needed < PRECISION * n for n, needed in counts]

    def after_pass(self, seconds: float, n_rows: int) -> bool:
        """Take a pass into account; gives whether a window is over, so that `end_window` is to be called.

        Passes of several rows differ too much from each other to be compared: they say nothing.
        """
        if n_rows != 1:
            return False
        self._seconds.append(seconds)
        self._total += seconds
        if self.level and self._plain:
            self._balance = min(self._balance + statistics.fmean(self._plain) - seconds, self._may_lose())
            if self._balance < -self._may_lose():
                return True
        return len(self._seconds) >= WINDOW

    def end_window(self, stats: WindowStats) -> bool:
        """Decide what the next passes do, given what the cache did in the last; gives whether `amounts` changed."""
        before = self.amounts
        self._left_out = [max(left - 1, 0) for left in self._left_out]
        seconds = statistics.fmean(self._seconds) if self._seconds else 0.0
        is_whole, self._seconds = len(self._seconds) >= WINDOW, []
        if self.level:
            self._count(stats)
        elif is_whole:
            self._plain.append(seconds)
            self._plain_busy += (stats.busy_share - self._plain_busy) * (0.5 if len(self._plain) > 1 else 1.0)
            self._plain_waits += (stats.waited_share - self._plain_waits) * (0.5 if len(self._plain) > 1 else 1.0)
        if self._trial is not None:
            self._go_on_with(self._trial, seconds, is_whole)
        else:
            self._rest_or_try()
        return self.amounts != before

    def _rest_or_try(self) -> None:
        """Begin a trial where it is time for one."""
        if self.level and (self._is_imprecise() or self._plain_busy > BUSY):
            self._keep(0, changed=False)
        elif self.level and self._balance < -self._may_lose():
            self._begin(self.level - 1, self.level)  # what plain passes take now may be something else than it was
        elif self._rest_left > 0:
            self._rest_left -= 1
        elif self.level in (0, len(LEVELS) - 1):
            self._begin(*((0, 1) if self.level == 0 else (self.level - 1, self.level)))
        else:
            self._begin(*((self.level, self.level + 1) if self._goes_up else (self.level - 1, self.level)))
            self._goes_up = not self._goes_up

    def _begin(self, lower: int, higher: int) -> None:
        is_of_use = self._plain_waits > WAITS and self._plain_busy <= BUSY and not self._is_imprecise()
        if higher > self._kept_level and not (is_of_use and self._balance > -0.5 * self._may_lose()):
            self._rest_left = _FIRST_REST
            return
        self._trial = _Trial(lower, higher)
        self.level = self._trial.level()

    def _go_on_with(self, trial: _Trial, seconds: float, is_whole: bool) -> None:
        """Take a window of a trial into account, and end it where enough is known."""
        if is_whole:
            trial.add(self.level, seconds)
        gain, error, n_pairs = trial.gain()
        is_lost = self.level > 0 and self._balance < -self._may_lose()
        if is_lost or self._is_imprecise() or self._plain_busy > BUSY:
            self._keep(0 if self._kept_level < trial.higher else trial.lower, changed=False)
            return
        least = GAIN if self._kept_level < trial.higher else 0.0
        is_known = n_pairs >= _FEWEST_PAIRS and (gain - error > least or gain + error < least)
        if is_known or n_pairs >= _MOST_PAIRS:
            kept = trial.higher if gain > least else trial.lower
            self._keep(kept, changed=kept != self._kept_level)
        else:
            self.level = trial.level()

    def _keep(self, level: int, changed: bool) -> None:
        """Stay at a level until the next trial, which comes later if this one changed nothing."""
        self._trial = None
        self._rest = _FIRST_REST if changed else min(2 * self._rest, _LONGEST_REST)
        self.level, self._kept_level, self._rest_left = level, level, self._rest

    def _may_lose(self) -> float:
        """Seconds."""
        plain = statistics.fmean(self._plain) if self._plain else 0.0
        return max(LOSS * self._total, _LOSS_PASSES * plain)

    def _count(self, stats: WindowStats) -> None:
        """Precision by layer, from windows with prefetch."""
        for layer in range(len(self._left_out)):
            issued = self._issued[layer] = _FORGET * self._issued[layer] + stats.issued[layer]
            useful = self._useful[layer] = _FORGET * self._useful[layer] + stats.useful[layer]
            if issued >= _LEAST_ISSUED and useful < PRECISION * issued:
                self._left_out[layer] = _LEFT_OUT
                self._issued[layer] = self._useful[layer] = 0.0

    def _is_imprecise(self) -> bool:
        """Whether reads ahead are of no use in most layers."""
        useless = (left > 0 or guess for left, guess in zip(self._left_out, self._is_guessed, strict=True))
        return 2 * sum(useless) > len(self._left_out)


class FirstLayerTable:
    """Which experts a token used in the first layer, learnt from passes: there is no layer before it to predict them.

    n_tokens: most tokens that it knows; the ones that came last.
    """

    def __init__(self, n_tokens: int = 8192) -> None:
        self._most = n_tokens
        self._experts: dict[int, tuple[int, ...]] = {}  # the latest last

    def __len__(self) -> int:
        return len(self._experts)

    def learn(self, tokens: Sequence[int], experts: Sequence[Sequence[int]]) -> None:
        """Tokens of a pass, and the experts of each."""
        for token, used in zip(tokens, experts, strict=True):
            self._experts.pop(token, None)
            self._experts[token] = tuple(used)
        while len(self._experts) > self._most:
            del self._experts[next(iter(self._experts))]

    def predict(self, tokens: Sequence[int]) -> list[int]:
        """Experts that tokens will probably use, each once; those of the first token first."""
        found = (expert for token in tokens for expert in self._experts.get(token, ()))
        return list(dict.fromkeys(found))
