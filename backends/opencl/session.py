"""The Session and the Backend in front of the decoder on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgeinfer.backends.base import (
    Progress,
    check_links,
    check_parents,
    check_path,
    check_rows,
    check_taps,
    check_tokens,
)
from edgeinfer.backends.opencl.decoder import Batch, Decoder
from edgeinfer.backends.opencl.device import OpenCLDevice
from edgeinfer.backends.opencl.library import DeviceInfo, choose_device
from edgeinfer.backends.opencl.parts import MAX_NODES, TOP, ModelParts, activation_bytes, kv_bytes
from edgeinfer.errors import (
    BudgetExceeded,
    ContextOverflow,
    EdgeInferError,
    Interrupted,
    InvalidArgument,
    ShapeError,
)
from edgeinfer.models import ModelSpec, read_spec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.types import CacheType, Device, Features, LogitsRows, MemoryPlan, MemoryUse, Nodes, Output, TokenIds


class OpenCLBackend:
    """Runs models on an OpenCL device: the one of `info`, else the one that `choose_device` takes.

    For drafts: logits depend on how a text is cut, and on the device. Raises BackendUnavailable where there is none.
    """

    name = "opencl"

    def __init__(self, info: DeviceInfo | None = None) -> None:
        self.info = choose_device() if info is None else info

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
        """Bytes of all buffers on the device. Exact; what the driver takes beside them is not known.

        Raises UnsupportedModel for a tensor type without a format, InvalidArgument for another cache than f16,
        BudgetExceeded for more than the device has.
        """
        if cache_type != "f16":
            raise InvalidArgument(f"the opencl backend has a KV cache of f16 only: found {cache_type}")
        return plan_parts(model, ModelParts.read(model, spec), spec, n_ctx, n_batch, self.info)

    def load(
        self, model: ModelFile, spec: ModelSpec, plan: MemoryPlan, device: Device, progress: Progress | None = None
    ) -> OpenCLSession:
        """Convert and upload the weights; the CPU `device` is not looked at. The file may be closed afterwards.

        Raises UnsupportedModel, BackendUnavailable, BackendLost.
        """
        return OpenCLSession(model, spec, plan, OpenCLDevice(self.info), progress)


def plan_parts(
    model: ModelFile, parts: ModelParts, spec: ModelSpec, n_ctx: int, n_batch: int, info: DeviceInfo
) -> MemoryPlan:
    """Bytes of all buffers of a model or a head; see OpenCLBackend.plan. Raises BudgetExceeded."""
    n_batch = min(n_batch, n_ctx)
    activations = activation_bytes(spec, n_ctx, n_batch)
    use = MemoryUse(sum(parts.buffer_bytes()), 2 * kv_bytes(spec, n_ctx), sum(activations.values()))
    largest = max(*parts.buffer_bytes(), kv_bytes(spec, n_ctx), *activations.values())
    if use.total > info.memory_bytes or largest > info.max_buffer_bytes:
        shortfall = max(use.total - info.memory_bytes, largest - info.max_buffer_bytes)
        raise BudgetExceeded(
            f"{model.path} needs {use.total} bytes at n_ctx {n_ctx}, {largest} of them in one buffer: {info.name} has "
            f"{info.memory_bytes}, with at most {info.max_buffer_bytes} in one buffer, {shortfall} too few"
        )
    return MemoryPlan(n_ctx, n_batch, use)


class OpenCLDecoder:
    """A decoder on a device with its KV cache: what sessions of models and of draft heads have in common.

    device: not shared with another session.
    """

    def __init__(
        self,
        parts: ModelParts,
        spec: ModelSpec,
        plan: MemoryPlan,
        device: OpenCLDevice,
        progress: Progress | None = None,
    ) -> None:
        self.spec = spec
        self.n_ctx = plan.n_ctx
        self.n_batch = plan.n_batch
        self._n_past = 0
        self._parents = np.empty(0, dtype=np.int32)  # of what is pending; its row i is in slot n_past + i
        self._stopped = False
        self._decoder: Decoder | None = Decoder(device, parts, spec, plan.n_ctx, plan.n_batch, self._poll, progress)

    @property
    def n_past(self) -> int:
        """Number of committed tokens."""
        self._open()
        return self._n_past

    def commit(self, path: ArrayLike) -> None:
        """See Session.commit."""
        decoder = self._open()
        rows = check_path(path, self._parents)
        self._parents = np.empty(0, dtype=np.int32)
        decoder.keep_path(rows, self._n_past)
        self._n_past += len(rows)

    def truncate(self, n_past: int) -> None:
        """See Session.truncate."""
        self._open()
        if not 0 <= n_past <= self._n_past:
            raise ShapeError(f"n_past must be in 0..{self._n_past}: found {n_past}")
        self._n_past = n_past
        self._parents = np.empty(0, dtype=np.int32)

    def memory(self) -> MemoryUse:
        """Bytes of all buffers on the device."""
        decoder = self._open()
        return MemoryUse(decoder.weight_bytes, decoder.kv_bytes, decoder.activation_bytes)

    def interrupt(self) -> None:
        """See Session.interrupt. It is looked for before each layer."""
        self._stopped = True

    def close(self) -> None:
        """Give the memory back. Further calls raise."""
        self._decoder = None

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
        decoder = self._open()
        n = len(ids)
        rows = check_rows(logits, n)
        links, is_chain = check_links(self._parents[:n_pending], parents, n, self.n_batch)
        self._stopped = False
        self._parents = np.empty(0, dtype=np.int32)
        out = np.empty((len(rows), self.spec.n_logits), dtype=np.float32)
        tapped = np.empty((len(taps), n, self.spec.n_embd), dtype=np.float32)
        for first in range(0, n, self.n_batch):
            self._poll()
            last = min(first + self.n_batch, n)
            batch = self._chain(ids[first:last], n_pending + first) if is_chain else self._tree(ids, links)
            if features is not None:
                batch = replace(batch, features=features[first:last])
            wanted = np.flatnonzero((rows >= first) & (rows < last))
            of_chunk = np.empty((len(wanted), self.spec.n_logits), dtype=np.float32)
            states = np.empty((len(taps), len(batch), self.spec.n_embd), dtype=np.float32)
            decoder.forward(batch, rows[wanted] - np.int32(first), of_chunk, taps, states)
            out[wanted] = of_chunk
            tapped[:, first:last] = states
        self._parents = links
        return Output(out, tapped if taps else None)

    def _draft(
        self,
        ids: TokenIds,
        n_levels: int,
        width: int,
        n_logits: int,
        features: Features | None = None,
        assumed: Sequence[int] = (),
    ) -> Nodes:
        """Make a tree of the first n_logits logits; see DraftingSession.draft and DraftingHead.draft."""
        decoder = self._open()
        n = len(ids) + len(assumed)
        self._check_tree(n, n_levels, width)
        self._stopped = False
        self._parents = np.empty(0, dtype=np.int32)
        for first in range(0, len(ids), self.n_batch):
            last = min(first + self.n_batch, len(ids))
            batch = self._chain(ids[first:last], first)
            if features is not None:
                batch = replace(batch, features=features[first:last])
            if last < len(ids):
                nothing = np.empty((0, self.spec.n_logits), dtype=np.float32)
                decoder.forward(batch, np.empty(0, dtype=np.int32), nothing, (), None)
        nodes = decoder.draft(batch, n_levels, width, n_logits, assumed)
        passed = nodes.parents[: (n_levels - 1) * width] + np.int32(n)
        self._parents = np.concatenate([check_parents(None, n), passed])
        return nodes

    def _check_tree(self, n_before: int, n_levels: int, width: int) -> None:
        """Raises InvalidArgument or ContextOverflow for a tree that cannot be drafted behind that many tokens."""
        widest = min(TOP, self.n_batch)
        if not (n_levels >= 1 and 1 <= width <= widest and n_levels * width <= MAX_NODES):
            raise InvalidArgument(
                f"a drafted tree has levels of 1..{widest} nodes, {MAX_NODES} in all: found {n_levels} of {width}"
            )
        n_past = self._n_past + n_before + (n_levels - 1) * width
        if n_past > self.n_ctx:
            raise ContextOverflow(n_past, self.n_ctx)

    def _open(self) -> Decoder:
        if self._decoder is None:
            raise EdgeInferError("this session is closed")
        return self._decoder

    def _poll(self) -> None:
        if self._stopped:
            raise Interrupted("the forward pass was interrupted; the session is as it was before")

    def _chain(self, ids: NDArray[np.int32], first: int) -> Batch:
        """Tokens that follow one another, behind `first` more of the same pass."""
        n_past = self._n_past + first
        return Batch(ids, np.arange(n_past, n_past + len(ids), dtype=np.int32), None, n_past)

    def _tree(self, ids: NDArray[np.int32], links: NDArray[np.int32]) -> Batch:
        """The last nodes of a tree, all of whose parents are known."""
        n_nodes = len(links)
        sees = np.eye(n_nodes, dtype=np.uint8)
        for row, parent in enumerate(links.tolist()):
            if parent >= 0:
                sees[row] |= sees[parent]
        depths = sees.sum(axis=1, dtype=np.int32) - 1
        return Batch(ids, self._n_past + depths, sees, self._n_past, n_nodes, n_nodes - len(ids))


class OpenCLSession(OpenCLDecoder):
    """See edgeinfer.backends.base.Session."""

    def __init__(
        self,
        model: ModelFile,
        spec: ModelSpec,
        plan: MemoryPlan,
        device: OpenCLDevice,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(ModelParts.read(model, spec), spec, plan, device, progress)

    def forward(
        self,
        tokens: ArrayLike,
        parents: ArrayLike | None = None,
        *,
        logits: LogitsRows = "last",
        hidden: bool | Sequence[int] = False,
    ) -> Output:
        """See Session.forward. A tree must fit into one batch of n_batch tokens; a chain may have any length.

        Raises BackendLost if the device fails.
        """
        self._open()
        ids = check_tokens(tokens, self.spec.n_vocab, self._n_past, self.n_ctx)
        return self._forward(ids, parents, 0, logits, check_taps(hidden, self.spec.n_layers))

    def draft(self, tokens: ArrayLike, n_levels: int, width: int = 1, n_vocab: int | None = None) -> Nodes:
        """See DraftingSession.draft. Only the tree is read back, once for all levels.

        n_levels: as many as make MAX_NODES nodes.  width: 1 .. TOP, and n_batch at most.  n_vocab: at least TOP, the
        number of candidates. Raises BackendLost if the device fails.
        """
        self._open()
        n_vocab = self.spec.n_vocab if n_vocab is None else n_vocab
        ids = check_tokens(tokens, self.spec.n_vocab, self._n_past, self.n_ctx)
        if not TOP <= n_vocab <= self.spec.n_vocab:
            raise InvalidArgument(f"n_vocab must be in {TOP}..{self.spec.n_vocab}: found {n_vocab}")
        return self._draft(ids, n_levels, width, n_vocab)

    def recall(self, tokens: ArrayLike) -> int:
        """See Session.recall. Finds nothing: the logits behind a text would depend on how it came there."""
        self.truncate(0)
        return 0
