"""The Model, whose process may be lost, and its Session: checks of arguments, and what of the committed text the
process does not know yet.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import numpy as np
from numpy.typing import ArrayLike

from edgeinfer.backends.base import HasProcesses, Rows, Session
from edgeinfer.backends.checks import (
    check_cache_type,
    check_parents,
    check_path,
    check_rows,
    check_session_size,
    check_taps,
    check_tokens,
)
from edgeinfer.backends.in_turn import forward_in_turn
from edgeinfer.backends.llama_cpp.context import MAX_OUTPUTS
from edgeinfer.backends.llama_cpp.loading import Loaded, load
from edgeinfer.backends.llama_cpp.process import Ended, Process
from edgeinfer.common.errors import (
    BackendLost,
    BackendUnavailable,
    BudgetExceeded,
    EdgeInferError,
    InvalidArgument,
    ModelFileError,
    ShapeError,
    UnsupportedModel,
)
from edgeinfer.common.file_identity import FileWatch
from edgeinfer.common.one_process import OfOneProcess
from edgeinfer.common.overriding import override
from edgeinfer.common.settings import CacheType
from edgeinfer.common.types import Logits, LogitsRows, MemoryUse, Output, TokenIds
from edgeinfer.models import ModelSizes


def _none() -> TokenIds:
    return np.empty(0, dtype=np.int32)


@dataclass(frozen=True)
class SessionText:
    """What is committed, and what of the last pass may be.

    n_past: committed tokens.  kept: rows of the last pass that were committed, which the process does not know yet.
    links: parents of the rows of the last pass, nothing once they are committed or dropped.
    """

    n_past: int = 0
    kept: TokenIds = field(default_factory=_none)
    links: TokenIds = field(default_factory=_none)


class LlamaCppModel(OfOneProcess, HasProcesses):
    """See edgeinfer.backends.base.Model. It is in a process of its own, which may crash without this one.

    llama.cpp holds one context, so there is one session at a time. After a crash each call raises BackendLost, until
    `Session.reuse_prefix` begins a new text: that starts a process anew.
    files: those of the model, which llama.cpp maps: each pass checks that they are what they were.
    """

    def __init__(self, loaded: Loaded, files: Sequence[FileWatch]) -> None:
        self.spec = loaded.sizes
        self.n_ctx = loaded.wanted.settings.n_ctx
        self.n_batch = loaded.wanted.settings.n_batch
        self._loaded = loaded
        self._files = files
        self._process = loaded.process
        self._session: weakref.ref[LlamaCppSession] | None = None
        self._lost: str | None = None
        self._is_closed = False

    @property
    @override
    def process_ids(self) -> tuple[int, ...]:
        return (self._process.pid,)

    def session(self, n_ctx: int | None = None, cache_type: CacheType | None = None) -> LlamaCppSession:
        """See Model.session. Raises InvalidArgument where another session is open, and for another cache type."""
        if self.is_lost:
            self.restart()
        self.check_open()
        if self._session is not None and (other := self._session()) is not None and not other.is_closed:
            raise InvalidArgument("llama.cpp holds one text at a time: close the session that is open, or load again")
        if cache_type is not None:
            check_cache_type(cache_type)
        planned = self._loaded.wanted.settings.cache_type
        if cache_type not in (None, planned):
            raise InvalidArgument(f"the cache was planned with type {planned}: found {cache_type}; load again")
        session = LlamaCppSession(self, check_session_size(n_ctx, self.n_ctx))
        self._session = weakref.ref(session)
        return session

    def forward(self, batch: Sequence[Rows]) -> list[Output]:
        """See Model.forward."""
        return forward_in_turn(self, batch)

    def memory(self) -> MemoryUse:
        """Bytes of the buffers that llama.cpp logged, without the KV cache; the vocabulary is not counted."""
        return replace(self.all_memory(), kv_cache=0)

    def interrupt(self) -> None:
        """See Model.interrupt."""
        self._process.stop()

    def close(self) -> None:
        """Give the memory back. Further calls raise."""
        self._is_closed = True
        self._process.close()
        for file in self._files:
            file.close()

    # ---- What its session uses ---------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raises EdgeInferError if it is closed, BackendLost if its process has ended."""
        if self._is_closed:
            raise EdgeInferError("this model is closed")
        if self._lost is not None:
            raise BackendLost(self._lost)

    def all_memory(self) -> MemoryUse:
        """Bytes of the buffers that llama.cpp logged, to 0.01 MiB each; the vocabulary is not counted."""
        self.check_open()
        return self._loaded.use

    def run(
        self, text: SessionText, ids: TokenIds, links: TokenIds, rows: TokenIds, has_run: Callable[[], None]
    ) -> Logits:
        """Logits (len(rows), n_vocab) of a pass behind a text; has_run: called once the process has run it.

        Raises BackendLost if llama.cpp fails or crashes, ModelFileChanged if somebody has written to the model's file,
        which may be why.
        """
        wanted, places = np.unique(rows, return_inverse=True)
        shared, n_vocab = self._process.shared, self.spec.n_vocab
        n_kept = MAX_OUTPUTS * n_vocab
        shared.reserve(len(wanted) * n_vocab, n_kept)
        try:
            self._process.ask("forward", text.n_past, arrays=[text.kept, ids, links, wanted], then=has_run)
        except Ended as end:
            try:
                self._lose(f"llama.cpp crashed on a pass of {len(ids)} tokens: {end}", end)
            finally:
                self._check_files()
        self._check_files()
        logits: Logits = shared.array((len(wanted), n_vocab))[places]
        shared.reserve(0, n_kept)
        return logits

    @property
    def is_lost(self) -> bool:
        """Whether the process has ended and `restart` may start another."""
        return self._lost is not None and not self._is_closed

    def restart(self) -> None:
        """Load the model into another process. Raises BackendLost; ModelFileChanged where the file was written to."""
        wanted = self._loaded.wanted
        self._check_files()
        try:
            for file in self._files:
                file.check_name()  # by which the process opens it
            self._process = Process()  # where `interrupt` finds it
            loaded = load(wanted, self._process)
            if loaded.sizes != self.spec:
                loaded.process.close()
                raise UnsupportedModel(f"{wanted.name} has become another model; load it anew")
        except (BackendUnavailable, BudgetExceeded, ModelFileError) as error:
            raise BackendLost(f"{self._lost}; it was started again, and failed: {error}") from error
        self._loaded, self._lost = loaded, None

    def _check_files(self) -> None:
        for file in self._files:
            file.check()

    def _lose(self, why: str, end: Ended) -> NoReturn:
        """Raise BackendLost, now and in each call until llama.cpp is started again; after a crash with less at risk."""
        self._lost = why
        self._process.close()
        if end.is_fault:
            self._loaded = replace(self._loaded, wanted=replace(self._loaded.wanted, extra_buffers=False))
        raise BackendLost(why) from end


class LlamaCppSession(OfOneProcess, Session):
    """See edgeinfer.backends.base.Session."""

    def __init__(self, model: LlamaCppModel, n_ctx: int) -> None:
        self.model = model
        self.n_ctx = n_ctx
        self.n_batch = model.n_batch
        self.is_closed = False
        self._text = SessionText()  # one object, put in one assignment: Ctrl-C finds the old or the new

    @property
    @override
    def spec(self) -> ModelSizes:
        return self.model.spec

    @property
    @override
    def n_past(self) -> int:
        """Number of committed tokens."""
        return self._open().n_past

    @override
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
        on others. Raises BackendLost if llama.cpp fails or crashes.
        """
        text = self._open()
        ids = check_tokens(tokens, self.spec.n_vocab, text.n_past, self.n_ctx)
        links = check_parents(parents, len(ids))
        rows = check_rows(logits, len(ids))
        if check_taps(hidden, self.spec.n_layers):
            raise InvalidArgument("the llama.cpp backend gives no hidden states; use the native or reference backend")
        is_chain = parents is None or np.array_equal(links, np.arange(-1, len(ids) - 1))
        if not is_chain and len(ids) > self.n_batch:
            raise ShapeError(f"a tree must fit into one batch of {self.n_batch} tokens: found {len(ids)}")
        return Output(self._run(text, ids, links, rows))

    @override
    def commit(self, path: ArrayLike) -> None:
        text = self._open()
        rows = check_path(path, text.links)
        self._text = SessionText(text.n_past + len(rows), rows if len(text.links) else text.kept)

    @override
    def truncate(self, n_past: int) -> int:
        """See Session.truncate. Reaches every length: a model with a state reads the text again in its next pass."""
        text = self._open()
        if not 0 <= n_past <= text.n_past:
            raise ShapeError(f"n_past must be in 0..{text.n_past}: found {n_past}")
        self._text = SessionText(n_past, text.kept)
        return n_past

    @override
    def reuse_prefix(self, tokens: ArrayLike) -> int:
        """See Session.reuse_prefix. Reuses nothing, 0: llama.cpp's logits depend on how a text was cut into passes.

        Starts llama.cpp again if it has crashed. Raises BackendLost if that fails.
        """
        if not self.is_closed and self.model.is_lost:
            self._text = SessionText()  # first: no Ctrl-C may leave the old one with the new process
            self.model.restart()
        return self.truncate(0)

    @override
    def memory(self) -> MemoryUse:
        """Bytes of the buffers that llama.cpp logged, to 0.01 MiB each; the vocabulary is not counted."""
        self._open()
        return self.model.all_memory()

    @override
    def interrupt(self) -> None:
        self.model.interrupt()

    @override
    def close(self) -> None:
        """End this text; the model may then have another session. Further calls raise."""
        self.is_closed = True

    def _open(self) -> SessionText:
        if self.is_closed:
            raise EdgeInferError("this session is closed")
        self.model.check_open()
        return self._text

    def _run(self, text: SessionText, ids: TokenIds, links: TokenIds, rows: TokenIds) -> Logits:
        """Logits (len(rows), n_vocab) of a pass."""

        def has_run() -> None:
            self._text = SessionText(text.n_past)  # what was committed before is known there now

        out = self.model.run(text, ids, links, rows, has_run)
        self._text = SessionText(text.n_past, links=links)
        return out
