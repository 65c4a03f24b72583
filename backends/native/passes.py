"""Forward passes over the rows of several sequences: cut to the size of a pass, and put together again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.native import _core
from edgeinfer.common.errors import Interrupted
from edgeinfer.common.types import Features, HiddenStates, Logits, Output, TokenIds

# See SequenceArguments in bind/decoder.cpp.
_Arguments: TypeAlias = tuple[
    _core.SequenceState,
    TokenIds,
    NDArray[np.int32],
    int,
    NDArray[np.int32],
    HiddenStates,
    int,
    Features | None,
]

# The rows of a sequence as `forward_lists` of C++ takes them, see ListArguments there: state, tokens, parents or None
# for a chain, parents of the pending rows before them, whether all of them or the last one have logits, layers, taps,
# features.
Listed: TypeAlias = tuple[
    _core.SequenceState,
    list[int],
    Any,
    list[int],
    bool,
    tuple[int, ...],
    HiddenStates | None,
    Features | None,
]


@dataclass(frozen=True)
class SequenceRows:
    """The rows of one sequence, checked."""

    state: _core.SequenceState
    tokens: TokenIds
    links: NDArray[np.int32]  # (n_pending + n,) parents of the pending rows and of these n
    is_chain: bool  # whether they all follow one another
    n_pending: int
    requested: NDArray[np.int32]  # (m,) the rows whose logits are requested
    taps: Sequence[int]  # see check_taps
    features: Features | None


@dataclass(frozen=True)
class Piece:
    """Rows first..last-1 of a sequence of the batch, in a pass."""

    sequence: int
    first: int
    last: int


def cut(sizes: Sequence[tuple[int, bool]], n_batch: int) -> Iterator[list[Piece]]:
    """The passes that rows of several sequences make, of n_batch rows at most, as full as they can be in that order.

    sizes: (number of rows, whether they are a chain) of each sequence. A tree is never cut; it has n_batch rows at
    most.
    """
    pieces: list[Piece] = []
    room = n_batch
    for sequence, (n_rows, is_chain) in enumerate(sizes):
        first = 0
        while first < n_rows:
            n = min(room, n_rows - first)
            if n == 0 or (not is_chain and n < n_rows):
                yield pieces
                pieces, room = [], n_batch
                continue
            pieces.append(Piece(sequence, first, first + n))
            first, room = first + n, room - n
    yield pieces


def distinct(requested: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.intp] | None]:
    """(rows in ascending order, each once; where in them each of the requested ones is), None if these are the same."""
    if len(requested) < 2 or (np.diff(requested) > 0).all():
        return requested, None
    rows, places = np.unique(requested, return_inverse=True)
    return rows, places


class JointPass:
    """Runs a batch through a decoder, in as many passes as it takes. An interrupt from now on stops it."""

    def __init__(self, decoder: _core.Decoder, batch: Sequence[SequenceRows], n_logits: int, n_embd: int) -> None:
        self._decoder = decoder
        self._interrupts = decoder.interrupts
        self._batch = batch
        self._requested, self._places = zip(*(distinct(rows.requested) for rows in batch), strict=True)
        counts = [len(requested) for requested in self._requested]
        self._logits: Logits = np.empty((sum(counts), n_logits), dtype=np.float32)
        self._of_sequence = np.split(self._logits, np.cumsum(counts)[:-1])  # views
        self._layers = [np.array(rows.taps, dtype=np.int32) for rows in batch]
        self._tapped: list[HiddenStates] = [
            np.empty((len(rows.taps), len(rows.tokens) if rows.taps else 0, n_embd), dtype=np.float32) for rows in batch
        ]

    def run(self, n_batch: int) -> bool:
        """One pass after the other; gives True. Raises Interrupted."""
        passes = list(cut([(len(rows.tokens), rows.is_chain) for rows in self._batch], n_batch))
        for pieces in passes:
            arguments, requested, offset = [], [], 0
            for piece in pieces:
                rows = self._batch[piece.sequence]
                arguments.append(self._arguments(rows, piece))
                of_sequence = self._requested[piece.sequence]
                of_piece = np.flatnonzero((of_sequence >= piece.first) & (of_sequence < piece.last))
                requested.append((piece.sequence, of_piece, of_sequence[of_piece] + np.int32(offset - piece.first)))
                offset += piece.last - piece.first
            rows_of_pass = np.concatenate([each[2] for each in requested])
            out = self._logits
            if len(passes) > 1:
                out = np.empty((len(rows_of_pass), self._logits.shape[1]), dtype=np.float32)
            if not self._decoder.forward(arguments, rows_of_pass, out, self._interrupts):
                raise interrupted()
            if out is not self._logits:
                self._put(out, [each[:2] for each in requested])
        return True

    def outputs(self) -> list[Output]:
        """One a sequence."""
        return [
            Output(logits if places is None else logits[places], tapped if len(tapped) else None)
            for logits, places, tapped in zip(self._of_sequence, self._places, self._tapped, strict=True)
        ]

    def _arguments(self, rows: SequenceRows, piece: Piece) -> _Arguments:
        """What Decoder.forward needs to know of a sequence."""
        part = slice(piece.first, piece.last)
        return (
            rows.state,
            rows.tokens[part],
            rows.links[: rows.n_pending + piece.last],
            rows.n_pending + piece.first,
            self._layers[piece.sequence],
            self._tapped[piece.sequence],
            piece.first,
            None if rows.features is None else rows.features[part],
        )

    def _put(self, logits: Logits, requested: Sequence[tuple[int, NDArray[np.intp]]]) -> None:
        """Put the logits of a pass where those of their sequences belong."""
        first = 0
        for sequence, rows in requested:
            self._of_sequence[sequence][rows] = logits[first : first + len(rows)]
            first += len(rows)


def interrupted() -> Interrupted:
    """What a pass that was stopped raises."""
    return Interrupted("the forward pass was interrupted; the session is as it was before")
