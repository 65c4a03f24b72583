"""The formats with the least loss that fit into a number of bytes and a time."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import BudgetExceeded

_NEAR = 1.001  # a multiplier is searched to this factor
_LARGE_SHARE, _MOST_DOMINANT = 0.08, 3  # of the bytes or the time, and tensors that are so large
Numbers = NDArray[np.float64]


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
