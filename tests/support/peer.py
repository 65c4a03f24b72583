"""llama.cpp as the second opinion, through llama-cpp-python as its users have it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import ArrayLike, NDArray


def llama_cpp_logits(llama_cpp: ModuleType, path: Path, tokens: ArrayLike) -> NDArray[np.float32]:
    """Logits (n, n_vocab) of n tokens, 256 at most, from llama-cpp-python's own interface."""
    model = llama_cpp.Llama(str(path), n_ctx=256, logits_all=True, n_threads=1, n_threads_batch=1, verbose=False)
    model.eval(np.asarray(tokens).tolist())
    logits: NDArray[np.float32] = model.scores[: model.n_tokens].copy()
    model.close()
    return logits


def clear_choices(logits: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Rows (n,) whose first choice is more than 0.5 before the second: no rounding turns it."""
    first_two = np.partition(logits, -2, axis=1)[:, -2:]
    clear: NDArray[np.bool_] = first_two[:, 1] - first_two[:, 0] > 0.5
    return clear
