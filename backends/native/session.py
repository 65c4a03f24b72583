"""The Session and the Backend in front of the C++ decoder."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgeinfer.backends.base import (
    Progress,
    QueryScales,
    check_cache,
    check_links,
    check_path,
    check_pending,
    check_rows,
    check_taps,
    check_tokens,
    common_length,
)
from edgeinfer.backends.native import _core
from edgeinfer.backends.native.packed import map_packed, packed_path, read_header, write_packed
from edgeinfer.backends.native.tuning import Tuning, tune, wanted_by_user
from edgeinfer.errors import (
    BackendUnavailable,
    EdgeInferError,
    Interrupted,
    ModelFileError,
    ShapeError,
    UnsupportedModel,
)
from edgeinfer.models import ModelSpec, RopeSpec, TensorRef, TensorRows, read_spec
from edgeinfer.models.gguf import I2_S_TAIL_BYTES, TERNARY_TYPES, GGMLType, ModelFile, TensorInfo
from edgeinfer.types import (
    CacheType,
    Device,
    Features,
    Logits,
    LogitsRows,
    MemoryPlan,
    MemoryUse,
    Output,
    TernaryBits,
    TokenIds,
)

MATRIX_TYPES = frozenset(
    GGMLType[name] for name in "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q4_K Q5_K Q6_K TQ1_0 TQ2_0 I2_S Q2_0".split()
)
# What packs to 1.6 bits a weight, and the number of that format in matrix.h. Q2_0's blocks are too short to gain.
BASE_THREE = {GGMLType.TQ1_0: 1034, GGMLType.TQ2_0: 1034, GGMLType.I2_S: 1036}
VECTOR_TYPES = frozenset((GGMLType.F32, GGMLType.F16))  # of norms and biases
PIECE_BYTES = 16 << 20  # of a matrix are packed at once
MADE_BYTES = 1 << 20  # the same of one that is made as it is read, which is memory that no plan counts
TRIAL_BYTES = 96 << 20  # at most are read to find out how ternary weights are best held: more than most caches have
WORTH_KEEPING = 32  # tokens: a text that loses fewer to the next one is not put aside
# For drafts: matrices of more bits a weight are rounded to Q4_0, and only the first tokens get logits. A vocabulary
# made by merging has its frequent tokens first: of 145,000 in prompts 96.5 % are among these of Qwen2.5's 151,936.
DRAFT_BITS, DRAFT_TOKENS = 5.0, 49152


def build_id() -> str:
    """Tells builds of the engine apart, for what was measured with one of them."""
    extension = Path(str(_core.__file__)).stat()
    return f"{extension.st_size}-{extension.st_mtime_ns}"


def available_isas() -> list[str]:
    """Instruction-set paths that this CPU and this build have, best first."""
    return _core.available_isas()


def best_isa() -> str:
    """The path to use: the best one, or the one that EDGEINFER_ISA names. Raises BackendUnavailable."""
    wanted = os.environ.get("EDGEINFER_ISA")
    available = available_isas()
    if wanted and wanted not in available:
        raise BackendUnavailable(
            f"EDGEINFER_ISA={wanted}, but this CPU and this build have: {', '.join(available)}; unset it or name one"
        )
    return wanted or available[0]


def likeliest(logits: Logits, k: int) -> list[tuple[int, float]]:
    """(id, probability) of about the k likeliest tokens, likeliest first; for drafts.

    logits: (n_vocab,) float32, n_vocab >= 1. In a large vocabulary only the best of each of 1024 groups is looked at:
    one in some hundred of the ids is missed, and probabilities are a little too large. They are NaN where a logit is,
    and where the largest is infinite.
    """
    return _core.likeliest(logits, k)


@dataclass(frozen=True)
class MachineLimits:
    """What this machine can do at most, all threads together."""

    read_bytes_per_second: float
    int8_multiply_adds_per_second: float

    @classmethod
    def measure(cls, isa: str, n_threads: int, n_rounds: int = 5) -> MachineLimits:
        """Measure it, in some tenths of a second and 512 MiB of memory: the best of n_rounds >= 1."""
        return cls(*_core.measure_limits(isa, n_threads, n_rounds))


class NativeBackend:
    """Runs models on the CPU. Same bits whatever the batch, the threads and the instruction set.

    Packed weights that stand beside the model file (`edgeinfer pack`) are mapped; otherwise they are packed at load.

    for_drafts: of plans and sessions, see NativeSession.  ternary_bits: that a ternary weight is to take in memory;
    "auto" is what its packed file has, or what is faster here, by a measurement of some tenths of a second.
    verify: before packed weights are used, all bytes of them and of the model are compared with those that were packed.
    """

    name = "native"

    def __init__(
        self,
        *,
        for_drafts: bool = False,
        ternary_bits: TernaryBits | Literal["auto"] = "auto",
        verify: bool = False,
    ) -> None:
        self.for_drafts = for_drafts
        self.ternary_bits = ternary_bits
        self.verify = verify

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
        """Bytes that a session takes: packed weights, KV cache, activations of a batch. Exact, not estimated.

        The cache takes its memory as the text grows; the plan has it whole.
        Raises UnsupportedModel for a tensor type without a kernel, InvalidArgument for heads that q8_0 does not fit.
        """
        check_cache(cache_type, spec)
        n_batch = min(n_batch, n_ctx)
        spec = _of_frequent_tokens(model, spec) if self.for_drafts else spec
        config = decoder_config(spec, n_ctx, n_batch, cache_type)
        embedding = model.tensors[spec.token_embd].n_bytes  # which stays mapped
        bits = self._ternary_bits(model, spec, n_threads, None if self.for_drafts else packed_path(model.paths[0]))
        weights = packed_bytes(parts_of(model, spec, Packing(self.for_drafts, bits))) + embedding
        use = MemoryUse(weights, config.kv_bytes(), config.activation_bytes(n_threads))
        return MemoryPlan(n_ctx, n_batch, use, cache_type, bits)

    def load(
        self, model: ModelFile, spec: ModelSpec, plan: MemoryPlan, device: Device, progress: Progress | None = None
    ) -> NativeSession:
        """Map the packed weights, or pack them now. Raises UnsupportedModel, ModelFileError, BackendUnavailable."""
        return NativeSession(model, spec, plan, device, progress, for_drafts=self.for_drafts, verify=self.verify)

    def pack(self, model: ModelFile, spec: ModelSpec, target: Path, progress: Progress | None = None) -> int:
        """Write the packed weights to a file; gives its size in bytes. Raises UnsupportedModel, OSError."""
        device = Device(os.cpu_count() or 1)
        bits = self._ternary_bits(model, spec, device.n_threads)
        plan = MemoryPlan(1, 1, MemoryUse(0, 0, 0), ternary_bits=bits)
        session = NativeSession(model, spec, plan, device, progress, packed=None, tuned=False)
        try:
            write_packed(target, model, session.packed_weights(), bits)
        finally:
            session.close()
        return target.stat().st_size

    def _ternary_bits(
        self, model: ModelFile, spec: ModelSpec, n_threads: int, packed: Path | None = None
    ) -> TernaryBits:
        """What a ternary weight is to take. packed: where packed weights are mapped from, if they are there."""
        if not any(info.type in BASE_THREE for info in model.tensors.values()):
            return "2"
        n_weights = sum(math.prod(part.shape) for part in parts_of(model, spec) if part.type in BASE_THREE)
        if not n_weights:
            return "2"
        if self.ternary_bits != "auto":
            return self.ternary_bits
        if packed is not None and os.path.lexists(packed):
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


class NativeDecoder:
    """A decoder in memory with its KV cache: what sessions of models and of draft heads have in common.

    parts: see parts_of.  packed: the weights as another session packed them, or None.  embedding: the matrix as GGUF
    stores it and its type. Both are not copied.  beside: one that it takes turns with; they
    share their threads where they have as many.
    """

    def __init__(
        self,
        model: ModelFile,
        spec: ModelSpec,
        parts: Sequence[Part],
        plan: MemoryPlan,
        device: Device,
        embedding: tuple[GGMLType, NDArray[np.uint8]],
        packed: NDArray[np.uint8] | None = None,
        progress: Progress | None = None,
        beside: NativeDecoder | None = None,
    ) -> None:
        self.spec = spec
        self.n_ctx = plan.n_ctx
        self.n_batch = plan.n_batch
        self.isa = device.isa or best_isa()
        self.embedding = embedding
        self._parents: list[int] = []  # of what is pending: forwarded and not committed
        self._tokens: list[int] = []
        self._text: list[int] = []  # committed
        self._interrupted = False
        config = decoder_config(spec, plan.n_ctx, plan.n_batch, plan.cache_type)
        scales = QueryScales.of(spec, plan.n_ctx)
        config.set_query_scales(scales.values.tolist(), scales.n_positions)
        n_bytes = packed_bytes(parts)
        other = None if beside is None else beside.decoder()
        decoder = _core.Decoder(config, self.isa, device.n_threads, n_bytes, packed, other)
        self._decoder: _core.Decoder | None = decoder
        self._load(model, parts, packed is not None, progress)

    @property
    def n_past(self) -> int:
        """Number of committed tokens."""
        return self._open().n_past

    def commit(self, path: ArrayLike) -> None:
        """See Session.commit."""
        is_path = isinstance(path, list) and _is_path(path, self._parents)
        rows: Any = path if is_path else check_path(path, self._parents).tolist()
        # The list first: cut to n_past when read, it is right even if KeyboardInterrupt comes between the two.
        del self._text[self.n_past :]
        self._text += [self._tokens[row] for row in rows]
        self._open().commit(rows)
        self._parents = []

    def truncate(self, n_past: int) -> None:
        """See Session.truncate."""
        decoder = self._open()
        if not 0 <= n_past <= decoder.n_past:
            raise ShapeError(f"n_past must be in 0..{decoder.n_past}: found {n_past}")
        decoder.truncate(n_past)
        del self._text[n_past:]
        self._parents = []

    def interrupt(self) -> None:
        """See Session.interrupt."""
        self._interrupted = True
        if self._decoder is not None:
            self._decoder.interrupt()

    def close(self) -> None:
        """Give the memory back. Further calls raise."""
        self._decoder = None

    def decoder(self) -> _core.Decoder:
        """The C++ decoder, for those that share its weights or threads. Raises EdgeInferError if this one is closed."""
        return self._open()

    def _forward(
        self,
        ids: TokenIds,
        parents: ArrayLike | None,
        n_pending: int,
        logits: LogitsRows,
        taps: Sequence[int],
        features: Features | None = None,
    ) -> Output:
        """Run tokens behind the first n_pending of those that are; see Decoder::forward and HeadSession.forward."""
        decoder, n = self._open(), len(ids)
        rows = check_rows(logits, n)
        pending = np.array(self._parents[:n_pending], dtype=np.int32)
        links, _ = check_links(pending, parents, n, self.n_batch)
        layers = np.array(taps, dtype=np.int32)
        out = np.empty((len(rows), self.spec.n_logits), dtype=np.float32)
        tapped = np.empty((len(taps), n if taps else 0, self.spec.n_embd), dtype=np.float32)
        before, self._parents = self._tokens[:n_pending], []
        self._interrupted = False
        for first in range(0, n, self.n_batch):
            chunk = slice(first, min(first + self.n_batch, n))
            wanted = np.flatnonzero((rows >= first) & (rows < chunk.stop))
            # All rows of a batch alone may come in any order; those of one of several are put into their places.
            chunk_out = out if n <= self.n_batch else np.empty((len(wanted), self.spec.n_logits), dtype=np.float32)
            whole = not self._interrupted and decoder.forward(
                ids[chunk],
                links[: n_pending + chunk.stop],
                n_pending + first,
                rows[wanted] - np.int32(first),
                chunk_out,
                layers,
                tapped,
                first,
                None if features is None else features[chunk],
            )
            if not whole:
                raise _interrupted()
            if chunk_out is not out:
                out[wanted] = chunk_out
        self._tokens = before + ids.tolist()
        self._parents = links.tolist()
        return Output(out, tapped if taps else None)

    def _forward_few(
        self,
        tokens: ArrayLike,
        parents: ArrayLike | None,
        n_pending: int,
        logits: LogitsRows,
        taps: tuple[int, ...],
        features: Any = None,
    ) -> Output | None:
        """What is usual, checked in C++ and so in little time; None for what is not, and for what is wrong.

        A step of a small model takes some milliseconds, a pass of a head a tenth of one. The checks in Python, whose
        code the weights have driven out of the caches, would add a twentieth, and a quarter.
        """
        few: Any = tokens.tolist() if isinstance(tokens, np.ndarray) and tokens.ndim == 1 else tokens
        if type(few) is not list or type(logits) is not str or type(n_pending) is not int:
            return None
        if not 0 <= n_pending <= len(self._parents) or logits not in ("last", "all"):
            return None
        if features is not None and not _is_float32(features):
            return None
        n, pending = len(few), self._parents[:n_pending]
        out = np.empty((n if logits == "all" else 1, self.spec.n_logits), dtype=np.float32)
        tapped = np.empty((len(taps), n, self.spec.n_embd), dtype=np.float32) if taps else None
        self._interrupted = False
        whole = self._open().forward_lists(few, parents, pending, out, taps, tapped, features)
        if whole is None:
            return None
        before, self._parents = self._tokens[:n_pending], []
        if not whole:
            raise _interrupted()
        self._tokens = before + few
        links: Any = range(n_pending - 1, n_pending + n - 1) if parents is None else parents
        self._parents = [*pending, *links]
        return Output(out, tapped)

    def _open(self) -> _core.Decoder:
        if self._decoder is None:
            raise EdgeInferError("this session is closed")
        return self._decoder

    def _load(self, model: ModelFile, parts: Sequence[Part], is_packed: bool, progress: Progress | None) -> None:
        decoder = self._open()
        total = sum(part.n_bytes for part in parts)
        done = 0
        for part in parts:
            role = _core.Role[part.role]
            if len(part.shape) == 1:
                if is_packed:
                    decoder.map_vector(role, part.layer, part.shape[0])
                else:
                    decoder.set_vector(role, part.layer, _vector(model, part))
            else:
                n_out, n_in = part.shape
                decoder.set_matrix(role, part.layer, part.packed_as, n_out, n_in)
                if not is_packed:
                    self._pack(model, role, part)
            done += part.n_bytes
            if progress is not None:
                progress(done / total)
        kind, rows = self.embedding
        decoder.set_embedding(int(kind), rows)

    def _pack(self, model: ModelFile, role: _core.Role, part: Part) -> None:
        """Pack a matrix piece by piece, so that little of the file is in memory beside what it becomes."""
        n_out = part.shape[0]
        row_bytes = part.n_bytes // n_out
        n_rows = max(1, (MADE_BYTES if model.makes(part.name) else PIECE_BYTES) // (16 * row_bytes)) * 16
        for first_row in range(0, n_out, n_rows):
            first, last = first_row * row_bytes, min(n_out, first_row + n_rows) * row_bytes
            data = part.data(model, first, last)
            if part.type in TERNARY_TYPES and not _core.holds_trits(int(part.type), data):
                raise ModelFileError(
                    f"{model.path}: tensor {part.name} is {part.type.name}, whose codes are 0, 1 and 2: found 3; it is "
                    f"damaged, or not ternary"
                )
            self._open().pack_rows(role, part.layer, first_row, int(part.type), data, part.scale)
            model.release(part.name, part.first_byte + first, part.first_byte + last)


class NativeSession(NativeDecoder):
    """See edgeinfer.backends.base.BranchingSession. The model file must stay open: embedding rows are read from it.

    resident: nothing is read from files after loading, so that one which is cut or unplugged does no harm; what would
    be mapped is copied.  for_drafts: less to read for each token, and logits that are not quite the model's: its larger
    matrices are rounded to Q4_0, and the first tokens alone have logits (after FR-Spec, Zhao et al., arXiv:2502.14856).
    verify: see NativeBackend.  beside: see NativeDecoder.  tuned: whether to choose how the weights are read, which may
    take half a second at the first load; see tuning.tune.  tuning: what was chosen, None without.
    """

    def __init__(
        self,
        model: ModelFile,
        spec: ModelSpec,
        plan: MemoryPlan,
        device: Device,
        progress: Progress | None = None,
        packed: Path | None | Literal["beside"] = "beside",
        *,
        resident: bool = False,
        for_drafts: bool = False,
        verify: bool = False,
        beside: NativeDecoder | None = None,
        tuned: bool = True,
    ) -> None:
        self._aside: dict[int, list[int]] = {}  # texts that the decoder has put aside, by its number
        if tuned:
            wanted_by_user()  # what is wrong there is said before anything takes time
        if for_drafts:
            spec = _of_frequent_tokens(model, spec)
        if packed == "beside":
            packed = packed_path(model.paths[0])
            if resident or for_drafts or not os.path.lexists(packed):
                packed = None
        parts = parts_of(model, spec, Packing(for_drafts, plan.ternary_bits))
        weights = None
        if packed is not None:
            weights = map_packed(packed, model, packed_bytes(parts), plan.ternary_bits, verify)
        rows = model.data(spec.token_embd)
        embedding = model.tensors[spec.token_embd].type, rows.copy() if resident else rows
        super().__init__(model, spec, parts, plan, device, embedding, weights, progress, beside)
        self.tuning: Tuning | None = None
        if tuned:
            self.tuning = self._tune(model, parts, device.n_threads, for_drafts, plan.ternary_bits)

    def forward(
        self,
        tokens: ArrayLike,
        parents: ArrayLike | None = None,
        *,
        n_pending: int = 0,
        logits: LogitsRows = "last",
        hidden: bool | Sequence[int] = False,
    ) -> Output:
        """See BranchingSession.forward. A chain may have any length."""
        taps = check_taps(hidden, self.spec.n_layers)
        if (out := self._forward_few(tokens, parents, n_pending, logits, taps)) is not None:
            return out
        n_pending = check_pending(n_pending, len(self._parents))
        ids = check_tokens(tokens, self.spec.n_vocab, self.n_past + n_pending, self.n_ctx)
        return self._forward(ids, parents, n_pending, logits, taps)

    def recall(self, tokens: ArrayLike) -> int:
        """See Session.recall. Finds the last texts too, as long as their memory was not needed for another.

        They share what they have in common, and take nothing beyond the planned cache.
        """
        decoder = self._open()
        wanted = np.asarray(tokens).tolist()
        self._parents = []
        del self._text[decoder.n_past :]
        self._aside = {number: self._aside[number] for number in decoder.aside() if number in self._aside}
        n_common = common_length(self._text, wanted)
        if len(self._text) - n_common >= WORTH_KEEPING:
            self._put_aside()
        lengths = {number: common_length(text, wanted) for number, text in self._aside.items()}
        best = max(lengths, key=lengths.__getitem__, default=-1)
        if lengths.get(best, 0) > n_common:
            decoder.truncate(0)
            self._text = wanted[: lengths[best]]
            decoder.resume(best, lengths[best])
        else:
            decoder.truncate(n_common)
            del self._text[n_common:]
        return len(self._text)

    def memory(self) -> MemoryUse:
        """Bytes of the weights (packed ones and the mapped embedding), the KV cache and the activations."""
        decoder = self._open()
        weights = decoder.weight_bytes + self.embedding[1].nbytes
        return MemoryUse(weights, decoder.kv_bytes, decoder.activation_bytes)

    def packed_weights(self) -> NDArray[np.uint8]:
        """All packed weights, (n_bytes,), read-only, without a copy."""
        return self._open().weights

    def _tune(self, model: ModelFile, parts: Sequence[Part], n_threads: int, *facts: object) -> Tuning:
        """Choose how the weights are read; facts: what else the measurement depends on. Raises InvalidArgument."""
        n_ternary = sum(part.n_bytes for part in parts if part.type in TERNARY_TYPES)
        is_ternary = 2 * n_ternary > sum(part.n_bytes for part in parts)
        n_tokens = min(self.n_batch, self.n_ctx)
        decoder, n_layers = self._open(), self.spec.n_layers
        return tune(decoder, model, n_layers, n_tokens, n_threads, is_ternary, self.isa, build_id(), *facts)

    def _put_aside(self) -> None:
        """Keep the committed text, unless one that is kept begins with it; those that it begins with are not needed."""
        lengths = {number: common_length(text, self._text) for number, text in self._aside.items()}
        if len(self._text) in lengths.values():
            return
        for number, length in lengths.items():
            if length == len(self._aside[number]):
                self._open().forget(number)
                del self._aside[number]
        self._aside[self._open().put_aside()] = list(self._text)


def _is_float32(values: object) -> bool:
    return isinstance(values, np.ndarray) and values.dtype == np.float32 and values.flags.c_contiguous


def _is_path(rows: Sequence[object], parents: Sequence[int]) -> bool:
    """Whether it surely is a path through them; check_path says what is wrong otherwise."""
    before = -1
    for row in rows:
        if type(row) is not int or not 0 <= row < len(parents) or parents[row] != before:
            return False
        before = row
    return True


def _interrupted() -> Interrupted:
    return Interrupted("the forward pass was interrupted; the session is as it was before")


@dataclass(frozen=True)
class Packing:
    """What matrices are packed as, where that is not what the file has.

    rounded: larger ones in Q4_0, for drafts.  ternary_bits: that a ternary weight takes.
    """

    rounded: bool = False
    ternary_bits: TernaryBits = "2"

    def format_of(self, info: TensorInfo) -> int:
        """The number of a tensor's packed format in matrix.h."""
        if self.ternary_bits == "1.6" and info.type in BASE_THREE:
            return BASE_THREE[info.type]
        bits = 8 * info.type.block_bytes / info.type.block_elements
        is_large = len(info.shape) == 2 and bits > DRAFT_BITS and info.shape[-1] % GGMLType.Q4_0.block_elements == 0
        return int(GGMLType.Q4_0 if self.rounded and is_large else info.type)


class Part(NamedTuple):
    """A tensor of the file, or some of its rows, and what it is in the decoder: role and layer.

    shape: (n_out, n_in) or (n,).  n_bytes: as GGUF stores it, from first_byte of the tensor on.  scale: of I2_S, whose
    bytes are without it.  packed_as: see Packing.format_of.
    """

    role: str
    layer: int
    name: str
    type: GGMLType
    packed_as: int
    shape: tuple[int, ...]
    n_bytes: int
    first_byte: int = 0
    scale: float = 1.0

    def data(self, model: ModelFile, first: int = 0, last: int | None = None) -> NDArray[np.uint8]:
        """Bytes first..last-1 of it."""
        return model.data(
            self.name, self.first_byte + first, self.first_byte + (self.n_bytes if last is None else last)
        )


def parts_of(model: ModelFile, spec: ModelSpec, packing: Packing = Packing()) -> list[Part]:  # noqa: B008
    """Everything that is packed; the embedding stays in the file. Raises UnsupportedModel, ModelFileError."""
    if spec.own_embeddings:
        name = spec.token_embd
        if _info(model, name).type == GGMLType.I2_S:
            raise UnsupportedModel(f"{model.path}: tensor {name} is I2_S, whose rows cannot be read one by one")
    return [_part(model, role, layer, ref, packing) for role, layer, ref in _weights(spec)]


def packed_bytes(parts: Sequence[Part]) -> int:
    """Bytes of all of them when packed."""
    return sum(_core.packed_bytes(part.packed_as, part.shape[0], (*part.shape, 0)[1]) for part in parts)


def _info(model: ModelFile, name: str) -> TensorInfo:
    """A tensor. Raises UnsupportedModel for a type that the engine lacks."""
    info = model.tensors[name]
    known = MATRIX_TYPES if len(info.shape) == 2 else VECTOR_TYPES
    if info.type not in known:
        raise UnsupportedModel(
            f"{model.path}: tensor {name} {info.shape} has type {info.type.name}, which the native engine lacks; it "
            f"has {', '.join(sorted(each.name for each in known))}"
        )
    return info


def _part(model: ModelFile, role: str, layer: int, ref: TensorRef, packing: Packing) -> Part:
    """What a reference to a tensor means."""
    name = ref.name if isinstance(ref, TensorRows) else ref
    if isinstance(ref, TensorRows) and model.tensors[name].type == GGMLType.I2_S:
        raise UnsupportedModel(f"{model.path}: tensor {name} is I2_S, which cannot be cut into several matrices")
    info = _info(model, name)
    packed_as = packing.format_of(info)
    if info.type == GGMLType.I2_S:
        n_bytes = info.n_bytes - I2_S_TAIL_BYTES
        return Part(role, layer, name, info.type, packed_as, info.shape, n_bytes, scale=_scale(model, name))
    if not isinstance(ref, TensorRows):
        return Part(role, layer, name, info.type, packed_as, info.shape, info.n_bytes)
    row_bytes, n_rows = info.n_bytes // info.shape[0], ref.last - ref.first
    shape = (n_rows, *info.shape[1:])
    return Part(role, layer, name, info.type, packed_as, shape, n_rows * row_bytes, ref.first * row_bytes)


def _of_frequent_tokens(model: ModelFile, spec: ModelSpec) -> ModelSpec:
    """The spec with an output matrix for the first tokens only, where there are more."""
    is_whole = spec.n_vocab <= DRAFT_TOKENS or model.tensors[spec.output].type == GGMLType.I2_S
    return spec if is_whole else replace(spec, n_draft=DRAFT_TOKENS)


def _scale(model: ModelFile, name: str) -> float:
    """The scale of an I2_S tensor. Raises ModelFileError."""
    scale = float(model.data(name)[-I2_S_TAIL_BYTES:][:4].copy().view("<f4")[0])
    if not math.isfinite(scale):
        raise ModelFileError(f"{model.path}: tensor {name} must have a finite scale: found {scale}")
    return scale


def _weights(spec: ModelSpec) -> Iterator[tuple[str, int, TensorRef]]:
    """(role, layer, tensor) of everything that is packed; the embedding stays in the file."""
    for index, layer in enumerate(spec.layers):
        for role, ref in vars(layer).items():
            if ref is not None:
                yield role, index, ref
    for role, name in vars(spec.gate).items() if spec.gate is not None else ():
        yield f"gate_{role}", 0, name
    if spec.pair is not None:
        yield "pair_token_norm", 0, spec.pair.token_norm
        yield "pair_feature_norm", 0, spec.pair.feature_norm
    if spec.combine is not None:
        yield "combine", 0, spec.combine.matrix
        if spec.combine.norm is not None:
            yield "combine_norm", 0, spec.combine.norm
    if spec.output_norm is not None:
        yield "output_norm", 0, spec.output_norm
    # The file of a head has as many rows as it gives logits, that of a model may have more.
    is_cut = not spec.is_head and spec.n_draft is not None
    if spec.own_output:
        yield "output", 0, TensorRows(spec.output, 0, spec.n_logits) if is_cut else spec.output


def _vector(model: ModelFile, part: Part) -> NDArray[np.float32]:
    """A norm or a bias as float32."""
    kind = "<f4" if part.type == GGMLType.F32 else "<f2"
    return np.frombuffer(part.data(model).tobytes(), dtype=kind).astype(np.float32, copy=False)


def decoder_config(spec: ModelSpec, n_ctx: int, n_batch: int, cache_type: CacheType) -> _core.DecoderConfig:
    """Sizes and recipe as the decoder wants them, but for its query scales, which grow with n_ctx."""
    config = _core.DecoderConfig(
        n_vocab=spec.n_vocab,
        n_layers=spec.n_layers,
        n_embd=spec.n_embd,
        n_ff=spec.n_ff,
        n_heads=spec.n_heads,
        n_kv_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
        n_ctx=n_ctx,
        n_batch=n_batch,
        norm_epsilon=spec.norm_epsilon,
    )
    ropes: list[RopeSpec] = []
    for attention in spec.attention:
        rope = attention.rope and attention.rope.of_context(n_ctx)
        if rope is not None and rope not in ropes:
            ropes.append(rope)
            config.add_rope(list(rope.inverse_frequencies), rope.magnitude)
        config.add_layer(-1 if rope is None else ropes.index(rope), attention.window or 0)
    config.rope_halves = any(rope.kind == "halves" for rope in ropes)
    config.activation = _core.Activation[spec.activation]
    config.qk_norm = _core.QKNorm[spec.qk_norm or "none"]
    config.kv_type = _core.KvType[cache_type]
    config.n_logits = spec.n_logits
    config.gated = spec.gate is not None
    if spec.pair is not None:
        config.paired = True
        config.normed_residual = spec.pair.normed_residual
    if spec.combine is not None:
        config.n_combined = spec.combine.n_rows
        config.n_normed = spec.combine.n_normed
    config.embedding_scale = spec.embedding_scale
    config.residual_scale = spec.residual_scale
    config.logit_scale = spec.logit_scale
    config.attention_soft_cap = spec.attention_soft_cap or 0.0
    config.logit_soft_cap = spec.logit_soft_cap or 0.0
    return config
