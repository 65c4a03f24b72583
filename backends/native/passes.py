"""Forward passes over the rows of several texts: cut to the size of a pass, and put together again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.native import _core
from edgeinfer.common.errors import Interrupted
from edgeinfer.common.types import Features, HiddenStates, Logits, Output, TokenIds

# See TextArguments in bind/decoder.cpp.
_Arguments: TypeAlias = tuple[
    _core.TextState,
    TokenIds,
    NDArray[np.int32],
    int,
    NDArray[np.int32],
    HiddenStates,
    int,
    Features | None,
]


@dataclass(frozen=True)
class TextRows:
    """The rows of one text, checked.

    links: (n_pending + n,) parents of the pending rows and of these n.  is_chain: whether they all follow one another.
    wanted: (m,) the rows that logits are wanted of.  taps: see check_taps.
    """

    state: _core.TextState
    tokens: TokenIds
    links: NDArray[np.int32]
    is_chain: bool
    n_pending: int
    wanted: NDArray[np.int32]
    taps: Sequence[int]
    features: Features | None


@dataclass(frozen=True)
class Piece:
    """Rows first..last-1 of a text of the batch, in a pass."""

    text: int
    first: int
    last: int


def cut(sizes: Sequence[tuple[int, bool]], n_batch: int) -> Iterator[list[Piece]]:
    """The passes that rows of several texts make, of n_batch rows at most, as full as they can be in that order.

    sizes: (number of rows, whether they are a chain) of each text. A tree is never cut; it has n_batch rows at most.
    """
    pieces: list[Piece] = []
    room = n_batch
    for text, (n_rows, is_chain) in enumerate(sizes):
        first = 0
        while first < n_rows:
            n = min(room, n_rows - first)
            if n == 0 or (not is_chain and n < n_rows):
                yield pieces
                pieces, room = [], n_batch
                continue
            pieces.append(Piece(text, first, first + n))
            first, room = first + n, room - n
    yield pieces


def distinct(wanted: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.intp] | None]:
    """(rows in ascending order, each once; where in them each of the wanted ones is), None if these are the same."""
    if len(wanted) < 2 or (np.diff(wanted) > 0).all():
        return wanted, None
    rows, places = np.unique(wanted, return_inverse=True)
    return rows, places


class JointPass:
    """Runs a batch through a decoder, in as many passes as it takes. An interrupt from now on stops it."""

    def __init__(self, decoder: _core.Decoder, batch: Sequence[TextRows], n_logits: int, n_embd: int) -> None:
        self._decoder = decoder
        self._interrupts = decoder.interrupts
        self._batch = batch
        self._wanted, self._places = zip(*(distinct(rows.wanted) for rows in batch), strict=True)
        counts = [len(wanted) for wanted in self._wanted]
        self._logits: Logits = np.empty((sum(counts), n_logits), dtype=np.float32)
        self._of_text = np.split(self._logits, np.cumsum(counts)[:-1])  # views
        self._layers = [np.array(rows.taps, dtype=np.int32) for rows in batch]
        self._tapped: list[HiddenStates] = [
            np.empty((len(rows.taps), len(rows.tokens) if rows.taps else 0, n_embd), dtype=np.float32) for rows in batch
        ]

    def run(self, n_batch: int) -> bool:
        """One pass after the other; gives True. Raises Interrupted."""
        passes = list(cut([(len(rows.tokens), rows.is_chain) for rows in self._batch], n_batch))
        for pieces in passes:
            arguments, wanted, offset = [], [], 0
            for piece in pieces:
                rows = self._batch[piece.text]
                arguments.append(self._arguments(rows, piece))
                of_text = self._wanted[piece.text]
                of_piece = np.flatnonzero((of_text >= piece.first) & (of_text < piece.last))
                wanted.append((piece.text, of_piece, of_text[of_piece] + np.int32(offset - piece.first)))
                offset += piece.last - piece.first
            rows_of_pass = np.concatenate([each[2] for each in wanted])
            out = self._logits
            if len(passes) > 1:
                out = np.empty((len(rows_of_pass), self._logits.shape[1]), dtype=np.float32)
            if not self._decoder.forward(arguments, rows_of_pass, out, self._interrupts):
                raise interrupted()
            if out is not self._logits:
                self._put(out, [each[:2] for each in wanted])
        return True

    def outputs(self) -> list[Output]:
        """One a text."""
        return [
            Output(logits if places is None else logits[places], tapped if len(tapped) else None)
            for logits, places, tapped in zip(self._of_text, self._places, self._tapped, strict=True)
        ]

    def _arguments(self, rows: TextRows, piece: Piece) -> _Arguments:
        """What Decoder.forward wants to know of a text."""
        part = slice(piece.first, piece.last)
        return (
            rows.state,
            rows.tokens[part],
            rows.links[: rows.n_pending + piece.last],
            rows.n_pending + piece.first,
            self._layers[piece.text],
            self._tapped[piece.text],
            piece.first,
            None if rows.features is None else rows.features[part],
        )

    def _put(self, logits: Logits, wanted: Sequence[tuple[int, NDArray[np.intp]]]) -> None:
        """Put the logits of a pass where those of their texts belong."""
        first = 0
        for text, rows in wanted:
            self._of_text[text][rows] = logits[first : first + len(rows)]
            first += len(rows)


def interrupted() -> Interrupted:
    """What a pass that was stopped raises."""
    return Interrupted("the forward pass was interrupted; the session is as it was before")
