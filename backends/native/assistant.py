"""Draft heads that attend to their target's keys and values, on the C++ decoder: assistants of Gemma 4."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgeinfer.backends.base import JointHeadModel, Rows, Session, TargetReader
from edgeinfer.backends.checks import check_features, check_rows, check_sessions, check_tokens
from edgeinfer.backends.native import _core
from edgeinfer.backends.native.head import NativeHead, load_parts
from edgeinfer.backends.native.model import DecoderParts, NativeModel
from edgeinfer.backends.native.passes import interrupted
from edgeinfer.backends.native.reused_rows import ReusedRows
from edgeinfer.backends.native.session import NativeSession
from edgeinfer.common.arguments import MAX_INT32
from edgeinfer.common.errors import EdgeInferError, InvalidArgument, ShapeError
from edgeinfer.common.one_process import OfOneProcess
from edgeinfer.common.overriding import override
from edgeinfer.common.types import Device, Features, LogitsRows, MemoryPlan, MemoryUse, Output, TokenIds
from edgeinfer.models.draft_head import HeadSpec
from edgeinfer.models.gguf import ModelFile

_ROWS = 32  # of logits whose memory passes use again


def load_assistant(
    assistant: ModelFile, spec: HeadSpec, target: NativeModel, plan: MemoryPlan, device: Device
) -> NativeAssistantModel:
    """See load_head. spec: with reads_target, as read_head_beside gives it. Raises UnsupportedModel."""
    return NativeAssistantModel(*load_parts(assistant, spec, target, plan, device), target)


class NativeAssistantModel(NativeHead, JointHeadModel):
    """See edgeinfer.backends.base.HeadModel. Made by load_assistant."""

    def __init__(
        self,
        parts: DecoderParts,
        spec: HeadSpec,
        plan: MemoryPlan,
        projection: _core.FeatureProjection | None,
        target: NativeModel,
    ) -> None:
        super().__init__(parts, spec, plan, projection)
        self.target = target
        self._rows = ReusedRows(_ROWS, spec.n_logits, 2)
        # (n_clusters, n) tokens of each cluster, None where all tokens have logits
        self._tokens = None if spec.clusters is None else spec.draft_vocab.reshape(spec.clusters.n_clusters, -1)

    @override
    def session(self, n_ctx: int | None = None) -> NativeAssistantSession:
        """See HeadModel.session. n_ctx: has no meaning, there is nothing to keep."""
        self.check_open()
        return NativeAssistantSession(self)

    @override
    def forward(self, batch: Sequence[Rows]) -> list[Output]:
        """See HeadModel.forward. All rows of a session must fit into n_batch."""
        check_sessions(self, batch)
        outputs: list[Output] = []
        for part in self._passes([rows.session.checked(rows) for rows in batch]):
            outputs += self._run_pass(part)
        return outputs

    def _passes(self, batch: Sequence[_Checked]) -> Iterator[list[_Checked]]:
        """The rows in as few passes as their order allows."""
        part: list[_Checked] = []
        for rows in batch:
            if sum(len(each.tokens) for each in part) + len(rows.tokens) > self.n_batch:
                yield part
                part = []
            part.append(rows)
        yield part

    def _run_pass(self, batch: Sequence[_Checked]) -> list[Output]:
        """One pass. Raises Interrupted."""
        decoder, n = self.decoder(), sum(len(rows.tokens) for rows in batch)
        layers = np.array([self.spec.feature_tap], dtype=np.int32)
        tapped = np.empty((1, n, self.decoder_spec.n_embd), dtype=np.float32)
        arguments, requested, first = [], [], 0
        for rows in batch:
            parents = np.full(len(rows.tokens), -1, dtype=np.int32)
            arguments.append((rows.state, rows.tokens, parents, 0, layers, tapped, first, rows.features))
            requested.append(rows.requested + np.int32(first))
            first += len(rows.tokens)
        wanted = np.concatenate(requested)
        logits = self._rows.take(len(wanted))
        if not decoder.forward(arguments, wanted, logits, decoder.interrupts):
            raise interrupted()
        features = np.empty((n, self.spec.n_embd), dtype=np.float32)
        assert self._projection is not None  # every assistant has one
        self._projection.run(tapped[0], features)
        return self._outputs(batch, logits, features)

    def _outputs(self, batch: Sequence[_Checked], logits: NDArray[np.float32], features: Features) -> list[Output]:
        """One for each session."""
        tokens = None
        if self._tokens is not None:
            chosen = np.array(self.decoder().clusters(), dtype=np.intp).reshape(len(logits), -1)
            tokens = self._tokens[chosen].reshape(logits.shape)
        outputs, row, first = [], 0, 0
        for rows in batch:
            end, last = row + len(rows.requested), first + len(rows.tokens)
            own = None if tokens is None else tokens[row:end]
            outputs.append(Output(logits[row:end], features[None, first:last], own))
            row, first = end, last
        return outputs

    @override
    def combine(self, rows: ArrayLike) -> Features:
        self.check_open()
        return check_features(rows, len(np.asarray(rows)), self.spec.n_rows)


class _Checked:
    """Rows of a session, checked."""

    def __init__(
        self, state: _core.SequenceState, tokens: TokenIds, features: Features, requested: NDArray[np.int32]
    ) -> None:
        self.state, self.tokens, self.features, self.requested = state, tokens, features, requested


class NativeAssistantSession(OfOneProcess, TargetReader):
    """See edgeinfer.backends.base.TargetReader."""

    def __init__(self, model: NativeAssistantModel) -> None:
        self.model = model
        self.n_ctx = model.n_ctx
        self.n_batch = model.n_batch
        self._target: NativeSession | None = None
        self._is_open = True

    @property
    @override
    def spec(self) -> HeadSpec:
        return self.model.spec

    @property
    @override
    def n_past(self) -> int:
        """See TargetReader; 0 before there is a target."""
        return 0 if self._target is None else self._target.n_past

    @override
    def follow(self, target: Session) -> None:
        if not isinstance(target, NativeSession) or target.model is not self.model.target:
            raise InvalidArgument("an assistant follows sessions of the model that it was loaded for: found another")
        self._target = target

    @override
    def forward(
        self,
        tokens: ArrayLike,
        features: ArrayLike,
        parents: ArrayLike | None = None,
        *,
        n_pending: int = 0,
        logits: LogitsRows = "last",
    ) -> Output:
        """See HeadSession.forward. parents, n_pending: are not looked at, see TargetReader."""
        return self.model.forward([Rows(self, tokens, parents, logits, n_pending=n_pending, features=features)])[0]

    def checked(self, rows: Rows) -> _Checked:
        """Rows of this session. Raises ShapeError, InvalidArgument; EdgeInferError where one of both is closed."""
        if not self._is_open:
            raise EdgeInferError("this session is closed")
        if self._target is None or self._target.n_past == 0:
            raise ShapeError("rows of an assistant attend to what its target has read: found no committed token")
        if self._target.n_past >= self._target.n_ctx:
            raise ShapeError(f"the target's context of {self._target.n_ctx} tokens is full: nothing can follow")
        if rows.hidden is not False:
            raise InvalidArgument("an assistant has no layers to choose from: leave `hidden` out")
        if rows.features is None:
            raise ShapeError("rows of an assistant need features, one a token: found none")
        ids = check_tokens(rows.tokens, self.spec.decoder.n_vocab, 0, MAX_INT32)
        if len(ids) > self.n_batch:
            raise ShapeError(f"an assistant runs {self.n_batch} rows of a session at once: found {len(ids)}")
        features = check_features(rows.features, len(ids), self.spec.n_embd)
        return _Checked(self._target.state, ids, features, check_rows(rows.logits, len(ids)))

    @override
    def combine(self, rows: ArrayLike) -> Features:
        return self.model.combine(rows)

    @override
    def commit(self, path: ArrayLike) -> None:
        pass  # nothing was kept

    @override
    def truncate(self, n_past: int) -> int:
        return self.n_past

    @override
    def memory(self) -> MemoryUse:
        return self.model.memory()

    @override
    def interrupt(self) -> None:
        self.model.interrupt()

    @override
    def close(self) -> None:
        self._is_open = False
        self._target = None
