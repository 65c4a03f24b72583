"""llama.cpp with a look at the nodes of its graph while it computes, through the callback that it has for that."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from late import Late  # noqa: E402

if TYPE_CHECKING:
    import llama_cpp
else:
    llama_cpp = Late("llama_cpp")

VERSION = "0.3.36"  # of llama-cpp-python
N_BATCH = 512
_SIZES, _STRIDES, _DATA, _NAME = 16, 48, 248, 256  # bytes into struct ggml_tensor of that version


@functools.cache
def _quiet() -> Any:
    """What llama.cpp logs with; kept, as it calls it as long as the process lives."""
    return llama_cpp.llama_log_callback(lambda *_: None)


class Node:
    """A tensor of the graph, valid inside the callback. name: as llama.cpp has it, `ffn_moe_topk-3` for example."""

    def __init__(self, address: int) -> None:
        self._address = address
        self.name = ctypes.string_at(address + _NAME, 64).partition(b"\0")[0].decode()

    @property
    def layer(self) -> int:
        return int(self.name.rpartition("-")[2])

    def values(self, dtype: Any) -> np.ndarray:
        """(rows, columns) copy of a two-dimensional node. dtype: what it holds."""
        columns, rows = np.frombuffer(ctypes.string_at(self._address + _SIZES, 16), np.int64)
        step, stride = np.frombuffer(ctypes.string_at(self._address + _STRIDES, 16), np.uint64)
        (data,) = np.frombuffer(ctypes.string_at(self._address + _DATA, 8), np.uint64)
        if int(step) != np.dtype(dtype).itemsize or not 0 < rows * stride < 1 << 32:
            raise SystemExit(f"{self.name}: no matrix of {np.dtype(dtype)}")
        raw = np.frombuffer(ctypes.string_at(int(data), int(rows * stride)), np.uint8).reshape(int(rows), int(stride))
        return raw[:, : int(columns * step)].copy().view(dtype)


def watching(prefix: str, seen: Callable[[Node], None]) -> Any:
    """A callback for nodes whose names begin with the prefix and end with the number of a layer."""
    expected = prefix.encode()

    def callback(address: int, ask: bool, _: object) -> bool:
        name = ctypes.string_at(address + _NAME, len(expected) + 4)
        if not name.startswith(expected) or not name[len(expected) : len(expected) + 1].isdigit():
            return not ask
        if not ask:
            seen(Node(address))
        return True

    return llama_cpp.ggml_backend_sched_eval_callback(callback)


class Llama:
    """A model in llama.cpp and one context. callback: of `watching`, or one in C.

    mapped: whether the file is mapped; then no weight is laid out anew. Repacked weights would be copies in memory.
    """

    def __init__(
        self,
        path: Path,
        n_ctx: int,
        n_threads: int,
        callback: Any = None,
        mapped: bool = True,
        n_batch: int = N_BATCH,
    ) -> None:
        if llama_cpp.__version__ != VERSION:
            raise SystemExit(f"llama-cpp-python {VERSION} is needed; found {llama_cpp.__version__}")
        llama_cpp.llama_log_set(_quiet(), None)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP if mapped else llama_cpp.LLAMA_LOAD_MODE_NONE
        params.use_extra_bufts = not mapped
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        sizes = llama_cpp.llama_context_default_params()
        sizes.n_ctx, sizes.n_batch, sizes.n_ubatch = n_ctx, n_batch, n_batch
        sizes.n_threads = sizes.n_threads_batch = n_threads
        if callback is not None:
            self._callback = sizes.cb_eval = callback
        self.context = llama_cpp.llama_init_from_model(self.model, sizes)
        if not self.model or not self.context:
            raise SystemExit(f"llama.cpp does not load {path}")
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.n_past = 0
        self._batch = llama_cpp.llama_batch_init(n_batch, 0, 1)

    def tokens(self, text: str) -> np.ndarray:
        """(n,) int32, without a token that begins texts."""
        raw = text.encode()
        found = (llama_cpp.llama_token * (len(raw) + 1))()
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        n = llama_cpp.llama_tokenize(vocab, raw, len(raw), found, len(found), False, False)
        return np.array(found[:n], dtype=np.int32)

    def decode(self, tokens: Sequence[int] | np.ndarray, all_rows: bool = False) -> np.ndarray:
        """(n or 1, n_vocab) logits of at most n_batch tokens after those before, of all or of the last."""
        batch, n = self._batch, len(tokens)
        batch.n_tokens = n
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = int(token), self.n_past + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, all_rows or i == n - 1
        if status := llama_cpp.llama_decode(self.context, batch):
            raise SystemExit(f"llama_decode gave {status}")
        self.n_past += n
        n_rows = n if all_rows else 1
        address = llama_cpp.llama_get_logits(self.context)
        return np.ctypeslib.as_array(address, (n_rows, self.n_vocab)).copy()

    def keep(self, n_past: int) -> None:
        """Forget what is after the first tokens."""
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.context), 0, n_past, -1)
        self.n_past = n_past

    def close(self) -> None:
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)
