"""A draft model or a head that can be opened on several devices, and how its sessions become drafters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from edgeinfer.backends.base import (
    DraftingHead,
    DraftingSession,
    ExpertDeviceModel,
    HeadSession,
    Session,
    TargetReader,
)
from edgeinfer.common.types import LogitsRows, Output
from edgeinfer.models import ModelSpec
from edgeinfer.models.draft_head import HeadSpec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.speculation.calibration import TimedSession
from edgeinfer.speculation.cost import CostModel
from edgeinfer.speculation.drafters.base import ModelBasedDrafter
from edgeinfer.speculation.drafters.cross_vocabulary import model_drafter
from edgeinfer.speculation.drafters.device_drafting import DeviceDrafting
from edgeinfer.speculation.drafters.head import DEFAULT_WIDTH, HeadDrafter


@dataclass(frozen=True)
class DeviceLevels:
    """How a session's device drafts by itself."""

    make: Callable[[int, int], object]  # that many levels after a token, in one call
    width: int  # nodes of a level


@dataclass(frozen=True)
class DraftSource:
    """A draft model or a head that is to be opened on some device."""

    file: ModelFile
    spec: ModelSpec | HeadSpec
    # its drafter, from its session, the costs of its passes, and its device drafting if any
    make: Callable[[Any, CostModel, DeviceDrafting[Any] | None], ModelBasedDrafter]
    timed: Callable[[Any], TimedSession]  # its session, for calibration
    # how its session's device drafts by itself, None where it does not
    device_levels: Callable[[Any], DeviceLevels | None]


def model_source(file: ModelFile, spec: ModelSpec, target: ModelFile, n_vocab: int) -> DraftSource:
    """A draft model for a target that has n_vocab tokens."""

    def make(
        session: Session, costs: CostModel, on_device: DeviceDrafting[DraftingSession] | None
    ) -> ModelBasedDrafter:
        return model_drafter(session, file, target, n_vocab, costs, on_device)

    return DraftSource(file, spec, make, lambda session: session, levels_of_model)


def head_source(file: ModelFile, head: HeadSpec, n_vocab: int, target: Session) -> DraftSource:
    """A head for a target that has n_vocab tokens. target: a session of it, empty."""

    def make(
        session: HeadSession, costs: CostModel, on_device: DeviceDrafting[DraftingHead] | None
    ) -> ModelBasedDrafter:
        return HeadDrafter(session, head.draft_vocab, n_vocab, costs, head.taps, on_device)

    timed = partial(TimedReader, target) if head.reads_target else TimedHead
    return DraftSource(file, head, make, timed, levels_of_head)


class TimedHead:
    """A head as a TimedSession: all features are ones."""

    def __init__(self, head: HeadSession) -> None:
        self._head = head
        self.spec = head.spec.decoder
        self.n_ctx = head.n_ctx
        self.n_batch = head.n_batch
        self.commit = head.commit
        self.truncate = head.truncate

    @property
    def n_past(self) -> int:
        """See TimedSession."""
        return self._head.n_past

    def forward(self, tokens: Sequence[int], *, logits: LogitsRows = "last") -> Output:
        """See TimedSession."""
        return self._head.forward(tokens, np.ones((len(tokens), self.spec.n_embd), np.float32), logits=logits)


class TimedReader:
    """The same of a head that attends to what the target has read: a token more than n_past says."""

    def __init__(self, target: Session, head: TargetReader) -> None:
        self._target, self._head = target, head
        self.spec = head.spec.decoder
        self.n_ctx = min(head.n_ctx, target.n_ctx) - 1
        self.n_batch = min(head.n_batch, target.n_batch)
        head.follow(target)

    @property
    def n_past(self) -> int:
        """See TimedSession."""
        return max(0, self._target.n_past - 1)

    def forward(self, tokens: Sequence[int], *, logits: LogitsRows = "last") -> Output:
        """See TimedSession. Without logits it is a pass of the target, which makes keys and values."""
        if not self._target.n_past:
            self._read(tokens[:1])
            self._target.commit([0])
        if logits == ():
            return self._read(tokens)
        return self._head.forward(tokens, np.ones((len(tokens), self._head.spec.n_embd), np.float32), logits=logits)

    def commit(self, path: ArrayLike) -> None:
        """See TimedSession."""
        if np.asarray(path).size:
            self._target.commit(path)

    def truncate(self, n_past: int) -> int:
        """See TimedSession. It makes the target empty too."""
        return self._target.truncate(n_past)

    def _read(self, tokens: Sequence[int]) -> Output:
        """A pass of the target that nobody watches."""
        model = self._target.model
        if not isinstance(model, ExpertDeviceModel):
            return self._target.forward(tokens, logits=())
        pass_hook, model.pass_hook = model.pass_hook, None
        try:
            return self._target.forward(tokens, logits=())
        finally:
            model.pass_hook = pass_hook


class TimedLevels:
    """A session as a TimedSession whose passes of n tokens are drafts of n levels that its device makes."""

    def __init__(self, timed: TimedSession, levels: DeviceLevels) -> None:
        self._timed, self._levels = timed, levels
        self.spec = timed.spec
        self.n_ctx = self.n_batch = timed.n_ctx // levels.width  # each level is a pass of its own
        self.commit = timed.commit
        self.truncate = timed.truncate

    @property
    def n_past(self) -> int:
        """See TimedSession."""
        return self._timed.n_past

    def forward(self, tokens: Sequence[int], *, logits: LogitsRows = "last") -> Output:
        """See TimedSession."""
        if logits == ():  # only fills the KV cache
            return self._timed.forward(tokens, logits=logits)
        self._levels.make(tokens[0], len(tokens))
        return Output(np.empty((0, self.spec.n_vocab), dtype=np.float32))


def levels_of_model(session: Session) -> DeviceLevels | None:
    """Chains, where the session's device drafts by itself."""
    if not isinstance(session, DraftingSession):
        return None
    return DeviceLevels(lambda token, n_levels: session.draft([token], n_levels), 1)


def levels_of_head(head: HeadSession) -> DeviceLevels | None:
    """Trees after a feature of ones, where the head's device drafts by itself."""
    if not isinstance(head, DraftingHead) or head.n_batch < DEFAULT_WIDTH:
        return None
    ones = np.ones((1, head.spec.n_embd), np.float32)
    return DeviceLevels(lambda token, n_levels: head.draft([token], ones, n_levels, DEFAULT_WIDTH), DEFAULT_WIDTH)
