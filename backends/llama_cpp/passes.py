"""What is committed, what the last pass left, and how trees become passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.llama_cpp.context import Context, Rows
from edgeinfer.common.errors import BackendLost
from edgeinfer.common.types import Logits, TokenIds

_NO_ROWS = np.empty(0, dtype=np.intp)
_NO_LOGITS = np.empty((0, 0), dtype=np.float32)


class Passes:
    """Passes through a model behind the committed tokens.

    A tree runs in one pass where its branches are sequences of llama.cpp over shared cells. Where there are more than
    MAX_OUTPUTS branches or rows of logits, or the model keeps a state and not cells (Mamba, RWKV, hybrids), each branch
    is run on its own instead, and what is committed of it is run again, before the next pass.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._cache = context.cache
        # Sequence 0 of the cache holds the first _n_held of the committed tokens, and if _is_clean nothing else is
        # there; it is brought up to date when the next pass begins.
        self._tokens: list[int] = []
        self._n_held = 0
        self._is_clean = True
        self._last = _NO_PASS

    def warm_up(self) -> None:
        """Run one token, and several where there are extra buffers: where llama.cpp crashes on each pass, it is now."""
        context = self._context
        logits = np.empty((1, context.model.n_vocab), dtype=np.float32)
        for n in (1, 8) if context.model.has_extra_buffers else (1,):
            ids = np.zeros(min(n, context.n_batch), dtype=np.int32)
            with suppress(BackendLost):  # a failure without a crash is told by the first pass that is asked for
                self._run_chain(ids, np.array([len(ids) - 1]), 0, logits)
            self._cache.clear()

    def run(self, ids: TokenIds, links: TokenIds, wanted: TokenIds, out: Logits) -> None:
        """Run a chain or a tree, see Session.forward; logits of the wanted rows, ascending, into out.

        Raises Interrupted, BackendLost.
        """
        self._last = _NO_PASS
        self._catch_up()
        self._is_clean = False
        if np.array_equal(links, np.arange(-1, len(ids) - 1)):
            sequence = self._cache.branch(1)
            self._run_chain(ids, wanted, sequence, out)
            keeps = [sequence] * len(ids) if self._cache.has_cells else [None] * (len(ids) - 1) + [sequence]
        else:
            keeps = self._run_tree(ids, links, wanted, out)
        self._last = _Pass(ids, keeps)

    def keep(self, rows: TokenIds, n_past: int) -> None:
        """Commit rows of the last pass that are a path, then forget all but the first n_past committed tokens."""
        last, self._last = self._last, _NO_PASS
        self._tokens.extend(last.ids[rows].tolist())
        sequence = last.keeps[rows[-1]] if len(rows) else None
        if sequence is not None:
            self._cache.adopt(sequence, len(self._tokens))
            self._n_held, self._is_clean = len(self._tokens), True
        self._is_clean = self._is_clean and n_past == len(self._tokens)
        del self._tokens[n_past:]
        self._n_held = min(self._n_held, n_past)

    def _run_chain(self, ids: TokenIds, wanted: Rows, sequence: int, out: Logits) -> None:
        """Logits (len(wanted), n_vocab) of a chain behind what the sequence holds, in as many passes as it takes."""
        context = self._context
        n_past = self._cache.length(sequence)
        for first, last in _chunks(len(ids), wanted, context.n_batch, context.n_outputs):
            inside = slice(*np.searchsorted(wanted, (first, last)))
            positions = np.arange(n_past + first, n_past + last)
            sequences = [(sequence,)] * (last - first)
            context.decode(ids[first:last], positions, sequences, wanted[inside] - first, out[inside])

    def _run_tree(self, ids: TokenIds, links: TokenIds, wanted: Rows, out: Logits) -> list[int | None]:
        """Logits of the wanted rows; gives for each row the sequence to keep if a path ends there."""
        paths = branches(links)
        if not self._cache.has_cells or max(len(paths), len(wanted)) > self._context.n_outputs:
            self._run_branches(ids, paths, wanted, out)
            return [None] * len(ids)
        sequences: list[list[int]] = [[] for _ in ids]
        positions = np.empty(len(ids), dtype=np.int32)
        for sequence, path in enumerate(paths):
            for depth, row in enumerate(path):
                sequences[row].append(sequence)
                positions[row] = len(self._tokens) + depth
        self._cache.branch(len(paths))
        self._context.decode(ids, positions, sequences, wanted, out)
        return [of_row[0] for of_row in sequences]

    def _run_branches(self, ids: TokenIds, paths: list[list[int]], wanted: Rows, out: Logits) -> None:
        """Logits of the wanted rows of a tree, one branch after the other."""
        for path in paths:
            self._catch_up()
            self._is_clean = False
            places = np.isin(wanted, path)
            inside = np.searchsorted(path, wanted[places])
            of_branch = np.empty((len(inside), out.shape[1]), dtype=np.float32)
            self._run_chain(ids[path], inside, self._cache.branch(1), of_branch)
            out[places] = of_branch

    def _catch_up(self) -> None:
        """Make sequence 0 hold the committed tokens, and the cache nothing else."""
        if not self._is_clean:
            self._n_held = self._cache.rewind(self._n_held)
            self._is_clean = True
        missing = np.array(self._tokens[self._n_held :], dtype=np.int32)
        if len(missing):
            self._is_clean = False
            self._run_chain(missing, _NO_ROWS, 0, _NO_LOGITS)
            self._n_held, self._is_clean = len(self._tokens), True


@dataclass(frozen=True)
class _Pass:
    """The last pass: its tokens, and for each row the sequence that holds what leads to it, or None.

    None where the cache holds more than that and cannot drop it, or nothing of it: what is committed is then run again.
    """

    ids: TokenIds
    keeps: Sequence[int | None]


_NO_PASS = _Pass(np.empty(0, dtype=np.int32), ())


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
