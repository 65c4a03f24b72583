"""The Session: what is committed, what the last pass left, and how trees become passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgeinfer.backends.base import check_parents, check_path, check_rows, check_taps, check_tokens
from edgeinfer.backends.llama_cpp.context import Context, Rows
from edgeinfer.backends.llama_cpp.worker import Worker
from edgeinfer.errors import EdgeInferError, InvalidArgument, ShapeError
from edgeinfer.types import Logits, LogitsRows, MemoryUse, Output, TokenIds


class LlamaCppSession:
    """See edgeinfer.backends.base.Session.

    A tree runs in one pass where its branches are sequences of llama.cpp over shared cells. Where there are more than
    MAX_OUTPUTS branches or rows of logits, or the model keeps a state and not cells (Mamba, RWKV, hybrids), each branch
    is run on its own instead, and what is committed of it is run again, before the next pass.
    """

    is_exact = False

    def __init__(self, context: Context, n_ctx: int, worker: Worker) -> None:
        self.spec = context.model.sizes
        self.n_ctx = n_ctx
        self.n_batch = context.n_batch
        self._context: Context | None = context
        self._worker = worker
        # Changed by the worker's thread only. Sequence 0 of the cache holds the first _n_held of the committed tokens,
        # and if _is_clean nothing else is there; it is brought up to date when the next pass begins.
        self._tokens: list[int] = []
        self._n_held = 0
        self._is_clean = True
        self._last = _NO_PASS

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

    def recall(self, tokens: ArrayLike) -> int:
        """See Session.recall. Finds nothing: the logits behind a text would depend on how it came there."""
        self.truncate(0)
        return 0

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

    def _open(self) -> Context:
        if self._context is None:
            raise EdgeInferError("this session is closed")
        return self._context

    # ---- in the worker's thread ------------------------------------------------------------------------------------

    def _run(self, context: Context, ids: TokenIds, links: TokenIds, rows: TokenIds, is_chain: bool) -> Logits:
        self._last = _NO_PASS
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

    def _run_chain(self, context: Context, ids: TokenIds, wanted: Rows, sequence: int) -> Logits:
        """Logits (len(wanted), n_vocab) of a chain behind what the sequence holds, in as many passes as it takes."""
        out = np.empty((len(wanted), context.model.n_vocab), dtype=np.float32)
        n_past = context.cache.length(sequence)
        for first, last in _chunks(len(ids), wanted, context.n_batch, context.n_outputs):
            inside = slice(*np.searchsorted(wanted, (first, last)))
            positions = np.arange(n_past + first, n_past + last)
            sequences = [(sequence,)] * (last - first)
            context.decode(ids[first:last], positions, sequences, wanted[inside] - first, out[inside])
        return out

    def _run_tree(
        self, context: Context, ids: TokenIds, links: TokenIds, wanted: Rows
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
        context.decode(ids, positions, sequences, wanted, out)
        return out, [of_row[0] for of_row in sequences]

    def _run_branches(self, context: Context, ids: TokenIds, paths: list[list[int]], wanted: Rows) -> Logits:
        """Logits of the wanted rows of a tree, one branch after the other."""
        out = np.empty((len(wanted), context.model.n_vocab), dtype=np.float32)
        for path in paths:
            self._catch_up(context)
            self._is_clean = False
            places = np.isin(wanted, path)
            inside = np.searchsorted(path, wanted[places])
            out[places] = self._run_chain(context, ids[path], inside, context.cache.branch(1))
        return out

    def _keep(self, context: Context, path: ArrayLike) -> None:
        last = self._last
        rows = check_path(path, last.links)
        n_past = len(self._tokens) + len(rows)
        sequence = last.keeps[rows[-1]] if len(rows) else None
        self._last = _NO_PASS
        self._tokens.extend(last.ids[rows].tolist())
        if sequence is not None:
            context.cache.adopt(sequence, n_past)
            self._n_held, self._is_clean = n_past, True

    def _forget(self, n_past: int) -> None:
        self._last = _NO_PASS
        self._is_clean = self._is_clean and n_past == len(self._tokens)
        del self._tokens[n_past:]
        self._n_held = min(self._n_held, n_past)

    def _catch_up(self, context: Context) -> None:
        """Make sequence 0 hold the committed tokens, and the cache nothing else."""
        if not self._is_clean:
            self._n_held = context.cache.rewind(self._n_held)
            self._is_clean = True
        missing = np.array(self._tokens[self._n_held :], dtype=np.int32)
        if len(missing):
            self._is_clean = False
            self._run_chain(context, missing, np.empty(0, dtype=np.intp), 0)
            self._n_held, self._is_clean = len(self._tokens), True


@dataclass(frozen=True)
class _Pass:
    """The last forward: its tokens, their parents, and for each row the sequence that holds what leads to it, or None.

    None where the cache holds more than that and cannot drop it, or nothing of it: what is committed is then run again.
    """

    ids: TokenIds
    links: TokenIds
    keeps: Sequence[int | None]


_NO_PASS = _Pass(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32), ())


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


def _chunks(n: int, wanted: Rows, n_batch: int, n_outputs: int) -> Iterator[tuple[int, int]]:
    """Runs (first, last) of n rows, each of at most n_batch rows and n_outputs wanted ones."""
    first = 0
    while first < n:
        last = min(first + n_batch, n)
        inside = wanted[(wanted >= first) & (wanted < last)]
        if len(inside) > n_outputs:
            last = int(inside[n_outputs])
        yield first, last
        first = last
