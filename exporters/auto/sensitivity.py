"""The loss of each tensor in each format: one of them measured, the others from the ratio of weighted errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from edgeinfer.exporters.auto.allocation import Numbers
from edgeinfer.exporters.auto.candidates import Subject
from edgeinfer.exporters.auto.rounding import Importance, errors_of
from edgeinfer.exporters.auto.state import State
from edgeinfer.exporters.auto.trials import Trials
from edgeinfer.models.gguf import GGMLType

# Losses are measured in the first of these that a tensor may have: large enough to be seen above the noise of float
# arithmetic, and small enough to be quadratic in the error, so that the ratio of errors holds.
_MEASURED = (GGMLType.Q4_0, GGMLType.Q4_K, GGMLType.Q5_0)


def all_errors(subjects: Sequence[Subject], importance: Importance, state: State) -> Sequence[Mapping[GGMLType, float]]:
    """The weighted error of each tensor in each of its formats; see rounding.errors_of."""
    found = []
    for subject in subjects:
        known = {type: state.get(_error_name(subject, type)) for type in subject.formats}
        errors = {type: error for type, error in known.items() if error is not None}
        missing = [type for type in subject.formats if type not in errors]
        for type, error in errors_of(subject.tensor, missing, importance).items() if missing else ():
            errors[type] = state.add(_error_name(subject, type), error)
        found.append(errors)
    return found


def measured_losses(
    trials: Trials, subjects: Sequence[Subject], progress: Callable[[float], None]
) -> list[tuple[GGMLType, float]]:
    """A format of each tensor, and the loss with this tensor alone rounded to it."""
    found = []
    for i, subject in enumerate(subjects):
        type = next((each for each in _MEASURED if each in subject.formats), subject.formats[0])
        found.append((type, trials.loss({}, subject.name, type)))
        progress((i + 1) / len(subjects))
    return found


def loss_table(
    subjects: Sequence[Subject],
    formats: Sequence[GGMLType],
    measured: Sequence[tuple[GGMLType, float]],
    errors: Sequence[Mapping[GGMLType, float]],
) -> Numbers:
    """(n_tensors, n_formats) losses, infinite where a tensor may not have the format."""
    table = np.full((len(subjects), len(formats)), np.inf)
    for i, (subject, (type, loss)) in enumerate(zip(subjects, measured, strict=True)):
        per_error = max(loss, 0.0) / max(errors[i][type], 1e-30)
        for j, each in enumerate(formats):
            if each in subject.formats:
                table[i, j] = per_error * errors[i][each]
    return table


def _error_name(subject: Subject, type: GGMLType) -> str:
    return f"error {subject.name} {type.name}"
