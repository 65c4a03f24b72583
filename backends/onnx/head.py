"""A draft head on ONNX Runtime."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from edgeinfer.backends.base import HeadModel, Progress
from edgeinfer.backends.device_session import DeviceHeadModel
from edgeinfer.backends.onnx.decoder import build_head, build_projection
from edgeinfer.backends.onnx.library import ProviderInfo, choose_provider
from edgeinfer.backends.onnx.runtime import Program
from edgeinfer.backends.onnx.session import OnnxDecoder, plan_graphs
from edgeinfer.common.overriding import override
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device, Features, MemoryPlan
from edgeinfer.models import ModelSpec
from edgeinfer.models.draft_head import HeadSpec
from edgeinfer.models.gguf import ModelFile


class OnnxHeadBackend:
    """Loads heads beside a target, as OnnxBackend does models."""

    def __init__(self, info: ProviderInfo | None, target: ModelFile, target_spec: ModelSpec) -> None:
        self.info = choose_provider() if info is None else info
        self._target = target, target_spec

    def plan(self, head: ModelFile, spec: HeadSpec, settings: LoadSettings) -> MemoryPlan:
        """Bytes that a head takes, its target's embeddings among them; see OnnxBackend.plan.

        Raises UnsupportedModel for a head with another front than GatedFusion.
        """
        graphs = [build_head(head, spec, *self._target, settings.n_ctx, self.info.style)]
        if spec.features is None:
            return plan_graphs(graphs, spec.decoder, settings)
        graphs.append(build_projection(head, spec, spec.features, self.info.style))
        return plan_graphs(graphs, spec.decoder, settings, spec.features.n_rows)

    def load(
        self, head: ModelFile, spec: HeadSpec, plan: MemoryPlan, device: Device, progress: Progress | None = None
    ) -> OnnxHeadModel:
        """See OnnxBackend.load. Both files may be closed afterwards."""
        graph = build_head(head, spec, *self._target, plan.n_ctx, self.info.style)
        projection = None
        if spec.features is not None:
            made = build_projection(head, spec, spec.features, self.info.style)
            projection = Program(made, self.info, device.n_threads)
        decoder = OnnxDecoder(graph, spec.decoder, plan, device, self.info, progress)
        return OnnxHeadModel(decoder, spec, plan, projection)


class OnnxHeadModel(DeviceHeadModel[OnnxDecoder], HeadModel):
    """See edgeinfer.backends.base.HeadModel. projection: the graph of spec.features."""

    def __init__(self, decoder: OnnxDecoder, spec: HeadSpec, plan: MemoryPlan, projection: Program | None) -> None:
        super().__init__(decoder, spec, plan)
        self._projection = projection

    @override
    def combine(self, rows: ArrayLike) -> Features:
        """See HeadSession.combine. Raises BackendLost if the provider fails."""
        of_target = super().combine(rows)
        if self._projection is None:
            return of_target
        n = len(of_target)
        features = np.empty((n, self.spec.n_embd), dtype=np.float32)
        self._projection.start()
        for first in range(0, n, self.n_batch):
            part = slice(first, first + self.n_batch)
            binding = self._projection.binding({})
            binding.give({"rows": of_target[None, part]})
            binding.take({"features": features[None, part]})
            self._projection.run(binding)
        return features

    @override
    def close(self) -> None:
        self._projection = None
        super().close()
