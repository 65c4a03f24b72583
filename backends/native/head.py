"""A draft head on the C++ decoder."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from edgeinfer.backends.checks import check_features, check_pending, check_tokens
from edgeinfer.backends.native.session import NativeDecoder, NativeSession, decoder_config, packed_bytes, parts_of
from edgeinfer.models import ModelSpec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.types import Device, Features, LogitsRows, MemoryPlan, MemoryUse, Output


def plan_head(head: ModelFile, spec: ModelSpec, n_ctx: int, n_batch: int, n_threads: int) -> MemoryPlan:
    """Bytes that a head takes beside its target, whose embeddings it reads if it has none. Exact.

    spec: DraftHeadSpec.decoder. Raises UnsupportedModel.
    """
    n_batch = min(n_batch, n_ctx)
    config = decoder_config(spec, n_ctx, n_batch, "f16")
    embedding = head.tensors[spec.token_embd].n_bytes if spec.own_embeddings else 0
    use = MemoryUse(
        packed_bytes(parts_of(head, spec)) + embedding, config.kv_bytes(), config.activation_bytes(n_threads)
    )
    return MemoryPlan(n_ctx, n_batch, use)


class NativeHead(NativeDecoder):
    """See edgeinfer.backends.base.HeadSession. Its file may be closed; that of the target must stay open."""

    def __init__(
        self, head: ModelFile, spec: ModelSpec, target: NativeSession, plan: MemoryPlan, device: Device
    ) -> None:
        if spec.pair is None:
            spec = replace(spec, embedding_scale=target.spec.embedding_scale)
        embedding = target.embedding
        if spec.own_embeddings:
            embedding = head.tensors[spec.token_embd].type, head.data(spec.token_embd).copy()
        super().__init__(head, spec, parts_of(head, spec), plan, device, embedding, beside=target)
        if not spec.own_output:
            self._open().share_output(target.decoder())

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
        n_pending = check_pending(n_pending, len(self._parents))
        ids = check_tokens(tokens, self.spec.n_vocab, self.n_past + n_pending, self.n_ctx)
        rows = check_features(features, len(ids), self.spec.n_embd)
        return self._forward(ids, parents, n_pending, logits, taps, rows)

    def combine(self, rows: ArrayLike) -> Features:
        """See HeadSession.combine."""
        decoder, combine = self._open(), self.spec.combine
        n = len(np.asarray(rows))
        of_target = check_features(rows, n, self.spec.n_embd if combine is None else combine.n_rows)
        if combine is None:
            return of_target
        combined = np.empty((n, self.spec.n_embd), dtype=np.float32)
        for first in range(0, n, self.n_batch):
            part = slice(first, first + self.n_batch)
            decoder.combine(of_target[part], combined[part])
        return combined

    def memory(self) -> MemoryUse:
        """See HeadSession.memory."""
        decoder = self._open()
        own = self.embedding[1].nbytes if self.spec.own_embeddings else 0
        return MemoryUse(decoder.weight_bytes + own, decoder.kv_bytes, decoder.activation_bytes)
