"""The oracle of draft heads: their forward pass in plain numpy, from the blocks of the reference backend."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from edgeinfer.backends.base import check_features, check_parents, check_pending, check_rows, check_tokens
from edgeinfer.backends.reference import (
    Activations,
    Floats,
    ReferenceBackend,
    ReferenceDecoder,
    Weights,
    rms_norm,
    scale,
    silu,
)
from edgeinfer.models import ModelSpec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.types import Features, LogitsRows, MemoryPlan, MemoryUse, Output


def open_reference_head(
    head: ModelFile, spec: ModelSpec, target: ModelFile, target_spec: ModelSpec, n_ctx: int, activations: Activations
) -> ReferenceHead:
    """A head of a target, dequantised; both files may be closed afterwards. Raises UnsupportedModel.

    spec: DraftHeadSpec.decoder.  activations: see ReferenceBackend.
    """
    backend = ReferenceBackend(activations)
    weights = backend.read_weights(head, spec.tensor_shapes())
    shape = target_spec.n_vocab, target_spec.n_embd
    if spec.own_embeddings:
        rows = weights[spec.token_embd].values
    else:
        rows = backend.read_weights(target, {target_spec.token_embd: shape})[target_spec.token_embd].values
    if not spec.own_output:
        weights[spec.output] = backend.read_weights(target, {target_spec.output: shape})[target_spec.output]
    rows = scale(rows, 1.0 if spec.pair is not None else target_spec.embedding_scale)
    return ReferenceHead(spec, MemoryPlan(n_ctx, n_ctx, MemoryUse(0, 0, 0)), weights, rows)


class ReferenceHead(ReferenceDecoder):
    """See edgeinfer.backends.base.HeadSession. embeddings: (n_vocab, n_embd), scaled as the head wants them."""

    def __init__(self, spec: ModelSpec, plan: MemoryPlan, weights: dict[str, Weights], embeddings: Floats) -> None:
        super().__init__(spec, plan, weights)
        self._embeddings = embeddings
        self._pairs = np.empty((0, 2 * spec.n_embd), dtype=np.float32)  # of the rows of this pass, see PairTensors

    def combine(self, rows: ArrayLike) -> Features:
        """See HeadSession.combine."""
        self._check_open()
        h, combine = np.asarray(rows, dtype=np.float32), self.spec.combine
        if combine is None:
            return h
        if combine.norm is not None:
            parts = h.reshape(len(h), -1, combine.n_normed)
            weights = self._part(combine.norm).values.reshape(-1, combine.n_normed)
            h = rms_norm(parts, weights, self.spec.norm_epsilon).reshape(h.shape)
        return self._linear(combine.matrix, None, h)

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
        ids = check_tokens(tokens, self.spec.n_vocab, self.n_past + n_pending, self.n_ctx)
        links = np.concatenate([self._parents[:n_pending], check_parents(parents, len(ids), n_pending)])
        rows = check_rows(logits, len(ids))
        f = check_features(features, len(ids), self.spec.n_embd)
        self._stopped = False
        pending, self._parents = self._tokens[:n_pending], np.empty(0, dtype=np.int32)
        out, tapped = self._layers(self._fuse(f, self._embeddings[ids]), links, rows, (self.spec.feature_tap,))
        self._parents, self._tokens = links, np.concatenate([pending, ids])
        return Output(out, tapped)

    def _fuse(self, f: Floats, e: Floats) -> Floats:
        """What goes into the first block, (n, n_embd), of features and embeddings (n, n_embd)."""
        gate, pair = self.spec.gate, self.spec.pair
        if pair is not None:
            normed = self._norm(pair.feature_norm, f)
            self._pairs = np.concatenate([self._norm(pair.token_norm, e), normed], axis=1)
            return normed if pair.normed_residual else f
        assert gate is not None
        a = self._linear(gate.feature, None, f)
        b = silu(self._linear(gate.token, None, self._norm(gate.token_norm, e)))
        z = self._linear(gate.mix, None, np.concatenate([a, b], axis=1))
        with np.errstate(over="ignore"):
            s: Floats = np.ones_like(z) / (1 + np.exp(-z))
        x: Floats = s * a + (1 - s) * b
        return x

    def _attention_inputs(self, layer: int, x: Floats) -> Floats:
        return super()._attention_inputs(layer, x) if self.spec.pair is None else self._pairs
