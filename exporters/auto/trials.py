"""Losses of mixes of formats, each measured once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Protocol

from edgeinfer.backends.native.repacking import Trace
from edgeinfer.exporters.auto.candidates import Subject
from edgeinfer.exporters.auto.objective import Objective
from edgeinfer.exporters.auto.rounding import Importance
from edgeinfer.exporters.auto.state import State
from edgeinfer.exporters.auto.trial import ReadSpec, TrialModel
from edgeinfer.exporters.auto.windows import Window
from edgeinfer.exporters.source import Source
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import GGMLType
from edgeinfer.types import Device

# In which a model is measured: its products take half of the time of those in floats. What tensors are rounded to is
# held in it again, as nearly the same.
_HELD = GGMLType.Q8_0

Types = Mapping[str, GGMLType]


class Measured(Protocol):
    """Losses of a model with some of its tensors rounded. n_measured: of them so far, without those that were known."""

    n_measured: int

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
