"""Backend, models and sessions on an OpenCL device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from edgeinfer.backends.base import Model, Progress
from edgeinfer.backends.checks import check_parents, check_tokens
from edgeinfer.backends.device_session import DeviceModel, DeviceSession, DeviceText, chain_batch
from edgeinfer.backends.opencl.decoder import Decoder
from edgeinfer.backends.opencl.device import OpenCLDevice
from edgeinfer.backends.opencl.drafting import draft_tree
from edgeinfer.backends.opencl.library import DeviceInfo, choose_device
from edgeinfer.backends.opencl.parts import MAX_NODES, TOP, ModelParts, activation_bytes, kv_buffer_bytes
from edgeinfer.common.errors import BudgetExceeded, ContextOverflow, InvalidArgument
from edgeinfer.common.overriding import override
from edgeinfer.common.settings import CacheType, LoadSettings
from edgeinfer.common.types import Device, Features, MemoryPlan, MemoryUse, Nodes, TokenIds
from edgeinfer.models import ModelSpec, read_spec
from edgeinfer.models.gguf import ModelFile


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

    def plan(self, model: ModelFile, spec: ModelSpec, settings: LoadSettings) -> MemoryPlan:
        """Bytes of all buffers on the device. Exact; what the driver takes beside them is not known.

        Raises UnsupportedModel for a block or a tensor type that does not run here, InvalidArgument for another cache
        than f16, BudgetExceeded for more than the device has.
        """
        if settings.cache_type != "f16":
            raise InvalidArgument(f"the opencl backend has a KV cache of f16 only: found {settings.cache_type}")
        settings, parts = settings.with_batch(), ModelParts.read(model, spec)
        return plan_parts(model, parts, spec, settings, activation_bytes(spec, settings.n_batch), self.info)

    def load(
        self, model: ModelFile, spec: ModelSpec, plan: MemoryPlan, device: Device, progress: Progress | None = None
    ) -> OpenCLModel:
        """Convert and upload the weights; the CPU `device` is not looked at. The file may be closed afterwards.

        Raises UnsupportedModel, BackendUnavailable, BackendLost.
        """
        return OpenCLModel(model, spec, plan, OpenCLDevice(self.info), progress)


def plan_parts(
    model: ModelFile,
    parts: ModelParts,
    spec: ModelSpec,
    settings: LoadSettings,
    activations: dict[str, int],
    info: DeviceInfo,
) -> MemoryPlan:
    """Bytes of all buffers of a model or a head; see OpenCLBackend.plan. Raises BudgetExceeded.

    activations: of each buffer of a pass.
    """
    caches = kv_buffer_bytes(spec, settings.n_ctx)
    use = MemoryUse(sum(parts.buffer_bytes()), 2 * sum(caches), sum(activations.values()))
    largest = max(*parts.buffer_bytes(), *caches, *activations.values())
    if use.total > info.memory_bytes or largest > info.max_buffer_bytes:
        shortfall = max(use.total - info.memory_bytes, largest - info.max_buffer_bytes)
        raise BudgetExceeded(
            f"{model.path} needs {use.total} bytes at n_ctx {settings.n_ctx}, {largest} of them in one buffer: "
            f"{info.name} has {info.memory_bytes}, with at most {info.max_buffer_bytes} in one buffer, "
            f"{shortfall} too few"
        )
    return MemoryPlan(settings, use)


class OpenCLModel(DeviceModel[Decoder], Model):
    """See edgeinfer.backends.base.Model. The file may be closed afterwards.

    device: not shared with another model.
    """

    def __init__(
        self,
        model: ModelFile,
        spec: ModelSpec,
        plan: MemoryPlan,
        device: OpenCLDevice,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(Decoder(device, ModelParts.read(model, spec), spec, plan.n_batch, progress), plan)

    @override
    def session(self, n_ctx: int | None = None, cache_type: CacheType | None = None) -> OpenCLSession:
        return OpenCLSession(self, self.checked_size(n_ctx, cache_type))


class DraftingText(DeviceText[Decoder]):
    """A text whose drafts the device makes by itself."""

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
        decoder.begin()
        self._parents = np.empty(0, dtype=np.int32)
        for first in range(0, len(ids), self.n_batch):
            last = min(first + self.n_batch, len(ids))
            batch = chain_batch(ids[first:last], self._n_past + first)
            if features is not None:
                batch = replace(batch, features=features[first:last])
            if last < len(ids):
                decoder.run(self._cache, batch)
                decoder.device.finish()
        nodes = draft_tree(decoder, self._cache, batch, n_levels, width, n_logits, assumed)
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


class OpenCLSession(DeviceSession[Decoder], DraftingText):
    """See edgeinfer.backends.base.DraftingSession."""

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
