"""A draft head on an OpenCL device."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from edgeinfer.backends.base import HeadModel, Progress
from edgeinfer.backends.checks import check_features, check_session_size, check_tokens
from edgeinfer.backends.device_session import DeviceHeadModel, DeviceHeadSession
from edgeinfer.backends.opencl.decoder import Decoder
from edgeinfer.backends.opencl.device import OpenCLDevice
from edgeinfer.backends.opencl.library import DeviceInfo, choose_device
from edgeinfer.backends.opencl.parts import ModelParts, head_activation_bytes
from edgeinfer.backends.opencl.session import DraftingText, plan_parts
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.common.overriding import override
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device, MemoryPlan, Nodes
from edgeinfer.models import ModelSpec
from edgeinfer.models.draft_head import HeadSpec
from edgeinfer.models.gguf import ModelFile


class OpenCLHeadBackend:
    """Loads heads beside a target, as OpenCLBackend does models; the device is that of `info`."""

    def __init__(self, info: DeviceInfo | None, target: ModelFile, target_spec: ModelSpec) -> None:
        self.info = choose_device() if info is None else info
        self._target = target, target_spec

    def plan(self, head: ModelFile, spec: HeadSpec, settings: LoadSettings) -> MemoryPlan:
        """Bytes of all buffers on the device, its copy of the target's embeddings among them; see OpenCLBackend.plan.

        Raises UnsupportedModel for a head with another front than GatedFusion, or that is fed by several layers.
        """
        settings, parts = settings.with_batch(), ModelParts.read_head(head, spec, *self._target)
        activations = head_activation_bytes(spec.decoder, settings.n_batch)
        return plan_parts(head, parts, spec.decoder, settings, activations, self.info)

    def load(
        self, head: ModelFile, spec: HeadSpec, plan: MemoryPlan, device: Device, progress: Progress | None = None
    ) -> OpenCLHeadModel:
        """See OpenCLBackend.load. Both files may be closed afterwards."""
        return OpenCLHeadModel(head, spec, *self._target, plan, OpenCLDevice(self.info), progress)


class OpenCLHeadModel(DeviceHeadModel[Decoder], HeadModel):
    """See edgeinfer.backends.base.HeadModel. Both files may be closed afterwards.

    device: not shared with another model.
    """

    def __init__(
        self,
        head: ModelFile,
        spec: HeadSpec,
        target: ModelFile,
        target_spec: ModelSpec,
        plan: MemoryPlan,
        device: OpenCLDevice,
        progress: Progress | None = None,
    ) -> None:
        parts = ModelParts.read_head(head, spec, target, target_spec)
        super().__init__(Decoder(device, parts, spec.decoder, plan.n_batch, progress), spec, plan)

    @override
    def session(self, n_ctx: int | None = None) -> OpenCLHead:
        return OpenCLHead(self, check_session_size(n_ctx, self.n_ctx))


class OpenCLHead(DeviceHeadSession[Decoder], DraftingText):
    """See edgeinfer.backends.base.DraftingHead."""

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
        n_tokens, vocabulary = self.spec.decoder.n_vocab, self.spec.draft_vocab
        ids = check_tokens(tokens, n_tokens, self._n_past, self.n_ctx)
        rows = check_features(features, len(ids), self.spec.n_embd)
        path: list[int] = []
        if np.size(np.asarray(assumed)):
            path = check_tokens(assumed, n_tokens, self._n_past + len(ids), self.n_ctx).tolist()
        n_logits = len(vocabulary) if n_vocab is None else int(np.searchsorted(vocabulary, n_vocab))
        if not n_logits:
            raise InvalidArgument(f"one of the head's tokens must be below n_vocab {n_vocab}: found none")
        return self._draft(ids, n_levels, width, n_logits, rows, path)
