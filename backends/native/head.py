"""A draft head on the C++ decoder."""

from __future__ import annotations

from dataclasses import replace

from numpy.typing import ArrayLike

from edgeinfer.backends.base import check_features, check_pending, check_tokens
from edgeinfer.backends.native.session import NativeDecoder, NativeSession, decoder_config, packed_bytes
from edgeinfer.gguf import ModelFile
from edgeinfer.models import ModelSpec
from edgeinfer.types import Device, LogitsRows, MemoryPlan, MemoryUse, Output


def plan_head(head: ModelFile, spec: ModelSpec, n_ctx: int, n_batch: int, n_threads: int) -> MemoryPlan:
    """Bytes that a head takes beside its target, whose embeddings it reads. Exact. Raises UnsupportedModel.

    spec: DraftHeadSpec.decoder.
    """
    n_batch = min(n_batch, n_ctx)
    config = decoder_config(spec, n_ctx, n_batch, "f16")
    use = MemoryUse(packed_bytes(head, spec), config.kv_bytes(), config.activation_bytes(n_threads))
    return MemoryPlan(n_ctx, n_batch, use)


class NativeHead(NativeDecoder):
    """See edgeinfer.backends.base.HeadSession. Its file may be closed; that of the target must stay open."""

    def __init__(
        self, head: ModelFile, spec: ModelSpec, target: NativeSession, plan: MemoryPlan, device: Device
    ) -> None:
        spec = replace(spec, embedding_scale=target.spec.embedding_scale)
        super().__init__(head, spec, plan, device, target.embedding)

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
        n_pending = check_pending(n_pending, len(self._parents))
        ids = check_tokens(tokens, self.spec.n_vocab, self.n_past + n_pending, self.n_ctx)
        rows = check_features(features, len(ids), self.spec.n_embd)
        return self._forward(ids, parents, n_pending, logits, (self.spec.n_layers,), rows)

    def memory(self) -> MemoryUse:
        """See HeadSession.memory."""
        decoder = self._open()
        return MemoryUse(decoder.weight_bytes, decoder.kv_bytes, decoder.activation_bytes)
