"""Loaded models: weights, threads and activations, which sessions of several sequences share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.base import ExpertDevice, Model, PassHook, Rows
from edgeinfer.backends.checks import check_cache, check_session_size, check_sessions
from edgeinfer.backends.native import _core
from edgeinfer.backends.native.config import add_query_scales
from edgeinfer.backends.native.experts.cache import ExpertCache
from edgeinfer.backends.native.machine import best_isa
from edgeinfer.backends.native.passes import JointPass, Listed, SequenceRows, interrupted
from edgeinfer.backends.native.reused_rows import ReusedRows
from edgeinfer.backends.native.sequence_pool import SharedPool, full_pool
from edgeinfer.backends.native.session import NativeSequence, NativeSession
from edgeinfer.backends.native.tuning import Fields, Tunable, Tuning
from edgeinfer.backends.native.weights import EmbeddingRows
from edgeinfer.common.errors import CacheFull, EdgeInferError
from edgeinfer.common.file_identity import FileWatch
from edgeinfer.common.one_process import OfOneProcess
from edgeinfer.common.overriding import override
from edgeinfer.common.settings import CacheType
from edgeinfer.common.types import Device, Logits, MemoryPlan, MemoryUse, Output
from edgeinfer.models import ModelSpec
from edgeinfer.models.gguf_reader.mapping import MappedFile

_ROWS = 128  # of logits whose memory joint passes use again; only what they write to is there


@dataclass(frozen=True)
class DecoderParts:
    """The parts of a decoder in memory."""

    decoder: _core.Decoder
    config: _core.DecoderConfig
    weights: _core.Weights
    threads: _core.Threads
    embedding: EmbeddingRows | None  # where it finds its own embeddings, None where it takes a target's
    experts: _core.ExpertStore | None = None
    is_mapped: bool = False  # whether weights and experts are pages of a packed file
    files: Sequence[FileWatch | MappedFile] = ()  # what passes read from
    table: EmbeddingRows | None = None  # where it finds what each layer has for a token, None without


def assemble(
    spec: ModelSpec,
    config: _core.DecoderConfig,
    front: _core.FrontConfig,
    plan: MemoryPlan,
    device: Device,
    weights: _core.Weights,
    threads: _core.Threads,
    embedding: EmbeddingRows | None,
    experts: _core.ExpertStore | None = None,
) -> DecoderParts:
    """A decoder of weights that are all there.

    config: of the plan, with what its matrices read. Raises ValueError for a weight that is missing, by its name.
    """
    add_query_scales(config, spec, plan.n_ctx)
    decoder = _core.Decoder(config, front, device.isa or best_isa(), threads, weights, experts)
    return DecoderParts(decoder, config, weights, threads, embedding, experts)


def shared_threads(other: _core.Threads | None, n: int) -> _core.Threads:
    """The thread pool of another model that never runs at the same time, if it has the requested number of threads.

    With pools of their own, the waiting threads of one would occupy the cores that the other's threads need.
    """
    return other if other is not None and other.n == n else _core.Threads(n)


def with_device(use: MemoryUse, beside: MemoryUse) -> MemoryUse:
    """Memory with that of a device's weights and activations."""
    return replace(use, weights=use.weights + beside.weights, activations=use.activations + beside.activations)


class NativeDecoder(OfOneProcess):
    """A decoder in memory: the common part of models and draft heads.

    decoder_spec: of the layers.  has_expert_cache: whether some experts are read from disk.  pass_hook: what runs each
    pass, None for nothing beside it.  beside: memory of a device that does some of the products, None without one.
    """

    def __init__(self, parts: DecoderParts, spec: ModelSpec, plan: MemoryPlan) -> None:
        self.decoder_spec = spec
        self.n_ctx = plan.n_ctx
        self.n_batch = plan.n_batch
        self._config = parts.config
        self._cache_type = plan.cache_type
        self._decoder: _core.Decoder | None = parts.decoder
        self._weights: _core.Weights | None = parts.weights
        self._threads: _core.Threads | None = parts.threads
        self._embedding_bytes = sum(each.n_bytes for each in (parts.embedding, parts.table) if each is not None)
        self._is_mapped = parts.is_mapped
        self._files = parts.files
        self._experts = parts.experts
        self._expert_cache_bytes = plan.expert_cache
        self.has_expert_cache = isinstance(parts.experts, _core.DiskExperts)
        self.pass_hook: PassHook | None = None
        self._rows = ReusedRows(_ROWS, spec.n_logits, 2)  # logits of joint passes
        self.beside: MemoryUse | None = None

    @property
    def isa(self) -> str:
        """The instruction-set path in use."""
        return self.decoder().isa

    @property
    def threads(self) -> _core.Threads:
        """The thread pool, which models that never run at the same time may share. Raises EdgeInferError if closed."""
        if self._threads is None:
            raise EdgeInferError("this model is closed")
        return self._threads

    def memory(self) -> MemoryUse:
        """See Model.memory: packed weights and the embeddings of this model, and the activations of a pass."""
        decoder = self.decoder()
        experts = 0 if self._experts is None else self._experts.n_bytes
        weights = decoder.weight_bytes + self._embedding_bytes
        use = MemoryUse(weights, 0, decoder.activation_bytes, experts=experts)
        if self.beside is not None:
            use = with_device(use, self.beside)
        return replace(use, mapped=weights, mapped_experts=experts) if self._is_mapped else use

    def interrupt(self) -> None:
        """See Session.interrupt."""
        if self._decoder is not None:
            self._decoder.interrupt()

    def close(self) -> None:
        """Give the memory and the threads back. Further calls raise, those of sessions too."""
        self._decoder = self._weights = self._threads = self._experts = None
        self._files = ()

    def decoder(self) -> _core.Decoder:
        """The C++ decoder. Raises EdgeInferError if this model is closed."""
        if self._decoder is None:
            raise EdgeInferError("this model is closed")
        return self._decoder

    def weights(self) -> _core.Weights:
        """The C++ weights. Raises EdgeInferError if this model is closed."""
        if self._weights is None:
            raise EdgeInferError("this model is closed")
        return self._weights

    def check_open(self) -> None:
        """Raises EdgeInferError if this model is closed."""
        self.decoder()

    def check_files(self) -> None:
        """After a pass: raises ModelFileChanged if a file that it read from has changed since the model was loaded."""
        for file in self._files:
            file.check()

    def pool(self, n_ctx: int, cache_type: CacheType, n_sequences: int = 1, n_positions: int = 0) -> SharedPool:
        """A new pool for sequences of this model.  n_positions: of all together, 0 for n_ctx."""
        self.check_open()
        core = _core.SequencePool(self._config, _core.KvType[cache_type], n_ctx, n_sequences, n_positions)
        return SharedPool(core, n_sequences)

    def run_lists(self, sequences: Sequence[NativeSequence], lists: list[Listed], out: Logits) -> bool:
        """Run rows of several sequences in one pass; gives False where they are not as they should be.

        out: (n, n_logits), for the logits. Raises CacheFull, Interrupted, ModelFileChanged.
        """
        decoder, whole = self.decoder(), None
        kept = [sequence.begin() for sequence in sequences]  # what is interrupted has overwritten rows
        try:
            if self.pass_hook is None:
                whole = decoder.forward_lists(lists, out)
            else:
                tokens = [token for each in lists for token in each[1]]
                whole = self.pass_hook(tokens, lambda: decoder.forward_lists(lists, out))
        except CacheFull:
            _go_back(sequences, kept)
            raise
        if whole is None:
            _go_back(sequences, kept)
            return False
        if not whole:
            raise interrupted()
        self.check_files()
        for sequence, each in zip(sequences, lists, strict=True):
            sequence.end(each)
        return True

    def forward_few(self, sequences: Sequence[NativeSequence], batch: Sequence[Rows]) -> list[Output] | None:
        """The outputs of rows that fit into one pass, checked in C++; None for others, and for what is wrong."""
        lists, counts, n_rows = [], [], 0
        for sequence, rows in zip(sequences, batch, strict=True):
            if (each := sequence.lists_of(rows)) is None:
                return None
            lists.append(each)
            counts.append(len(each[1]) if each[4] else 1)
            n_rows += len(each[1])
        if n_rows > self.n_batch:
            return None
        out = self._rows.take(sum(counts))
        if not self.run_lists(sequences, lists, out):
            return None
        outputs, first = [], 0
        for each, n in zip(lists, counts, strict=True):
            logits = out[first : first + n]
            # A request keeps the last row of its prompt while it decodes: not in memory that passes use again.
            outputs.append(Output(logits if n == len(each[1]) else logits.copy(), each[6]))
            first += n
        return outputs

    def _run(self, sequences: Sequence[NativeSequence], batch: Sequence[SequenceRows]) -> list[Output]:
        """Run rows of several sequences that were checked. Raises CacheFull, Interrupted, ModelFileChanged."""
        wants = (sequence.want(len(rows.links)) for sequence, rows in zip(sequences, batch, strict=True))
        if (full := full_pool(wants, by_batches=False)) is not None:
            raise CacheFull(full.core.n_positions)
        joint = JointPass(self.decoder(), batch, self.decoder_spec.n_logits, self.decoder_spec.n_embd)
        for sequence in sequences:
            sequence.begin()
        if self.pass_hook is None:
            joint.run(self.n_batch)
        else:
            self.pass_hook([token for rows in batch for token in rows.tokens.tolist()], lambda: joint.run(self.n_batch))
        self.check_files()
        for sequence, rows in zip(sequences, batch, strict=True):
            sequence.set_pending(rows)
        return joint.outputs()


def _go_back(sequences: Sequence[NativeSequence], kept: Sequence[list[int]]) -> None:
    """A pass did not begin: what was pending is so still."""
    for sequence, pending in zip(sequences, kept, strict=True):
        sequence.go_back(pending)


class NativeModel(NativeDecoder, Model):
    """See edgeinfer.backends.base.Model. Made by NativeBackend.load.

    The model file may be closed: what is still read from it, embedding rows and experts, has it open for itself.
    """

    tuning: Tuning | None = None  # how the weights are read, None where that was not chosen; see tuning.tune

    def __init__(self, parts: DecoderParts, spec: ModelSpec, plan: MemoryPlan) -> None:
        super().__init__(parts, spec, plan)
        self.n_sequences = plan.n_sequences
        self._n_positions = plan.n_positions
        self._pool: SharedPool | None = None  # of all sessions that are as planned

    @override
    def close(self) -> None:
        super().close()
        self._pool = None

    @property
    @override
    def spec(self) -> ModelSpec:
        """Sizes and layers."""
        return self.decoder_spec

    @override
    def session(self, n_ctx: int | None = None, cache_type: CacheType | None = None) -> NativeSession:
        """See Model.session. Sessions as planned share the memory of one pool; another one has its own."""
        self.check_open()
        if n_ctx is None and cache_type is None:
            return NativeSession(self, self.n_ctx, self._shared())
        cache_type = self._cache_type if cache_type is None else cache_type
        check_cache(cache_type, self.spec)
        n_ctx = check_session_size(n_ctx, self.n_ctx)
        return NativeSession(self, n_ctx, self.pool(n_ctx, cache_type))

    def _shared(self) -> SharedPool:
        """The pool of all sessions that are as planned."""
        if self._pool is None:
            self._pool = self.pool(self.n_ctx, self._cache_type, self.n_sequences, self._n_positions)
        return self._pool

    def cache_type_of(self, pool: SharedPool) -> CacheType | None:
        """The type of the numbers in the pool of all sessions that are as planned; None for another pool."""
        return self._cache_type if pool is self._pool else None

    def has_room(self, wants: Sequence[tuple[NativeSession, int]]) -> bool:
        """See PooledModel.has_room."""
        if any(session.n_past + n_slots > session.n_ctx for session, n_slots in wants):
            return False
        return full_pool((session.want(n_slots) for session, n_slots in wants), by_batches=True) is None

    def forget_parked(self) -> None:
        """See PooledModel.forget_parked."""
        if self._pool is not None:
            self._pool.forget_parked()

    @override
    def forward(self, batch: Sequence[Rows]) -> list[Output]:
        """See Model.forward. Rows of all sequences go through the layers together, n_batch per pass.

        Chains are cut where a pass is full, trees are not.
        """
        check_sessions(self, batch)
        sessions: list[NativeSession] = [rows.session for rows in batch]
        if (outputs := self.forward_few(sessions, batch)) is not None:
            return outputs
        return self._run(sessions, [session.checked(rows) for session, rows in zip(sessions, batch, strict=True)])

    def routing(self) -> NDArray[np.int32]:
        """The experts that the rows of the last pass chose, (n_layers, n_rows, n_used), in the order of their sum.

        -1 in layers without experts, and after the experts of layers that use fewer than others.
        """
        return self.decoder().routing()

    def record_inputs(self, is_on: bool) -> None:
        """From the next pass on, sum the squares of what matrices read; or no longer. Off it costs nothing.

        Of experts that a device computes, the inputs of down are left out. After an interrupted pass the sums are of no
        use. Raises EdgeInferError if this model is closed.
        """
        self.decoder().record_inputs(is_on)

    def input_squares(self) -> dict[str, tuple[NDArray[np.float64], NDArray[np.int64]]]:
        """What was summed since record_inputs: (n_matrices, n_in) sums and (n_matrices,) rows, by tensor of the file.

        The number of threads changes no bit of them. The output matrix is not among them; for parts of one tensor,
        which read the same, there is one entry. Raises EdgeInferError if this model is closed.
        """
        found: dict[str, tuple[NDArray[np.float64], NDArray[np.int64]]] = {}
        summed = self.decoder().input_squares()
        for weight in self.spec.weights():
            squares = summed.get(f"{weight.block}.{weight.role}")
            name = weight.tensor if isinstance(weight.tensor, str) else weight.tensor.name
            if squares is not None:
                found.setdefault(name, squares)
        return found

    @property
    def expert_bytes_of_token(self) -> int:
        """Bytes of the experts that one row needs in all layers."""
        return self.decoder().expert_bytes_of_row

    def expert_union(self) -> float:
        """Bytes of the experts that the last pass needed, each once, over those of one row; 0 without experts."""
        return self.decoder().expert_union()

    @property
    def expert_cache(self) -> ExpertCache | None:
        """The cache of experts, None where all are in memory. Raises EdgeInferError if this model is closed."""
        decoder = self.decoder()
        if self._expert_cache_bytes is None or not isinstance(self._experts, _core.DiskExperts):
            return None
        return ExpertCache(self._experts, decoder, self._expert_cache_bytes)

    def expert_stats(self) -> _core.ExpertStats | None:
        """What the cache of experts did since the model was loaded, by layer; None where all are in memory."""
        cache = self.expert_cache
        return None if cache is None else cache.stats()

    def set_expert_device(self, device: ExpertDevice | None) -> None:
        """See ExpertDeviceModel.set_expert_device. Logits are near those of the CPU alone then, not equal to them."""
        self.decoder().set_expert_device(device)

    def tuned(self, n_tokens: int) -> TunedDecoder:
        """What is tuned of this model, with a sequence of its own for passes of up to n_tokens."""
        state = _core.SequenceState(self._config, _core.KvType[self._cache_type], n_tokens)
        return TunedDecoder(self.decoder(), state)


class TunedDecoder(Tunable):
    """See tuning.Tunable. state: of the sequence whose passes are timed."""

    def __init__(self, decoder: _core.Decoder, state: _core.SequenceState) -> None:
        self._decoder = decoder
        self._state = state
        self.streams_at_once = decoder.streams_at_once
        self.groups_at_once = decoder.groups_at_once
        self.weight_bytes = decoder.part_bytes(1, 0)

    @override
    def prefetch(self, is_ternary: bool, n: int) -> Fields:
        return self._decoder.prefetch(is_ternary, n)

    @override
    def set_prefetch(self, is_ternary: bool, n: int, fields: Fields) -> None:
        self._decoder.set_prefetch(is_ternary, n, fields)

    @override
    def seconds_of_part(self, n: int, n_parts: int, part: int) -> float:
        return self._decoder.seconds_of_part(self._state, n, n_parts, part)

    @override
    def part_bytes(self, n_parts: int, part: int) -> int:
        return self._decoder.part_bytes(n_parts, part)
