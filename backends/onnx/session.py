"""Backend, models and sessions on ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.base import Progress
from edgeinfer.backends.device_session import Batch, DeviceDecoder, DeviceModel
from edgeinfer.backends.onnx.attention import bias_name, windows_of
from edgeinfer.backends.onnx.decoder import HIDDEN, build_model, build_move
from edgeinfer.backends.onnx.graph import Graph
from edgeinfer.backends.onnx.library import ProviderInfo, choose_provider
from edgeinfer.backends.onnx.runtime import Binding, Buffer, Program, constant_bytes
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.common.overriding import override
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device, HiddenStates, Logits, MemoryPlan, MemoryUse
from edgeinfer.models import ModelSpec, attention_of, read_spec
from edgeinfer.models.gguf import ModelFile

_MAX_BATCH = 128  # tokens of a pass: prompts are read no faster with more


class OnnxBackend:
    """Runs models on an execution provider of ONNX Runtime: the one of `info`, else that of `choose_provider`.

    For drafts: logits depend on how a text is cut, and on the provider. Raises BackendUnavailable where onnxruntime or
    onnx is missing.
    """

    name = "onnx"

    def __init__(self, info: ProviderInfo | None = None) -> None:
        self.info = choose_provider() if info is None else info

    def read_spec(self, model: ModelFile) -> ModelSpec:
        """See edgeinfer.models.read_spec. Raises UnsupportedModel."""
        return read_spec(model)

    def plan(self, model: ModelFile, spec: ModelSpec, settings: LoadSettings) -> MemoryPlan:
        """Bytes that a model and a session take: constants, the KV cache, in float32, and at most those of a pass.

        ONNX Runtime keeps a copy of the constants, and of most another that its kernels read. Passes have 128 tokens at
        most. Raises UnsupportedModel for a block or a tensor type without a rule, InvalidArgument for a cache of
        another type.
        """
        if settings.cache_type != "f16":
            raise InvalidArgument(
                f"the onnx backend has no KV cache of {settings.cache_type}: use f16, which is float32 here"
            )
        graph = build_model(model, spec, settings.n_ctx, self.info.style, taps=True)
        return plan_graphs([graph], spec, settings)

    def load(
        self, model: ModelFile, spec: ModelSpec, plan: MemoryPlan, device: Device, progress: Progress | None = None
    ) -> OnnxModel:
        """Build the graph and load it. The file may be closed afterwards. Raises UnsupportedModel, BackendLost."""
        return OnnxModel(model, spec, plan, device, self.info, progress)


def plan_graphs(graphs: Sequence[Graph], spec: ModelSpec, settings: LoadSettings, n_rows: int = 0) -> MemoryPlan:
    """Bytes of the graphs of a decoder, and of the one that moves rows of its cache; see OnnxBackend.plan.

    n_rows: numbers of a row that a head's features are made of.
    """
    settings = settings.with_batch(_MAX_BATCH)
    n_ctx, n_batch = settings.n_ctx, settings.n_batch
    mixers = [attention_of(layer) for layer in spec.layers]
    widths = 12 * spec.n_embd + 2 * n_rows + 4 * max((mixer.n_activations for mixer in mixers), default=0)
    widths += 2 * max((layer.ffn.n_activations for layer in spec.layers), default=0)
    n_heads = max((mixer.n_heads for mixer in mixers), default=0)
    n_activations = n_batch * (widths + 2 * n_heads * n_ctx + 2 * spec.n_logits)
    n_cache = sum(2 * mixer.n_kv * n_ctx for mixer in mixers)
    use = MemoryUse(constant_bytes([build_move(spec), *graphs]), 4 * n_cache, 4 * n_activations)
    return MemoryPlan(settings, use)


class Cache:
    """Keys and values of one text, and where its passes find them.

    n_ctx: positions.  buffers: inputs and outputs of the graphs.  bindings: by the outputs that are wanted.
    """

    def __init__(self, provider: ProviderInfo, spec: ModelSpec, n_ctx: int) -> None:
        self.n_ctx = n_ctx
        self.buffers: dict[str, Buffer] = {}
        self.bindings: dict[tuple[str, ...], Binding] = {}
        for index, block in enumerate(attention_of(layer) for layer in spec.layers):
            for kind in ("key", "value"):
                buffer = Buffer(provider, (1, block.n_kv_heads, n_ctx, block.head_dim))
                self.buffers |= {f"past_{kind}.{index}": buffer, f"present_{kind}.{index}": buffer}

    @property
    def n_bytes(self) -> int:
        """Bytes that it takes."""
        return sum(buffer.n_bytes for name, buffer in self.buffers.items() if name.startswith("past"))


class OnnxDecoder(DeviceDecoder):
    """A graph in memory; see DeviceDecoder. plan: its n_ctx is that of the graph."""

    def __init__(
        self,
        graph: Graph,
        spec: ModelSpec,
        plan: MemoryPlan,
        device: Device,
        provider: ProviderInfo,
        progress: Progress | None = None,
    ) -> None:
        self.spec = spec
        self.provider = provider
        self.n_threads = device.n_threads
        self._plan = plan
        self._has_slots = any(value.name == "cache_slots" for value in graph.inputs)
        self._windows = windows_of(spec)
        self.program = Program(graph, provider, device.n_threads, progress)
        self._move = Program(build_move(spec), provider, device.n_threads) if spec.layers else None

    @override
    def new_cache(self, n_ctx: int) -> Cache:
        """See DeviceDecoder.new_cache. A graph with slots has a cache of the size that was planned."""
        whole = self._plan.n_ctx
        for rope in {attention_of(layer).rope for layer in self.spec.layers} - {None}:
            assert rope is not None
            if rope.of_context(n_ctx) != rope.of_context(whole):
                raise InvalidArgument(
                    f"a session of {n_ctx} positions has other rotations than the graph, which was made for {whole}: "
                    f"load the model with n_ctx {n_ctx}"
                )
        return Cache(self.provider, self.spec, whole if self._has_slots else n_ctx)

    @override
    def cache_bytes(self, cache: Cache) -> int:
        return cache.n_bytes

    @override
    def memory(self) -> MemoryUse:
        """Bytes of the constants and of a pass, as they were planned."""
        return MemoryUse(self._plan.use.weights, 0, self._plan.use.activations)

    @override
    def begin(self) -> None:
        self.program.start()

    @override
    def interrupt(self) -> None:
        """See DeviceDecoder.interrupt. It is looked for before each operator."""
        self.program.interrupt()

    @override
    def forward(
        self,
        cache: Cache,
        batch: Batch,
        rows: NDArray[np.int32],
        out: Logits,
        taps: Sequence[int],
        tapped: HiddenStates,
    ) -> None:
        given: dict[str, NDArray[Any]] = {
            "input_ids": batch.ids[None].astype(np.int64),
            "logit_rows": rows.astype(np.int64),
        }
        if batch.features is not None:
            given["features"] = batch.features[None]
        names = ["hidden_states" if tap == self.spec.n_layers else f"layer_output.{tap}" for tap in taps]
        taken = dict(zip(names, tapped[:, None], strict=True)) | ({"logits": out} if len(out) else {})
        key = tuple(taken)
        if key not in cache.bindings:
            cache.bindings[key] = self.program.binding(cache.buffers)
        binding = cache.bindings[key]
        binding.give(given | self._places(cache, batch))
        binding.take(taken)
        self.program.run(binding)

    @override
    def keep_path(self, cache: Cache, rows: NDArray[np.int32], n_past: int) -> None:
        if self._move is not None:
            binding = self._move.binding(cache.buffers)
            slots = n_past + np.arange(len(rows), dtype=np.int64)
            binding.give({"rows": n_past + rows.astype(np.int64), "slots": slots})
            self._move.run(binding)

    def _places(self, cache: Cache, batch: Batch) -> dict[str, NDArray[Any]]:
        """The inputs that say where tokens stand, and what they see."""
        n, n_past = len(batch), batch.n_past
        n_nodes = batch.first + n  # that stand behind n_past, these the last of them
        n_slots = cache.n_ctx if self._has_slots else n_past + n_nodes
        positions = np.zeros(n_slots, dtype=np.int64)  # by slot
        positions[:n_past] = np.arange(n_past)
        positions[n_past:][:n_nodes] = batch.positions
        visible = np.zeros((n, n_slots), dtype=np.bool_)
        visible[:, :n_past] = True
        sees = np.tri(n, dtype=np.bool_) if batch.sees is None else batch.sees[batch.first :].astype(np.bool_)
        visible[:, n_past:][:, :n_nodes] = sees
        slots = n_past + batch.first + np.arange(n, dtype=np.int64)
        own = positions[slots]
        given: dict[str, NDArray[Any]] = {"position_ids": own[None]}
        for window in self._windows:
            near = visible if window is None else visible & (own[:, None] - positions < window)
            given[bias_name(window)] = np.where(near, np.float32(0), np.float32(HIDDEN))[None, None]
        return given | ({"cache_slots": slots} if self._has_slots else {})


class OnnxModel(DeviceModel[OnnxDecoder]):
    """See edgeinfer.backends.base.Model. The file may be closed afterwards."""

    def __init__(
        self,
        model: ModelFile,
        spec: ModelSpec,
        plan: MemoryPlan,
        device: Device,
        provider: ProviderInfo,
        progress: Progress | None = None,
    ) -> None:
        graph = build_model(model, spec, plan.n_ctx, provider.style, taps=True)
        super().__init__(OnnxDecoder(graph, spec, plan, device, provider, progress), plan)
