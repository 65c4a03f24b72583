"""The target's hidden states of texts, as draft heads need them, in memory that the texts share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from edgeinfer.common.errors import CacheFull
from edgeinfer.common.types import Features

SEGMENT = 128  # positions


class FeatureMemory:
    """Rows of hidden states in segments of SEGMENT positions. Memory is taken when rows are first written.

    n_positions: of all texts together.  n_texts: each may end within a segment of its own.
    """

    def __init__(self, n_positions: int, n_embd: int, n_texts: int = 1) -> None:
        n_segments = n_segments_of(n_positions, n_texts)
        self.rows = np.empty((n_segments, SEGMENT, n_embd), dtype=np.float32)
        self._free = list(range(n_segments))[::-1]
        self._n_touched = 0
        self._idle: list[KnownText] = []  # the oldest first

    @property
    def n_bytes(self) -> int:
        """Bytes of the segments that were ever written."""
        return self._n_touched * int(self.rows[0].nbytes)

    def take(self) -> int:
        """A segment, of a text that has ended where none is free. Raises CacheFull."""
        while not self._free and self._idle:
            self._idle[0].forget()
        if not self._free:
            raise CacheFull(SEGMENT * len(self.rows))
        segment = self._free.pop()
        self._n_touched = max(self._n_touched, segment + 1)
        return segment

    def give_back(self, segments: Sequence[int]) -> None:
        """Segments that no text has any more; those that were written are taken first."""
        self._free = sorted([*self._free, *segments], reverse=True)

    def set_idle(self, text: KnownText, is_idle: bool) -> None:
        """Whether what a text has may be taken from it."""
        if text in self._idle:
            self._idle.remove(text)
        if is_idle:
            self._idle.append(text)


class KnownText:
    """A text and its hidden states from a position on: those before it are not known.

    forgotten: called when the memory is taken from a text that has ended.
    """

    def __init__(self, memory: FeatureMemory, forgotten: Callable[[], object]) -> None:
        self.memory = memory
        self._forgotten = forgotten
        self.tokens: list[int] = []
        self.start = 0
        self._segments: dict[int, int] = {}  # in the memory, by number in the text

    def forget(self) -> None:
        """Know nothing."""
        self.cut(0)
        self.start = 0
        self.set_idle(False)
        self._forgotten()

    def set_idle(self, is_idle: bool) -> None:
        """Whether the memory may be taken from the text."""
        self.memory.set_idle(self, is_idle)

    def begin(self, text: Sequence[int], start: int) -> None:
        """Hidden states of that text will be known from there on."""
        self.cut(0)
        self.tokens[:] = text[:start]
        self.start = start

    def cut(self, n: int) -> None:
        """Keep the first n tokens."""
        del self.tokens[n:]
        last = -(-n // SEGMENT)
        gone = [number for number in self._segments if number >= last]
        self.memory.give_back([self._segments.pop(number) for number in gone])

    def extend(self, tokens: Sequence[int], features: Features) -> None:
        """Tokens that follow, with their hidden states (n, n_embd). Raises CacheFull, and knows as much as before."""
        first, n = len(self.tokens), len(tokens)
        try:
            for at in range(first // SEGMENT, -(-(first + n) // SEGMENT)):
                if at not in self._segments:
                    self._segments[at] = self.memory.take()
        except CacheFull:
            self.cut(first)
            raise
        written = 0
        for part in self._parts(first, first + n):
            part[:] = features[written : written + len(part)]
            written += len(part)
        self.tokens.extend(tokens)

    def features(self, start: int, end: int) -> Features:
        """(end - start, n_embd) hidden states of these positions, none of which is before `start`."""
        parts = list(self._parts(start, end))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _parts(self, start: int, end: int) -> Iterator[Features]:
        """The memory of these positions, segment by segment."""
        while start < end:
            upto, first = min(end, (start // SEGMENT + 1) * SEGMENT), start % SEGMENT
            yield self.memory.rows[self._segments[start // SEGMENT], first : first + upto - start]
            start = upto


class LastKnown:
    """The same of a head that goes on from the last hidden state alone. It has memory of its own, for one row."""

    start = 0

    def __init__(self, n_embd: int) -> None:
        self.tokens: list[int] = []
        self._row = np.empty((1, n_embd), dtype=np.float32)

    @property
    def n_bytes(self) -> int:
        """Bytes of the row."""
        return self._row.nbytes

    def set_idle(self, is_idle: bool) -> None:
        """See KnownText; nobody else could use it."""

    def begin(self, text: Sequence[int], start: int) -> None:
        """See KnownText."""
        self.tokens[:] = text[:start]

    def cut(self, n: int) -> None:
        """See KnownText; more tokens are to follow."""
        del self.tokens[n:]

    def extend(self, tokens: Sequence[int], features: Features) -> None:
        """See KnownText."""
        self._row[:] = features[-1:]
        self.tokens.extend(tokens)

    def features(self, start: int, end: int) -> Features:
        """(1, n_embd) of the last token, which is what is asked for. It changes with the next `extend`."""
        return self._row


def n_segments_of(n_positions: int, n_texts: int) -> int:
    """Segments for so many positions of so many texts, each of which ends within one."""
    return -(-n_positions // SEGMENT) + n_texts - 1
