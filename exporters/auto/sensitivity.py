"""The loss of each tensor in each format: one of them measured, the others from the ratio of weighted errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from edgeinfer.exporters.auto.allocation import Numbers
from edgeinfer.exporters.auto.candidates import Importance, Subject, errors_of
from edgeinfer.exporters.auto.progress import Pace, State
from edgeinfer.exporters.auto.trial import Measured
from edgeinfer.exporters.request import StepProgress
from edgeinfer.models.gguf import GGMLType

# Formats with a scale alone, and with a scale and a minimum. Their errors differ in kind: in matrices of values, the
# same weighted error costs two to four times as much without a minimum. So a loss is measured in one format of each
# kind, the first of these that a tensor may have; other formats have it by the ratio of errors.
_KINDS: tuple[frozenset[GGMLType], ...] = (
    frozenset(GGMLType[name] for name in ("Q3_K", "Q4_0", "Q5_0", "Q6_K", "Q8_0", "F16", "BF16", "F32")),
    frozenset(GGMLType[name] for name in ("Q2_K", "Q4_1", "Q4_K", "Q5_1", "Q5_K")),
)
_LEAST = 1e-9  # of a loss that is measured: less is noise
# Any change in a model changes some int8 codes of the activations after it, and so the logits: by about ten times as
# much as rounding one tensor to four bits does. So the errors of the tensor are amplified (the loss is nearly quadratic
# in them), and the loss of a change without error is measured in some layers and subtracted. Losses above
# _LARGE are no longer quadratic, and large enough to be measured as they are.
GAIN, _NO_GAIN, _FLOORS, _LARGE = 4.0, 0.05, 8, 0.25
_ROUNDING = 4.0  # time of rounding a weight over that of a pass with it
_MEASURED = (("Q4_0", "Q5_0", "Q8_0"), ("Q4_1", "Q4_K", "Q5_1"))

Losses = Mapping[GGMLType, float]


def all_errors(
    subjects: Sequence[Subject], importance: Importance, state: State, report: StepProgress
) -> Sequence[Losses]:
    """The weighted error of each tensor in each of its formats; see rounding.errors_of."""
    found, pace = [], Pace("errors of formats", "tensors", [1.0] * len(subjects), report)
    for subject in subjects:
        known = {type: state.get(_error_name(subject, type)) for type in subject.formats}
        errors = {type: error for type, error in known.items() if error is not None}
        missing = [type for type in subject.formats if type not in errors]
        for type, error in errors_of(subject.tensor, missing, importance).items() if missing else ():
            errors[type] = state.add(_error_name(subject, type), error)
        found.append(errors)
        pace.done(was_known=not missing)
    return found


def measured_losses(trials: Measured, subjects: Sequence[Subject], report: StepProgress) -> Sequence[Losses]:
    """The losses with each tensor alone rounded, to a format of each kind."""
    floor, found = floors(trials, subjects), []
    pace = Pace("losses", "tensors", _costs_of_losses(subjects), report)
    for subject in subjects:
        before = trials.n_measured
        found.append({type: _loss_alone(trials, subject, type, floor) for type in measured_formats(subject)})
        pace.done(was_known=trials.n_measured == before)
    return found


def _costs_of_losses(subjects: Sequence[Subject]) -> list[float]:
    """Relative time to measure the loss of each tensor: rounding it, and a pass through the layers after it."""
    sizes = [float(math.prod(subject.tensor.shape)) for subject in subjects]
    after: dict[int, float] = {}
    for layer in {subject.layer for subject in subjects}:
        after[layer] = sum(size for each, size in zip(subjects, sizes, strict=True) if each.layer >= layer)
    return [_ROUNDING * size + after[subject.layer] for subject, size in zip(subjects, sizes, strict=True)]


def floors(trials: Measured, subjects: Sequence[Subject]) -> Callable[[int], float]:
    """The loss that any change before a layer has, however small, by layer; 0 for the output matrix."""
    first = {subject.layer: subject for subject in reversed(subjects) if subject.n_used}
    last = max(subject.layer for subject in subjects)
    inside = sorted(layer for layer in first if layer < last or len(first) == 1)
    some = inside[:: max(1, len(inside) // _FLOORS)]
    found = [trials.loss({}, first[layer].name, measured_formats(first[layer])[0], _NO_GAIN) for layer in some]
    return lambda layer: float(np.interp(layer, some, found)) if layer <= inside[-1] else 0.0


def _loss_alone(trials: Measured, subject: Subject, type: GGMLType, floor: Callable[[int], float]) -> float:
    loss = trials.loss({}, subject.name, type, GAIN)
    if loss > _LARGE:
        return max(_LEAST, trials.loss({}, subject.name, type) - floor(subject.layer))
    return max(_LEAST, (loss - floor(subject.layer)) / GAIN**2)


def measured_formats(subject: Subject) -> list[GGMLType]:
    """The formats in which the loss of a tensor is measured."""
    found = []
    for names in _MEASURED:
        found += [GGMLType[name] for name in names if GGMLType[name] in subject.formats][:1]
    return found or [subject.formats[0]]


def loss_table(
    subjects: Sequence[Subject], formats: Sequence[GGMLType], measured: Sequence[Losses], errors: Sequence[Losses]
) -> Numbers:
    """(n_tensors, n_formats) losses, infinite where a tensor may not have the format."""
    by_kind = _sensitivities([_per_error(kind, measured, errors) for kind in _KINDS])
    table = np.full((len(subjects), len(formats)), np.inf)
    for i, subject in enumerate(subjects):
        for j, type in enumerate(formats):
            if type in subject.formats:
                table[i, j] = by_kind[0 if type in _KINDS[0] else 1][i] * errors[i][type]
    return table


def _sensitivities(by_kind: Sequence[Numbers]) -> Sequence[Numbers]:
    """What an error of each kind costs in each tensor, of what was measured; NaN is what was not.

    A measurement depends on the text and on how the errors happen to fall. So it counts half, and half the geometric
    mean of the kinds, each over what is usual for it.
    """
    usual = [float(np.exp(np.nanmedian(np.log(each)))) if np.isfinite(each).any() else np.nan for each in by_kind]
    usual = [float(np.nanmean(usual)) if np.isnan(value) else value for value in usual]
    relative = np.array([each / value for each, value in zip(by_kind, usual, strict=True)])
    n_measured = np.isfinite(relative).sum(axis=0)
    common = np.exp(np.where(np.isfinite(relative), np.log(relative), 0.0).sum(axis=0) / np.maximum(n_measured, 1))
    own = [np.where(np.isfinite(each), each, common) for each in relative]
    return [value * np.sqrt(common * each) for value, each in zip(usual, own, strict=True)]


def _per_error(kind: frozenset[GGMLType], measured: Sequence[Losses], errors: Sequence[Losses]) -> Numbers:
    """(n_tensors,) loss of a weighted error of one, NaN where none of the kind was measured."""
    found = np.full(len(measured), np.nan)
    for i, losses in enumerate(measured):
        for type, loss in losses.items():
            if type in kind and errors[i][type] > 0:
                found[i] = max(loss, _LEAST) / errors[i][type]
    return found


def _error_name(subject: Subject, type: GGMLType) -> str:
    return f"error {subject.name} {type.name}"
