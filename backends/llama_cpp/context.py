"""The KV cache and the buffers of a session, and the passes through the model."""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.llama_cpp.cache import Cache
from edgeinfer.backends.llama_cpp.log import log, mebibytes, quote, refuse
from edgeinfer.backends.llama_cpp.model import Model
from edgeinfer.backends.llama_cpp.shared import Writable
from edgeinfer.common.errors import BackendLost, Interrupted, UnsupportedModel
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Logits, TokenIds
from edgeinfer.models.gguf import GGMLType

Rows: TypeAlias = NDArray[np.int32] | NDArray[np.intp]  # (m,), ascending

MAX_OUTPUTS = 64  # rows of logits of one pass, and branches of a tree: llama.cpp holds a buffer for that many


class Context:
    """KV cache and buffers of a session on a model, with or without weights.

    flag: memory of a C string; a pass stops once it is not empty.  Raises UnsupportedModel, BudgetExceeded.
    """

    def __init__(
        self,
        model: Model,
        settings: LoadSettings,
        flag: Writable,
    ) -> None:
        self.library = library = model.library
        self.model = model
        self.n_batch = n_batch = settings.n_batch
        self.n_outputs = min(MAX_OUTPUTS, n_batch)
        params = library.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = settings.n_ctx, n_batch, n_batch
        params.n_seq_max = self.n_outputs if model.has_cells else 2
        params.n_outputs_max = max(self.n_outputs, params.n_seq_max)
        params.n_threads = params.n_threads_batch = settings.n_threads
        params.type_k = params.type_v = GGMLType[settings.cache_type.upper()]
        params.kv_unified = params.swa_full = True  # branches share cells, and a window can be rewound
        params.offload_kqv = params.op_offload = False
        params.abort_callback = ctypes.cast(_strlen(), library.ggml_abort_callback)
        string = (ctypes.c_char * 2).from_buffer(flag)
        params.abort_callback_data = ctypes.cast(string, ctypes.c_void_p)
        with log.record() as lines:
            self.pointer = library.llama_init_from_model(model.pointer, params)
        if not self.pointer:
            refuse(model.path, lines)
        # The model, and the byte that llama.cpp reads, live as long as the context.
        self.close = weakref.finalize(self, _free_context, library, self.pointer, model, string)
        memory = library.llama_get_memory(self.pointer)
        if not memory:
            raise UnsupportedModel(f"{model.path}: llama.cpp keeps no text for this model: it is no language model")
        self.cache = Cache(library, memory, model.has_cells)
        self.kv_bytes = sum(mebibytes(line, r"^\w+: (?:.*, )?size") for line in lines)
        output_bytes = 4 * model.n_vocab * params.n_outputs_max
        self.activation_bytes = output_bytes + sum(mebibytes(line, r"compute buffer size") for line in lines)

    def decode(
        self, ids: TokenIds, positions: NDArray[Any], sequences: Sequence[Sequence[int]], wanted: Rows, out: Logits
    ) -> None:
        """Run tokens, each a part of the sequences of its row; logits of the wanted rows, ascending, into out.

        positions: (n,).  Raises Interrupted, BackendLost.
        """
        batch = _Batch(self.library, ids, positions, sequences, wanted)
        with log.record() as lines:
            status = self.library.llama_decode(self.pointer, batch.structure)
        if status == 2:
            raise Interrupted("the forward pass was interrupted; the session is as it was before")
        if status:
            raise BackendLost(f"llama.cpp failed on a pass of {len(ids)} tokens: {quote(lines)} ({status})")
        if len(out):
            out[:] = np.ctypeslib.as_array(self.library.llama_get_logits(self.pointer), out.shape)


def _free_context(library: Any, pointer: int, model: Model, flag: object) -> None:
    library.llama_free(pointer)


class _Batch:
    """The argument of llama_decode, and the arrays that it points into."""

    def __init__(
        self, library: Any, ids: TokenIds, positions: NDArray[Any], sequences: Sequence[Sequence[int]], wanted: Rows
    ) -> None:
        n = len(ids)
        self._outputs = np.zeros(n, dtype=np.int8)
        self._outputs[wanted] = 1
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
            self._outputs.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )


def _strlen() -> Any:
    """A C function that is true of a string that is not empty: the answer to "stop now?".

    llama.cpp asks hundreds of times a token; a function in Python would wait for the interpreter's lock each time.
    """
    return (ctypes.cdll.msvcrt if sys.platform == "win32" else ctypes.CDLL(None)).strlen
