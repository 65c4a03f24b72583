"""Checks of arguments of models and sessions, the same for all backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgeinfer.backends.base import Rows
from edgeinfer.common.arguments import check_choice, check_integer
from edgeinfer.common.errors import ContextOverflow, InvalidArgument, ShapeError
from edgeinfer.common.settings import CacheType
from edgeinfer.common.types import Features, LogitsRows, TokenIds
from edgeinfer.models import ModelSpec


def check_tokens(tokens: ArrayLike, n_vocab: int, n_past: int, n_ctx: int) -> TokenIds:
    """Tokens as a contiguous (n,) int32 array, n >= 1, ids in the vocabulary, fitting after n_past.

    Raises ShapeError or ContextOverflow.
    """
    try:
        array = np.asarray(tokens)
    except ValueError:  # lists of different lengths in a list
        array = np.asarray(None)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise ShapeError(f"tokens must be a non-empty 1-D array of integers: found {array.dtype} {array.shape}")
    if array.min() < 0 or array.max() >= n_vocab:
        bad = array[(array < 0) | (array >= n_vocab)][0]
        raise ShapeError(f"token ids must be in 0..{n_vocab - 1}: found {bad}")
    if n_past + array.size > n_ctx:
        raise ContextOverflow(n_past + array.size, n_ctx)
    return np.ascontiguousarray(array, dtype=np.int32)


def check_parents(parents: ArrayLike | None, n: int, first: int = 0) -> NDArray[np.int32]:
    """Parents of the rows first..first + n - 1 as a contiguous (n,) int32 array; None is a chain. Raises ShapeError."""
    if parents is None:
        return np.arange(first - 1, first + n - 1, dtype=np.int32)
    array = np.asarray(parents)
    if array.shape != (n,) or array.dtype.kind not in "iu":
        raise ShapeError(f"parents must be integers of shape ({n},), one a token: found {array.dtype} {array.shape}")
    wrong = np.flatnonzero((array < -1) | (array >= np.arange(first, first + n)))
    if wrong.size:
        row = int(wrong[0])
        raise ShapeError(f"a parent must be -1 or an earlier row: row {first + row} has parent {array[row]}")
    return np.ascontiguousarray(array, dtype=np.int32)


def check_links(
    pending: NDArray[np.int32], parents: ArrayLike | None, n: int, n_batch: int
) -> tuple[NDArray[np.int32], bool]:
    """(parents of the pending rows and of n after them, (n_pending + n,) int32; whether they are a chain).

    pending: (n_pending,) int32.  parents: of the n rows, see check_parents. Raises ShapeError, also for a tree that
    does not fit into one batch.
    """
    links = np.concatenate([pending, check_parents(parents, n, len(pending))])
    is_chain = np.array_equal(links, np.arange(-1, len(links) - 1))
    if not is_chain and len(links) > n_batch:
        raise ShapeError(f"a tree must fit into one batch of {n_batch} tokens: found {len(links)}")
    return links, is_chain


def check_rows(logits: LogitsRows, n: int) -> NDArray[np.int32]:
    """Row indices (m,) int32 that a `logits` argument asks for. Raises ShapeError."""
    if isinstance(logits, str):
        if logits == "last":
            return np.array([n - 1], dtype=np.int32)
        if logits == "all":
            return np.arange(n, dtype=np.int32)
        raise ShapeError(f"logits must be 'last', 'all' or row indices: found {logits!r}")
    rows = np.asarray(logits, dtype=np.int64)
    if rows.ndim != 1 or (rows.size and (rows.min() < 0 or rows.max() >= n)):
        raise ShapeError(f"logits rows must be in 0..{n - 1}: found {list(logits)}")
    return np.ascontiguousarray(rows, dtype=np.int32)


def check_taps(hidden: bool | Sequence[int], n_layers: int) -> tuple[int, ...]:
    """Layer indices 0..n_layers-1 that a `hidden` argument asks for, n_layers for what the output matrix reads.

    Raises ShapeError.
    """
    if isinstance(hidden, bool):
        return (n_layers,) if hidden else ()
    for layer in hidden:
        if not -n_layers <= layer < n_layers:
            raise ShapeError(f"hidden layers must be in {-n_layers}..{n_layers - 1}: found {layer}")
    return tuple(layer % n_layers for layer in hidden)


def check_path(path: ArrayLike, parents: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
    """Rows (m,) int32 that form a path from the committed sequence through the last batch. Raises ShapeError."""
    rows = np.asarray(path, dtype=np.int64)
    if rows.ndim != 1:
        raise ShapeError(f"path must be a 1-D array of rows: found shape {rows.shape}")
    before = -1
    for row in rows.tolist():
        if not 0 <= row < len(parents):
            raise ShapeError(f"path must name rows 0..{len(parents) - 1} of the last forward: found {row}")
        if parents[row] != before:
            raise ShapeError(f"row {row} follows row {parents[row]}, but the path comes from row {before}")
        before = row
    return np.ascontiguousarray(rows, dtype=np.int32)


def check_features(features: ArrayLike, n: int, n_embd: int) -> Features:
    """Features as a contiguous (n, n_embd) float32 array. Raises ShapeError."""
    array = np.asarray(features)
    if array.shape != (n, n_embd) or array.dtype != np.float32:
        raise ShapeError(f"features must be ({n}, {n_embd}) float32, one a token: found {array.shape} {array.dtype}")
    return np.ascontiguousarray(array)


def check_pending(n_pending: int, n_kept: int) -> int:
    """The number of pending rows that a forward goes on from, of n_kept. Raises ShapeError."""
    if n_pending not in range(n_kept + 1):
        raise ShapeError(f"{n_kept} rows are pending, n_pending must be in 0..{n_kept}: found {n_pending}")
    return n_pending


def check_session_size(n_ctx: int | None, most: int) -> int:
    """Positions of a session: n_ctx, or as many as were planned. Raises InvalidArgument."""
    return most if n_ctx is None else check_integer("n_ctx of a session", n_ctx, 1, most)


def check_sessions(model: object, batch: Sequence[Rows]) -> None:
    """Raises InvalidArgument unless the rows are of several sessions of this model, each once."""
    if not batch:
        raise InvalidArgument("a pass must have rows of at least one session: found none")
    for rows in batch:
        if getattr(rows.session, "model", None) is not model:
            raise InvalidArgument("all rows of a pass must be of sessions of the model that runs it")
    if len({id(rows.session) for rows in batch}) < len(batch):
        raise InvalidArgument("a session may come once in a pass: give all of its rows together")


def check_cache_type(cache_type: CacheType) -> None:
    """Raises InvalidArgument unless there are caches of that type."""
    check_choice("cache_type", cache_type, get_args(CacheType))


def check_cache(cache_type: CacheType, spec: ModelSpec) -> None:
    """Raises InvalidArgument if there is no cache of that type, or if a mixer cannot keep its state so."""
    check_cache_type(cache_type)
    for layer in spec.layers:
        if reason := layer.mixer.refused_cache(cache_type):
            raise InvalidArgument(f"a {cache_type} KV cache {reason}")


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of tokens at the start in which two sequences agree.

    Most differ in the first tokens, and the others in the last ones: slices of growing length are compared, then
    halved.
    """
    if not (type(a) is type(b) is list):
        a, b = list(a), list(b)
    first, size, n = 0, 32, min(len(a), len(b))
    while first < n and a[first : first + size] == b[first : first + size]:
        first, size = first + size, 2 * size
    last = min(first + size, n)  # somewhere from first on, if there is anything
    while first < last:
        middle = (first + last + 1) // 2
        if a[first:middle] == b[first:middle]:
            first = middle
        else:
            last = middle - 1
    return min(first, n)
