"""llama.cpp as the second opinion, through llama-cpp-python as its users have it."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import ArrayLike, NDArray


def llama_cpp_logits(llama_cpp: ModuleType, path: Path, tokens: ArrayLike, **options: object) -> NDArray[np.float32]:
    """Logits (n, n_vocab) of n tokens, 256 at most, from llama-cpp-python's own interface, with further options."""
    sizes = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1}
    model = llama_cpp.Llama(str(path), logits_all=True, verbose=False, **sizes, **options)
    model.eval(np.asarray(tokens).tolist())
    logits: NDArray[np.float32] = model.scores[: model.n_tokens].copy()
    model.close()
    return logits


def llama_cpp_crashes(path: Path) -> bool:
    """Whether llama-cpp-python ends its process on a sound model; asked in a process of its own."""
    script = "import sys, llama_cpp; llama_cpp.Llama(sys.argv[1], n_ctx=64, verbose=False).eval(list(range(20)))"
    return subprocess.run([sys.executable, "-c", script, path], capture_output=True).returncode != 0


def clear_choices(logits: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Rows (n,) whose first choice is more than 0.5 before the second: no rounding turns it."""
    first_two = np.partition(logits, -2, axis=1)[:, -2:]
    clear: NDArray[np.bool_] = first_two[:, 1] - first_two[:, 0] > 0.5
    return clear


def llama_cpp_eagle3(
    llama_cpp: ModuleType, path: Path, target: Path, rows: NDArray[np.float32], tokens: ArrayLike
) -> tuple[NDArray[np.float32], ...]:
    """Features, logits and own features of an EAGLE-3 head, (n, n_embd), (n, n_vocab) and (n, n_embd).

    rows: (n, n_rows) of the target, n <= 256.  tokens: (n,). Two of llama.cpp's functions for this are C++ alone.
    Raises AttributeError where a build lacks them.
    """
    lib = llama_cpp.llama_cpp
    set_nextn = lib._lib["_Z26llama_set_embeddings_nextnP13llama_contextbb"]
    set_nextn.argtypes = (ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool)
    get_nextn = lib._lib["_Z26llama_get_embeddings_nextnP13llama_context"]
    get_nextn.argtypes, get_nextn.restype = (ctypes.c_void_p,), ctypes.POINTER(ctypes.c_float)
    n = len(rows)
    other = llama_cpp.Llama(str(target), n_ctx=256, n_threads=1, verbose=False)
    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.ctx_other = 256, 256, 256, other.ctx
    context = lib.llama_init_from_model(model, params)
    set_nextn(context, True, True)
    batch = lib.llama_batch_ext_init(context)

    def row(values: NDArray[np.float32]) -> object:
        return lib.llama_embd(values.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), 1, len(values))

    def run(kind: int, add: Callable[[int], int]) -> NDArray[np.float32]:
        lib.llama_batch_ext_clear(batch)
        for i in range(n):
            index = add(i)
            lib.llama_batch_ext_set_pos(batch, index, ctypes.byref(ctypes.c_int32(i)))
            lib.llama_batch_ext_set_output_logits(batch, index, True)
        assert lib.llama_process(context, kind, batch) == 0
        return np.ctypeslib.as_array(get_nextn(context), (n, lib.llama_model_n_embd(model))).copy()

    def add_pair(i: int) -> int:
        index = int(lib.llama_batch_ext_add_token(batch, 0, int(ids[i])))
        assert lib.llama_batch_ext_set_embd_token(batch, index, row(features[i]))
        return index

    ids, rows = np.asarray(tokens), np.ascontiguousarray(rows)
    features = run(lib.LLAMA_PROCESS_TYPE_ENCODE, lambda i: lib.llama_batch_ext_add_embd(batch, 0, row(rows[i])))
    own = run(lib.LLAMA_PROCESS_TYPE_DECODE, add_pair)
    n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    logits = np.ctypeslib.as_array(lib.llama_get_logits(context), (n, n_vocab)).copy()
    lib.llama_batch_ext_free(batch)
    lib.llama_free(context)
    lib.llama_model_free(model)
    other.close()
    return features, logits, own


def llama_cpp_mtp(llama_cpp: ModuleType, path: Path, tokens: ArrayLike) -> tuple[NDArray[np.float32], ...]:
    """Hidden rows of a model, and of its block that drafts logits and own rows: (n, n_embd), (n, n_vocab), (n, n_embd).

    tokens: (n,), 128 at most. Raises AttributeError where a build lacks functions that are C++ alone.
    """
    lib = llama_cpp.llama_cpp
    set_nextn = lib._lib["_Z26llama_set_embeddings_nextnP13llama_contextbb"]
    set_nextn.argtypes = (ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool)
    row_of = lib._lib["_Z30llama_get_embeddings_nextn_ithP13llama_contexti"]
    row_of.argtypes, row_of.restype = (ctypes.c_void_p, ctypes.c_int), ctypes.POINTER(ctypes.c_float)
    ids = np.asarray(tokens).tolist()
    params = lib.llama_model_default_params()
    params.load_mtp = True
    model = lib.llama_model_load_from_file(str(path).encode(), params)
    n_embd, n_vocab = lib.llama_model_n_embd(model), lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))

    def run(kind: int, rows: NDArray[np.float32] | None) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        params = lib.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = 128
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = params.flash_attn_type = 0
        params.ctx_type = kind
        context = lib.llama_init_from_model(model, params)
        set_nextn(context, True, False)
        batch = lib.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
            batch.seq_id[i][0] = 0
        if rows is not None:
            batch.embd = rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        assert lib.llama_decode(context, batch) == 0
        batch.embd = None
        hidden = np.array([np.ctypeslib.as_array(row_of(context, i), (n_embd,)) for i in range(len(ids))])
        found = [np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), (n_vocab,)) for i in range(len(ids))]
        logits = np.array(found)
        lib.llama_batch_free(batch)
        lib.llama_free(context)
        return hidden, logits

    hidden, _ = run(0, None)
    own, logits = run(1, np.ascontiguousarray(np.concatenate([np.zeros_like(hidden[:1]), hidden[:-1]])))
    lib.llama_model_free(model)
    return hidden, logits, own


def llama_cpp_layer_inputs(
    llama_cpp: ModuleType, path: Path, tokens: ArrayLike, layers: Sequence[int]
) -> NDArray[np.float32]:
    """(n_layers, n, n_embd), what goes into these layers for n tokens, 256 at most. Raises AttributeError as above."""
    lib = llama_cpp.llama_cpp
    wanted = lib._lib["_Z30llama_set_embeddings_layer_inpP13llama_contextjb"]
    wanted.argtypes = (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool)
    of_layer = lib._lib["_Z30llama_get_embeddings_layer_inpP13llama_contextj"]
    of_layer.argtypes, of_layer.restype = (ctypes.c_void_p, ctypes.c_uint32), ctypes.POINTER(ctypes.c_float)
    model = llama_cpp.Llama(str(path), n_ctx=256, logits_all=True, n_threads=1, verbose=False)
    for layer in layers:
        wanted(model.ctx, layer, True)
    ids = np.asarray(tokens).tolist()
    model.eval(ids)
    shape = len(ids), lib.llama_model_n_embd(model.model)
    rows = np.stack([np.ctypeslib.as_array(of_layer(model.ctx, layer), shape) for layer in layers])
    model.close()
    return rows
