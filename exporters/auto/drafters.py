"""Draft models and draft heads whose types are chosen: what they draft beside a target in formats that are tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.head_weights import read_head_beside
from edgeinfer.backends.native import NativeHeadModel, load_head, plan_head
from edgeinfer.backends.native.weights import of_frequent_tokens
from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.common.overriding import override
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device, Features
from edgeinfer.exporters.auto.candidates import Importance, Subject, formats_of, subjects_of
from edgeinfer.exporters.auto.chains import Agreement, MarginNoise, Margins, margins_of, of_rows
from edgeinfer.exporters.auto.choice import importance_by_tensor
from edgeinfer.exporters.auto.draft_search import Drafter
from edgeinfer.exporters.auto.progress import State
from edgeinfer.exporters.auto.target import MeasuredTarget, TargetText
from edgeinfer.exporters.auto.trial import (
    LossTrials,
    Measured,
    Rounding,
    TrialModel,
    Types,
    Window,
    least_seconds,
    loss_key,
    rounded_file,
)
from edgeinfer.exporters.calibration.imatrix import Imatrix
from edgeinfer.exporters.checks.head import target_rows
from edgeinfer.exporters.source import Source
from edgeinfer.exporters.virtual_file import model_file_of
from edgeinfer.models import ModelSpec, TensorRows, read_draft_spec
from edgeinfer.models.draft_head import HeadSpec
from edgeinfer.models.draft_vocab import draft_vocab_of
from edgeinfer.models.gguf import GGMLType, ModelFile
from edgeinfer.speculation.drafters.cross_vocabulary import has_vocabulary_of
from edgeinfer.speculation.drafters.head import DEFAULT_WIDTH


def drafting_spec(file: ModelFile) -> ModelSpec:
    """The spec of a draft model as it is loaded: with logits for some tokens only where there are many."""
    return of_frequent_tokens(file, read_draft_spec(file))


class DraftModel(Drafter):
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

    @override
    def trials(self, texts: Sequence[TargetText], noise: MarginNoise, state: State, n_depths: int) -> Measured:
        objective = Agreement([self._columns(text) for text in texts], noise)
        windows = [_window(text) for text in texts]
        return LossTrials(
            self._source, self.subjects, self.importance, windows, self._device, objective, state, drafting_spec
        )

    @override
    def shapes(self, texts: Sequence[TargetText], n_depths: int) -> list[tuple[int, int]]:
        return [(len(text.rows), 1) for text in texts]

    @override
    def chains(self, margins: Sequence[Margins], n_depths: int) -> Margins:
        return np.concatenate([of_rows(rows[:, 0], n_depths) for rows in margins])

    @override
    def run(self, types: Types, texts: Sequence[TargetText], n_depths: int) -> tuple[Margins, float]:
        windows = [_window(text) for text in texts]
        n_tokens = max(len(text.tokens) for text in texts)
        with TrialModel(self._source, types, self.importance, n_tokens, self._device, drafting_spec) as model:
            found = [
                of_rows(margins_of(rows, self._columns(text)), n_depths)
                for text, rows in zip(texts, model.read(windows), strict=True)
            ]
            return np.concatenate(found), model.pass_seconds(self.n_tokens)

    @override
    def seconds(self, types: Types) -> float:
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


class _Read(NamedTuple):
    """A text that the target has read. features: its rows, (n, n_rows)."""

    text: TargetText
    features: Features


class DraftHead(Drafter):
    """See Drafter."""

    n_tokens = DEFAULT_WIDTH  # of the passes in which it drafts
    importance: Importance = MappingProxyType({})  # nothing measures one of heads

    def __init__(self, source: Source, target: MeasuredTarget, device: Device) -> None:
        self._source, self._target, self._device = source, target, device
        with model_file_of(source) as file:
            self._spec = read_head_beside(file, target.file, target.model.spec)
        self.subjects = head_subjects(source, self._spec)
        self._known: list[tuple[Sequence[TargetText], list[_Read]]] = []

    @override
    def trials(self, texts: Sequence[TargetText], noise: MarginNoise, state: State, n_depths: int) -> Measured:
        return _HeadTrials(self, texts, noise, state, n_depths)

    @override
    def shapes(self, texts: Sequence[TargetText], n_depths: int) -> list[tuple[int, int]]:
        return [(len(_starts(text, n_depths)), n_depths) for text in texts]

    @override
    def chains(self, margins: Sequence[Margins], n_depths: int) -> Margins:
        return np.concatenate(list(margins))

    @override
    def run(self, types: Types, texts: Sequence[TargetText], n_depths: int) -> tuple[Margins, float]:
        with self._loaded(types, {}, texts, n_depths) as head:
            return np.concatenate(self._margins(head, texts, n_depths)), self._seconds(head)

    @override
    def seconds(self, types: Types) -> float:
        with self._loaded(types, {}, (), 2) as head:
            return self._seconds(head)

    def margins(self, roundings: Mapping[str, Rounding], texts: Sequence[TargetText], n_depths: int) -> list[Margins]:
        """By text, with tensors rounded and held as the source has them."""
        with self._loaded({}, roundings, texts, n_depths) as head:
            return self._margins(head, texts, n_depths)

    @contextmanager
    def _loaded(
        self, held: Types, roundings: Mapping[str, Rounding], texts: Sequence[TargetText], n_depths: int
    ) -> Iterator[NativeHeadModel]:
        n = n_depths * max((len(text.tokens) for text in texts), default=8)
        with rounded_file(self._source, held, roundings, {}) as file:
            spec = read_head_beside(file, self._target.file, self._target.model.spec)
            plan = plan_head(file, spec, LoadSettings(n, n_batch=n, n_threads=self._device.n_threads))
            head = load_head(file, spec, self._target.model, plan, self._device)
        try:
            yield head
        finally:
            head.close()

    def _margins(self, head: NativeHeadModel, texts: Sequence[TargetText], n_depths: int) -> list[Margins]:
        return [_chain_margins(head, each, n_depths) for each in self._read(texts)]

    def _read(self, texts: Sequence[TargetText]) -> list[_Read]:
        """The texts with the target's rows, which are read once."""
        for known, read in self._known:
            if known is texts:
                return read
        model = self._target.model
        read = [_Read(text, target_rows(model, text.tokens, self._spec)[0]) for text in texts]
        self._known.append((texts, read))
        return read

    def _seconds(self, head: NativeHeadModel) -> float:
        """Of a pass in which it drafts, the least of some."""
        session, tokens = head.session(), list(range(self.n_tokens))
        features = np.ones((self.n_tokens, self._spec.n_embd), dtype=np.float32)
        try:
            return least_seconds(lambda: session.forward(tokens, features, logits="all"))
        finally:
            session.close()


class _HeadTrials(Measured):
    """See Measured. The head is loaded for each measurement: it is small."""

    def __init__(
        self, head: DraftHead, texts: Sequence[TargetText], noise: MarginNoise, state: State, n_depths: int
    ) -> None:
        self._head, self._texts, self._noise, self._state, self._n_depths = head, texts, noise, state, n_depths
        self._has_begun = False
        self.n_measured = 0

    @override
    def loss(self, mix: Types, name: str = "", type: GGMLType | None = None, gain: float = 1.0) -> float:
        key = loss_key(mix, name, type, gain)
        known = self._state.get(key)
        if known is not None:
            return known
        if not self._has_begun:
            self._noise.begin(self._head.margins({}, self._texts, self._n_depths))
            self._has_begun = True
        self.n_measured += 1
        roundings = {each: Rounding(of, 1.0) for each, of in mix.items()}
        if type is not None:
            roundings[name] = Rounding(type, gain)
        return self._state.add(key, self._noise.loss(self._head.margins(roundings, self._texts, self._n_depths)))

    @override
    def close(self) -> None:
        pass


def head_subjects(source: Source, spec: HeadSpec) -> list[Subject]:
    """The matrices of a head in floats."""
    names = {weight.tensor for weight in spec.weights() if len(weight.shape) == 2}
    found = []
    for tensor in source.tensors:
        formats = formats_of(tensor)
        is_read = tensor.name in names
        if len(tensor.shape) == 2 and len(formats) > 1 and (is_read or tensor.name == spec.decoder.token_embd):
            shape = (tensor.shape[0], tensor.n_in)
            found.append(Subject(tensor, formats, shape, 1, int(is_read), 0))
    return found


def _starts(text: TargetText, n_depths: int) -> range:
    """Positions from which a whole chain stays in the rows that count; the first token has no feature before it."""
    first, last = max(1, text.rows[0]), text.rows[-1] - n_depths + 1
    return range(first, max(first, last + 1))


def _chain_margins(head: NativeHeadModel, read: _Read, n_depths: int) -> Margins:
    """The margins of the drafts from each position, where the text says what is accepted.

    All levels of all drafts are in the session at once: a row of level d + 1 follows the row of level d.
    """
    text, n = read.text, len(read.text.tokens) - 1
    starts, found = _starts(text, n_depths), []
    session, features, n_pending = head.session(), head.combine(read.features[:n]), 0
    parents: NDArray[np.int32] | None = None
    for depth in range(n_depths):
        tokens = list(text.tokens[1 + depth : n + 1])
        out = session.forward(tokens, features[: len(tokens)], parents, logits="all", n_pending=n_pending)
        rows = np.array([start - 1 for start in starts], dtype=np.intp)  # row i has read tokens up to i + 1 + depth
        chosen = text.chosen[rows + 1 + depth - text.rows[0]]
        found.append(margins_of(out.logits[rows], _columns(head.spec, chosen)))
        assert out.features is not None
        parents = np.arange(n_pending, n_pending + len(tokens) - 1, dtype=np.int32)
        features, n_pending = out.features.copy(), n_pending + len(tokens)
    session.close()
    return np.stack(found, axis=1).astype(np.float64)


def _columns(spec: HeadSpec, chosen: NDArray[np.int64]) -> NDArray[np.intp]:
    """Of the target's tokens in the logits of a head."""
    places = np.searchsorted(spec.draft_vocab, chosen).clip(max=len(spec.draft_vocab) - 1)
    return np.where(spec.draft_vocab[places] == chosen, places, -1)
