"""The Backend: plans, and model files in memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

from edgeinfer.backends.base import Progress
from edgeinfer.backends.checks import check_cache
from edgeinfer.backends.native import _core
from edgeinfer.backends.native.config import BLOCKS, add_inputs, cache_sizes, check_recurrences, decoder_config
from edgeinfer.backends.native.experts.cache import cache_bytes, open_cache
from edgeinfer.backends.native.experts.model_experts import ModelExperts, experts_of, resident_experts, write_records
from edgeinfer.backends.native.experts.times import expert_seconds
from edgeinfer.backends.native.machine import best_isa, build_id, warn_of_better_isa
from edgeinfer.backends.native.model import NativeModel, assemble, shared_threads
from edgeinfer.backends.native.packing.packed import Packed, Write, map_packed, packed_path, read_header, write_packed
from edgeinfer.backends.native.tuning import Tuning, tune, user_choice
from edgeinfer.backends.native.weights import (
    BASE_THREE,
    MATRIX_TYPES,
    PIECE_BYTES,
    EmbeddingRows,
    Packing,
    Part,
    Placement,
    embedding_of,
    inputs_of,
    is_mostly_ternary,
    layer_table_of,
    map_weights,
    n_base_three,
    of_frequent_tokens,
    pack_weights,
    packed_bytes,
    parts_of,
    read_weights,
    set_embedding,
)
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.common.file_identity import FileWatch
from edgeinfer.common.settings import LoadSettings, TernaryBits
from edgeinfer.common.types import Device, ExpertSizes, MemoryPlan, MemoryUse
from edgeinfer.models import ModelSpec, check_blocks, read_spec
from edgeinfer.models.draft_vocab import is_as_stored, storage_facts
from edgeinfer.models.gguf import GGMLType, ModelFile
from edgeinfer.models.gguf_reader.mapping import AROUND, MappedFile

TRIAL_BYTES = 96 << 20  # at most are read to find out how ternary weights are best held: more than most caches have


class NativeBackend:
    """Runs models on the CPU, with the same bits whatever the batch, the threads and the instruction set.

    Packed weights beside the model file (`edgeinfer pack`) are mapped; otherwise weights are packed at load.

    for_drafts: for draft models: larger matrices are rounded to Q4_0, unless the file is AS_STORED, and only the first
    tokens have logits (after FR-Spec, Zhao et al., arXiv:2502.14856). Less is read for each token; logits differ from
    the model's. ternary_bits: of a ternary weight in memory; "auto" is what the packed file has, or the faster one,
    measured in some tenths of a second. verify: compares all bytes of packed weights and model before use. resident:
    nothing is read from files after loading, so a file that is truncated or unplugged does no harm; mapped parts are
    copied. packed: False ignores packed weights. tuned: whether prefetch is tuned, which may take half a second at the
    first load; see tuning.tune. threads: those of a model that never runs at the same time, see NativeModel.threads;
    used if there are as many as the device is to have. placement: moves products to a device, see Placement.
    """

    name = "native"
    # A piece, on two huge pages of the file at most, and the rows that are made of it.
    source_bytes = 2 * AROUND + PIECE_BYTES

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
        placement: Placement | None = None,
    ) -> None:
        self.for_drafts = for_drafts
        self.ternary_bits = ternary_bits
        self.verify = verify
        self.resident = resident
        self.packed = packed
        self.tuned = tuned
        self.threads = threads
        self.placement = placement

    def read_spec(self, model: ModelFile) -> ModelSpec:
        """See edgeinfer.models.read_spec. Raises UnsupportedModel."""
        return read_spec(model)

    def plan(self, model: ModelFile, spec: ModelSpec, settings: LoadSettings) -> MemoryPlan:
        """Bytes of packed weights, of the KV cache of all texts, of activations and experts. Exact, not estimated.

        The KV cache takes its memory as the text grows; the plan has it whole. An expert cache of at least the bytes of
        all is all experts in memory.
        Raises UnsupportedModel for a block or a tensor type without a kernel, InvalidArgument for heads that q8_0 does
        not fit, and for an expert cache of fewer bytes than a pass needs.
        """
        check_blocks(spec.blocks(), BLOCKS, self.name, model.path)
        check_recurrences(spec, model.path)
        check_cache(settings.cache_type, spec)
        settings = settings.with_batch()
        spec = self._spec(model, spec)
        bits = self._ternary_bits(model, spec, settings.n_threads)
        experts = self.experts(model, spec, bits)
        config = self._config(model, spec, bits, settings)
        if settings.expert_cache is not None and settings.expert_cache >= experts.n_bytes:
            settings = replace(settings, expert_cache=None)
        expert_cache, cache = settings.expert_cache, cache_sizes(spec, settings)
        use = MemoryUse(
            self._weight_bytes(model, spec, bits, expert_cache),
            cache.n_bytes,
            config.activation_bytes(_core.FrontConfig(), settings.n_threads),
            experts=self._expert_bytes(model, experts, expert_cache),
            windows=cache.windows,
            states=cache.states,
        )
        if expert_cache is None and self._packed_file(model) is not None:
            use = replace(use, mapped=use.weights, mapped_experts=use.experts)
        return MemoryPlan(settings, use, bits, cache.n_positions)

    def load(
        self, model: ModelFile, spec: ModelSpec, plan: MemoryPlan, device: Device, progress: Progress | None = None
    ) -> NativeModel:
        """Map the packed weights, or pack them now. Raises UnsupportedModel, ModelFileError, BackendUnavailable."""
        if self.tuned:
            user_choice()  # what is wrong there is said before anything takes time
        check_blocks(spec.blocks(), BLOCKS, self.name, model.path)
        spec = self._spec(model, spec)
        isa = device.isa or best_isa()
        if device.isa is None:
            warn_of_better_isa()
        parts, experts = self._parts(model, spec, plan.ternary_bits), self.experts(model, spec, plan.ternary_bits)
        threads = shared_threads(self.threads, device.n_threads)
        packed = self._mapped(model, parts, experts, plan)
        n_dense = packed_bytes(parts)
        of_weights, of_experts = split(progress, n_dense, experts.n_bytes)
        is_cached = plan.expert_cache is not None
        weights = _weights(model, parts, packed, threads, of_weights, is_mapped=not is_cached)
        if plan.expert_cache is not None:
            store: _core.ExpertStore | None = self._cache(model, experts, packed, plan.expert_cache)
        else:
            store = _store(model, experts, packed, threads, of_experts)
        rows = embedding_of(model, spec, parts, is_held=self.resident or is_cached)
        if rows is not None:
            set_embedding(weights, model, rows)
        table = layer_table_of(model, spec, is_held=self.resident)
        if table is not None:
            set_embedding(weights, model, table, of_layers=True)
        beside = None if self.placement is None else self.placement(weights, model, parts)
        device = Device(device.n_threads, isa)
        config = self._config(model, spec, plan.ternary_bits, plan.settings)
        made = assemble(spec, config, _core.FrontConfig(), plan, device, weights, threads, rows, store)
        made = replace(
            made,
            is_mapped=packed is not None and not is_cached,
            files=_files_of(model, packed, (rows, table), is_cached),
            table=table,
        )
        weights.check_all_are_used()
        model.check()
        model.unmap()
        loaded = NativeModel(made, spec, plan)
        loaded.beside = beside
        if self.tuned and not is_cached:  # what is measured while experts are read is the disk
            loaded.tuning = self._tune(loaded, model, parts, device, plan.ternary_bits)
        return loaded

    def pack(self, model: ModelFile, spec: ModelSpec, target: Path, progress: Progress | None = None) -> int:
        """Write the packed weights to a file; gives its size in bytes. Raises UnsupportedModel, OSError."""
        check_blocks(spec.blocks(), BLOCKS, self.name, model.path)
        packer = NativeBackend(ternary_bits=self.ternary_bits, packed=False)
        threads = _core.Threads(os.cpu_count() or 1)
        bits = packer._ternary_bits(model, spec, threads.n)
        parts, experts = packer._parts(model, spec, bits), packer.experts(model, spec, bits)
        of_weights, of_experts = split(progress, packed_bytes(parts), experts.n_bytes)
        weights = _weights(model, parts, None, threads, of_weights)

        def write_experts(write: Write) -> None:
            write_records(experts, model, threads, write, of_experts)

        write_packed(target, model, weights.data, bits, experts.n_bytes, write_experts if experts.layers else None)
        return target.stat().st_size

    def warm_up(self, model: ModelFile, device: Device) -> None:
        """See MeasurableBackend: a product in each format of the file."""
        isa = device.isa or best_isa()
        for kind in sorted({info.type for info in model.tensors.values() if len(info.shape) > 1} & MATRIX_TYPES):
            for n_tokens in (1, 4):
                _core.time_format(int(kind), isa, 1, n_tokens, 1)

    def expert_sizes(self, model: ModelFile, spec: ModelSpec) -> ExpertSizes:
        """What the experts of a model take in memory. Raises UnsupportedModel."""
        return self.experts(model, spec).sizes()

    def expert_seconds(
        self, model: ModelFile, spec: ModelSpec, device: Device, sizes: Sequence[int]
    ) -> dict[int, float]:
        """Seconds of one expert with so many rows, by rows, measured now."""
        return expert_seconds(self.experts(model, spec), model, device.isa or best_isa(), device.n_threads, sizes)

    def experts(self, model: ModelFile, spec: ModelSpec, bits: TernaryBits = "2") -> ModelExperts:
        """The experts of a model, where they lie and how they are packed. Raises UnsupportedModel."""
        return experts_of(model, spec, self._packing(model, bits))

    def _spec(self, model: ModelFile, spec: ModelSpec) -> ModelSpec:
        return of_frequent_tokens(model, spec) if self.for_drafts else spec

    def _parts(self, model: ModelFile, spec: ModelSpec, bits: TernaryBits) -> list[Part]:
        return parts_of(model, spec.weights(), self._packing(model, bits))

    def _packing(self, model: ModelFile, bits: TernaryBits) -> Packing:
        return Packing(self.for_drafts and not is_as_stored(model), bits)

    def _config(
        self, model: ModelFile, spec: ModelSpec, bits: TernaryBits, settings: LoadSettings
    ) -> _core.DecoderConfig:
        """Sizes of the decoder and of what it computes."""
        config = decoder_config(spec, settings.n_ctx, settings.n_batch)
        add_inputs(config, inputs_of(self._parts(model, spec, bits)))
        add_inputs(config, self.experts(model, spec, bits).inputs())
        return config

    def _packed_file(self, model: ModelFile) -> Path | None:
        """The packed weights that are to be mapped, None where the weights are packed at load."""
        if not self.packed or self.for_drafts or self.resident:
            return None
        path = packed_path(model.paths[0])
        return path if os.path.lexists(path) else None

    def _expert_bytes(self, model: ModelFile, experts: ModelExperts, expert_cache: int | None) -> int:
        """Memory of all experts, or of a cache. Raises InvalidArgument."""
        if expert_cache is None:
            return experts.n_bytes
        if self.resident:
            raise InvalidArgument("expert_cache must be None where nothing is read after loading")
        return cache_bytes(experts, expert_cache, self._packed_file(model) is not None)

    def _cache(self, model: ModelFile, experts: ModelExperts, packed: Packed | None, n_bytes: int) -> _core.DiskExperts:
        """An empty cache of experts. Raises ModelFileError, InvalidArgument."""
        return open_cache(experts, model, n_bytes, None if packed is None else (packed.file, packed.records_at))

    def _mapped(
        self, model: ModelFile, parts: Sequence[Part], experts: ModelExperts, plan: MemoryPlan
    ) -> Packed | None:
        """What the packed file holds, None where it is packed at load. Raises BadPack."""
        if (path := self._packed_file(model)) is None:
            return None
        return map_packed(path, model, packed_bytes(parts), plan.ternary_bits, self.verify, experts.n_bytes)

    def _weight_bytes(self, model: ModelFile, spec: ModelSpec, bits: TernaryBits, expert_cache: int | None) -> int:
        """Packed weights, and a copy of the embeddings where there is to be one. Raises UnsupportedModel."""
        parts = self._parts(model, spec, bits)
        rows = embedding_of(model, spec, parts, is_held=self.resident or expert_cache is not None)
        table = layer_table_of(model, spec, is_held=self.resident)
        return packed_bytes(parts) + sum(each.n_bytes for each in (rows, table) if each is not None)

    def _tune(
        self, loaded: NativeModel, model: ModelFile, parts: Sequence[Part], device: Device, bits: TernaryBits
    ) -> Tuning:
        """Choose how the weights are read. Raises InvalidArgument."""
        n_tokens, n_threads = min(loaded.n_batch, loaded.n_ctx), device.n_threads
        facts = (device.isa, build_id(), self.for_drafts, bits, *storage_facts(model))
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


def _weights(
    model: ModelFile,
    parts: Sequence[Part],
    packed: Packed | None,
    threads: _core.Threads,
    progress: Progress | None,
    is_mapped: bool = True,
) -> _core.Weights:
    """The weights beside experts, packed now where there is no packed file.

    is_mapped: those of a packed file are mapped, else read into memory, so that the system cannot take them back.
    """
    n_bytes = packed_bytes(parts)
    if packed is None:
        weights = _core.Weights(n_bytes)
        pack_weights(weights, model, parts, threads, progress)
        return weights
    weights = (
        _core.Weights(n_bytes, packed.weights) if is_mapped else read_weights(n_bytes, packed.file, packed.weights_at)
    )
    map_weights(weights, parts, progress)
    return weights


def _store(
    model: ModelFile,
    experts: ModelExperts,
    packed: Packed | None,
    threads: _core.Threads,
    progress: Progress | None,
) -> _core.ExpertStore | None:
    """All experts in memory or mapped, None for a model without any."""
    if not experts.layers:
        return None
    if packed is not None:
        return _core.ResidentExperts(_core.ExpertRecords(experts.layout, packed.records))
    return _core.ResidentExperts(resident_experts(experts, model, threads, progress))


def _files_of(
    model: ModelFile, packed: Packed | None, rows: Sequence[EmbeddingRows | None], is_cached: bool
) -> list[FileWatch | MappedFile]:
    """What passes read from: packed weights, rows of embeddings and experts."""
    packed_files: list[FileWatch | MappedFile] = [] if packed is None else [packed.file]
    is_read = any(each is not None and each.place == "file" for each in rows) or (is_cached and packed is None)
    return [*packed_files, *(model.watches() if is_read else [])]


def split(progress: Progress | None, first: int, second: int) -> tuple[Progress | None, Progress | None]:
    """The progress of two parts of a work, by their sizes."""
    if progress is None:
        return None, None
    share = first / max(1, first + second)
    return lambda done: progress(share * done), lambda done: progress(share + (1 - share) * done)


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
