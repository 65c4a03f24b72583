"""llama.cpp (llama-cpp-python) as a peer: greedy answers to token ids, free or under a grammar of its own.

A grammar is used as llama.cpp's programs do (common/sampling.cpp): the token is chosen of all, and only where the
grammar refuses it, it is chosen again of those that the grammar allows. That is faster than a sampler chain with the
grammar in it, which looks at every token of the vocabulary each time, and gives the same text.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llama_nodes import llama_cpp

N_BATCH = 512
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


@dataclass(frozen=True)
class Answer:
    """What llama.cpp answered."""

    tokens: list[int]  # without the one that ended it
    has_ended: bool  # by itself
    first_seconds: float  # from the prompt to the first token
    seconds: float  # of all
    refused: int  # tokens that were chosen first, and that the grammar refused


def grammar_of_schema(schema: str) -> str:
    """llama-cpp-python's GBNF of a schema (JSON text). Raises Exception for what it does not know."""
    from llama_cpp.llama_grammar import json_schema_to_gbnf

    return str(json_schema_to_gbnf(schema))


class Peer:
    """A model of llama.cpp with a context."""

    def __init__(self, path: Path, n_ctx: int, n_threads: int) -> None:
        llama_cpp.llama_backend_init()
        self._log = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, N_BATCH, N_BATCH
        params.n_threads = params.n_threads_batch = n_threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._n_vocab = llama_cpp.llama_vocab_n_tokens(self._vocab)

    def close(self) -> None:
        """Free the model."""
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)

    def check(self, grammar: str) -> None:
        """Raises ValueError for a grammar that llama.cpp cannot read."""
        llama_cpp.llama_sampler_free(self._sampler_of(grammar))

    def _sampler_of(self, grammar: str) -> Any:
        sampler = llama_cpp.llama_sampler_init_grammar(self._vocab, grammar.encode(), b"root")
        if not sampler:
            raise ValueError("llama.cpp cannot read the grammar")
        return sampler

    def answer(self, prompt: Sequence[int], n_tokens: int, grammar: str | None = None) -> Answer:
        """At most n_tokens that follow a prompt. grammar: GBNF with a rule `root`. Raises ValueError if it is wrong."""
        sampler = None if grammar is None else self._sampler_of(grammar)
        try:
            return self._answer(prompt, n_tokens, sampler)
        finally:
            if sampler:
                llama_cpp.llama_sampler_free(sampler)

    def _answer(self, prompt: Sequence[int], n_tokens: int, sampler: Any) -> Answer:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        started = time.perf_counter()
        for first in range(0, len(prompt), N_BATCH):
            self._decode(prompt[first : first + N_BATCH])
        tokens: list[int] = []
        first_seconds, refused = 0.0, 0
        while True:
            token, was_refused = self._chosen(sampler)
            refused += was_refused
            if not tokens:
                first_seconds = time.perf_counter() - started
            has_ended = llama_cpp.llama_vocab_is_eog(self._vocab, token)
            if not has_ended:
                tokens.append(token)
            if has_ended or len(tokens) == n_tokens:
                return Answer(tokens, has_ended, first_seconds, time.perf_counter() - started, refused)
            if sampler:
                llama_cpp.llama_sampler_accept(sampler, token)
            self._decode([token])

    def _decode(self, tokens: Sequence[int]) -> None:
        ids = (ctypes.c_int32 * len(tokens))(*tokens)  # which a batch does not keep
        if llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(ids, len(tokens))) != 0:
            raise RuntimeError("llama_decode failed")

    def _chosen(self, sampler: Any) -> tuple[int, bool]:
        """The most likely token that may follow, and whether a more likely one was refused."""
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context, -1), shape=(self._n_vocab,))
        best = int(logits.argmax())
        if not sampler or np.isfinite(self._allowed(sampler, logits, np.array([best]))[0]):
            return best, False
        return int(self._allowed(sampler, logits, np.arange(self._n_vocab)).argmax()), True

    def _allowed(self, sampler: Any, logits: Any, ids: Any) -> Any:
        """Logits of these tokens, -inf where the grammar refuses them."""
        candidates = np.zeros(len(ids), _CANDIDATE)
        candidates["id"], candidates["logit"] = ids, logits[ids]
        data = candidates.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data))
        array = llama_cpp.llama_token_data_array(data=data, size=len(ids), selected=-1, sorted=False)
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
        return candidates["logit"]
