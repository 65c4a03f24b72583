"""The oracle of draft heads: their forward pass in plain numpy, from the blocks of the reference backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgeinfer.backends.base import Rows
from edgeinfer.backends.checks import (
    check_features,
    check_parents,
    check_pending,
    check_rows,
    check_session_size,
    check_tokens,
)
from edgeinfer.backends.in_turn import heads_in_turn
from edgeinfer.backends.reference import (
    LayerRows,
    ReferenceBackend,
    ReferenceDecoder,
    ReferenceSession,
    SequenceState,
    known_blocks,
)
from edgeinfer.backends.reference_math import Floats, rms_norm, scale, silu
from edgeinfer.backends.reference_weights import Activations, Weights
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Features, LogitsRows, MemoryPlan, MemoryUse, Output, TokenIds
from edgeinfer.models import Attention, ModelSpec, TensorRef, check_blocks
from edgeinfer.models.draft_head import ConcatenatedInput, GatedFusion, HeadSpec, TargetInput
from edgeinfer.models.gguf import ModelFile


def open_reference_head(
    head: ModelFile, spec: HeadSpec, target: ModelFile, target_spec: ModelSpec, n_ctx: int, activations: Activations
) -> ReferenceHead:
    """A text of a head of a target, dequantised; both files may be closed afterwards. Raises UnsupportedModel.

    spec: as read_head_beside gives it.  activations: see ReferenceBackend.
    """
    check_blocks(spec.decoder.blocks(), known_blocks(), ReferenceBackend.name, head.path)
    backend = ReferenceBackend(activations)
    weights = backend.read_weights(head, spec.tensor_shapes())
    of_target = backend.read_weights(target, _shapes_of_target(spec, target_spec))
    decoder = replace(
        spec.decoder,
        token_embd=spec.decoder.token_embd or f"target.{target_spec.token_embd}",
        output=spec.decoder.output or f"target.{target_spec.output}",
    )
    weights |= {f"target.{name}": values for name, values in of_target.items()}
    plan = MemoryPlan(LoadSettings(n_ctx, n_batch=n_ctx), MemoryUse(0, 0, 0))
    return ReferenceHeadModel(replace(spec, decoder=decoder), plan, weights).session()


def _shapes_of_target(spec: HeadSpec, target: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of the target's tensors that a head uses."""
    used: set[TensorRef | None] = {target.token_embd} if spec.decoder.token_embd is None else set()
    used |= {target.output} if spec.decoder.output is None else set()
    return {name: shape for name, shape in target.tensor_shapes().items() if name in used}


class ReferenceHeadModel(ReferenceDecoder):
    """See edgeinfer.backends.base.HeadModel. spec: with the names of the target's tensors where it takes those."""

    def __init__(self, spec: HeadSpec, plan: MemoryPlan, weights: dict[str, Weights]) -> None:
        super().__init__(spec.decoder, plan, weights)
        self.spec = spec

    def session(self, n_ctx: int | None = None) -> ReferenceHead:
        """See HeadModel.session."""
        self.check_open()
        return ReferenceHead(self, check_session_size(n_ctx, self.n_ctx))

    def forward(self, batch: Sequence[Rows]) -> list[Output]:
        """See HeadModel.forward. One text after the other."""
        return heads_in_turn(self, batch)

    def combine(self, rows: ArrayLike) -> Features:
        """See HeadSession.combine."""
        self.check_open()
        h, features = np.asarray(rows, dtype=np.float32), self.spec.features
        if features is None:
            return h
        if features.norm is not None:
            parts = h.reshape(len(h), -1, features.n_normed)
            weights = self.weights_of(features.norm).values.reshape(-1, features.n_normed)
            h = rms_norm(parts, weights, self.decoder.norm_epsilon).reshape(h.shape)
        return self.linear(features.matrix, None, h)

    def fused(self, f: Floats, tokens: TokenIds) -> tuple[Floats, Floats | None]:
        """What the residual stream begins with, (n, n_embd), and what the layer attends from if that is not its norm.

        f: (n, n_embd), the features that come with the tokens.
        """
        assert self.decoder.token_embd is not None
        e = scale(self.weights_of(self.decoder.token_embd).values[tokens], self.decoder.embedding_scale)
        front = self.spec.front
        if isinstance(front, GatedFusion):
            return self._gated(front, f, e), None
        if isinstance(front, TargetInput):
            return self.linear(front.projection, None, np.concatenate([e, f], axis=1)), None
        normed = self.norm(front.feature_norm, f)
        inputs = np.concatenate([self.norm(front.token_norm, e), normed], axis=1)
        if not isinstance(front, ConcatenatedInput):
            return self.linear(front.projection, None, inputs), None
        return normed if front.normed_residual else f, inputs

    def _gated(self, front: GatedFusion, f: Floats, e: Floats) -> Floats:
        a = self.linear(front.feature, None, f)
        b = silu(self.linear(front.token, None, self.norm(front.token_norm, e)))
        z = self.linear(front.mix, None, np.concatenate([a, b], axis=1))
        with np.errstate(over="ignore"):
            s: Floats = np.ones_like(z) / (1 + np.exp(-z))
        x: Floats = s * a + (1 - s) * b
        return x


class ReferenceHead(SequenceState):
    """See edgeinfer.backends.base.HeadSession."""

    def __init__(self, model: ReferenceHeadModel, n_ctx: int) -> None:
        super().__init__(model, n_ctx, "f16")
        self.model = model

    @property
    def spec(self) -> HeadSpec:
        """See HeadSession.spec."""
        return self.model.spec

    def combine(self, rows: ArrayLike) -> Features:
        """See HeadSession.combine."""
        self._check_open()
        return self.model.combine(rows)

    def forward(
        self,
        tokens: ArrayLike,
        features: ArrayLike,
        parents: ArrayLike | None = None,
        *,
        n_pending: int = 0,
        logits: LogitsRows = "last",
    ) -> Output:
        """See HeadSession.forward."""
        self._check_open()
        n_pending = check_pending(n_pending, len(self._parents))
        ids = check_tokens(tokens, self.spec.decoder.n_vocab, self.n_past + n_pending, self.n_ctx)
        links = np.concatenate([self._parents[:n_pending], check_parents(parents, len(ids), n_pending)])
        rows = check_rows(logits, len(ids))
        f = check_features(features, len(ids), self.spec.n_embd)
        self.model.begin()
        pending, self._parents = self._tokens[:n_pending], np.empty(0, dtype=np.int32)
        x, inputs = self.model.fused(f, ids)
        out, tapped = self.model.run_layers(x, self, links, rows, (self.spec.feature_tap,), inputs)
        self._parents, self._tokens = links, np.concatenate([pending, ids])
        return Output(out, tapped)


class ReferenceAssistant:
    """See edgeinfer.backends.base.TargetReader: an assistant, which keeps nothing of a text."""

    def __init__(self, model: ReferenceHeadModel, target: ReferenceSession) -> None:
        self.model = model
        self._target = target

    @property
    def spec(self) -> HeadSpec:
        """See HeadSession.spec."""
        return self.model.spec

    @property
    def n_past(self) -> int:
        """Committed tokens of the target, which rows attend to. SequenceState of ReferenceDecoder.run_layers has it."""
        return self._target.n_past

    def rows(self, layer: int, paths: Sequence[NDArray[np.intp]], inputs: Floats | None) -> LayerRows:
        """What rows see in a layer: not themselves. SequenceState of ReferenceDecoder.run_layers has it."""
        mixer = self.spec.decoder.layers[layer].mixer
        assert isinstance(mixer, Attention) and mixer.kv_of is not None
        return self._target.rows(mixer.kv_of, [path[:-1] for path in paths], inputs)

    def forward(self, tokens: ArrayLike, features: ArrayLike, *, logits: LogitsRows = "last") -> Output:
        """See TargetReader.forward."""
        ids = check_tokens(tokens, self.spec.decoder.n_vocab, 0, self._target.n_ctx)
        rows = check_rows(logits, len(ids))
        f = check_features(features, len(ids), self.spec.n_embd)
        self.model.begin()
        x, _ = self.model.fused(f, ids)
        links = np.full(len(ids), -1, np.int32)
        out, tapped = self.model.run_layers(x, self, links, rows, (self.spec.feature_tap,))  # type: ignore[arg-type]
        assert self.spec.prediction is not None
        predicted = self.model.linear(self.spec.prediction.matrix, None, tapped[0])[None]
        clusters = self.spec.clusters
        if clusters is None:
            return Output(out, predicted)
        scores = self.model.linear(clusters.centroids, None, tapped[0][rows])
        best = np.sort(np.argsort(-scores, axis=1, kind="stable")[:, : clusters.n_used], axis=1)
        each = self.spec.decoder.n_logits // clusters.n_clusters
        places = (best[:, :, None] * each + np.arange(each)).reshape(len(rows), -1)
        return Output(np.take_along_axis(out, places, axis=1), predicted, self.spec.draft_vocab[places])


def open_reference_assistant(
    assistant: ModelFile,
    spec: HeadSpec,
    target: ModelFile,
    session: ReferenceSession,
    activations: Activations = "float32",
) -> ReferenceAssistant:
    """An assistant that reads a session of its target. The file of the assistant may be closed."""
    opened = open_reference_head(assistant, spec, target, session.spec, session.n_ctx, activations)
    return ReferenceAssistant(opened.model, session)
