"""A source on the native engine, tensor by tensor in formats that are tried, and the losses that they cost on texts."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import NamedTuple, Protocol

import numpy as np

from edgeinfer.backends.native.packing.repacking import RepackableModel, Trace
from edgeinfer.common.overriding import override
from edgeinfer.common.types import Device, Logits
from edgeinfer.exporters.auto.candidates import Importance, Subject, amplified_rows, rounded_bytes
from edgeinfer.exporters.auto.progress import State
from edgeinfer.exporters.divergence import Reference, mean_distance
from edgeinfer.exporters.source import Bytes, Source, SourceTensor
from edgeinfer.exporters.virtual_file import VirtualModelFile, VirtualTensor
from edgeinfer.models import ModelSpec, formats, read_spec
from edgeinfer.models.gguf import GGMLType, ModelFile

ReadSpec = Callable[[ModelFile], ModelSpec]
_TIMED, _TIMED_SECONDS = 12, 0.5  # passes at least, and their time: longer than what disturbs some of them
# In which a model is measured: its products take half of the time of those in floats. What tensors are rounded to is
# held in it again, as nearly the same.
_HELD = GGMLType.Q8_0
Types = Mapping[str, GGMLType]


@dataclass(frozen=True)
class CalibrationText:
    """A text in tokens."""

    tokens: Sequence[int]
    n_prompt: int = 1  # the first tokens, whose predictions do not count; at least 1


@dataclass(frozen=True)
class Window:
    """Tokens of one pass, and the rows whose predictions count."""

    tokens: Sequence[int]
    rows: Sequence[int]


def windows_of(texts: Iterable[CalibrationText], n_tokens: int, n_windows: int, n_rows: int) -> list[Window]:
    """Windows of n_tokens with n_rows that count at most, evenly spread; fewer where the texts end before.

    Texts stand one after the other, as llama.cpp's perplexity tool has them. The last one of a window is cut; what is
    left of it is not used.
    """
    windows: list[Window] = []
    tokens: list[int] = []
    rows: list[int] = []
    for text in texts:
        ids = list(text.tokens)[: n_tokens - len(tokens)]
        rows = rows + [len(tokens) + i for i in range(max(text.n_prompt, 1) - 1, len(ids) - 1)]
        tokens = tokens + ids
        if len(tokens) == n_tokens:
            windows += [Window(tokens, _thinned(rows, n_rows))] if rows else []
            tokens, rows = [], []
        if len(windows) == n_windows:
            return windows
    return [*windows, Window(tokens, _thinned(rows, n_rows))] if rows else windows


def _thinned(values: list[int], most: int) -> list[int]:
    """At most so many of the values, evenly spread."""
    return values if len(values) <= most else [values[i * len(values) // most] for i in range(most)]


class Objective(Protocol):
    """A loss of logits, by window: 0 for those of the model that is measured against, and above for others."""

    def begin(self, logits: Sequence[Logits]) -> None:
        """Take the logits that others are compared with; they may be overwritten."""
        ...

    def loss(self, logits: Sequence[Logits]) -> float:
        """Of the windows' logits."""
        ...


class Divergence(Objective):
    """The mean Kullback-Leibler divergence of a token, in nats: the objective of models that answer."""

    def __init__(self) -> None:
        self._references: list[Reference] = []

    @override
    def begin(self, logits: Sequence[Logits]) -> None:
        self._references = [Reference(each) for each in logits]

    @override
    def loss(self, logits: Sequence[Logits]) -> float:
        return mean_distance(self._references, logits).divergence


def least_seconds(run: Callable[[], object]) -> float:
    """What something takes that is run again and again, undisturbed."""
    best, n, began = math.inf, 0, time.perf_counter()
    while n < _TIMED or time.perf_counter() - began < _TIMED_SECONDS:
        started = time.perf_counter()
        run()
        best, n = min(best, time.perf_counter() - started), n + 1
    return best


class Rounding(NamedTuple):
    """A format, and what its errors are multiplied by."""

    type: GGMLType
    gain: float


class TrialModel:
    """The model of a source. A context manager.

    held: the type in which each tensor is in memory; those that are not in it are as the source has them.
    n_tokens: of a window at most.  read: the spec of its file.
    Raises UnsupportedModel, ModelFileError.
    """

    def __init__(
        self,
        source: Source,
        held: Mapping[str, GGMLType],
        importance: Importance,
        n_tokens: int,
        device: Device,
        read: ReadSpec = read_spec,
    ) -> None:
        self._held = held
        self._rounded: dict[str, Rounding] = {}
        self._resources = ExitStack()
        try:
            rounded = rounded_file(source, self._held, self._rounded, importance)
            file = self._resources.enter_context(rounded)
            spec = read(file)
            self.n_layers = spec.n_layers
            self._model = RepackableModel(file, spec, n_tokens, device)
        except BaseException:
            self.close()
            raise

    def round(self, name: str, type: GGMLType | None, gain: float = 1.0) -> None:
        """Round a tensor to a format from now on, None to have it as it was.  gain: of its errors."""
        requested = None if type is None else Rounding(type, gain)
        if self._rounded.get(name) == requested:
            return
        if requested is None:
            del self._rounded[name]
        else:
            self._rounded[name] = requested
        self._model.repack(name)

    def traces(self, windows: Sequence[Window]) -> list[Trace]:
        """Passes of whole windows. Raises Interrupted."""
        return [self._model.trace(window.tokens, window.rows) for window in windows]

    def read(self, windows: Sequence[Window]) -> list[Logits]:
        """The logits of windows. Raises Interrupted."""
        return [self._model.read(window.tokens, window.rows) for window in windows]

    def pass_seconds(self, n_tokens: int) -> float:
        """Of a pass of that many tokens, the least of some. Raises Interrupted."""
        tokens = list(range(1, n_tokens + 1))
        return least_seconds(lambda: self._model.read(tokens, [n_tokens - 1]))

    def logits(self, traces: Sequence[Trace], changed: str) -> list[Logits]:
        """What the windows have for logits where a tensor alone has changed since. Raises Interrupted."""
        first = self._model.first_layer_of(changed)
        return [self._model.logits(trace, first) for trace in traces]

    def close(self) -> None:
        """Give everything back."""
        self._resources.close()

    def __enter__(self) -> TrialModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def rounded_file(
    source: Source, held: Mapping[str, GGMLType], roundings: Mapping[str, Rounding], importance: Importance
) -> AbstractContextManager[ModelFile]:
    """A model file with the metadata of a source, which gives the tensors as they are to be in memory.

    held: see TrialModel.  roundings: of tensors, as they are when one is read.
    """

    def virtual(tensor: SourceTensor) -> VirtualTensor:
        type = held.get(tensor.name, tensor.type)
        make = partial(_bytes, tensor, type, roundings, importance)
        # The engine asks for the place of one tensor alone, the table of LayerInputs, which is never rounded.
        place = tensor.place if type == tensor.type else None
        return VirtualTensor(tensor.name, type, tensor.shape, make, place)

    return VirtualModelFile.of(source.path, source.metadata, map(virtual, source.tensors))


def _bytes(
    tensor: SourceTensor,
    held: GGMLType,
    roundings: Mapping[str, Rounding],
    importance: Importance,
    first: int,
    last: int,
) -> Bytes:
    """Bytes first..last-1 of a tensor, whole rows, in the type that it is held in."""
    rounded = roundings.get(tensor.name)
    row_bytes = held.n_bytes(tensor.n_in)
    first, last = first // row_bytes, last // row_bytes
    if rounded is None or rounded == (held, 1.0):
        return rounded_bytes(tensor, held, importance, first, last)
    rows = amplified_rows(tensor, *rounded, importance, first, last)
    return np.ascontiguousarray(formats.quantize(held, rows))


class Measured(Protocol):
    """Losses of a model with some of its tensors rounded."""

    n_measured: int  # of them so far, without those that were known

    def loss(self, mix: Types, name: str = "", type: GGMLType | None = None, gain: float = 1.0) -> float:
        """See LossTrials.loss."""
        ...

    def close(self) -> None:
        """Give the model back."""
        ...


class LossTrials:
    """See Measured. The model is loaded when something is to be measured that the state does not have."""

    def __init__(
        self,
        source: Source,
        subjects: Sequence[Subject],
        importance: Importance,
        windows: Sequence[Window],
        device: Device,
        objective: Objective,
        state: State,
        read: ReadSpec = read_spec,
    ) -> None:
        self._source, self._importance, self._windows, self._device = source, importance, windows, device
        self._read = read
        self._held = {subject.name: _HELD for subject in subjects if _HELD in subject.formats}
        self._objective, self._state = objective, state
        self.n_measured = 0
        self._model: TrialModel | None = None
        self._mix: Types = {}
        self._traces: list[Trace] = []  # of the model as it is now

    def loss(self, mix: Types, name: str = "", type: GGMLType | None = None, gain: float = 1.0) -> float:
        """The loss with some tensors rounded, and one of them to another format than in the mix.

        gain: that the errors of this one are multiplied by. Raises Interrupted.
        """
        key = loss_key(mix, name, type, gain)
        known = self._state.get(key)
        return self._state.add(key, self._measured(mix, name, type, gain)) if known is None else known

    def _measured(self, mix: Types, name: str, type: GGMLType | None, gain: float) -> float:
        model = self._model or self._loaded()
        self.n_measured += 1
        self._set(model, mix)
        if not name:
            return self._objective.loss([trace.logits for trace in self._traces])
        model.round(name, type, gain)
        try:
            return self._objective.loss(model.logits(self._traces, name))
        finally:
            model.round(name, mix.get(name))

    def _loaded(self) -> TrialModel:
        n_tokens = max(len(window.tokens) for window in self._windows)
        self._model = TrialModel(self._source, self._held, self._importance, n_tokens, self._device, self._read)
        self._traces = self._model.traces(self._windows)
        self._objective.begin([trace.logits.copy() for trace in self._traces])
        return self._model

    def _set(self, model: TrialModel, mix: Types) -> None:
        """Round the model as the mix is."""
        changed = [name for name in {**self._mix, **mix} if self._mix.get(name) != mix.get(name)]
        self._mix = dict(mix)
        for name in changed:
            model.round(name, mix.get(name))
        if changed:
            self._traces = []  # before others take as much memory
            self._traces = model.traces(self._windows)

    def close(self) -> None:
        """Give the model back; it is loaded again where it is needed."""
        if self._model is not None:
            self._model.close()
        self._model, self._mix, self._traces = None, {}, []


def loss_key(mix: Types, name: str, type: GGMLType | None, gain: float) -> str:
    """What a loss is called in the state."""
    return f"loss {digest_of(mix)} {name} {'' if type is None else type.name} {gain:g}"


def digest_of(mix: Types) -> str:
    """A name of a mix; "alone" for none."""
    if not mix:
        return "alone"
    return hashlib.sha256(repr(sorted((name, type.name) for name, type in mix.items())).encode()).hexdigest()[:16]


def fingerprint_of(
    subjects: Sequence[Subject], windows: Sequence[Window], importance: Importance, more: str = ""
) -> str:
    """Of the tensors (their first rows), their formats, the texts and the importance. more: what else there is."""
    digest = hashlib.sha256()
    for subject in subjects:
        digest.update(repr((subject.name, subject.tensor.shape, [each.name for each in subject.formats])).encode())
        digest.update(subject.tensor.rows(0, 1).tobytes())
        found = importance.get(subject.name)
        digest.update(b"" if found is None else found.tobytes())
    digest.update(repr([(list(window.tokens), list(window.rows)) for window in windows]).encode())
    digest.update(more.encode())
    return digest.hexdigest()
