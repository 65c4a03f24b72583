"""Any model file that llama.cpp loads, through the C API of llama-cpp-python: what the native engine lacks.

Promise 1 does not hold here. llama.cpp's logits depend on how a text is cut into batches and on which slots of the KV
cache it fell: on quantised models they move by some percent of their spread, and once in a while that tips a choice.
Nothing is added to that: the same calls, on a new session or after truncate(0), give the same bits.

Every call of a session into llama.cpp is made by one thread of its own, one after the other, while the caller waits
for it in Python. So Ctrl-C is served at once, and cannot strike between two changes that belong together. llama.cpp
asks between any two operations of a pass whether to stop; the answer is a byte, read without Python's lock.

llama.cpp checks less than `ModelFile` does, and ends the process on some files that are sound but make no sense.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgeinfer.backends.base import (
    Progress,
    check_parents,
    check_path,
    check_rows,
    check_taps,
    check_tokens,
)
from edgeinfer.errors import (
    BackendLost,
    BackendUnavailable,
    BudgetExceeded,
    EdgeInferError,
    Interrupted,
    InvalidArgument,
    ShapeError,
    UnsupportedModel,
)
from edgeinfer.gguf import ModelFile
from edgeinfer.models import ModelSpec
from edgeinfer.types import Device, Logits, LogitsRows, MemoryPlan, MemoryUse, Output, TokenIds

VERSION = "0.3.36"  # of llama-cpp-python, as in pyproject.toml
LIBRARY_VERSION = b"0.5.0-dev"  # of the llama.cpp in it
MAX_OUTPUTS = 64  # rows of logits of one pass, and branches of a tree: llama.cpp holds a buffer for that many
MAX_N_CTX = 1 << 22  # llama.cpp fills some 60 bytes a position, before it knows whether the cache fits

_T = TypeVar("_T")
_Rows: TypeAlias = NDArray[np.int32] | NDArray[np.intp]

_logger = logging.getLogger(__name__)
_logger.addHandler(logging.NullHandler())


class LlamaCppBackend:
    """Runs models with llama.cpp on the CPU. Raises BackendUnavailable where llama-cpp-python is missing.

    A spec may be None: the architecture need not be one of edgeinfer.models. What llama.cpp logs goes to the logger
    "edgeinfer.backends.llama_cpp" as DEBUG, for all users of llama.cpp in this process.
    """

    name = "llama.cpp"

    def __init__(self) -> None:
        self._library = open_library()
        self._described: tuple[weakref.ref[ModelFile], _Model] | None = None  # without weights, for the next plan

    def read_spec(self, model: ModelFile) -> ModelSpec:
        """Sizes of a model as llama.cpp reads them; no layers. Raises UnsupportedModel if it does not know the model.

        The file is described to llama.cpp without loading weights: 0.1 s to 0.3 s.
        """
        with _Worker() as worker:
            return worker.call(self._describe, model).spec

    def plan(
        self, model: ModelFile, spec: ModelSpec | None, n_ctx: int, n_batch: int = 512, n_threads: int = 1
    ) -> MemoryPlan:
        """Bytes that llama.cpp itself would take, to 0.01 MiB; its vocabulary, some 10 to 60 MB, is not counted.

        A tied embedding counts twice: llama.cpp keeps a second, repacked copy of some. Raises UnsupportedModel, and
        InvalidArgument for an n_ctx on which llama.cpp would end the process.
        """
        _check_n_ctx(model, n_ctx)
        n_batch = min(n_batch, n_ctx)
        with _Worker() as worker:

            def use() -> MemoryUse:
                described = self._describe(model)
                context = _Context(described, n_ctx, n_batch, n_threads, worker.flag)
                context.close()
                tied = None if "output.weight" in model.tensors else model.tensors.get("token_embd.weight")
                n_bytes = described.n_bytes + (tied.n_bytes if tied else 0)
                return MemoryUse(n_bytes, context.kv_bytes, context.activation_bytes)

            return MemoryPlan(n_ctx, n_batch, worker.call(use))

    def load(
        self,
        model: ModelFile,
        spec: ModelSpec | None,
        plan: MemoryPlan,
        device: Device,
        progress: Progress | None = None,
    ) -> LlamaCppSession:
        """Load a model; the device's isa is not looked at, llama.cpp was compiled for one. The file may be closed then.

        Raises UnsupportedModel, with what llama.cpp says, and BudgetExceeded if memory is too short.
        """
        _check_n_ctx(model, plan.n_ctx)
        self._described = None
        worker = _Worker()
        share = 0.0

        def is_to_go_on(done: float, _: object) -> bool:
            nonlocal share
            share = done
            return not worker.is_stopped

        def open_context() -> _Context:
            loaded = _Model(self._library, model.paths[0], is_to_go_on)
            return _Context(loaded, plan.n_ctx, min(plan.n_batch, plan.n_ctx), device.n_threads, worker.flag)

        def report() -> None:
            if progress is not None:
                progress(min(share, 0.99))

        try:
            session = LlamaCppSession(worker.call(open_context, meanwhile=report), spec, plan, worker)
        except BaseException:
            worker.close()
            raise
        if progress is not None:
            progress(1.0)
        return session

    def _describe(self, model: ModelFile) -> _Model:
        """The model without weights; that of the file that was asked for last is kept."""
        if self._described is not None and self._described[0]() is model:
            return self._described[1]
        described = _Model(self._library, model.paths[0])
        self._described = weakref.ref(model), described
        return described


def _check_n_ctx(model: ModelFile, n_ctx: int) -> None:
    """Raises InvalidArgument for a context that llama.cpp cannot be asked for."""
    learned = model.tensors.get("position_embd.weight")
    most, why = MAX_N_CTX, "its table of the cache's cells must stay small"
    if learned is not None and learned.shape[0] < most:
        most, why = learned.shape[0], "the model has learned that many positions"
    if n_ctx > most:
        raise InvalidArgument(f"n_ctx must be at most {most} in llama.cpp, {why}: found {n_ctx}")


class LlamaCppSession:
    """See edgeinfer.backends.base.Session.

    A tree runs in one pass where its branches are sequences of llama.cpp over shared cells. Where there are more than
    MAX_OUTPUTS branches or rows of logits, or the model keeps a state and not cells (Mamba, RWKV, hybrids), each branch
    is run on its own instead, and what is committed of it is run again, before the next pass.
    """

    def __init__(self, context: _Context, spec: ModelSpec | None, plan: MemoryPlan, worker: _Worker) -> None:
        self.spec = context.model.spec if spec is None else spec
        self.n_ctx = plan.n_ctx
        self.n_batch = context.n_batch
        if self.spec.n_vocab != context.model.n_vocab:
            raise InvalidArgument(
                f"the spec must be of this model: it has {self.spec.n_vocab} tokens, the model {context.model.n_vocab}"
            )
        self._context: _Context | None = context
        self._worker = worker
        # Changed by the worker's thread only. Sequence 0 of the cache holds the first _n_held of the committed tokens,
        # and if _is_clean nothing else is there; it is brought up to date when the next pass begins.
        self._tokens: list[int] = []
        self._n_held = 0
        self._is_clean = True
        self._last = _Pass()

    @property
    def n_past(self) -> int:
        """Number of committed tokens."""
        self._open()
        return len(self._tokens)

    def forward(
        self,
        tokens: ArrayLike,
        parents: ArrayLike | None = None,
        *,
        logits: LogitsRows = "last",
        hidden: bool | Sequence[int] = False,
    ) -> Output:
        """See Session.forward. A tree must fit into n_batch tokens; a chain may have any length.

        Raises InvalidArgument for hidden states: the C API gives them of some architectures only, and ends the process
        on others. Raises BackendLost if llama.cpp fails.
        """
        context = self._open()
        ids = check_tokens(tokens, self.spec.n_vocab, len(self._tokens), self.n_ctx)
        links = check_parents(parents, len(ids))
        rows = check_rows(logits, len(ids))
        if check_taps(hidden, self.spec.n_layers):
            raise InvalidArgument("the llama.cpp backend gives no hidden states; use the native or reference backend")
        is_chain = parents is None or np.array_equal(links, np.arange(-1, len(ids) - 1))
        if not is_chain and len(ids) > self.n_batch:
            raise ShapeError(f"a tree must fit into one batch of {self.n_batch} tokens: found {len(ids)}")
        return Output(self._worker.call(self._run, context, ids, links, rows, is_chain))

    def commit(self, path: ArrayLike) -> None:
        """See Session.commit."""
        self._worker.call(self._keep, self._open(), path)

    def truncate(self, n_past: int) -> None:
        """See Session.truncate. A model that keeps a state reads the text again, in the next pass."""
        self._open()
        if not 0 <= n_past <= len(self._tokens):
            raise ShapeError(f"n_past must be in 0..{len(self._tokens)}: found {n_past}")
        self._worker.call(self._forget, n_past)

    def memory(self) -> MemoryUse:
        """Bytes of the buffers that llama.cpp logged, to 0.01 MiB each; the vocabulary is not counted."""
        context = self._open()
        return MemoryUse(context.model.n_bytes, context.kv_bytes, context.activation_bytes)

    def interrupt(self) -> None:
        """See Session.interrupt."""
        self._worker.stop()

    def close(self) -> None:
        """Give the memory back. Further calls raise."""
        context, self._context = self._context, None
        if context is not None:
            self._worker.close()
            context.close()
            context.model.close()

    def _open(self) -> _Context:
        if self._context is None:
            raise EdgeInferError("this session is closed")
        return self._context

    # ---- in the worker's thread ------------------------------------------------------------------------------------

    def _run(self, context: _Context, ids: TokenIds, links: TokenIds, rows: TokenIds, is_chain: bool) -> Logits:
        self._last = _Pass()
        self._catch_up(context)
        wanted, places = np.unique(rows, return_inverse=True)
        self._is_clean = False
        if is_chain:
            sequence = context.cache.branch(1)
            out = self._run_chain(context, ids, wanted, sequence)
            keeps = [sequence] * len(ids) if context.cache.has_cells else [None] * (len(ids) - 1) + [sequence]
        else:
            out, keeps = self._run_tree(context, ids, links, wanted)
        self._last = _Pass(ids, links, keeps)
        return out if np.array_equal(wanted, rows) else out[places]

    def _run_chain(self, context: _Context, ids: TokenIds, wanted: _Rows, sequence: int) -> Logits:
        """Logits (len(wanted), n_vocab) of a chain behind what the sequence holds, in as many passes as it takes."""
        out = np.empty((len(wanted), context.model.n_vocab), dtype=np.float32)
        n_past = context.cache.length(sequence)
        for first, last in _chunks(len(ids), wanted, context.n_batch, context.n_outputs):
            inside = slice(*np.searchsorted(wanted, (first, last)))
            positions = np.arange(n_past + first, n_past + last)
            batch = _Batch(context.library, ids[first:last], positions, [(sequence,)] * (last - first))
            context.decode(batch, wanted[inside] - first, out[inside])
        return out

    def _run_tree(
        self, context: _Context, ids: TokenIds, links: TokenIds, wanted: _Rows
    ) -> tuple[Logits, list[int | None]]:
        """Logits of the wanted rows, and for each row the sequence to keep if a path ends there."""
        paths = branches(links)
        if not context.cache.has_cells or max(len(paths), len(wanted)) > context.n_outputs:
            return self._run_branches(context, ids, paths, wanted), [None] * len(ids)
        sequences: list[list[int]] = [[] for _ in ids]
        positions = np.empty(len(ids), dtype=np.int32)
        for sequence, path in enumerate(paths):
            for depth, row in enumerate(path):
                sequences[row].append(sequence)
                positions[row] = len(self._tokens) + depth
        context.cache.branch(len(paths))
        out = np.empty((len(wanted), context.model.n_vocab), dtype=np.float32)
        context.decode(_Batch(context.library, ids, positions, sequences), wanted, out)
        return out, [of_row[0] for of_row in sequences]

    def _run_branches(self, context: _Context, ids: TokenIds, paths: list[list[int]], wanted: _Rows) -> Logits:
        """Logits of the wanted rows of a tree, one branch after the other."""
        out = np.empty((len(wanted), context.model.n_vocab), dtype=np.float32)
        for path in paths:
            self._catch_up(context)
            self._is_clean = False
            places = np.isin(wanted, path)
            inside = np.searchsorted(path, wanted[places])
            out[places] = self._run_chain(context, ids[path], inside, context.cache.branch(1))
        return out

    def _keep(self, context: _Context, path: ArrayLike) -> None:
        last = self._last
        rows = check_path(path, last.links)
        n_past = len(self._tokens) + len(rows)
        sequence = last.keeps[rows[-1]] if len(rows) else None
        self._last = _Pass()
        self._tokens.extend(last.ids[rows].tolist())
        if sequence is not None:
            context.cache.adopt(sequence, n_past)
            self._n_held, self._is_clean = n_past, True

    def _forget(self, n_past: int) -> None:
        self._last = _Pass()
        self._is_clean = self._is_clean and n_past == len(self._tokens)
        del self._tokens[n_past:]
        self._n_held = min(self._n_held, n_past)

    def _catch_up(self, context: _Context) -> None:
        """Make sequence 0 hold the committed tokens, and the cache nothing else."""
        if not self._is_clean:
            self._n_held = context.cache.rewind(self._n_held)
            self._is_clean = True
        missing = np.array(self._tokens[self._n_held :], dtype=np.int32)
        if len(missing):
            self._is_clean = False
            self._run_chain(context, missing, np.empty(0, dtype=np.intp), 0)
            self._n_held, self._is_clean = len(self._tokens), True


class _Pass:
    """The last forward: its tokens, their parents, and for each row the sequence that holds what leads to it, or None.

    None where the cache holds more than that and cannot drop it, or nothing of it: what is committed is then run again.
    """

    def __init__(
        self,
        ids: TokenIds | None = None,
        links: TokenIds | None = None,
        keeps: Sequence[int | None] = (),
    ) -> None:
        self.ids = np.empty(0, dtype=np.int32) if ids is None else ids
        self.links = np.empty(0, dtype=np.int32) if links is None else links
        self.keeps = keeps


def branches(parents: NDArray[np.int32]) -> list[list[int]]:
    """Paths from a root to each leaf, in the order of the leaves. parents: (n,), see Session.forward."""
    inner = set(parents.tolist())
    paths = []
    for leaf in range(len(parents)):
        if leaf not in inner:
            path = [leaf]
            while (parent := int(parents[path[-1]])) >= 0:
                path.append(parent)
            paths.append(path[::-1])
    return paths


def _chunks(n: int, wanted: _Rows, n_batch: int, n_outputs: int) -> Iterator[tuple[int, int]]:
    """Runs (first, last) of n rows, each of at most n_batch rows and n_outputs wanted ones."""
    first = 0
    while first < n:
        last = min(first + n_batch, n)
        inside = wanted[(wanted >= first) & (wanted < last)]
        if len(inside) > n_outputs:
            last = int(inside[n_outputs])
        yield first, last
        first = last


# ---- what llama.cpp holds --------------------------------------------------------------------------------------------


class _Model:
    """A model in llama.cpp; without `on_progress` its sizes and vocabulary only. Raises UnsupportedModel.

    n_bytes: of the weights.  on_progress: called with the share that is loaded; stops loading with False.
    """

    def __init__(self, library: Any, path: Path, on_progress: Callable[[float, object], bool] | None = None) -> None:
        self.library = library
        params = library.llama_model_default_params()
        no_devices = (ctypes.c_void_p * 1)()  # a list that ends at once: no GPU
        params.devices = ctypes.cast(no_devices, ctypes.c_void_p)
        params.n_gpu_layers = 0
        params.load_mode = library.LLAMA_LOAD_MODE_NONE  # not mapped: repacked weights would be there twice
        params.no_alloc = on_progress is None
        if on_progress is not None:
            params.progress_callback = library.llama_progress_callback(on_progress)
        with _log.record() as lines:
            pointer = library.llama_model_load_from_file(os.fsencode(path), params)
        if not pointer:
            _refuse(path, lines)
        self.pointer = pointer
        self.close = weakref.finalize(self, library.llama_model_free, pointer)
        self.n_vocab: int = library.llama_vocab_n_tokens(library.llama_model_get_vocab(pointer))
        logged = sum(_mebibytes(line, r"model buffer size") for line in lines)
        in_file: int = library.llama_model_size(pointer)
        self.n_bytes = logged if logged > in_file + 2**15 else in_file  # more than rounding: repacked copies
        self.has_cells = not library.llama_model_is_recurrent(pointer) and not library.llama_model_is_hybrid(pointer)
        self.path = path
        self._check_kind()

    @property
    def spec(self) -> ModelSpec:
        """What the C API tells: sizes, no layers, and no numbers to compute with."""
        library, n_heads = self.library, self.library.llama_model_n_head(self.pointer)
        n_embd = library.llama_model_n_embd(self.pointer)
        return ModelSpec(
            architecture=self._text("general.architecture"),
            n_vocab=self.n_vocab,
            n_ctx_train=library.llama_model_n_ctx_train(self.pointer),
            n_layers=library.llama_model_n_layer(self.pointer),
            n_embd=n_embd,
            n_ff=0,
            n_heads=n_heads,
            n_kv_heads=library.llama_model_n_head_kv(self.pointer),
            head_dim=n_embd // max(n_heads, 1),
            norm_epsilon=0.0,
            token_embd="token_embd.weight",
            output_norm="output_norm.weight",
            output="output.weight",
            layers=(),
            attention=(),
            attention_scale=0.0,
        )

    def _text(self, key: str) -> str:
        buffer = ctypes.create_string_buffer(256)
        self.library.llama_model_meta_val_str(self.pointer, key.encode(), buffer, len(buffer))
        return buffer.value.decode(errors="replace")

    def _check_kind(self) -> None:
        """Raises UnsupportedModel for a model that does not go on with a text token by token."""
        library, pointer = self.library, self.pointer
        if (
            library.llama_model_has_encoder(pointer)
            or not library.llama_model_has_decoder(pointer)
            or library.llama_model_is_diffusion(pointer)
        ):
            raise UnsupportedModel(
                f"{self.path}: architecture {self._text('general.architecture')!r} has an encoder or fills in texts; "
                "only models that go on with a text are supported"
            )


class _Context:
    """KV cache and buffers of a session on a model, with or without weights.

    flag: a C string; a pass stops once it is not empty.  Raises UnsupportedModel, BudgetExceeded.
    """

    def __init__(self, model: _Model, n_ctx: int, n_batch: int, n_threads: int, flag: ctypes.Array[ctypes.c_char]):
        self.library = library = model.library
        self.model = model
        self.n_batch = n_batch
        self.n_outputs = min(MAX_OUTPUTS, n_batch)
        params = library.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_batch, n_batch
        params.n_seq_max = self.n_outputs if model.has_cells else 2
        params.n_outputs_max = max(self.n_outputs, params.n_seq_max)
        params.n_threads = params.n_threads_batch = n_threads
        params.kv_unified = params.swa_full = True  # branches share cells, and a window can be rewound
        params.offload_kqv = params.op_offload = False
        params.abort_callback = ctypes.cast(_strlen(), library.ggml_abort_callback)
        params.abort_callback_data = ctypes.cast(flag, ctypes.c_void_p)
        with _log.record() as lines:
            self.pointer = library.llama_init_from_model(model.pointer, params)
        if not self.pointer:
            _refuse(model.path, lines)
        # The model, and the byte that llama.cpp reads, live as long as the context.
        self.close = weakref.finalize(self, _free_context, library, self.pointer, model, flag)
        memory = library.llama_get_memory(self.pointer)
        if not memory:
            raise UnsupportedModel(f"{model.path}: llama.cpp keeps no text for this model: it is no language model")
        self.cache = _Cache(library, memory, model.has_cells)
        self.kv_bytes = sum(_mebibytes(line, r"^\w+: (?:.*, )?size") for line in lines)
        output_bytes = 4 * model.n_vocab * params.n_outputs_max
        self.activation_bytes = output_bytes + sum(_mebibytes(line, r"compute buffer size") for line in lines)

    def decode(self, batch: _Batch, wanted: _Rows, out: Logits) -> None:
        """Run a batch; logits of the wanted rows, ascending, into out. Raises Interrupted, BackendLost."""
        batch.outputs[wanted] = 1
        with _log.record() as lines:
            status = self.library.llama_decode(self.pointer, batch.structure)
        if status == 2:
            raise Interrupted("the forward pass was interrupted; the session is as it was before")
        if status:
            raise BackendLost(f"llama.cpp failed on a pass of {len(batch.outputs)} tokens: {_quote(lines)} ({status})")
        if len(out):
            out[:] = np.ctypeslib.as_array(self.library.llama_get_logits(self.pointer), out.shape)


def _free_context(library: Any, pointer: int, model: _Model, flag: object) -> None:
    library.llama_free(pointer)


class _Batch:
    """The arguments of one llama_decode. positions: (n,); sequences: those that each row is part of."""

    def __init__(
        self, library: Any, ids: TokenIds, positions: NDArray[Any], sequences: Sequence[Sequence[int]]
    ) -> None:
        n = len(ids)
        self.outputs = np.zeros(n, dtype=np.int8)
        self._ids = np.ascontiguousarray(ids, dtype=np.int32)
        self._positions = positions.astype(np.int32)
        self._counts = np.array([len(of_row) for of_row in sequences], dtype=np.int32)
        self._sequences = np.array([sequence for of_row in sequences for sequence in of_row], dtype=np.int32)
        starts = np.cumsum(self._counts) - self._counts
        self._pointers = self._sequences.ctypes.data + 4 * starts.astype(np.uintp)
        int32 = ctypes.POINTER(ctypes.c_int32)
        self.structure = library.llama_batch(
            n,
            self._ids.ctypes.data_as(int32),
            None,  # embeddings in place of tokens
            self._positions.ctypes.data_as(int32),
            self._counts.ctypes.data_as(int32),
            self._pointers.ctypes.data_as(ctypes.POINTER(int32)),
            self.outputs.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )


class _Cache:
    """What llama.cpp remembers of texts, by sequence; sequence 0 is the committed one.

    With cells, one a token, a sequence can be cut short and branches share what they have in common. Without, there is
    a state that is the sum of all tokens: passes then run on a copy, sequence 1, that is adopted whole or dropped.
    """

    def __init__(self, library: Any, memory: int, has_cells: bool) -> None:
        self.has_cells = has_cells
        self._library = library
        self._memory = memory
        self._is_branched = False

    def length(self, sequence: int) -> int:
        """Number of tokens of a sequence."""
        n: int = self._library.llama_memory_seq_pos_max(self._memory, sequence) + 1
        return n

    def branch(self, n: int) -> int:
        """Make n sequences that go on from sequence 0, which may be the first of them; gives the first."""
        first = 0 if self.has_cells else 1
        for sequence in range(max(first, 1), first + n):
            self._is_branched = True
            self._library.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)
        return first

    def adopt(self, sequence: int, n: int) -> None:
        """Make the first n tokens of a sequence the committed ones, and drop the rest and all other sequences."""
        library, memory = self._library, self._memory
        library.llama_memory_seq_rm(memory, sequence, n, -1)
        if sequence:
            library.llama_memory_seq_keep(memory, sequence)
            library.llama_memory_seq_cp(memory, sequence, 0, -1, -1)
        self._drop_branches()

    def rewind(self, n: int) -> int:
        """Keep the first n committed tokens and nothing else; gives n, or 0 where that was not possible."""
        library, memory = self._library, self._memory
        self._drop_branches()
        removed = library.llama_memory_seq_rm(memory, 0, n, -1)
        # Cells that are behind a sliding window may have been used again.
        is_whole = not self.has_cells or library.llama_memory_seq_pos_min(memory, 0) <= 0
        if removed and is_whole:
            return n
        library.llama_memory_clear(memory, True)
        return 0

    def _drop_branches(self) -> None:
        if self._is_branched:
            self._library.llama_memory_seq_keep(self._memory, 0)
            self._is_branched = False


# ---- threads ---------------------------------------------------------------------------------------------------------


class _Worker:
    """One thread that calls functions one after the other, and the flag that stops the one that runs."""

    def __init__(self) -> None:
        self.flag = ctypes.create_string_buffer(2)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="llama.cpp")

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called since the last function was."""
        return bool(self.flag.value)

    def stop(self) -> None:
        """Ask the function that runs to stop; from any thread and signal handler."""
        self.flag[0] = b"\x01"

    def call(self, function: Callable[..., _T], *args: object, meanwhile: Callable[[], None] | None = None) -> _T:
        """What the function gives or raises. What is raised here meanwhile, Ctrl-C above all, stops and awaits it.

        meanwhile: called in this thread every 50 ms.
        """
        self.flag[0] = b"\x00"
        future: Future[_T] | None = None
        try:
            future = self._threads.submit(function, *args)
            while meanwhile is not None and not wait([future], 0.05).done:
                meanwhile()
            return future.result()
        except BaseException:
            self.stop()
            while future is not None and not future.done():
                with suppress(KeyboardInterrupt):
                    wait([future])
            raise

    def close(self) -> None:
        """Stop what runs, and end the thread."""
        self.stop()
        self._threads.shutdown()


def _strlen() -> Any:
    """A C function that is true of a string that is not empty: the answer to "stop now?".

    llama.cpp asks hundreds of times a token; a function in Python would wait for the interpreter's lock each time.
    """
    return (ctypes.cdll.msvcrt if sys.platform == "win32" else ctypes.CDLL(None)).strlen


# ---- the library and its log -----------------------------------------------------------------------------------------

_DEBUG, _ERROR = 1, 4  # enum ggml_log_level


class _Log(threading.local):
    """Takes what llama.cpp logs; each thread sees its own lines."""

    def __init__(self) -> None:
        self._lines: list[tuple[int, str]] | None = None

    @contextmanager
    def record(self) -> Iterator[list[tuple[int, str]]]:
        """Lines (level, text) that this thread has logged meanwhile, but for DEBUG."""
        lines: list[tuple[int, str]] = []
        self._lines = lines
        try:
            yield lines
        finally:
            self._lines = None

    def receive(self, level: int, text: bytes, _: object) -> None:
        """A ggml_log_callback."""
        line = text.decode(errors="replace").rstrip()
        _logger.debug("%s", line)
        if self._lines is not None and level > _DEBUG:
            self._lines.append((level, line))


_log = _Log()
_callbacks: list[Any] = []  # llama.cpp calls them for as long as the process lives


def _quote(lines: list[tuple[int, str]]) -> str:
    """What llama.cpp gave as the reason of a failure."""
    errors = [line for level, line in lines if level == _ERROR and not line.endswith(": failed to load model")]
    return errors[-1] if errors else "it gives no reason"


def _refuse(path: Path, lines: list[tuple[int, str]]) -> NoReturn:
    reason = _quote(lines)
    if "alloc" in reason:
        raise BudgetExceeded(f"{path}: llama.cpp found too little memory: {reason}")
    raise UnsupportedModel(f"{path}: llama.cpp cannot load this model: {reason}")


def _mebibytes(line: tuple[int, str], what: str) -> int:
    """Bytes of "what = 1.25 MiB" in a line of the log, 0 if it does not say that."""
    match = re.search(what + r" = +([0-9.]+) MiB", line[1])
    return round(float(match[1]) * 2**20) if match else 0


_FIELDS = {
    "llama_batch": "n_tokens token embd pos n_seq_id seq_id logits",
    "llama_model_params": "devices n_gpu_layers load_mode progress_callback no_alloc",
    "llama_context_params": (
        "n_ctx n_batch n_ubatch n_seq_max n_outputs_max n_threads n_threads_batch abort_callback abort_callback_data "
        "offload_kqv op_offload swa_full kv_unified"
    ),
}


def _check_layouts(library: Any) -> None:
    """Raises BackendUnavailable if structures could lie otherwise in memory than this file and llama_cpp assume.

    llama_cpp describes the structures of the library that it comes with; it is another library, or lacks a field.
    """
    found = getattr(library, "__version__", "of no version")
    lacking = [
        f"{structure}.{name}"
        for structure, names in _FIELDS.items()
        for name in names.split()
        if not hasattr(getattr(library, structure, None), name)
    ]
    if lacking:
        raise BackendUnavailable(
            f"the llama.cpp backend wants llama-cpp-python {VERSION}; found {found}, which lacks {', '.join(lacking)}: "
            "pip install 'edgeinfer[llama]'"
        )
    elsewhere = os.environ.get("LLAMA_CPP_LIB_PATH")
    if elsewhere is not None and library.llama_version() != LIBRARY_VERSION:
        raise BackendUnavailable(
            f"LLAMA_CPP_LIB_PATH={elsewhere} has llama.cpp {library.llama_version().decode()}; llama-cpp-python "
            f"{VERSION} wants {LIBRARY_VERSION.decode()}: unset it"
        )


@functools.cache
def open_library() -> Any:
    """The module llama_cpp, ready for use. Raises BackendUnavailable if it is missing, broken or another version."""
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # where llama.cpp ends the process, it would start a debugger first
    try:
        library = importlib.import_module("llama_cpp")
    except ModuleNotFoundError as error:
        raise BackendUnavailable(
            f"the llama.cpp backend needs llama-cpp-python ({error}): pip install 'edgeinfer[llama]'"
        ) from error
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise BackendUnavailable(f"llama-cpp-python cannot be loaded: {error}; install it anew") from error
    _check_layouts(library)
    _callbacks.append(library.llama_log_callback(_log.receive))
    library.llama_log_set(_callbacks[-1], None)
    library.llama_backend_init()
    return library
