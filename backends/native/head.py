"""Draft heads on the C++ decoder. Those that read their target's keys and values are in assistant.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from edgeinfer.backends.base import HeadSession, JointHeadModel, Rows
from edgeinfer.backends.checks import check_features, check_session_size, check_sessions
from edgeinfer.backends.native import _core
from edgeinfer.backends.native.config import (
    BLOCKS,
    PARTS_OF_HEADS,
    add_inputs,
    decoder_config,
    front_config,
    positions_of,
)
from edgeinfer.backends.native.experts.model_experts import ModelExperts, experts_of, resident_experts
from edgeinfer.backends.native.model import DecoderParts, NativeDecoder, NativeModel, assemble, shared_threads
from edgeinfer.backends.native.passes import Listed, SequenceRows
from edgeinfer.backends.native.sequence_pool import SharedPool
from edgeinfer.backends.native.session import NativeSequence
from edgeinfer.backends.native.weights import (
    Packing,
    Part,
    embedding_of,
    inputs_of,
    pack_weights,
    packed_bytes,
    parts_of,
    set_embedding,
)
from edgeinfer.common.errors import InvalidArgument, ShapeError
from edgeinfer.common.overriding import override
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device, Features, LogitsRows, MemoryPlan, MemoryUse, Output
from edgeinfer.models import check_blocks
from edgeinfer.models.draft_head import HeadSpec, TargetInput
from edgeinfer.models.gguf import ModelFile

_BLOCKS = {**BLOCKS, **PARTS_OF_HEADS}


def plan_head(head: ModelFile, spec: HeadSpec, settings: LoadSettings) -> MemoryPlan:
    """Bytes that a head and its sequences take beside its target, whose embeddings it reads if it has none. Exact.

    The sequences share n_ctx positions, and each may end within a segment of its own.

    All experts that it may have are in memory: a draft that waits for the disk comes too late.
    Raises UnsupportedModel.
    """
    _check(head, spec)
    settings = settings.with_batch()
    parts = parts_of(head, spec.weights())
    experts = experts_of(head, spec.decoder, Packing())
    config = _config(spec, parts, experts, settings.n_ctx, settings.n_batch)
    rows = embedding_of(head, spec.decoder, parts, is_held=True)
    weights = packed_bytes(parts) + (0 if rows is None else rows.n_bytes)
    activations = config.activation_bytes(front_config(spec), settings.n_threads)
    activations += _bytes_of_projection(spec)
    n_texts, n_positions, kv_cache = settings.n_texts, positions_of(settings), 0
    if not spec.reads_target:
        kv_cache = config.kv_bytes(_core.KvType.f16, settings.n_ctx, n_texts, n_positions)
    use = MemoryUse(weights, kv_cache, activations, experts=experts.n_bytes)
    return MemoryPlan(settings, use, cache_positions=n_positions)


def load_head(
    head: ModelFile, spec: HeadSpec, target: NativeModel, plan: MemoryPlan, device: Device
) -> NativeHeadModel:
    """A head of a target. The files of both may be closed afterwards.

    It takes what it lacks from the target: embeddings, the output matrix, and threads where it needs as many.
    spec: see read_head_beside. Raises UnsupportedModel.
    """
    return NativeHeadModel(*load_parts(head, spec, target, plan, device))


def load_parts(
    head: ModelFile, spec: HeadSpec, target: NativeModel, plan: MemoryPlan, device: Device
) -> tuple[DecoderParts, HeadSpec, MemoryPlan, _core.FeatureProjection | None]:
    """What models of heads are made of; see load_head."""
    _check(head, spec)
    parts, experts = parts_of(head, spec.weights()), experts_of(head, spec.decoder, Packing())
    threads = shared_threads(target.threads, device.n_threads)
    weights = _core.Weights(packed_bytes(parts), None, target.weights())
    pack_weights(weights, head, parts, threads)
    rows = embedding_of(head, spec.decoder, parts, is_held=True)
    if rows is not None:
        set_embedding(weights, head, rows)
    store = _core.ResidentExperts(resident_experts(experts, head, threads)) if experts.layers else None
    head.unmap()
    config = _config(spec, parts, experts, plan.n_ctx, plan.n_batch)
    made = assemble(spec.decoder, config, front_config(spec), plan, device, weights, threads, rows, store)
    projection = None
    if (part := spec.features or spec.prediction) is not None:
        sizes = part.n_embd, part.n_rows, part.n_normed, spec.decoder.norm_epsilon
        projection = _core.FeatureProjection(weights, made.decoder.isa, threads, *sizes)
    weights.check_all_are_used()
    return made, spec, plan, projection


def _bytes_of_projection(spec: HeadSpec) -> int:
    """Activations of what makes features."""
    part = spec.features or spec.prediction
    return 0 if part is None else _core.FeatureProjection.activation_bytes(part.n_rows)


def _config(
    spec: HeadSpec, parts: Sequence[Part], experts: ModelExperts, n_ctx: int, n_batch: int
) -> _core.DecoderConfig:
    """Sizes of the decoder and of what it computes."""
    config = decoder_config(spec.decoder, n_ctx, n_batch)
    add_inputs(config, inputs_of(parts) | experts.inputs())
    if spec.decoder.output is None:  # which is the target's
        config.add_inputs_of_output()
    if isinstance(spec.front, TargetInput):
        config.set_target(spec.front.n_target)
    if spec.clusters is not None:
        config.set_clusters(spec.clusters.n_clusters, spec.clusters.n_used)
    return config


def _check(head: ModelFile, spec: HeadSpec) -> None:
    """Raises UnsupportedModel for a part that the engine lacks."""
    parts = {"front": spec.front, "features": spec.features or spec.prediction, "clusters": spec.clusters}
    there = ((name, part) for name, part in parts.items() if part is not None)
    check_blocks([*there, *spec.decoder.blocks()], _BLOCKS, "native", head.path)


class NativeHead(NativeDecoder):
    """The common part of heads with keys and values of their own, and of those without.

    projection: what makes features of rows, or the predicted ones.
    """

    def __init__(
        self, parts: DecoderParts, spec: HeadSpec, plan: MemoryPlan, projection: _core.FeatureProjection | None
    ) -> None:
        super().__init__(parts, spec.decoder, plan)
        self.spec = spec
        self.n_sequences = plan.n_sequences
        self._projection = projection

    @override
    def memory(self) -> MemoryUse:
        use = super().memory()
        return replace(use, activations=use.activations + _bytes_of_projection(self.spec))

    @override
    def close(self) -> None:
        super().close()
        self._projection = None


class NativeHeadModel(NativeHead, JointHeadModel):
    """See edgeinfer.backends.base.HeadModel. Made by load_head."""

    def __init__(
        self, parts: DecoderParts, spec: HeadSpec, plan: MemoryPlan, projection: _core.FeatureProjection | None
    ) -> None:
        super().__init__(parts, spec, plan, projection)
        self._n_positions = plan.n_positions
        self._pool: SharedPool | None = None  # of all sessions that are as planned

    @override
    def session(self, n_ctx: int | None = None) -> NativeHeadSession:
        """See HeadModel.session. Where several are planned they share the memory of one pool."""
        if n_ctx is None and self.n_sequences > 1:
            return NativeHeadSession(self, self.n_ctx, self._shared())
        n_ctx = check_session_size(n_ctx, self.n_ctx)
        return NativeHeadSession(self, n_ctx, self.pool(n_ctx, "f16"))

    def _shared(self) -> SharedPool:
        """The pool of all sessions that are as planned."""
        if self._pool is None:
            self._pool = self.pool(self.n_ctx, "f16", self.n_sequences, self._n_positions)
        return self._pool

    @override
    def forward(self, batch: Sequence[Rows]) -> list[Output]:
        """See HeadModel.forward and NativeModel.forward."""
        check_sessions(self, batch)
        sessions: list[NativeHeadSession] = [rows.session for rows in batch]
        if (outputs := self.forward_few(sessions, batch)) is not None:
            return outputs
        return self._run(sessions, [session.checked(rows) for session, rows in zip(sessions, batch, strict=True)])

    @override
    def combine(self, rows: ArrayLike) -> Features:
        self.check_open()
        n = len(np.asarray(rows))
        of_target = check_features(rows, n, self.spec.n_rows)
        if self._projection is None:
            return of_target
        features = np.empty((n, self.spec.n_embd), dtype=np.float32)
        if n:
            self._projection.run(of_target, features)
        return features

    @override
    def close(self) -> None:
        super().close()
        self._pool = None


class NativeHeadSession(NativeSequence, HeadSession):
    """See edgeinfer.backends.base.HeadSession."""

    def __init__(self, model: NativeHeadModel, n_ctx: int, pool: SharedPool) -> None:
        super().__init__(model, n_ctx, pool)
        self.model = model

    @property
    @override
    def spec(self) -> HeadSpec:
        return self.model.spec

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
        """See HeadSession.forward. All rows of a tree must fit into n_batch."""
        taps = (self.spec.feature_tap,)
        if (out := self._forward_few(tokens, parents, n_pending, logits, taps, features)) is not None:
            return out
        return self.model.forward([Rows(self, tokens, parents, logits, n_pending=n_pending, features=features)])[0]

    def checked(self, rows: Rows) -> SequenceRows:
        """Rows of this sequence, checked. Raises ShapeError, ContextOverflow."""
        if rows.hidden is not False:
            raise InvalidArgument(
                "a draft head has no layers to choose from: leave `hidden` out, its feature always comes"
            )
        if rows.features is None:
            raise ShapeError("rows of a draft head need features, one a token: found none")
        return self._checked(rows, (self.spec.feature_tap,), rows.features)

    @override
    def lists_of(self, rows: Rows) -> Listed | None:
        if rows.hidden is not False or rows.features is None:
            return None
        taps = (self.spec.feature_tap,)
        return self.listed(rows.tokens, rows.parents, rows.n_pending, rows.logits, taps, rows.features)

    @override
    def combine(self, rows: ArrayLike) -> Features:
        self._open()
        return self.model.combine(rows)
