"""A draft head on an OpenCL device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from edgeinfer.backends.base import Progress
from edgeinfer.backends.checks import check_features, check_pending, check_tokens
from edgeinfer.backends.opencl.device import OpenCLDevice
from edgeinfer.backends.opencl.library import DeviceInfo, choose_device
from edgeinfer.backends.opencl.parts import ModelParts
from edgeinfer.backends.opencl.session import OpenCLDecoder, plan_parts
from edgeinfer.errors import InvalidArgument
from edgeinfer.models import ModelSpec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.types import Device, Features, LogitsRows, MemoryPlan, Nodes, Output


class OpenCLHeadBackend:
    """Makes sessions of heads beside a target, as OpenCLBackend does of models; the device is that of `info`."""

    def __init__(self, info: DeviceInfo | None, target: ModelFile, target_spec: ModelSpec) -> None:
        self.info = choose_device() if info is None else info
        self._target = target, target_spec

    def plan(self, head: ModelFile, spec: ModelSpec, n_ctx: int, n_batch: int = 512, n_threads: int = 1) -> MemoryPlan:
        """Bytes of all buffers on the device, its copy of the target's embeddings among them; see OpenCLBackend.plan.

        spec: DraftHeadSpec.decoder. Raises UnsupportedModel for a head of another kind than the gate's.
        """
        parts = ModelParts.read_head(head, spec, *self._target)
        return plan_parts(head, parts, spec, n_ctx, n_batch, self.info)

    def load(self, head: ModelFile, spec: ModelSpec, plan: MemoryPlan, device: Device) -> OpenCLHead:
        """See OpenCLBackend.load. Both files may be closed afterwards."""
        return OpenCLHead(head, spec, *self._target, plan, OpenCLDevice(self.info))


class OpenCLHead(OpenCLDecoder):
    """See edgeinfer.backends.base.HeadSession. Both files may be closed afterwards.

    device: not shared with another session.
    """

    def __init__(
        self,
        head: ModelFile,
        spec: ModelSpec,
        target: ModelFile,
        target_spec: ModelSpec,
        plan: MemoryPlan,
        device: OpenCLDevice,
        progress: Progress | None = None,
    ) -> None:
        parts = ModelParts.read_head(head, spec, target, target_spec)
        scaled = replace(spec, embedding_scale=target_spec.embedding_scale)
        super().__init__(parts, scaled, plan, device, progress)
        assert parts.draft_vocab is not None  # heads have one
        self._draft_vocab = parts.draft_vocab

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

        Raises BackendLost if the device fails.
        """
        self._open()
        n_pending = check_pending(n_pending, len(self._parents))
        ids = check_tokens(tokens, self.spec.n_vocab, self._n_past + n_pending, self.n_ctx)
        rows = check_features(features, len(ids), self.spec.n_embd)
        return self._forward(ids, parents, n_pending, logits, (self.spec.feature_tap,), rows)

    def draft(
        self,
        tokens: ArrayLike,
        features: ArrayLike,
        n_levels: int,
        width: int = 1,
        assumed: ArrayLike = (),
        n_vocab: int | None = None,
    ) -> Nodes:
        """See DraftingHead.draft. Only the tree is read back, once for all levels.

        n_levels, width: see OpenCLSession.draft. Of a head with fewer tokens than TOP the candidates that are not
        there have p 0. Raises BackendLost if the device fails.
        """
        self._open()
        ids = check_tokens(tokens, self.spec.n_vocab, self._n_past, self.n_ctx)
        rows = check_features(features, len(ids), self.spec.n_embd)
        path: list[int] = []
        if np.size(np.asarray(assumed)):
            path = check_tokens(assumed, self.spec.n_vocab, self._n_past + len(ids), self.n_ctx).tolist()
        n_logits = len(self._draft_vocab) if n_vocab is None else int(np.searchsorted(self._draft_vocab, n_vocab))
        if not n_logits:
            raise InvalidArgument(f"one of the head's tokens must be below n_vocab {n_vocab}: found none")
        return self._draft(ids, n_levels, width, n_logits, rows, path)

    def combine(self, rows: ArrayLike) -> Features:
        """See HeadSession.combine: the rows themselves."""
        self._open()
        return check_features(rows, len(np.asarray(rows)), self.spec.n_embd)
