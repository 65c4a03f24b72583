"""The formats that fit best: with the least loss in a number of bytes and a time, or with the highest rate of both.

A rate is a measure of the sum of losses and the time, such as tokens a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import BudgetExceeded

_NEAR = 1.001  # a multiplier is searched to this factor
_LARGE_SHARE, _MOST_DOMINANT = 0.08, 3  # of the bytes or the time, and tensors that are so large
Numbers = NDArray[np.float64]
_MOST = 512  # points of a front that is exact
_MULTIPLIERS = 400  # of a larger one
_STEPS = 16  # of the worth of a byte
_ENOUGH = 0.999  # of the best rate, for which fewer bytes are taken
_BETTER = 1 + 1e-9
_SMALL = 1e-3  # a step, as a share, by which the worth of a second is found
Rate = Callable[[Numbers, Numbers], Numbers]  # of (n,) losses and (n,) seconds; falls with both


@dataclass(frozen=True)
class Options:
    """What each tensor may become: (n_tensors, n_options) each, with infinite losses where there is no such option."""

    losses: Numbers
    n_bytes: Numbers
    seconds: Numbers


@dataclass(frozen=True)
class Allocation:
    """chosen: (n_tensors,), an option of each.  per_byte, per_second: what the last ones were worth, in loss."""

    chosen: NDArray[np.intp]
    per_byte: float
    per_second: float


def allocate(options: Options, n_bytes: float, seconds: float = np.inf) -> Allocation:
    """The options with the smallest sum of losses within both limits, as far as multipliers and single moves find.

    A Lagrangian of both limits (Everett 1963, doi:10.1287/opre.11.3.399), whose gap greedy moves fill. A tensor that is
    a large part of the whole leaves a gap that these do not: each of its options is tried. Raises BudgetExceeded where
    nothing fits.
    """
    best = _allocate(options, n_bytes, seconds)
    for tensor in _dominant(options):
        loss = _sum(options.losses, best.chosen)
        for option in np.flatnonzero(np.isfinite(options.losses[tensor])):
            with suppress(BudgetExceeded):
                found = _allocate(_fixed(options, tensor, int(option)), n_bytes, seconds)
                if _sum(options.losses, found.chosen) < loss:
                    best, loss = found, _sum(options.losses, found.chosen)
        options = _fixed(options, tensor, int(best.chosen[tensor]))
    return best


def _dominant(options: Options) -> list[int]:
    """Tensors whose bytes or time are a large part of the whole, the largest first."""
    shares = np.zeros(len(options.losses))
    for values in (options.n_bytes, options.seconds):
        mean = np.where(np.isfinite(options.losses), values, 0.0).max(axis=1)
        shares = np.maximum(shares, mean / max(float(mean.sum()), 1e-30))
    order = np.argsort(-shares, kind="stable")[:_MOST_DOMINANT]
    return [int(tensor) for tensor in order if shares[tensor] > _LARGE_SHARE]


def _fixed(options: Options, tensor: int, option: int) -> Options:
    """The options with one alone for a tensor."""
    losses = options.losses.copy()
    losses[tensor] = np.inf
    losses[tensor, option] = options.losses[tensor, option]
    return Options(losses, options.n_bytes, options.seconds)


def _allocate(options: Options, n_bytes: float, seconds: float) -> Allocation:
    """The same without trying options."""
    _check_possible(options, n_bytes, seconds)
    per_second, per_byte = 0.0, _byte_multiplier(options, n_bytes, 0.0)
    chosen = _best(options, per_byte, 0.0)
    if _sum(options.seconds, chosen) > seconds:
        high = _scale(options.losses, options.seconds)
        low = high * 1e-18
        while high > low * _NEAR:
            per_second = float(np.sqrt(low * high))
            per_byte = _byte_multiplier(options, n_bytes, per_second)
            chosen = _best(options, per_byte, per_second)
            if _sum(options.seconds, chosen) > seconds:
                low = per_second
            else:
                high = per_second
        per_second = high
        per_byte = _byte_multiplier(options, n_bytes, per_second)
        chosen = _best(options, per_byte, per_second)
    chosen = _within(options, chosen, n_bytes, seconds)
    return Allocation(_filled(options, chosen, n_bytes, seconds), per_byte, per_second)


def margins(options: Options, allocation: Allocation) -> tuple[Numbers, NDArray[np.intp]]:
    """How little another option of each tensor is worse, at these multipliers and over both losses; and which one."""
    costs = _costs(options, allocation.per_byte, allocation.per_second)
    rows = np.arange(len(costs))
    own = costs[rows, allocation.chosen]
    others = costs.copy()
    others[rows, allocation.chosen] = np.inf
    second = others.argmin(axis=1)
    gaps = np.abs(others[rows, second] - own)
    scale = options.losses[rows, allocation.chosen] + options.losses[rows, second] + 1e-30
    return np.where(np.isfinite(gaps), gaps / scale, np.inf), second


def _check_possible(options: Options, n_bytes: float, seconds: float) -> None:
    possible = np.isfinite(options.losses)
    least = [float(np.where(possible, each, np.inf).min(axis=1).sum()) for each in (options.n_bytes, options.seconds)]
    if least[0] > n_bytes:
        raise BudgetExceeded(f"the smallest formats take {least[0]:.0f} bytes: {n_bytes:.0f} are wanted")
    if least[1] > seconds:
        raise BudgetExceeded(f"the fastest formats take {1e3 * least[1]:.3f} ms: {1e3 * seconds:.3f} are wanted")


def _costs(options: Options, per_byte: float, per_second: float) -> Numbers:
    return options.losses + per_byte * options.n_bytes + per_second * options.seconds


def _best(options: Options, per_byte: float, per_second: float) -> NDArray[np.intp]:
    return np.asarray(_costs(options, per_byte, per_second).argmin(axis=1), dtype=np.intp)


def _sum(values: Numbers, chosen: NDArray[np.intp]) -> float:
    return float(values[np.arange(len(values)), chosen].sum())


def _scale(losses: Numbers, of: Numbers) -> float:
    """A multiplier at which losses do not count any more."""
    finite = np.isfinite(losses)
    steps = np.diff(np.unique(of[finite]))
    smallest = float(steps[steps > 0].min()) if (steps > 0).any() else 1.0
    return float(losses[finite].max()) / smallest * 2 + 1e-30


def _byte_multiplier(options: Options, n_bytes: float, per_second: float) -> float:
    """The smallest one with which the best options fit."""
    if _sum(options.n_bytes, _best(options, 0.0, per_second)) <= n_bytes:
        return 0.0
    high = _scale(options.losses, options.n_bytes)
    low = high * 1e-18
    while high > low * _NEAR:
        middle = float(np.sqrt(low * high))
        if _sum(options.n_bytes, _best(options, middle, per_second)) > n_bytes:
            low = middle
        else:
            high = middle
    return high


def _within(options: Options, chosen: NDArray[np.intp], n_bytes: float, seconds: float) -> NDArray[np.intp]:
    """Where both multipliers still leave too much: moves that take the most of it away for the least loss."""
    chosen = chosen.copy()
    rows = np.arange(len(chosen))
    while True:
        bytes_now, time_now = _sum(options.n_bytes, chosen), _sum(options.seconds, chosen)
        if bytes_now <= n_bytes and time_now <= seconds:
            return chosen
        over = _over(bytes_now / n_bytes) + _over(time_now / seconds)
        bytes_then = bytes_now + options.n_bytes - options.n_bytes[rows, chosen][:, None]
        time_then = time_now + options.seconds - options.seconds[rows, chosen][:, None]
        saved = over - _over(bytes_then / n_bytes) - _over(time_then / seconds)
        lost = options.losses - options.losses[rows, chosen][:, None]
        rate = np.where((saved > 1e-12) & np.isfinite(lost), saved / np.maximum(lost, 1e-12), -np.inf)
        tensor, option = np.unravel_index(int(rate.argmax()), rate.shape)
        if not np.isfinite(rate[tensor, option]):
            raise BudgetExceeded("no mix of formats was found that fits into both the bytes and the time")
        chosen[tensor] = option


def _over(share: Numbers | float) -> Numbers:
    return np.maximum(0.0, np.asarray(share) - 1.0)


def _filled(options: Options, chosen: NDArray[np.intp], n_bytes: float, seconds: float) -> NDArray[np.intp]:
    """The best single moves that still fit, until there is none."""
    chosen = chosen.copy()
    rows = np.arange(len(chosen))
    while True:
        bytes_left, time_left = n_bytes - _sum(options.n_bytes, chosen), seconds - _sum(options.seconds, chosen)
        gained = options.losses[rows, chosen][:, None] - options.losses
        fits = (options.n_bytes - options.n_bytes[rows, chosen][:, None] <= bytes_left) & (
            options.seconds - options.seconds[rows, chosen][:, None] <= time_left
        )
        gained = np.where(fits, gained, -np.inf)
        tensor, option = np.unravel_index(int(gained.argmax()), gained.shape)
        if gained[tensor, option] <= 0:
            return chosen
        chosen[tensor] = option


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
