"""A draft model whose types are chosen: what it chooses along texts of its target, with tensors in tried formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.native.weights import of_frequent_tokens
from edgeinfer.errors import UnsupportedModel
from edgeinfer.exporters.auto.agreement import Agreement, MarginNoise, margins_of
from edgeinfer.exporters.auto.candidates import Subject, subjects_of
from edgeinfer.exporters.auto.chains import Margins, of_rows
from edgeinfer.exporters.auto.choice import importance_by_tensor
from edgeinfer.exporters.auto.state import State
from edgeinfer.exporters.auto.target import MeasuredTarget, TargetText
from edgeinfer.exporters.auto.trial import TrialModel
from edgeinfer.exporters.auto.trials import LossTrials, Measured, Types
from edgeinfer.exporters.auto.windows import Window
from edgeinfer.exporters.calibration.imatrix import Imatrix
from edgeinfer.exporters.source import Source
from edgeinfer.exporters.virtual_file import model_file_of
from edgeinfer.models import ModelSpec, TensorRows, read_draft_spec
from edgeinfer.models.draft_vocab import draft_vocab_of
from edgeinfer.models.gguf import ModelFile
from edgeinfer.speculation.drafters.cross_vocabulary import has_vocabulary_of
from edgeinfer.types import Device


def drafting_spec(file: ModelFile) -> ModelSpec:
    """The spec of a draft model as it is loaded: with logits for some tokens only where there are many."""
    return of_frequent_tokens(file, read_draft_spec(file))


class DraftModel:
    """See Drafter. Raises UnsupportedModel for a model with another vocabulary than the target's."""

    n_tokens = 1  # of the passes in which it drafts

    def __init__(self, source: Source, target: MeasuredTarget, imatrix: Imatrix | None, device: Device) -> None:
        self._source, self._device = source, device
        with model_file_of(source) as file:
            spec = drafting_spec(file)
            if not has_vocabulary_of(file, target.file, target.model.spec.n_vocab):
                raise UnsupportedModel(
                    f"{source.path}: --type auto chooses for draft models with the tokens of their target, which "
                    f"{target.file.path} does not have"
                )
            ids = draft_vocab_of(file, spec.n_vocab)
        self._ids = np.arange(spec.n_logits) if ids is None else ids
        self.subjects = [_as_drafted(subject, spec) for subject in subjects_of(source, spec)]
        self.importance = importance_by_tensor(self.subjects, imatrix)

    def trials(self, texts: Sequence[TargetText], noise: MarginNoise, state: State, n_depths: int) -> Measured:
        """See Drafter.trials."""
        objective = Agreement([self._columns(text) for text in texts], noise)
        windows = [_window(text) for text in texts]
        return LossTrials(
            self._source, self.subjects, self.importance, windows, self._device, objective, state, drafting_spec
        )

    def shapes(self, texts: Sequence[TargetText], n_depths: int) -> list[tuple[int, int]]:
        """See Drafter.shapes."""
        return [(len(text.rows), 1) for text in texts]

    def chains(self, margins: Sequence[Margins], n_depths: int) -> Margins:
        """See Drafter.chains."""
        return np.concatenate([of_rows(rows[:, 0], n_depths) for rows in margins])

    def run(self, types: Types, texts: Sequence[TargetText], n_depths: int) -> tuple[Margins, float]:
        """See Drafter.run."""
        windows = [_window(text) for text in texts]
        n_tokens = max(len(text.tokens) for text in texts)
        with TrialModel(self._source, types, self.importance, n_tokens, self._device, drafting_spec) as model:
            found = [
                of_rows(margins_of(rows, self._columns(text)), n_depths)
                for text, rows in zip(texts, model.read(windows), strict=True)
            ]
            return np.concatenate(found), model.pass_seconds(self.n_tokens)

    def seconds(self, types: Types) -> float:
        """See Drafter.seconds."""
        with TrialModel(self._source, types, self.importance, 16, self._device, drafting_spec) as model:
            return model.pass_seconds(self.n_tokens)

    def _columns(self, text: TargetText) -> NDArray[np.intp]:
        """Of the target's tokens in the logits."""
        places = np.searchsorted(self._ids, text.chosen).clip(max=len(self._ids) - 1)
        return np.where(self._ids[places] == text.chosen, places, -1)


def _window(text: TargetText) -> Window:
    return Window(text.tokens, text.rows)


def _as_drafted(subject: Subject, spec: ModelSpec) -> Subject:
    """The output matrix with the rows that are multiplied."""
    output = spec.output.name if isinstance(spec.output, TensorRows) else spec.output
    return subject if subject.name != output else replace(subject, shape=(spec.n_logits, subject.shape[1]))
