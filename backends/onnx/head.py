"""A draft head on ONNX Runtime."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from edgeinfer.backends.base import Progress
from edgeinfer.backends.checks import check_features, check_pending, check_tokens
from edgeinfer.backends.onnx.decoder import Embedding, build_combine, build_decoder
from edgeinfer.backends.onnx.graph import Graph
from edgeinfer.backends.onnx.library import ProviderInfo, Style, choose_provider
from edgeinfer.backends.onnx.runtime import Program
from edgeinfer.backends.onnx.session import OnnxDecoder, plan_graph
from edgeinfer.errors import UnsupportedModel
from edgeinfer.models import ModelSpec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.types import Device, Features, LogitsRows, MemoryPlan, Output


def build_head(
    head: ModelFile, spec: ModelSpec, target: ModelFile, target_spec: ModelSpec, n_ctx: int, style: Style
) -> Graph:
    """The graph of a head, with a copy of its target's embeddings; see build_decoder. spec: DraftHeadSpec.decoder.

    Raises UnsupportedModel for a head of another kind than the gate's.
    """
    if spec.pair is not None:
        raise UnsupportedModel(f"{head.path}: EAGLE-3 heads have no ONNX graph: run them on the native engine (-md)")
    return build_decoder(head, spec, Embedding.of(target, target_spec), n_ctx, style)


def plan_onnx_head(
    head: ModelFile,
    spec: ModelSpec,
    target: ModelFile,
    target_spec: ModelSpec,
    n_ctx: int,
    n_batch: int,
    info: ProviderInfo | None = None,
) -> MemoryPlan:
    """Bytes that a head takes, its target's embeddings among them; see OnnxBackend.plan. Raises UnsupportedModel."""
    style = (info or choose_provider()).style
    others = [] if spec.combine is None else [build_combine(head, spec, style)]
    return plan_graph(build_head(head, spec, target, target_spec, n_ctx, style), spec, n_ctx, n_batch, others)


class OnnxHeadBackend:
    """Makes sessions of heads beside a target, as OnnxBackend does of models."""

    def __init__(self, info: ProviderInfo, target: ModelFile, target_spec: ModelSpec) -> None:
        self._info = info
        self._target = target, target_spec

    def plan(self, head: ModelFile, spec: ModelSpec, n_ctx: int, n_batch: int = 512, n_threads: int = 1) -> MemoryPlan:
        """See plan_onnx_head."""
        return plan_onnx_head(head, spec, *self._target, n_ctx, n_batch, self._info)

    def load(self, head: ModelFile, spec: ModelSpec, plan: MemoryPlan, device: Device) -> OnnxHead:
        """See OnnxHead."""
        return OnnxHead(head, spec, *self._target, plan, device, self._info)


class OnnxHead(OnnxDecoder):
    """See edgeinfer.backends.base.HeadSession. Both files may be closed afterwards."""

    def __init__(
        self,
        head: ModelFile,
        spec: ModelSpec,
        target: ModelFile,
        target_spec: ModelSpec,
        plan: MemoryPlan,
        device: Device,
        info: ProviderInfo | None = None,
        progress: Progress | None = None,
    ) -> None:
        provider = info or choose_provider()
        graph = build_head(head, spec, target, target_spec, plan.n_ctx, provider.style)
        super().__init__(graph, spec, plan, device, provider, progress)
        self._combine: Program | None = None
        if spec.combine is not None:
            self._combine = Program(build_combine(head, spec, provider.style), provider, device.n_threads)

    def forward(
        self,
        tokens: ArrayLike,
        features: ArrayLike,
        parents: ArrayLike | None = None,
        *,
        n_pending: int = 0,
        logits: LogitsRows = "last",
    ) -> Output:
        """See HeadSession.forward. All rows of a tree must fit into n_batch.

        Raises BackendLost if the provider fails.
        """
        self._open()
        n_pending = check_pending(n_pending, len(self._parents))
        ids = check_tokens(tokens, self.spec.n_vocab, self._n_past + n_pending, self.n_ctx)
        rows = check_features(features, len(ids), self.spec.n_embd)
        return self._forward(ids, parents, n_pending, logits, (self.spec.n_layers,), rows)

    def combine(self, rows: ArrayLike) -> Features:
        """See HeadSession.combine. Raises BackendLost if the provider fails."""
        self._open()
        combine, n = self.spec.combine, len(np.asarray(rows))
        of_target = check_features(rows, n, self.spec.n_embd if combine is None else combine.n_rows)
        if self._combine is None:
            return of_target
        features = np.empty((n, self.spec.n_embd), dtype=np.float32)
        self._combine.start()
        for first in range(0, n, self.n_batch):
            part = slice(first, first + self.n_batch)
            binding = self._combine.binding({})
            binding.give({"rows": of_target[None, part]})
            binding.take({"features": features[None, part]})
            self._combine.run(binding)
        return features

    def close(self) -> None:
        """See HeadSession.close."""
        self._combine = None
        super().close()
