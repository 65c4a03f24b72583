"""The formats that are best for a measure of both the sum of losses and the time, such as tokens a millisecond."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import BudgetExceeded
from edgeinfer.exporters.auto.allocation import Allocation, Numbers, Options

_MOST = 512  # points of a front that is exact
_MULTIPLIERS = 400  # of a larger one
_STEPS = 16  # of the worth of a byte
_ENOUGH = 0.999  # of the best rate, for which fewer bytes are taken
_BETTER = 1 + 1e-9
_SMALL = 1e-3  # a step, as a share, by which the worth of a second is found

Rate = Callable[[Numbers, Numbers], Numbers]  # of (n,) losses and (n,) seconds; falls with both


@dataclass(frozen=True)
class Front:
    """Mixes of which none has both less loss and less time than another. losses, n_bytes, seconds: (n,) sums.

    chosen: (n, n_tensors), an option of each tensor.
    """

    losses: Numbers
    n_bytes: Numbers
    seconds: Numbers
    chosen: NDArray[np.intp]


def front_of(options: Options, per_byte: float = 0.0) -> Front:
    """Such mixes, with per_byte times the bytes as a part of the loss: all of them where they are no more than 512,
    else those of the convex hull.
    """
    return _exact_front(options, per_byte) or _hull(options, per_byte)


def _exact_front(options: Options, per_byte: float) -> Front | None:
    """All of them, None where they are too many."""
    sums, parents, picks = np.zeros((1, 3)), [], []
    for losses, n_bytes, seconds in zip(options.losses, options.n_bytes, options.seconds, strict=True):
        added = np.stack([losses, n_bytes, seconds], axis=1)
        which = np.flatnonzero(np.isfinite(losses))
        candidates = (sums[:, None] + added[None, which]).reshape(-1, 3)
        kept = _undominated(candidates, per_byte)
        if len(kept) > _MOST:
            return None
        sums = candidates[kept]
        parents.append(kept // len(which))
        picks.append(which[kept % len(which)])
    chosen = np.empty((len(sums), len(picks)), dtype=np.intp)
    at = np.arange(len(sums))
    for i in range(len(picks) - 1, -1, -1):
        chosen[:, i] = picks[i][at]
        at = parents[i][at]
    return Front(sums[:, 0], sums[:, 1], sums[:, 2], chosen)


def _hull(options: Options, per_byte: float) -> Front:
    """The mixes that are best for some worth of a second."""
    finite = np.isfinite(options.losses)
    worth = np.where(finite, options.losses + per_byte * options.n_bytes, np.inf)
    most = float(worth[finite].max()) / max(float(options.seconds[finite].max()), 1e-30)
    multipliers = np.concatenate([[0.0], most * np.geomspace(1e-7, 1e7, _MULTIPLIERS)])
    chosen = np.unique([(worth + each * options.seconds).argmin(axis=1) for each in multipliers], axis=0)
    rows = np.arange(len(worth))
    losses, n_bytes, seconds = (
        values[rows, chosen].sum(axis=1) for values in (options.losses, options.n_bytes, options.seconds)
    )
    return Front(losses, n_bytes, seconds, chosen)


def _undominated(sums: Numbers, per_byte: float) -> NDArray[np.intp]:
    """By time. sums: (n, 3) losses, bytes, seconds."""
    worth = sums[:, 0] + per_byte * sums[:, 1]
    order = np.lexsort((worth, sums[:, 2]))
    least = np.minimum.accumulate(worth[order])
    return np.asarray(order[np.concatenate([[True], worth[order][1:] < least[:-1]])], dtype=np.intp)


def best_mix(options: Options, rate: Rate, n_bytes: float = np.inf) -> Allocation:
    """The options with the highest rate within a number of bytes, and what a byte and a second are worth there.

    Without a limit it is the best of all mixes where fronts are exact; else as far as the worth of a byte, and moves of
    single tensors, find it. Raises BudgetExceeded.
    """
    best = max(_mixes(options, rate, n_bytes, is_limited=True), key=lambda mix: mix.rate, default=None)
    if best is None:
        raise _too_small(options, n_bytes)
    return _climbed(options, rate, n_bytes, best.allocation)


def _climbed(options: Options, rate: Rate, n_bytes: float, start: Allocation) -> Allocation:
    """The best moves of single tensors, as long as there are any."""
    chosen, rows = start.chosen.copy(), np.arange(len(start.chosen))
    while True:
        sums = [values[rows, chosen].sum() for values in (options.losses, options.n_bytes, options.seconds)]
        moved = [
            total + values - values[rows, chosen][:, None]
            for total, values in zip(sums, (options.losses, options.n_bytes, options.seconds), strict=True)
        ]
        fits = np.isfinite(moved[0]) & (moved[1] <= n_bytes)
        rates = np.full(fits.shape, -np.inf)
        rates[fits] = rate(moved[0][fits], moved[2][fits])
        tensor, option = np.unravel_index(int(rates.argmax()), rates.shape)
        if rates[tensor, option] <= _BETTER * float(rate(np.array(sums[:1]), np.array(sums[2:]))[0]):
            return Allocation(chosen, start.per_byte, start.per_second)
        chosen[tensor] = option


def small_mix(options: Options, rate: Rate, n_bytes: float = np.inf) -> Allocation:
    """The smallest of mixes that reach the best rate within a thousandth; see best_mix."""
    best_of_all = best_mix(options, rate, n_bytes)
    mixes = [*_mixes(options, rate, n_bytes, is_limited=False), _rated(options, rate, best_of_all)]
    best = max(mix.rate for mix in mixes)
    return min((mix for mix in mixes if mix.rate >= _ENOUGH * best), key=lambda mix: mix.n_bytes).allocation


class _Rated(NamedTuple):
    allocation: Allocation
    rate: float
    n_bytes: float


def _mixes(options: Options, rate: Rate, n_bytes: float, is_limited: bool) -> Iterator[_Rated]:
    """Those of each worth of a byte that fit: the best one, and the smallest that is nearly as good.

    is_limited: only worths up to the first with which all mixes fit.
    """
    for per_byte in (0.0, *_worths(options)):
        front = front_of(options, per_byte)
        fits = front.n_bytes <= n_bytes
        if not fits.any():
            continue
        rates = np.where(fits, rate(front.losses, front.seconds), -np.inf)
        best = int(rates.argmax())
        smallest = int(np.where(rates >= _ENOUGH * rates[best], front.n_bytes, np.inf).argmin())
        for i in {best, smallest}:
            per_second = _worth_of_second(rate, float(front.losses[i]), float(front.seconds[i]))
            yield _Rated(Allocation(front.chosen[i], per_byte, per_second), float(rates[i]), float(front.n_bytes[i]))
        if is_limited and fits.all():
            return


def _rated(options: Options, rate: Rate, allocation: Allocation) -> _Rated:
    rows = np.arange(len(allocation.chosen))
    losses, n_bytes, seconds = (
        values[rows, allocation.chosen].sum(keepdims=True)
        for values in (options.losses, options.n_bytes, options.seconds)
    )
    return _Rated(allocation, float(rate(losses, seconds)[0]), float(n_bytes[0]))


def _too_small(options: Options, n_bytes: float) -> BudgetExceeded:
    least = float(np.where(np.isfinite(options.losses), options.n_bytes, np.inf).min(axis=1).sum())
    return BudgetExceeded(f"the smallest formats take {least:.0f} bytes: {n_bytes:.0f} are wanted")


def _worths(options: Options) -> Numbers:
    """Worths of a byte, from next to nothing to one at which losses do not count."""
    finite = np.isfinite(options.losses)
    high = float(options.losses[finite].max()) + 1e-30
    return high / float(options.n_bytes[finite].max()) * np.geomspace(1e-6, 1e6, _STEPS)


def _worth_of_second(rate: Rate, loss: float, seconds: float) -> float:
    """How much loss a second is worth."""
    more_loss, more_time = max(loss, 1e-12) * _SMALL, max(seconds, 1e-12) * _SMALL
    losses, times = np.full(3, loss), np.full(3, seconds)
    losses[1] += more_loss
    times[2] += more_time
    now, lossier, slower = rate(losses, times).tolist()
    by_loss, by_time = (now - lossier) / more_loss, (now - slower) / more_time
    return float(by_time / by_loss) if by_loss > 0 else 0.0
