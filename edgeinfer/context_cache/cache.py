"""Contexts on disk: blocks are written behind the answer, and read back where a text begins with the same tokens.

What is read are bytes that a forward pass of the same tokens gave, and passes after them give the same bits whether a
segment was computed or read. So this changes no text; what is missing, damaged or of another model is computed.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from edgeinfer.backends.base import SegmentedSession, Segments, Session
from edgeinfer.common.errors import EdgeInferError
from edgeinfer.common.files import cache_folder
from edgeinfer.context_cache.blocks import HEADER_BYTES, Block, block_of, first_key, write_header
from edgeinfer.context_cache.folder import Kept, SizedFolder
from edgeinfer.context_cache.kept_text import KeptText
from edgeinfer.context_cache.model_content import ModelContent

_MOST_JOBS = 1 << 14  # blocks that wait to be written; what comes then takes the place of the oldest
_CLOSING_SECONDS = 5.0  # that a closing engine waits for what is still to be written
_LOW_PRIORITY = 19


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
    tail: tuple[int, ...]  # its tokens where it is not whole


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
        text = KeptText(self, session, segments, self.model, self.cache_type)
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

    def put(self, text: KeptText, number: int, stamp: int, tail: tuple[int, ...] = ()) -> None:
        """Have a segment of a text written.  tail: its tokens where it is not whole."""
        with self._changed:
            for kind in text.segments.n_bytes:
                (self._of_windows if kind else self._others).append(_Job(text, number, kind, stamp, tail))
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
        text, number, kind = job.text, job.number, job.kind
        block = text.tail(number, kind, job.tail) if job.tail else text.block(number, kind)
        used_ns = text.used_ns(number)
        if self._is_there(block) and self.folder.touch(block.name, block.file_bytes, used_ns):
            return

        def fill(file: BinaryIO) -> None:
            sum_of_bytes = segments.byte_sum(block.header(), 0)
            file.write(bytes(HEADER_BYTES))
            for piece in segments.pieces(kind, number, block.n_tokens, job.stamp):
                sum_of_bytes = segments.byte_sum(piece, sum_of_bytes)
                file.write(piece)
            file.seek(0)
            file.write(write_header(block, sum_of_bytes))

        self.folder.write(block.name, block.file_bytes, used_ns, fill)
        if not job.tail and number:  # the text has gone on
            old = text.tail(number, kind, ())
            if self.folder.has(old.name, old.file_bytes):
                self.folder.remove(old.name)

    def _is_there(self, block: Block) -> bool:
        """Whether the file of a block, if there is one, holds as much: a tail may be that of another text."""
        if not block.tokens:
            return True
        try:
            found = block_of(self.folder.path, Kept(block.name, block.file_bytes, 0))
        except OSError:
            return False
        return found is not None and found.tokens[: block.n_tokens] == block.tokens
