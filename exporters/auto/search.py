"""The search for the formats of a model: measure, allocate, and measure the closest decisions again."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgeinfer.common.types import Device
from edgeinfer.exporters.auto.allocation import Allocation, Numbers, Options, allocate, margins
from edgeinfer.exporters.auto.candidates import Importance, Subject
from edgeinfer.exporters.auto.progress import Pace, State
from edgeinfer.exporters.auto.sensitivity import GAIN, all_errors, loss_table, measured_losses
from edgeinfer.exporters.auto.speed import Speeds
from edgeinfer.exporters.auto.trial import (
    Divergence,
    LossTrials,
    Measured,
    Objective,
    TrialModel,
    Types,
    Window,
    digest_of,
    fingerprint_of,
)
from edgeinfer.exporters.divergence import Distance, Reference, mean_distance
from edgeinfer.exporters.request import Told, untold
from edgeinfer.exporters.source import Source
from edgeinfer.models.gguf import GGMLType

_ROUNDS, _MARGINAL = 2, 20  # how often how many tensors are measured again in the mix
_LEAST_RATIO, _MOST_RATIO = 0.25, 4.0  # of a tensor's ratio to the usual one


@dataclass(frozen=True)
class Limits:
    """n_bytes: of the chosen tensors at most; infinite for any number.  n_tokens: of the pass whose time counts.
    seconds: of their products.

    None for seconds is the time of uniform formats with as many bytes: the mix is not slower than these.
    """

    n_bytes: float
    n_tokens: int = 1
    seconds: float | None = math.inf


@dataclass(frozen=True)
class Mix:
    """Formats of tensors. predicted: the loss by the table.  seconds: of the products of a pass."""

    types: Mapping[str, GGMLType]
    predicted: float
    n_bytes: int
    seconds: float


Choose = Callable[[Options, Limits], Allocation]


class Search:
    """Losses, bytes and times of each tensor of a source in each format.

    importance: see Importance.  windows: of calibration.  state: what was measured, or the file that measurements are
    added to as they come.  trials: None for losses of the model of the source.  choose: None for the least loss.
    """

    def __init__(
        self,
        source: Source,
        subjects: Sequence[Subject],
        importance: Importance,
        windows: Sequence[Window],
        device: Device,
        objective: Objective | None = None,
        state: State | Path | None = None,
        trials: Measured | None = None,
        choose: Choose | None = None,
    ) -> None:
        self._source, self._subjects, self._importance, self._device = source, subjects, importance, device
        if not isinstance(state, State):
            state = State(state, fingerprint_of(subjects, windows, importance))
        self._state = state
        self._choose = choose or self._least_loss
        self._trials: Measured = trials or LossTrials(
            source, subjects, importance, windows, device, objective or Divergence(), self._state
        )
        self.formats = sorted({type for subject in subjects for type in subject.formats}, key=_bits)
        self._speeds = Speeds(device.n_threads, device.isa)
        self._losses: Numbers = np.empty((0, 0))

    def measure(self, told: Told = untold) -> None:
        """Measure the loss of every tensor, one forward pass or a part of it each."""
        errors = all_errors(self._subjects, self._importance, self._state, told)
        measured = measured_losses(self._trials, self._subjects, told)
        self._losses = loss_table(self._subjects, self.formats, measured, errors)

    def allocate(self, limits: Limits) -> Mix:
        """The mix with the least loss. Raises BudgetExceeded."""
        return self._mix(self._allocation(limits), limits)

    def refine(self, limits: Limits, told: Told = untold) -> Mix:
        """The same, with the closest decisions measured again in the mix, twice. Raises BudgetExceeded."""
        n_each = min(_MARGINAL, len(self._subjects))
        pace = Pace("closest decisions", "measurements", [1.0] * (_ROUNDS * (n_each + 1)), told)
        for _ in range(_ROUNDS):
            self._measure_again(limits, pace)
        return self.allocate(limits)

    def compare(self, mixes: Sequence[Types], windows: Sequence[Window], told: Told = untold) -> list[Distance]:
        """How far mixes are from the source on other texts, as the engine runs them; each is measured once."""
        texts = hashlib.sha256(repr(windows).encode()).hexdigest()[:16]
        keys = [f"{digest_of(types)} {texts}" for types in mixes]
        missing = {key: types for key, types in zip(keys, mixes, strict=True) if self._known(key) is None}
        found = distances(self._source, list(missing.values()), self._importance, windows, self._device)
        pace = Pace("other texts", "models", [1.0] * len(missing), told)
        for key, distance in zip(missing, found, strict=True) if missing else ():
            pace.done()
            for kind, value in distance._asdict().items():
                self._state.add(f"{kind} {key}", value)
        return [each for each in map(self._known, keys) if each is not None]

    def _known(self, key: str) -> Distance | None:
        divergence, agreement = (self._state.get(f"{kind} {key}") for kind in Distance._fields)
        return None if divergence is None or agreement is None else Distance(divergence, agreement)

    def close(self) -> None:
        """Give the model that was measured back."""
        self._trials.close()

    def seconds(self, types: Mapping[str, GGMLType], n_tokens: int) -> float:
        """Of the products of a pass."""
        return sum(self._speeds.of(subject, types[subject.name], n_tokens) for subject in self._subjects)

    def predicted(self, types: Mapping[str, GGMLType]) -> float:
        """The loss by the table."""
        options = [self.formats.index(types[subject.name]) for subject in self._subjects]
        return float(self._losses[np.arange(len(options)), options].sum())

    def n_bytes(self, types: Mapping[str, GGMLType]) -> int:
        """Of the tensors that are chosen for."""
        return sum(subject.n_bytes(types[subject.name]) for subject in self._subjects)

    def _allocation(self, limits: Limits) -> Allocation:
        return self._choose(self._options(limits.n_tokens), limits)

    def _least_loss(self, options: Options, limits: Limits) -> Allocation:
        seconds = limits.seconds if limits.seconds is not None else _uniform_seconds(options, limits.n_bytes)
        return allocate(options, limits.n_bytes, seconds)

    def _options(self, n_tokens: int) -> Options:
        n_bytes, seconds = np.zeros_like(self._losses), np.zeros_like(self._losses)
        for i, subject in enumerate(self._subjects):
            for j, type in enumerate(self.formats):
                if type in subject.formats:
                    n_bytes[i, j] = subject.n_bytes(type)
                    seconds[i, j] = self._speeds.of(subject, type, n_tokens)
        return Options(self._losses, n_bytes, seconds)

    def _mix(self, allocation: Allocation, limits: Limits) -> Mix:
        types = {
            subject.name: self.formats[option]
            for subject, option in zip(self._subjects, allocation.chosen, strict=True)
        }
        return Mix(types, self.predicted(types), self.n_bytes(types), self.seconds(types, limits.n_tokens))

    def _measure_again(self, limits: Limits, pace: Pace) -> None:
        """Measure the tensors whose formats are the closest decisions, in a mix with all others as chosen.

        Their errors are amplified, as in sensitivity.py. All losses are larger in a mix; only what differs from the
        usual ratio says something of a tensor.
        """
        allocation = self._allocation(limits)
        mix = self._mix(allocation, limits).types
        gaps, _ = margins(self._options(limits.n_tokens), allocation)
        n_before, before = self._trials.n_measured, self._trials.loss(mix)
        pace.done(was_known=self._trials.n_measured == n_before)
        ratios: dict[int, float] = {}
        for i in np.argsort(gaps, kind="stable")[:_MARGINAL].tolist():
            name, alone = self._subjects[i].name, float(self._losses[i, allocation.chosen[i]])
            n_before = self._trials.n_measured
            if alone > 0:
                change = self._trials.loss(mix, name, mix[name], GAIN) - before
                ratios[i] = max(change / (GAIN**2 - 1), 0.0) / alone
            pace.done(was_known=self._trials.n_measured == n_before)
        usual = float(np.median(list(ratios.values()))) if ratios else 0.0
        for i, ratio in ratios.items() if usual > 0 else ():
            self._losses[i] *= min(max(ratio / usual, _LEAST_RATIO), _MOST_RATIO)


def distances(
    source: Source, mixes: Sequence[Types], importance: Importance, windows: Sequence[Window], device: Device
) -> Iterator[Distance]:
    """How far the source is from itself with tensors in other formats, as the engine runs these."""
    with TrialModel(source, {}, importance, _longest(windows), device) as model:
        references = [Reference(logits) for logits in model.read(windows)]
    for types in mixes:
        with TrialModel(source, types, importance, _longest(windows), device) as model:
            yield mean_distance(references, model.read(windows))


def _longest(windows: Sequence[Window]) -> int:
    return max(len(window.tokens) for window in windows)


def _bits(type: GGMLType) -> float:
    return type.block_bytes / type.block_elements


def _uniform_seconds(options: Options, n_bytes: float) -> float:
    """What uniform formats with as many bytes take, between the two nearest ones."""
    points = []
    for j in np.flatnonzero(np.isfinite(options.losses).all(axis=0)):
        points.append((float(options.n_bytes[:, j].sum()), float(options.seconds[:, j].sum())))
    if not points:
        return float("inf")
    sizes, seconds = zip(*sorted(points), strict=True)
    return max(float(np.interp(n_bytes, sizes, np.maximum.accumulate(seconds))), 1.001 * _least(options))


def _least(options: Options) -> float:
    return float(np.where(np.isfinite(options.losses), options.seconds, np.inf).min(axis=1).sum())
