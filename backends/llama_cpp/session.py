"""The Session: checks of arguments, and what of the committed text the process does not know yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import numpy as np
from numpy.typing import ArrayLike

from edgeinfer.backends.checks import check_parents, check_path, check_rows, check_taps, check_tokens
from edgeinfer.backends.llama_cpp.context import MAX_OUTPUTS
from edgeinfer.backends.llama_cpp.loading import Loaded, load
from edgeinfer.backends.llama_cpp.process import Ended, Process
from edgeinfer.errors import (
    BackendLost,
    BackendUnavailable,
    BudgetExceeded,
    EdgeInferError,
    InvalidArgument,
    ModelFileError,
    ShapeError,
    UnsupportedModel,
)
from edgeinfer.types import Logits, LogitsRows, MemoryUse, Output, TokenIds


def _none() -> TokenIds:
    return np.empty(0, dtype=np.int32)


@dataclass(frozen=True)
class _Text:
    """What is committed, and what of the last pass may be.

    n_past: committed tokens.  kept: rows of the last pass that were committed, which the process does not know yet.
    links: parents of the rows of the last pass, nothing once they are committed or dropped.
    """

    n_past: int = 0
    kept: TokenIds = field(default_factory=_none)
    links: TokenIds = field(default_factory=_none)


class LlamaCppSession:
    """See edgeinfer.backends.base.Session. The model is in a process of its own, which may crash without this one.

    It then says so, by BackendLost, in each call until `recall` begins a new text: that starts a process anew.
    """

    is_exact = False

    def __init__(self, loaded: Loaded) -> None:
        self.spec = loaded.sizes
        self.n_ctx = loaded.wanted.n_ctx
        self.n_batch = loaded.wanted.n_batch
        self._loaded = loaded
        self._process = loaded.process
        self._text = _Text()  # one object, put in one assignment: Ctrl-C finds the old or the new
        self._lost: str | None = None
        self._is_closed = False

    @property
    def n_past(self) -> int:
        """Number of committed tokens."""
        return self._open().n_past

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

    def commit(self, path: ArrayLike) -> None:
        """See Session.commit."""
        text = self._open()
        rows = check_path(path, text.links)
        self._text = _Text(text.n_past + len(rows), rows if len(text.links) else text.kept)

    def truncate(self, n_past: int) -> None:
        """See Session.truncate. A model that keeps a state reads the text again, in the next pass."""
        text = self._open()
        if not 0 <= n_past <= text.n_past:
            raise ShapeError(f"n_past must be in 0..{text.n_past}: found {n_past}")
        self._text = _Text(n_past, text.kept)

    def recall(self, tokens: ArrayLike) -> int:
        """See Session.recall. Finds nothing: the logits behind a text would depend on how it came there.

        Starts llama.cpp again if it has crashed. Raises BackendLost if that fails.
        """
        if self._lost is not None and not self._is_closed:
            self._start_again(self._lost)
        self.truncate(0)
        return 0

    def memory(self) -> MemoryUse:
        """Bytes of the buffers that llama.cpp logged, to 0.01 MiB each; the vocabulary is not counted."""
        self._open()
        return self._loaded.use

    def interrupt(self) -> None:
        """See Session.interrupt."""
        self._process.stop()

    def close(self) -> None:
        """Give the memory back. Further calls raise."""
        self._is_closed = True
        self._process.close()

    def _open(self) -> _Text:
        if self._is_closed:
            raise EdgeInferError("this session is closed")
        if self._lost is not None:
            raise BackendLost(self._lost)
        return self._text

    def _run(self, text: _Text, ids: TokenIds, links: TokenIds, rows: TokenIds) -> Logits:
        """Logits (len(rows), n_vocab) of a pass."""
        wanted, places = np.unique(rows, return_inverse=True)
        shared, n_vocab = self._process.shared, self.spec.n_vocab
        n_kept = MAX_OUTPUTS * n_vocab
        shared.reserve(len(wanted) * n_vocab, n_kept)

        def has_run() -> None:
            self._text = _Text(text.n_past)  # what was committed before is known there now

        try:
            self._process.ask("forward", text.n_past, arrays=[text.kept, ids, links, wanted], then=has_run)
        except Ended as end:
            self._lose(f"llama.cpp crashed on a pass of {len(ids)} tokens: {end}", end)
        out = shared.array((len(wanted), n_vocab))[places]
        shared.reserve(0, n_kept)
        self._text = _Text(text.n_past, links=links)
        return out

    def _lose(self, why: str, end: Ended) -> NoReturn:
        """Raise BackendLost, now and in each call until llama.cpp is started again; after a crash with less at risk."""
        self._lost = why
        self._process.close()
        if end.is_fault:
            self._loaded = replace(self._loaded, wanted=replace(self._loaded.wanted, extra_buffers=False))
        raise BackendLost(why) from end

    def _start_again(self, why: str) -> None:
        """Load the model into another process. Raises BackendLost."""
        wanted = self._loaded.wanted
        try:
            self._process = Process()  # where `interrupt` finds it
            loaded = load(wanted, self._process)
            if loaded.sizes != self.spec:
                loaded.process.close()
                raise UnsupportedModel(f"{wanted.name} has become another model; load it anew")
        except (BackendUnavailable, BudgetExceeded, ModelFileError) as error:
            raise BackendLost(f"{why}; it was started again, and failed: {error}") from error
        self._loaded, self._text, self._lost = loaded, _Text(), None
