"""The state of one text: layer states, pending rows, and parked texts that it may return to."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgeinfer.backends.base import Rows, Session
from edgeinfer.backends.checks import (
    check_features,
    check_links,
    check_path,
    check_pending,
    check_rows,
    check_taps,
    check_tokens,
    common_length,
)
from edgeinfer.backends.native import _core
from edgeinfer.backends.native.passes import TextRows, interrupted
from edgeinfer.common.errors import EdgeInferError, InvalidArgument, ShapeError
from edgeinfer.common.one_process import OfOneProcess
from edgeinfer.common.overriding import override
from edgeinfer.common.settings import CacheType
from edgeinfer.common.types import LogitsRows, MemoryUse, Output
from edgeinfer.models import ModelSpec

if TYPE_CHECKING:
    from edgeinfer.backends.native.model import NativeDecoder, NativeModel

_ROWS = 32  # of logits whose memory is used again: as many as a verify pass has
WORTH_KEEPING = 32  # tokens: a text that loses fewer to the next one is not parked


class NativeText(OfOneProcess):
    """The common part of sessions of models and of draft heads."""

    def __init__(self, decoder: NativeDecoder, n_ctx: int, cache_type: CacheType) -> None:
        self.n_ctx = n_ctx
        self.n_batch: int = decoder.n_batch
        self._decoder = decoder
        self._state: _core.TextState | None = decoder.state(n_ctx, cache_type)
        self._parents: list[int] = []  # of what is pending: forwarded and not committed
        self._tokens: list[int] = []
        self._text: list[int] = []  # committed
        self._rows: mmap.mmap | None = None  # where logits of several rows were, used again
        self._keeps_rows = False
        self._array: weakref.ref[NDArray[np.float32]] | None = None  # of which all of those logits were views

    @property
    def n_past(self) -> int:
        """Number of committed tokens."""
        return self._open().n_past

    def commit(self, path: ArrayLike) -> None:
        """See Session.commit."""
        is_path = isinstance(path, list) and _is_path(path, self._parents)
        rows: Any = path if is_path else check_path(path, self._parents).tolist()
        if self._decoder.has_expert_cache and len(rows) < len(self._parents):
            self._decoder.decoder().commit_experts(self._open(), rows)
        # The list first: cut to n_past when read, it is right even if KeyboardInterrupt comes between the two.
        del self._text[self.n_past :]
        self._text += [self._tokens[row] for row in rows]
        self._parents = []
        self._open().commit(rows)

    def truncate(self, n_past: int) -> int:
        """See Session.truncate."""
        state = self._open()
        if not 0 <= n_past <= state.n_past:
            raise ShapeError(f"n_past must be in 0..{state.n_past}: found {n_past}")
        self._parents = []
        if n_past == 0 and not self._keeps_rows:  # others than these may not want so many
            self._rows = None
        n_reached = state.truncate(n_past)
        del self._text[n_reached:]
        return n_reached

    def reserve_rows(self, n: int) -> None:
        """Take memory for the logits of up to n rows now, and keep it for all passes: none waits for it later."""
        self._rows = self._array = None
        self._keeps_rows = True
        self._rows_for(min(n, _ROWS)).fill(0.0)

    def memory(self) -> MemoryUse:
        """Bytes that the model and this text hold now."""
        use = self._decoder.memory()
        return replace(use, kv_cache=self._open().used_bytes, windows=self._open().window_bytes)

    def interrupt(self) -> None:
        """See Session.interrupt. It stops the pass of any text of the model."""
        self._decoder.interrupt()

    def close(self) -> None:
        """Give the memory of this text back. Further calls raise. The model stays."""
        self._state = self._rows = self._array = None

    def _checked(self, rows: Rows, taps: Sequence[int], features: ArrayLike | None) -> TextRows:
        """Rows of this text, checked, with what comes with them. Raises ShapeError, ContextOverflow."""
        state, n_vocab = self._open(), self._decoder.decoder_spec.n_vocab
        n_pending = check_pending(rows.n_pending, len(self._parents))
        ids = check_tokens(rows.tokens, n_vocab, state.n_past + n_pending, self.n_ctx)
        wanted = check_rows(rows.logits, len(ids))
        pending = np.array(self._parents[:n_pending], dtype=np.int32)
        links, is_chain = check_links(pending, rows.parents, len(ids), self.n_batch)
        if not state.has_room(state.n_past + len(links)):
            raise ShapeError(
                f"the model has windows, so at most n_batch = {self.n_batch} tokens can be uncommitted behind "
                f"{state.n_past}: found {len(links)}; forward and commit n_batch at a time (run_text does)"
            )
        given = None if features is None else check_features(features, len(ids), self._decoder.decoder_spec.n_embd)
        return TextRows(state, ids, links, is_chain, n_pending, wanted, taps, given)

    def drop_pending(self) -> None:
        """Drop all pending rows: a pass begins that may fail."""
        self._parents = []

    def set_pending(self, rows: TextRows) -> None:
        """A pass has ended: its rows are pending, behind those that they came behind."""
        self._tokens = self._tokens[: rows.n_pending] + rows.tokens.tolist()
        self._parents = rows.links.tolist()

    def _forward_few(
        self,
        tokens: ArrayLike,
        parents: ArrayLike | None,
        n_pending: int,
        logits: LogitsRows,
        taps: tuple[int, ...],
        features: Any = None,
    ) -> Output | None:
        """What is usual, checked in C++ and so in little time; None for what is not, and for what is wrong.

        A step of a small model takes some milliseconds, a pass of a head a tenth of one. The checks in Python, whose
        code the weights have driven out of the caches, would add a twentieth, and a quarter.
        """
        few: Any = tokens.tolist() if isinstance(tokens, np.ndarray) and tokens.ndim == 1 else tokens
        if type(few) is not list or type(logits) is not str or type(n_pending) is not int:
            return None
        if not 0 <= n_pending <= len(self._parents) or logits not in ("last", "all"):
            return None
        if features is not None and not _is_float32(features):
            return None
        n, pending = len(few), self._parents[:n_pending]
        spec = self._decoder.decoder_spec
        out = self._rows_for(n) if logits == "all" and n > 1 else np.empty((1, spec.n_logits), dtype=np.float32)
        tapped = np.empty((len(taps), n, spec.n_embd), dtype=np.float32) if taps else None
        state, decoder, kept = self._open(), self._decoder.decoder(), self._parents
        before, self._parents = self._tokens[:n_pending], []  # first: a pass that is interrupted has overwritten them
        watcher = self._decoder.watcher
        if watcher is None:
            whole = decoder.forward_lists(state, few, parents, pending, out, taps, tapped, features)
        else:
            arguments = (state, few, parents, pending, out, taps, tapped, features)
            whole = watcher(few, lambda: decoder.forward_lists(*arguments))
        if whole is None:
            self._parents = kept
            return None
        if not whole:
            raise interrupted()
        self._decoder.check_files()
        self._tokens = before + few
        links: Any = range(n_pending - 1, n_pending + n - 1) if parents is None else parents
        self._parents = [*pending, *links]
        return Output(out, tapped)

    def _rows_for(self, n: int) -> NDArray[np.float32]:
        """Memory for the logits (n, n_logits) of a pass: that of an earlier one whose logits nobody has any more.

        A verify pass has up to 20 MB of them. Taken anew each time, the allocator would keep twice as much; so it is
        memory of its own, of which only what passes write to is there.
        """
        n_logits = self._decoder.decoder_spec.n_logits
        if n > _ROWS:
            return np.empty((n, n_logits), dtype=np.float32)
        if self._rows is None or (self._array is not None and self._array() is not None):
            self._rows = mmap.mmap(-1, _ROWS * n_logits * 4, access=mmap.ACCESS_COPY)
        array = np.frombuffer(self._rows, dtype=np.float32)
        self._array = weakref.ref(array)  # views keep it alive, whatever they were made of
        return array[: n * n_logits].reshape(n, n_logits)

    def _open(self) -> _core.TextState:
        if self._state is None:
            raise EdgeInferError("this session is closed")
        self._decoder.check_open()
        return self._state


class NativeSession(NativeText, Session):
    """See edgeinfer.backends.base.BranchingSession."""

    def __init__(self, model: NativeModel, n_ctx: int, cache_type: CacheType) -> None:
        super().__init__(model, n_ctx, cache_type)
        self.model = model
        self._parked: dict[int, list[int]] = {}  # texts that the state has parked, by its number

    @property
    @override
    def spec(self) -> ModelSpec:
        return self.model.spec

    @override
    def forward(
        self,
        tokens: ArrayLike,
        parents: ArrayLike | None = None,
        *,
        n_pending: int = 0,
        logits: LogitsRows = "last",
        hidden: bool | Sequence[int] = False,
    ) -> Output:
        """See BranchingSession.forward. A chain may have any length, where the model has no windows."""
        taps = check_taps(hidden, self.spec.n_layers)
        if (out := self._forward_few(tokens, parents, n_pending, logits, taps)) is not None:
            return out
        return self.model.forward([Rows(self, tokens, parents, logits, hidden, n_pending)])[0]

    def checked(self, rows: Rows) -> TextRows:
        """Rows of this text, checked. Raises ShapeError, ContextOverflow, InvalidArgument."""
        if rows.features is not None:
            raise InvalidArgument("only rows of draft heads have features")
        return self._checked(rows, check_taps(rows.hidden, self.spec.n_layers), None)

    @override
    def reuse_prefix(self, tokens: ArrayLike) -> int:
        """See Session.reuse_prefix. Finds the last texts too, as long as their memory was not needed for another.

        They share what they have in common, and take nothing beyond the planned cache.
        """
        state = self._open()
        wanted = np.asarray(tokens).tolist()
        self._parents = []
        del self._text[state.n_past :]
        self._parked = {number: self._parked[number] for number in state.parked() if number in self._parked}
        n_common = common_length(self._text, wanted)
        if len(self._text) - n_common >= WORTH_KEEPING:
            self._park()
        lengths = {
            number: state.reach_parked(number, common_length(text, wanted)) for number, text in self._parked.items()
        }
        best = max(lengths, key=lengths.__getitem__, default=-1)
        if lengths.get(best, 0) <= state.reach(n_common):
            return self.truncate(n_common)
        state.truncate(0)
        self._text = wanted[: lengths[best]]
        return state.resume(best, lengths[best])

    def _park(self) -> None:
        """Park the committed text, unless a parked one can be cut to it; forget those that it can be cut to."""
        state, n_past = self._open(), len(self._text)
        lengths = {number: common_length(text, self._text) for number, text in self._parked.items()}
        if any(n == n_past and state.reach_parked(number, n) == n for number, n in lengths.items()):
            return
        for number, length in lengths.items():
            if length == len(self._parked[number]) and state.reach(length) == length:
                state.forget(number)
                del self._parked[number]
        self._parked[state.park()] = list(self._text)


def _is_float32(values: object) -> bool:
    return isinstance(values, np.ndarray) and values.dtype == np.float32 and values.flags.c_contiguous


def _is_path(rows: Sequence[object], parents: Sequence[int]) -> bool:
    """Whether it surely is a path through them; check_path says what is wrong otherwise."""
    before = -1
    for row in rows:
        if type(row) is not int or not 0 <= row < len(parents) or parents[row] != before:
            return False
        before = row
    return True
