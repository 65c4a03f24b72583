"""Contexts on disk: blocks are written behind the answer, and read back where a text begins with the same tokens.

What is read are bytes that a forward pass of the same tokens gave, and passes after them give the same bits whether a
segment was computed or read. So this changes no text; what is missing, damaged or of another model is computed.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from edgeinfer.backends.base import SegmentedSession, SegmentFile, Segments, Session
from edgeinfer.common.errors import CacheFull, EdgeInferError
from edgeinfer.common.files import cache_folder
from edgeinfer.context_cache.blocks import HEADER_BYTES, Block, first_key, next_key, segment_file, write_header
from edgeinfer.context_cache.folder import SizedFolder
from edgeinfer.context_cache.model_content import ModelContent

_MOST_JOBS = 1 << 14  # segments that wait to be written; what comes then takes the place of the oldest
_CLOSING_SECONDS = 5.0  # that a closing engine waits for what is still to be written
_LOW_PRIORITY = 19
_DEPTH_NS = 1000  # later segments count as used so much earlier each: without those before them they are of no use


def contexts_folder() -> Path | None:
    """Where contexts are kept, None where the user has no folder for caches."""
    folder = cache_folder()
    return None if folder is None else folder / "contexts"


class _Job(NamedTuple):
    """A block to be written: a segment of a text in the layers of a kind."""

    text: KeptText
    number: int
    kind: int
    stamp: int


class KeptText:
    """A text that runs, whose segments are read from disk and written to it."""

    def __init__(self, cache: ContextCache, session: Session, segments: Segments) -> None:
        self.segments = segments
        self._cache, self._session = cache, session
        self._tokens: list[int] = []  # those of `keys`, or of segments that are to be written
        self._keys: list[bytes] = []  # by segment
        self._used_ns = time.time_ns()
        self._until = 0  # segments that are to be read
        self._needed_from: dict[int, int] = {}  # by kind, the first of these segments
        self._n_noted = 0
        self._is_cut = False

    # ---- reading -----------------------------------------------------------------------------------------------------

    def find(self, tokens: list[int]) -> None:
        """Find what there is of the beginning of a text beyond what its session holds; the last token is always run."""
        segments = self.segments
        n_of, n_past = segments.n_tokens, segments.n_past
        first, last = n_past // n_of, (len(tokens) - 1) // n_of
        if last * n_of <= n_past or self._cache.first_key(segments) is None:
            return
        self._tokens = tokens[: last * n_of]
        of_all = [kind for kind in segments.n_bytes if segments.kept_from(kind, last * n_of) == 0]
        until = first if of_all else last
        while until < last and all(self._has(until, kind) for kind in of_all):
            until += 1
        of_windows = [kind for kind in segments.n_bytes if kind not in of_all]
        while until > first and not self._can_begin(first, until, of_windows):
            until -= 1
        if until > first and until * n_of > n_past and self._session.truncate(first * n_of) == first * n_of:
            self._until = until
            self._needed_from = {kind: segments.kept_from(kind, until * n_of) for kind in segments.n_bytes}

    def _can_begin(self, first: int, until: int, kinds: Iterable[int]) -> bool:
        """Whether passes could run after so many segments: what the session holds before the first one, and the disk.

        kinds: of layers with windows.
        """
        segments = self.segments
        for kind in kinds:
            for number in range(segments.kept_from(kind, until * segments.n_tokens), until):
                is_held = segments.held_from(kind) <= number < first
                if not is_held and (number < first or not self._has(number, kind)):
                    return False
        return True

    def _has(self, number: int, kind: int) -> bool:
        block = self.block(number, kind)
        return self._cache.folder.has(block.name, block.file_bytes)

    @property
    def is_reading(self) -> bool:
        """Whether there is more to read."""
        return self._until > 0

    def read(self, seconds: float) -> None:
        """Read segments for so long, at least one. Raises EdgeInferError if the session is closed."""
        segments, end = self.segments, time.monotonic() + seconds
        while self._until and (number := segments.n_past // segments.n_tokens) < self._until:
            if not self._read_segment(number):
                self._until = number
            if time.monotonic() >= end:
                break
        if segments.n_past >= self._until * segments.n_tokens:
            self.leave()

    def leave(self) -> None:
        """Read no more. What the session cannot go on after is given up."""
        if self._until:
            self._until = 0
            self._n_noted = 0
            if self.segments.reach() < self.segments.n_past:
                self._session.truncate(self.segments.n_past)

    def _read_segment(self, number: int) -> bool:
        """Read the segment after what is committed; whether there was one."""
        segments, folder = self.segments, self._cache.folder
        files: list[SegmentFile] = []
        blocks = [self.block(number, kind) for kind, needed in self._needed_from.items() if number >= needed]
        try:
            for block in blocks:
                if (descriptor := folder.open(block.name)) is None:
                    return False
                file = segment_file(block, descriptor, folder.path / block.name, segments)
                if file is None:
                    os.close(descriptor)
                    folder.remove(block.name)
                    return False
                files.append(file)
            first = number * segments.n_tokens
            if not segments.read(self._tokens[first : first + segments.n_tokens], files):
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

    def note(self) -> None:
        """Have the segments written that are committed since. To be called between passes."""
        segments = self.segments
        n_of = segments.n_tokens
        n = segments.n_past // n_of
        self._is_cut = self._is_cut or n < self._n_noted
        if n == self._n_noted or self._is_cut or self._until or not self._cache.is_writing:
            return
        known = len(self._tokens) // n_of
        if n > known:
            new = segments.committed(known * n_of, n * n_of)
            if len(new) != (n - known) * n_of:  # it is closed
                return
            self._tokens = self._tokens + new
        for number in range(self._n_noted, n):
            self._cache.put(self, number, segments.stamp(number))
        self._n_noted = n

    def block(self, number: int, kind: int) -> Block:
        """The block of a segment. The key of the model must be known."""
        segments = self.segments
        first = self._cache.first_key(segments)
        assert first is not None
        n_of = segments.n_tokens
        while len(self._keys) <= number:
            at = len(self._keys) * n_of
            self._keys.append(next_key(self._keys[-1] if self._keys else first, self._tokens[at : at + n_of]))
        model, cache_type = self._cache.model, self._cache.cache_type
        return Block(self._keys[number], kind, number, n_of, segments.n_bytes[kind], model, cache_type)

    def used_ns(self, number: int) -> int:
        """When a segment of it was of use."""
        return self._used_ns - number * _DEPTH_NS


class ContextCache:
    """The contexts on disk of one loaded model.

    A thread of low priority writes what texts have noted, and reads the model once to know its content, where that is
    not known from earlier.  folder: of the blocks.  model, cache_type: their names.  problem: why nothing is written
    any more, None as long as all is well.
    """

    def __init__(self, folder: SizedFolder, content: ModelContent, model: str, cache_type: str, facts: object) -> None:
        """facts: what the bytes depend on beside those of Segments.facts."""
        self.folder = folder
        self.model, self.cache_type = model, cache_type
        self.problem: str | None = None
        self._content, self._facts = content, facts
        self._first_key: bytes | None = None
        self._changed = threading.Condition()
        # Of windows first: their segments give way to the next ones.
        self._of_windows: deque[_Job] = deque(maxlen=_MOST_JOBS)
        self._others: deque[_Job] = deque(maxlen=_MOST_JOBS)
        self._is_busy = self._is_closing = self._must_end = False
        self._thread: threading.Thread | None = None

    def text(self, session: Session, tokens: list[int]) -> KeptText | None:
        """What reads and writes the segments of a text that begins; None where its session has none."""
        if not isinstance(session, SegmentedSession) or (segments := session.segments) is None:
            return None
        text = KeptText(self, session, segments)
        with suppress(OSError):
            text.find(tokens)
        return text

    def first_key(self, segments: Segments) -> bytes | None:
        """See blocks.first_key; None as long as the content of the model is not known."""
        if self._first_key is None and self._content.value is not None:
            self._first_key = first_key(self._content.value, self._facts, segments.facts)
        return self._first_key

    @property
    def is_writing(self) -> bool:
        """Whether what is put is written."""
        return self.problem is None and not self._is_closing

    def put(self, text: KeptText, number: int, stamp: int) -> None:
        """Have a segment of a text written."""
        with self._changed:
            for kind in text.segments.n_bytes:
                (self._of_windows if kind else self._others).append(_Job(text, number, kind, stamp))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="edgeinfer-contexts", daemon=True)
                self._thread.start()
            self._changed.notify()

    def flush(self, seconds: float = _CLOSING_SECONDS) -> bool:
        """Wait until all is written, at most so long; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._has_jobs or self._is_busy), seconds)

    def close(self) -> None:
        """Write what texts have noted, for some seconds at most, and end."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self.flush()
            self._must_end = True
            self._thread.join(_CLOSING_SECONDS)
        if self._thread is None or not self._thread.is_alive():
            self._content.close()

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        with suppress(AttributeError, OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)
        while (job := self._next_job()) is not None:
            try:
                self._store(job)
            except LookupError:  # the text has been cut, or others needed the memory
                pass
            except (OSError, EOFError, EdgeInferError) as error:
                self._give_up(error)
            finally:
                with self._changed:
                    self._is_busy = False
                    self._changed.notify_all()

    @property
    def _has_jobs(self) -> bool:
        return bool(self._of_windows or self._others)

    def _next_job(self) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._has_jobs or self._is_closing)
            if not self._has_jobs or self._must_end:
                return None
            self._is_busy = True
            return (self._of_windows or self._others).popleft()

    def _give_up(self, error: Exception) -> None:
        self.problem = getattr(error, "strerror", None) or str(error)
        with self._changed:
            self._of_windows.clear()
            self._others.clear()

    def _store(self, job: _Job) -> None:
        """Write a block, unless it is there. Raises LookupError where its bytes are gone, OSError."""
        segments = job.text.segments
        if self.first_key(segments) is None:
            self._content.compute(lambda: not self._must_end)
            if self.first_key(segments) is None:
                return
        block, used_ns = job.text.block(job.number, job.kind), job.text.used_ns(job.number)
        if self.folder.touch(block.name, block.file_bytes, used_ns):
            return

        def fill(file: BinaryIO) -> None:
            sum_of_bytes = segments.byte_sum(block.header(), 0)
            file.write(bytes(HEADER_BYTES))
            for piece in segments.pieces(job.kind, job.number, job.stamp):
                sum_of_bytes = segments.byte_sum(piece, sum_of_bytes)
                file.write(piece)
            file.seek(0)
            file.write(write_header(block, sum_of_bytes))

        self.folder.write(block.name, block.file_bytes, used_ns, fill)
