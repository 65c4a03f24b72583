"""A draft head whose types are chosen: what it drafts beside its target, with tensors in tried formats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.head_weights import read_head_beside
from edgeinfer.backends.native import NativeHeadModel, load_head, plan_head
from edgeinfer.exporters.auto.agreement import MarginNoise, margins_of
from edgeinfer.exporters.auto.candidates import Subject, formats_of
from edgeinfer.exporters.auto.chains import Margins
from edgeinfer.exporters.auto.rounding import Importance
from edgeinfer.exporters.auto.state import State
from edgeinfer.exporters.auto.target import Target, TargetText
from edgeinfer.exporters.auto.trial import Rounding, least_seconds, open_rounded
from edgeinfer.exporters.auto.trials import Measured, Types, loss_key
from edgeinfer.exporters.calibration.running import model_file_of
from edgeinfer.exporters.checks.head import target_rows
from edgeinfer.exporters.source import Source
from edgeinfer.files import temporary_folder
from edgeinfer.models.draft_head import HeadSpec
from edgeinfer.models.gguf import GGMLType
from edgeinfer.settings import LoadSettings
from edgeinfer.speculation.drafters.head import DEFAULT_WIDTH
from edgeinfer.types import Device, Features


class _Read(NamedTuple):
    """A text that the target has read. features: its rows, (n, n_rows)."""

    text: TargetText
    features: Features


class DraftHead:
    """See Drafter."""

    n_tokens = DEFAULT_WIDTH  # of the passes in which it drafts
    importance: Importance = MappingProxyType({})  # nothing measures one of heads

    def __init__(self, source: Source, target: Target, device: Device) -> None:
        self._source, self._target, self._device = source, target, device
        with model_file_of(source) as file:
            self._spec = read_head_beside(file, target.file, target.model.spec)
        self.subjects = head_subjects(source, self._spec)
        self._known: list[tuple[Sequence[TargetText], list[_Read]]] = []

    def trials(self, texts: Sequence[TargetText], noise: MarginNoise, state: State, n_depths: int) -> Measured:
        """See Drafter.trials."""
        return _HeadTrials(self, texts, noise, state, n_depths)

    def shapes(self, texts: Sequence[TargetText], n_depths: int) -> list[tuple[int, int]]:
        """See Drafter.shapes."""
        return [(len(_starts(text, n_depths)), n_depths) for text in texts]

    def chains(self, margins: Sequence[Margins], n_depths: int) -> Margins:
        """See Drafter.chains."""
        return np.concatenate(list(margins))

    def run(self, types: Types, texts: Sequence[TargetText], n_depths: int) -> tuple[Margins, float]:
        """See Drafter.run."""
        with self._loaded(types, {}, texts, n_depths) as head:
            return np.concatenate(self._margins(head, texts, n_depths)), self._seconds(head)

    def seconds(self, types: Types) -> float:
        """See Drafter.seconds."""
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
        with temporary_folder() as folder:
            with open_rounded(folder, self._source, held, roundings, {}) as file:
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


class _HeadTrials:
    """See Measured. The head is loaded for each measurement: it is small."""

    def __init__(
        self, head: DraftHead, texts: Sequence[TargetText], noise: MarginNoise, state: State, n_depths: int
    ) -> None:
        self._head, self._texts, self._noise, self._state, self._n_depths = head, texts, noise, state, n_depths
        self._has_begun = False
        self.n_measured = 0

    def loss(self, mix: Types, name: str = "", type: GGMLType | None = None, gain: float = 1.0) -> float:
        """See Measured.loss."""
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

    def close(self) -> None:
        """See Measured.close."""


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
