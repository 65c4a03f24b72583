"""The Session and the Backend in front of a graph on ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgeinfer.backends.base import (
    Progress,
    check_links,
    check_path,
    check_rows,
    check_taps,
    check_tokens,
)
from edgeinfer.backends.onnx.decoder import HIDDEN, bias_name, build_model, build_move, windows_of
from edgeinfer.backends.onnx.graph import Graph
from edgeinfer.backends.onnx.library import ProviderInfo, choose_provider
from edgeinfer.backends.onnx.runtime import Binding, Buffer, Program, constant_bytes
from edgeinfer.errors import EdgeInferError, InvalidArgument, ShapeError
from edgeinfer.models import ModelSpec, read_spec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.types import CacheType, Device, Features, LogitsRows, MemoryPlan, MemoryUse, Output, TokenIds

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

    def plan(
        self,
        model: ModelFile,
        spec: ModelSpec,
        n_ctx: int,
        n_batch: int = 512,
        n_threads: int = 1,
        cache_type: CacheType = "f16",
    ) -> MemoryPlan:
        """Bytes that a session takes: constants, the KV cache, in float32, and at most those of a pass.

        ONNX Runtime keeps a copy of the constants, and of most another that its kernels read. Passes have 128 tokens at
        most. Raises UnsupportedModel for a tensor type without a rule, InvalidArgument for a cache of another type.
        """
        if cache_type != "f16":
            raise InvalidArgument(f"the onnx backend has no KV cache of {cache_type}: use f16, which is float32 here")
        graph = build_model(model, spec, n_ctx, self.info.style, taps=True)
        return plan_graph(graph, spec, n_ctx, n_batch)

    def load(
        self, model: ModelFile, spec: ModelSpec, plan: MemoryPlan, device: Device, progress: Progress | None = None
    ) -> OnnxSession:
        """Build the graph and load it. The file may be closed afterwards. Raises UnsupportedModel, BackendLost."""
        return OnnxSession(model, spec, plan, device, self.info, progress)


def plan_graph(graph: Graph, spec: ModelSpec, n_ctx: int, n_batch: int, others: Sequence[Graph] = ()) -> MemoryPlan:
    """Bytes of a decoder's graph, of the one that moves rows of its cache, and of others; see OnnxBackend.plan."""
    n_batch = min(n_batch, n_ctx, _MAX_BATCH)
    widths = 12 * spec.n_embd + 4 * (spec.n_heads + 2 * spec.n_kv_heads) * spec.head_dim + 4 * spec.n_ff
    widths += 0 if spec.combine is None else 2 * spec.combine.n_rows
    n_activations = n_batch * (widths + 2 * spec.n_heads * n_ctx + 2 * spec.n_logits)
    n_cache = 2 * spec.n_layers * spec.n_kv_heads * n_ctx * spec.head_dim
    use = MemoryUse(constant_bytes([graph, build_move(spec), *others]), 4 * n_cache, 4 * n_activations)
    return MemoryPlan(n_ctx, n_batch, use)


class OnnxDecoder:
    """A graph in memory with its KV cache: what sessions of models and of draft heads have in common."""

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
        self.n_ctx = plan.n_ctx
        self.n_batch = plan.n_batch
        self._use = plan.use
        self._n_past = 0
        self._parents = np.empty(0, dtype=np.int32)  # of what is pending; its row i is in slot n_past + i
        self._has_slots = any(value.name == "cache_slots" for value in graph.inputs)
        self._windows = windows_of(spec)
        self._program: Program | None = Program(graph, provider, device.n_threads, progress)
        move = build_move(spec)
        self._move = Program(move, provider, device.n_threads) if spec.n_layers else None
        shape = (1, spec.n_kv_heads, plan.n_ctx, spec.head_dim)
        self._caches: dict[str, Buffer] = {}
        for layer in range(spec.n_layers):
            for kind in ("key", "value"):
                buffer = Buffer(provider, shape)
                self._caches |= {f"past_{kind}.{layer}": buffer, f"present_{kind}.{layer}": buffer}
        self._bindings: dict[tuple[str, ...], Binding] = {}  # by the outputs that are wanted

    @property
    def n_past(self) -> int:
        """Number of committed tokens."""
        self._open()
        return self._n_past

    def commit(self, path: ArrayLike) -> None:
        """See Session.commit."""
        self._open()
        rows = check_path(path, self._parents)
        if self._move is not None and not np.array_equal(rows, np.arange(len(rows))):
            binding = self._move.binding(self._caches)
            slots = self._n_past + np.arange(len(rows), dtype=np.int64)
            binding.give({"rows": self._n_past + rows.astype(np.int64), "slots": slots})
            self._move.run(binding)
        self._parents = np.empty(0, dtype=np.int32)
        self._n_past += len(rows)

    def truncate(self, n_past: int) -> None:
        """See Session.truncate."""
        self._open()
        if not 0 <= n_past <= self._n_past:
            raise ShapeError(f"n_past must be in 0..{self._n_past}: found {n_past}")
        self._n_past = n_past
        self._parents = np.empty(0, dtype=np.int32)

    def memory(self) -> MemoryUse:
        """Bytes of the KV cache; of the constants and of a pass those that were planned."""
        self._open()
        cache = sum(buffer.n_bytes for name, buffer in self._caches.items() if name.startswith("past"))
        return MemoryUse(self._use.weights, cache, self._use.activations)

    def interrupt(self) -> None:
        """See Session.interrupt. It is looked for before each operator."""
        if self._program is not None:
            self._program.interrupt()

    def close(self) -> None:
        """Give the memory back. Further calls raise."""
        self._program = self._move = None
        self._bindings, self._caches = {}, {}

    def _forward(
        self,
        ids: TokenIds,
        parents: ArrayLike | None,
        n_pending: int,
        logits: LogitsRows,
        taps: Sequence[int],
        features: Features | None = None,
    ) -> Output:
        """Run tokens behind the first n_pending of those that are; see HeadSession.forward."""
        n = len(ids)
        rows = check_rows(logits, n)
        links, is_chain = check_links(self._parents[:n_pending], parents, n, self.n_batch)
        self._open().start()
        self._parents = np.empty(0, dtype=np.int32)
        out = np.empty((len(rows), self.spec.n_logits), dtype=np.float32)
        tapped = np.empty((len(taps), n, self.spec.n_embd), dtype=np.float32)
        for first in range(0, n, self.n_batch):
            last = min(first + self.n_batch, n)
            wanted = np.flatnonzero((rows >= first) & (rows < last))
            family = _family(links, is_chain, n_pending + first, n_pending + last)
            given: dict[str, NDArray[Any]] = {
                "input_ids": ids[None, first:last].astype(np.int64),
                "logit_rows": rows[wanted] - np.int64(first),
            }
            if features is not None:
                given["features"] = features[None, first:last]
            of_chunk = np.empty((len(wanted), self.spec.n_logits), dtype=np.float32)
            states = np.empty((len(taps), 1, last - first, self.spec.n_embd), dtype=np.float32)
            self._run(given | self._places(*family), taps, of_chunk, states)
            out[wanted] = of_chunk
            tapped[:, first:last] = states[:, 0]
        self._parents = links
        return Output(out, tapped if taps else None)

    def _run(
        self,
        given: dict[str, NDArray[Any]],
        taps: Sequence[int],
        out: NDArray[np.float32],
        states: NDArray[np.float32],
    ) -> None:
        """One pass. out: (m, n_logits), states: (len(taps), 1, n, n_embd), to be written."""
        program = self._open()
        names = ["hidden_states" if tap == self.spec.n_layers else f"layer_output.{tap}" for tap in taps]
        taken = dict(zip(names, states, strict=True)) | ({"logits": out} if len(out) else {})
        key = tuple(taken)
        if key not in self._bindings:
            self._bindings[key] = program.binding(self._caches)
        binding = self._bindings[key]
        binding.give(given)
        binding.take(taken)
        program.run(binding)

    def _places(self, seen: NDArray[np.bool_], depths: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """The inputs that say where tokens stand; see _family, of the tokens that are not committed."""
        n, first = len(seen), len(depths) - len(seen)
        n_slots = self.n_ctx if self._has_slots else self._n_past + len(depths)
        positions = np.zeros(n_slots, dtype=np.int64)  # by slot
        positions[: self._n_past] = np.arange(self._n_past)
        positions[self._n_past :][: len(depths)] = self._n_past + depths
        visible = np.zeros((n, n_slots), dtype=np.bool_)
        visible[:, : self._n_past] = True
        visible[:, self._n_past :][:, : len(depths)] = seen
        slots = self._n_past + first + np.arange(n, dtype=np.int64)
        own = positions[slots]
        given: dict[str, NDArray[Any]] = {"position_ids": own[None]}
        for window in self._windows:
            near = visible if window is None else visible & (own[:, None] - positions < window)
            given[bias_name(window)] = np.where(near, np.float32(0), np.float32(HIDDEN))[None, None]
        return given | ({"cache_slots": slots} if self._has_slots else {})

    def _open(self) -> Program:
        if self._program is None:
            raise EdgeInferError("this session is closed")
        return self._program


class OnnxSession(OnnxDecoder):
    """See edgeinfer.backends.base.Session."""

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
        super().__init__(graph, spec, plan, device, provider, progress)

    def forward(
        self,
        tokens: ArrayLike,
        parents: ArrayLike | None = None,
        *,
        logits: LogitsRows = "last",
        hidden: bool | Sequence[int] = False,
    ) -> Output:
        """See Session.forward. A tree must fit into one batch of n_batch tokens; a chain may have any length.

        Raises BackendLost if the provider fails.
        """
        self._open()
        ids = check_tokens(tokens, self.spec.n_vocab, self._n_past, self.n_ctx)
        return self._forward(ids, parents, 0, logits, check_taps(hidden, self.spec.n_layers))

    def recall(self, tokens: ArrayLike) -> int:
        """See Session.recall. Finds nothing: the logits behind a text would depend on how it came there."""
        self.truncate(0)
        return 0


def _family(
    links: NDArray[np.int32], is_chain: bool, first: int, last: int
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Of rows below last: which each of those from first on sees, (last - first, last), and the depths of all, (last,).

    A row sees itself and its ancestors.
    """
    if is_chain:
        return np.tri(last - first, last, first, dtype=np.bool_), np.arange(last)
    sees = np.eye(last, dtype=np.bool_)
    for row, parent in enumerate(links[:last].tolist()):
        if parent >= 0:
            sees[row] |= sees[parent]
    return sees[first:], sees.sum(axis=1) - 1
