"""A text that runs, whose segments are read from disk and written to it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from edgeinfer.backends.base import SegmentFile, Segments, Session
from edgeinfer.backends.checks import common_length
from edgeinfer.common.errors import CacheFull
from edgeinfer.context_cache.blocks import Block, next_key, segment_file, tail_key
from edgeinfer.context_cache.folder import SizedFolder

_DEPTH_NS = 1000  # later segments count as used so much earlier each: without those before them they are of no use
_LEAST_TAIL = 16  # tokens that are worth a block


class Disk(Protocol):
    """What a text needs of a ContextCache."""

    folder: SizedFolder

    @property
    def is_writing(self) -> bool:
        """Whether what is put is written."""
        ...

    def first_key(self, segments: Segments) -> bytes | None:
        """What the key of the first segment follows; None as long as the content of the model is not known."""
        ...

    def put(self, text: KeptText, number: int, stamp: int, tail: tuple[int, ...] = ()) -> None:
        """Have a segment of a text written.  tail: its tokens where it is not whole."""
        ...


class KeptText:
    """A text of a session.  model, cache_type: names for headers.

    First `find` and `read`, as long as it is_reading, then `note` between passes, and at the end `leave`.
    """

    def __init__(self, disk: Disk, session: Session, segments: Segments, model: str, cache_type: str) -> None:
        self.segments = segments
        self.is_reading = False
        self._disk, self._session, self._names = disk, session, (model, cache_type)
        self._tokens: list[int] = []  # of whole segments
        self._keys: list[bytes] = []  # of these, as far as they were asked for
        self._used_ns = time.time_ns()
        self._until = 0  # segments that are to be read
        self._needed_from: dict[int, int] = {}  # by kind, the first of these segments
        self._following: list[int] = []  # tokens after these segments, if a tail is to be read
        self._n_noted = 0
        self._is_cut = False

    # ---- reading -----------------------------------------------------------------------------------------------------

    def find(self, tokens: list[int]) -> None:
        """Find what there is of the beginning of a text beyond what its session holds; the last token is always run."""
        segments = self.segments
        n_of, n_past = segments.n_tokens, segments.n_past
        first, last = n_past // n_of, (len(tokens) - 1) // n_of
        if len(tokens) - 1 <= n_past or self._disk.first_key(segments) is None:
            return
        self._tokens = tokens[: last * n_of]
        until = self._last_found(first, last)
        following = tokens[until * n_of : min(len(tokens) - 1, (until + 1) * n_of)]
        has_tail = until > 0 and bool(following) and all(self._has(self.tail(until, kind)) for kind in segments.n_bytes)
        if until * n_of + (1 if has_tail else 0) <= n_past or (until == first and n_past > first * n_of):
            return
        if self._session.truncate(first * n_of) == first * n_of:
            self.is_reading, self._until = True, until
            self._following = following if has_tail else []
            self._needed_from = {kind: segments.kept_from(kind, until * n_of) for kind in segments.n_bytes}

    def _last_found(self, first: int, last: int) -> int:
        """The number of segments up to which passes can go on from disk, at least the first ones, which are held."""
        segments = self.segments
        of_all = [kind for kind in segments.n_bytes if segments.kept_from(kind, last * segments.n_tokens) == 0]
        until = first if of_all else last
        while until < last and all(self._has(self.block(until, kind)) for kind in of_all):
            until += 1
        of_windows = [kind for kind in segments.n_bytes if kind not in of_all]
        while until > first and not self._can_begin(first, until, of_windows):
            until -= 1
        return until

    def _can_begin(self, first: int, until: int, kinds: Iterable[int]) -> bool:
        """Whether passes could run after so many segments: what the session holds before the first one, and the disk.

        kinds: of layers with windows.
        """
        segments = self.segments
        for kind in kinds:
            for number in range(segments.kept_from(kind, until * segments.n_tokens), until):
                is_held = segments.held_from(kind) <= number < first
                if not is_held and (number < first or not self._has(self.block(number, kind))):
                    return False
        return True

    def _has(self, block: Block) -> bool:
        return self._disk.folder.has(block.name, block.file_bytes)

    def read(self, seconds: float) -> None:
        """Read segments for so long, at least one. Raises EdgeInferError if the session is closed."""
        segments, end = self.segments, time.monotonic() + seconds
        while self.is_reading:
            number = segments.n_past // segments.n_tokens
            if number >= self._until:
                if self._following:
                    blocks = [self.tail(number, kind) for kind in segments.n_bytes]
                    self._read_blocks(blocks, self._following)
                self.leave()
                return
            blocks = [self.block(number, kind) for kind, needed in self._needed_from.items() if number >= needed]
            first = number * segments.n_tokens
            if not self._read_blocks(blocks, self._tokens[first : first + segments.n_tokens]):
                self.leave()
            if time.monotonic() >= end:
                return

    def leave(self) -> None:
        """Read no more. What the session cannot go on after is given up."""
        if self.is_reading:
            self.is_reading = False
            if self.segments.reach() < self.segments.n_past:
                self._session.truncate(self.segments.n_past)

    def _read_blocks(self, blocks: Sequence[Block], tokens: list[int]) -> bool:
        """Read the segment after what is committed, of tails what they have of the tokens; whether there was one."""
        folder = self._disk.folder
        files: list[SegmentFile] = []
        try:
            for block in blocks:
                if (descriptor := folder.open(block.name)) is None:
                    return False
                found = segment_file(block, descriptor, folder.path / block.name, self.segments)
                if found is None:
                    os.close(descriptor)
                    folder.remove(block.name)
                    return False
                files.append(found[0])
                if found[1]:
                    tokens = tokens[: common_length(found[1], tokens)]
            if not tokens:
                return False
            if not self.segments.read(tokens, files):
                for block in blocks:
                    folder.remove(block.name)
                return False
        except (OSError, CacheFull):
            return False
        finally:
            for file in files:
                os.close(file.descriptor)
        return True

    # ---- writing -----------------------------------------------------------------------------------------------------

    def note(self, is_last: bool = False) -> None:
        """Have the segments written that are committed since. To be called between passes.

        is_last: the text ends, so that its last segment is written too, although it is not whole.
        """
        segments = self.segments
        n_of, n_past = segments.n_tokens, segments.n_past
        n = n_past // n_of
        self._is_cut = self._is_cut or n < self._n_noted
        if (n == self._n_noted and not is_last) or self._is_cut or self.is_reading or not self._disk.is_writing:
            return
        known = len(self._tokens) // n_of
        if n > known:
            new = segments.committed(known * n_of, n * n_of)
            if len(new) != (n - known) * n_of:  # it is closed
                return
            self._tokens = self._tokens + new
        for number in range(self._n_noted, n):
            self._disk.put(self, number, segments.stamp(number))
        self._n_noted = n
        tail = tuple(segments.committed(n * n_of, n_past)) if is_last and n else ()
        if len(tail) >= _LEAST_TAIL:
            self._disk.put(self, n, segments.stamp(n), tail)

    # ---- blocks ------------------------------------------------------------------------------------------------------

    def block(self, number: int, kind: int) -> Block:
        """The block of a whole segment. The key of the model must be known."""
        n_of = self.segments.n_tokens
        return Block(self._key(number), kind, number, n_of, self.segments.n_bytes[kind], *self._names)

    def tail(self, number: int, kind: int, tokens: tuple[int, ...] = ()) -> Block:
        """The block of these tokens as a segment that is not whole, not the first one."""
        n_bytes = self.segments.n_bytes[kind]
        return Block(tail_key(self._key(number - 1)), kind, number, len(tokens), n_bytes, *self._names, tokens)

    def used_ns(self, number: int) -> int:
        """When a segment of it was of use."""
        return self._used_ns - number * _DEPTH_NS

    def _key(self, number: int) -> bytes:
        first, n_of = self._disk.first_key(self.segments), self.segments.n_tokens
        assert first is not None
        while len(self._keys) <= number:
            at = len(self._keys) * n_of
            self._keys.append(next_key(self._keys[-1] if self._keys else first, self._tokens[at : at + n_of]))
        return self._keys[number]
