"""The Backend: plans, and model files in memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from edgeinfer.backends.base import Progress
from edgeinfer.backends.checks import check_cache
from edgeinfer.backends.native import _core
from edgeinfer.backends.native.config import BLOCKS, decoder_config
from edgeinfer.backends.native.machine import best_isa, build_id
from edgeinfer.backends.native.model import NativeModel, assemble, shared_threads
from edgeinfer.backends.native.packed import map_packed, packed_path, read_header, write_packed
from edgeinfer.backends.native.tuning import Tuning, tune, wanted_by_user
from edgeinfer.backends.native.weights import (
    BASE_THREE,
    Packing,
    Part,
    embedding_of,
    is_mostly_ternary,
    map_weights,
    n_base_three,
    of_frequent_tokens,
    pack_weights,
    packed_bytes,
    parts_of,
)
from edgeinfer.models import ModelSpec, check_blocks, read_spec
from edgeinfer.models.gguf import GGMLType, ModelFile
from edgeinfer.types import CacheType, Device, MemoryPlan, MemoryUse, TernaryBits

TRIAL_BYTES = 96 << 20  # at most are read to find out how ternary weights are best held: more than most caches have


class NativeBackend:
    """Runs models on the CPU, with the same bits whatever the batch, the threads and the instruction set.

    Packed weights beside the model file (`edgeinfer pack`) are mapped; otherwise weights are packed at load.

    for_drafts: for draft models: larger matrices are rounded to Q4_0, and only the first tokens have logits (after
    FR-Spec, Zhao et al., arXiv:2502.14856). Less is read for each token; logits differ from the model's.  ternary_bits:
    of a ternary weight in memory; "auto" is what the packed file has, or the faster one, measured in some tenths of a
    second.  verify: compares all bytes of packed weights and model before use.  resident: nothing is read from files
    after loading, so a file that is truncated or unplugged does no harm; mapped parts are copied.  packed: False
    ignores packed weights.  tuned: whether prefetch is tuned, which may take half a second at the first load; see
    tuning.tune.  threads: those of a model that never runs at the same time, see NativeModel.threads; used if there are
    as many as the device is to have.
    """

    name = "native"

    def __init__(
        self,
        *,
        for_drafts: bool = False,
        ternary_bits: TernaryBits | Literal["auto"] = "auto",
        verify: bool = False,
        resident: bool = False,
        packed: bool = True,
        tuned: bool = True,
        threads: _core.Threads | None = None,
    ) -> None:
        self.for_drafts = for_drafts
        self.ternary_bits = ternary_bits
        self.verify = verify
        self.resident = resident
        self.packed = packed
        self.tuned = tuned
        self.threads = threads

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
        """Bytes of packed weights, of the KV cache of one session, and of activations. Exact, not estimated.

        The cache takes its memory as the text grows; the plan has it whole.
        Raises UnsupportedModel for a block or a tensor type without a kernel, InvalidArgument for heads that q8_0 does
        not fit.
        """
        check_blocks(spec.blocks(), BLOCKS, self.name, model.path)
        check_cache(cache_type, spec)
        n_batch = min(n_batch, n_ctx)
        spec = self._spec(model, spec)
        config = decoder_config(spec, n_ctx, n_batch)
        embedding = embedding_of(model, spec)  # which stays mapped
        bits = self._ternary_bits(model, spec, n_threads)
        weights = packed_bytes(self._parts(model, spec, bits)) + (0 if embedding is None else embedding.n_bytes)
        activations = config.activation_bytes(_core.FrontConfig(), n_threads)
        use = MemoryUse(weights, config.kv_bytes(_core.KvType[cache_type], n_ctx), activations)
        return MemoryPlan(n_ctx, n_batch, use, cache_type, bits)

    def load(
        self, model: ModelFile, spec: ModelSpec, plan: MemoryPlan, device: Device, progress: Progress | None = None
    ) -> NativeModel:
        """Map the packed weights, or pack them now. Raises UnsupportedModel, ModelFileError, BackendUnavailable."""
        if self.tuned:
            wanted_by_user()  # what is wrong there is said before anything takes time
        check_blocks(spec.blocks(), BLOCKS, self.name, model.path)
        spec = self._spec(model, spec)
        isa = device.isa or best_isa()
        parts = self._parts(model, spec, plan.ternary_bits)
        threads = shared_threads(self.threads, device.n_threads)
        weights = self._weights(model, parts, plan, threads, progress)
        embedding_bytes = self._set_embedding(model, spec, weights)
        device = Device(device.n_threads, isa)
        made = assemble(spec, _core.FrontConfig(), plan, device, weights, threads, embedding_bytes)
        weights.check_all_are_used()
        loaded = NativeModel(made, spec, plan)
        if self.tuned:
            loaded.tuning = self._tune(loaded, model, parts, device, plan.ternary_bits)
        return loaded

    def pack(self, model: ModelFile, spec: ModelSpec, target: Path, progress: Progress | None = None) -> int:
        """Write the packed weights to a file; gives its size in bytes. Raises UnsupportedModel, OSError."""
        device = Device(os.cpu_count() or 1)
        packer = NativeBackend(ternary_bits=self.ternary_bits, packed=False, tuned=False)
        bits = packer._ternary_bits(model, spec, device.n_threads)
        loaded = packer.load(model, spec, MemoryPlan(1, 1, MemoryUse(0, 0, 0), ternary_bits=bits), device, progress)
        try:
            write_packed(target, model, loaded.packed_weights(), bits)
        finally:
            loaded.close()
        return target.stat().st_size

    def _spec(self, model: ModelFile, spec: ModelSpec) -> ModelSpec:
        return of_frequent_tokens(model, spec) if self.for_drafts else spec

    def _parts(self, model: ModelFile, spec: ModelSpec, bits: TernaryBits) -> list[Part]:
        return parts_of(model, spec.weights(), Packing(self.for_drafts, bits))

    def _packed_file(self, model: ModelFile) -> Path | None:
        """The packed weights that are to be mapped, None where the weights are packed at load."""
        if not self.packed or self.for_drafts or self.resident:
            return None
        path = packed_path(model.paths[0])
        return path if os.path.lexists(path) else None

    def _weights(
        self,
        model: ModelFile,
        parts: Sequence[Part],
        plan: MemoryPlan,
        threads: _core.Threads,
        progress: Progress | None,
    ) -> _core.Weights:
        n_bytes, path = packed_bytes(parts), self._packed_file(model)
        if path is None:
            weights = _core.Weights(n_bytes)
            pack_weights(weights, model, parts, threads, progress)
            return weights
        weights = _core.Weights(n_bytes, map_packed(path, model, n_bytes, plan.ternary_bits, self.verify))
        map_weights(weights, parts, progress)
        return weights

    def _set_embedding(self, model: ModelFile, spec: ModelSpec, weights: _core.Weights) -> int:
        """Bytes of the embeddings, whose rows are read from the file, or from a copy of it."""
        info = embedding_of(model, spec)
        if info is None:
            return 0
        rows = model.data(info.name)
        n_vocab, n_embd = info.shape
        weights.set_embedding(int(info.type), n_vocab, n_embd, rows.copy() if self.resident else rows)
        return rows.nbytes

    def _tune(
        self, loaded: NativeModel, model: ModelFile, parts: Sequence[Part], device: Device, bits: TernaryBits
    ) -> Tuning:
        """Choose how the weights are read. Raises InvalidArgument."""
        n_tokens, n_threads = min(loaded.n_batch, loaded.n_ctx), device.n_threads
        facts = (device.isa, build_id(), self.for_drafts, bits)
        decoder, n_layers = loaded.tuned(n_tokens), loaded.spec.n_layers
        return tune(decoder, model, n_layers, n_tokens, n_threads, is_mostly_ternary(parts), *facts)

    def _ternary_bits(self, model: ModelFile, spec: ModelSpec, n_threads: int) -> TernaryBits:
        """What a ternary weight is to take."""
        if not any(info.type in BASE_THREE for info in model.tensors.values()):
            return "2"
        n_weights = n_base_three(parts_of(model, spec.weights()))
        if not n_weights:
            return "2"
        if self.ternary_bits != "auto":
            return self.ternary_bits
        if (packed := self._packed_file(model)) is not None:
            return read_header(packed).ternary_bits
        return faster_bits(best_isa(), n_threads, n_weights)


@cache
def faster_bits(isa: str, n_threads: int, n_weights: int) -> TernaryBits:
    """Which way to hold ternary weights passes one token and four, as when drafts are checked, sooner.

    Takes no more memory meanwhile than the weights will.
    """
    n_bytes = min(n_weights // 5, TRIAL_BYTES)
    two, three = (
        sum(_core.time_format(int(kind), isa, n_threads, n, n_bytes) for n in (1, 4))
        for kind in (GGMLType.I2_S, BASE_THREE[GGMLType.I2_S])
    )
    return "1.6" if three < two else "2"
