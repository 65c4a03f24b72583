"""A model in memory whose matrices are packed again one by one: what a change of one of them does to the logits costs a
prefill, or less, and no load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.native import _core
from edgeinfer.backends.native.config import BLOCKS, add_inputs, decoder_config
from edgeinfer.backends.native.experts.model_experts import EXPERT_ROLES, ModelExperts, experts_of, resident_experts
from edgeinfer.backends.native.machine import best_isa
from edgeinfer.backends.native.model import assemble
from edgeinfer.backends.native.passes import interrupted
from edgeinfer.backends.native.weights import (
    EmbeddingRows,
    Packing,
    embedding_of,
    inputs_of,
    layer_table_of,
    pack_matrix,
    pack_weights,
    packed_bytes,
    parts_of,
    set_embedding,
)
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device, Logits, MemoryPlan, MemoryUse, TokenIds
from edgeinfer.models import ModelSpec, check_blocks
from edgeinfer.models.gguf import ModelFile

_COPIED_BYTES = 1 << 20


@dataclass(frozen=True)
class Trace:
    """A sequence that went through a model."""

    tokens: TokenIds
    rows: NDArray[np.int32]  # (m,) whose logits are requested
    residuals: NDArray[np.float32]  # (n_layers, n, n_embd), the residual stream after each layer
    logits: Logits  # (m, n_logits)


class RepackableModel:
    """The weights of a model file in memory of their own, and passes of one new sequence at a time.

    file: stays open. What it gives for a tensor may change (`ModelFile.define`), in the type that it had at first; it
    counts once `repack` was called.  n_tokens: of a sequence at most.
    Raises UnsupportedModel, ModelFileError, BackendUnavailable.
    """

    def __init__(self, file: ModelFile, spec: ModelSpec, n_tokens: int, device: Device) -> None:
        check_blocks(spec.blocks(), BLOCKS, "native", file.path)
        self.spec = spec
        self._file = file
        self._parts = parts_of(file, spec.weights())
        self._experts = experts_of(file, spec, Packing())
        self._threads = _core.Threads(device.n_threads)
        self._weights = _core.Weights(packed_bytes(self._parts))
        pack_weights(self._weights, file, self._parts, self._threads)
        self._rows = embedding_of(file, spec, self._parts, is_held=True)
        self._embedding = self._held_embedding()
        self._table = self._held_table()
        self._records = resident_experts(self._experts, file, self._threads) if self._experts.layers else None
        plan = MemoryPlan(LoadSettings(n_tokens, n_batch=n_tokens), MemoryUse(0, 0, 0))
        device = Device(device.n_threads, device.isa or best_isa())
        store = None if self._records is None else _core.ResidentExperts(self._records)
        config = self._config_of(n_tokens)
        front = _core.FrontConfig()
        made = assemble(spec, config, front, plan, device, self._weights, self._threads, self._rows, store)
        self._decoder = made.decoder
        self._state = _core.SequenceState(config, _core.KvType.f16, n_tokens)

    @staticmethod
    def bytes_of(file: ModelFile, spec: ModelSpec, n_tokens: int, n_threads: int) -> int:
        """What such a model takes in memory. Raises UnsupportedModel."""
        parts, experts = parts_of(file, spec.weights()), experts_of(file, spec, Packing())
        rows = (embedding_of(file, spec, parts, is_held=True), layer_table_of(file, spec))
        config = _config_of(spec, n_tokens, inputs_of(parts) | experts.inputs())
        others = config.kv_bytes(_core.KvType.f16, n_tokens) + config.activation_bytes(_core.FrontConfig(), n_threads)
        held = sum(each.n_bytes for each in rows if each is not None)
        return packed_bytes(parts) + experts.n_bytes + held + others

    def read(self, tokens: Sequence[int], rows: Sequence[int]) -> Logits:
        """The logits of some rows of a sequence. Raises Interrupted."""
        return self._read(np.array(tokens, dtype=np.int32), np.array(rows, dtype=np.int32))

    def trace(self, tokens: Sequence[int], rows: Sequence[int]) -> Trace:
        """A pass through all layers. Raises Interrupted."""
        ids, requested = np.array(tokens, dtype=np.int32), np.array(rows, dtype=np.int32)
        n_layers = self.spec.n_layers
        residuals = np.empty((n_layers, len(ids), self.spec.n_embd), dtype=np.float32)
        logits = self._run(ids, requested, np.arange(n_layers, dtype=np.int32), residuals)
        return Trace(ids, requested, residuals, logits)

    def logits(self, trace: Trace, first_layer: int) -> Logits:
        """The logits of a traced sequence, as they are now that nothing before a layer has changed.

        first_layer: n_layers for the output matrix alone. Raises Interrupted.
        """
        if first_layer < self.spec.n_layers and self.spec.layers[first_layer].is_beside:
            first_layer -= 1  # what stands beside another mixer needs what that one read
        if first_layer == 0:
            return self._read(trace.tokens, trace.rows)
        logits = np.empty((len(trace.rows), self.spec.n_logits), dtype=np.float32)
        self._state.truncate(0)
        x = trace.residuals[first_layer - 1]
        if not self._decoder.forward_from(self._state, trace.tokens, first_layer, x, trace.rows, logits):
            raise interrupted()
        return logits

    def first_layer_of(self, name: str) -> int:
        """The first layer that reads a tensor: 0 for the embeddings, n_layers for the output matrix alone."""
        inputs = self.spec.layer_inputs
        if name == self.spec.token_embd or (inputs is not None and name == inputs.table):
            return 0
        blocks = [part.block for part in self._parts if part.name == name]
        blocks += [
            f"layers.{layer.index}" for layer in self._experts.layers if any(part.name == name for part in layer.parts)
        ]
        return min(self.spec.first_layer_of(block) for block in blocks)

    def repack(self, name: str) -> None:
        """Take a matrix, or those of experts, from the file as it is now. Vectors stay. Raises ModelFileError."""
        for part in self._parts:
            if part.name == name and len(part.shape) == 2:
                pack_matrix(self._weights, self._file, part, self._threads)
        if self._embedding is not None and name == self.spec.token_embd:
            _copy(self._file, name, self._embedding)
        if self._table is not None and self.spec.layer_inputs is not None and name == self.spec.layer_inputs.table:
            _copy(self._file, name, self._table)
        if self._records is not None:
            _repack_experts(self._experts, self._records, self._file, name, self._threads)

    def _config_of(self, n_tokens: int) -> _core.DecoderConfig:
        return _config_of(self.spec, n_tokens, inputs_of(self._parts) | self._experts.inputs())

    def _held_embedding(self) -> NDArray[np.uint8] | None:
        """The bytes of the embeddings, None where they are the output matrix."""
        rows: EmbeddingRows | None = self._rows
        if rows is None:
            return None
        if rows.place == "output":
            set_embedding(self._weights, self._file, rows)
            return None
        return self._held(rows, of_layers=False)

    def _held_table(self) -> NDArray[np.uint8] | None:
        """The bytes of the table of LayerInputs; None without, and where its rows are read from a file."""
        rows = layer_table_of(self._file, self.spec)
        if rows is not None and rows.place == "file":
            set_embedding(self._weights, self._file, rows, of_layers=True)
            return None
        return None if rows is None else self._held(rows, of_layers=True)

    def _held(self, rows: EmbeddingRows, of_layers: bool) -> NDArray[np.uint8]:
        info = rows.info
        held = np.empty(info.n_bytes, np.uint8)
        _copy(self._file, info.name, held)
        n_vocab, n_embd = info.shape
        self._weights.set_embedding(int(info.type), n_vocab, n_embd, held, of_layers)
        return held

    def _read(self, ids: TokenIds, requested: NDArray[np.int32]) -> Logits:
        nothing = np.empty((0, len(ids), self.spec.n_embd), dtype=np.float32)
        return self._run(ids, requested, np.empty(0, dtype=np.int32), nothing)

    def _run(
        self, ids: TokenIds, requested: NDArray[np.int32], layers: NDArray[np.int32], taps: NDArray[np.float32]
    ) -> Logits:
        logits = np.empty((len(requested), self.spec.n_logits), dtype=np.float32)
        self._state.truncate(0)
        chain = np.arange(-1, len(ids) - 1, dtype=np.int32)
        sequences = [(self._state, ids, chain, 0, layers, taps, 0, None)]
        if not self._decoder.forward(sequences, requested, logits, self._decoder.interrupts):
            raise interrupted()
        return logits


def _config_of(spec: ModelSpec, n_tokens: int, inputs: set[tuple[int, int]]) -> _core.DecoderConfig:
    config = decoder_config(spec, n_tokens, n_tokens)
    add_inputs(config, inputs)
    return config


def _copy(file: ModelFile, name: str, to: NDArray[np.uint8]) -> None:
    """Copy the bytes of a tensor, piece by piece."""
    info = file.tensors[name]
    row_bytes = info.n_bytes // info.shape[0]
    step = max(1, _COPIED_BYTES // row_bytes) * row_bytes
    for first in range(0, info.n_bytes, step):
        last = min(info.n_bytes, first + step)
        to[first:last] = file.data(name, first, last)
        file.release(name, first, last)


def _repack_experts(
    experts: ModelExperts, records: _core.ExpertRecords, file: ModelFile, name: str, threads: _core.Threads
) -> None:
    """Pack the matrices of all experts that lie in a tensor."""
    for layer in experts.layers:
        for number, part in enumerate(layer.parts):
            assert EXPERT_ROLES[number] == part.role
            if part.name != name or not part.n_bytes:
                continue
            for expert in range(layer.n_experts):
                data, record = part.data(file, expert), records.record(layer.index, expert)
                _core.pack_expert(experts.layout, layer.index, number, int(part.type), data, record, threads)
