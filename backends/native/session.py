"""The state of one sequence: layer states, pending rows, and parked sequences that it may return to."""

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
from edgeinfer.backends.native.passes import SequenceRows, interrupted
from edgeinfer.common.errors import EdgeInferError, InvalidArgument, ShapeError
from edgeinfer.common.one_process import OfOneProcess
from edgeinfer.common.overriding import override
from edgeinfer.common.settings import CacheType
from edgeinfer.common.types import LogitsRows, MemoryUse, Output
from edgeinfer.models import ModelSpec

if TYPE_CHECKING:
    from edgeinfer.backends.native.model import NativeDecoder, NativeModel

_ROWS = 32  # of logits whose memory is used again: as many as a verify pass has
WORTH_KEEPING = 32  # tokens: a sequence that loses fewer to the next one is not parked


class _ReusedRows:
    """Memory for up to n_rows rows of logits, which are those of the next pass once nobody has any of them any more.

    A verify pass has up to 20 MB of them. Taken anew each time, the allocator would keep twice as much, and a step of a
    small model would spend a twentieth on page faults; so it is memory of its own, of which only what passes write to
    is there.
    """

    def __init__(self, n_rows: int, n_logits: int) -> None:
        self._n_rows = n_rows
        self._n_logits = n_logits
        self._memory: mmap.mmap | None = None
        self._array: weakref.ref[NDArray[np.float32]] | None = None  # of which all of the last rows were views

    def take(self, n: int) -> NDArray[np.float32]:
        """(n, n_logits) for the next pass, n <= n_rows. Memory that somebody still has logits in is left to them."""
        if self._memory is None or (self._array is not None and self._array() is not None):
            self._memory = mmap.mmap(-1, self._n_rows * self._n_logits * 4, access=mmap.ACCESS_COPY)
        array = np.frombuffer(self._memory, dtype=np.float32)
        self._array = weakref.ref(array)  # views keep it alive, whatever they were made of
        return array[: n * self._n_logits].reshape(n, self._n_logits)

    def drop(self) -> None:
        """Give the memory back once nobody has logits in it."""
        self._memory = self._array = None


class NativeSequence(OfOneProcess):
    """The common part of sessions of models and of draft heads."""

    def __init__(self, decoder: NativeDecoder, n_ctx: int, cache_type: CacheType) -> None:
        self.n_ctx = n_ctx
        self.n_batch: int = decoder.n_batch
        self._decoder = decoder
        self._state: _core.SequenceState | None = decoder.state(n_ctx, cache_type)
        self._parents: list[int] = []  # of what is pending: forwarded and not committed
        self._tokens: list[int] = []
        self._sequence: list[int] = []  # committed
        n_logits = decoder.decoder_spec.n_logits
        self._row, self._rows = _ReusedRows(1, n_logits), _ReusedRows(_ROWS, n_logits)  # for logits
        self._keeps_rows = False

    @property
    def n_past(self) -> int:
        """Number of committed tokens."""
        return self._open().n_past

    def commit(self, path: ArrayLike) -> None:
        """See Session.commit."""
        given: Any = list(path) if isinstance(path, range) else path
        is_path = isinstance(given, list) and _is_path(given, self._parents)
        rows: Any = given if is_path else check_path(given, self._parents).tolist()
        if self._decoder.has_expert_cache and len(rows) < len(self._parents):
            self._decoder.decoder().commit_experts(self._open(), rows)
        # The list first: cut to n_past when read, it is right even if KeyboardInterrupt comes between the two.
        del self._sequence[self.n_past :]
        self._sequence += [self._tokens[row] for row in rows]
        self._parents = []
        self._open().commit(rows)

    def truncate(self, n_past: int) -> int:
        """See Session.truncate."""
        state = self._open()
        if not 0 <= n_past <= state.n_past:
            raise ShapeError(f"n_past must be in 0..{state.n_past}: found {n_past}")
        self._parents = []
        if n_past == 0 and not self._keeps_rows:  # others than these may not need so many
            self._rows.drop()
        n_reached = state.truncate(n_past)
        del self._sequence[n_reached:]
        return n_reached

    def reserve_rows(self, n: int) -> None:
        """Take memory for the logits of up to n rows now, and keep it for all passes: none waits for it later."""
        self._rows.drop()
        self._keeps_rows = True
        self._rows.take(min(n, _ROWS)).fill(0.0)

    def memory(self) -> MemoryUse:
        """Bytes that the model and this sequence hold now."""
        use = self._decoder.memory()
        state = self._open()
        return replace(use, kv_cache=state.used_bytes, windows=state.window_bytes, states=state.recurrent_bytes)

    def interrupt(self) -> None:
        """See Session.interrupt. It stops the pass of any sequence of the model."""
        self._decoder.interrupt()

    def close(self) -> None:
        """Give the memory of this sequence back. Further calls raise. The model stays."""
        self._state = None
        self._row.drop()
        self._rows.drop()

    def _checked(self, rows: Rows, taps: Sequence[int], features: ArrayLike | None) -> SequenceRows:
        """Rows of this sequence, checked, with what comes with them. Raises ShapeError, ContextOverflow."""
        state, n_vocab = self._open(), self._decoder.decoder_spec.n_vocab
        n_pending = check_pending(rows.n_pending, len(self._parents))
        ids = check_tokens(rows.tokens, n_vocab, state.n_past + n_pending, self.n_ctx)
        requested = check_rows(rows.logits, len(ids))
        pending = np.array(self._parents[:n_pending], dtype=np.int32)
        links, is_chain = check_links(pending, rows.parents, len(ids), self.n_batch)
        if not state.has_room(state.n_past + len(links)):
            raise ShapeError(
                f"the model has windows, so at most n_batch = {self.n_batch} tokens can be uncommitted after "
                f"{state.n_past}: found {len(links)}; forward and commit n_batch at a time (run_sequence does)"
            )
        if not state.can_begin(links, n_pending, len(ids)):
            most = _core.MOST_ROWS_OF_RECURRENCE
            raise ShapeError(
                f"the model has recurrent layers, so a tree must fit into {most} tokens, and of a chain of more that "
                f"is pending all must stay or none: found {len(links)} tokens, {n_pending} of them pending before"
            )
        given = None if features is None else check_features(features, len(ids), self._decoder.decoder_spec.n_embd)
        return SequenceRows(state, ids, links, is_chain, n_pending, requested, taps, given)

    def drop_pending(self) -> None:
        """Drop all pending rows: a pass begins that may fail."""
        self._parents = []

    def set_pending(self, rows: SequenceRows) -> None:
        """A pass has ended: its rows are pending, after those that they came after."""
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
        out = self._logits_of(n, n if logits == "all" else 1)
        tapped = np.empty((len(taps), n, spec.n_embd), dtype=np.float32) if taps else None
        state, decoder, kept = self._open(), self._decoder.decoder(), self._parents
        before, self._parents = self._tokens[:n_pending], []  # first: a pass that is interrupted has overwritten them
        pass_hook = self._decoder.pass_hook
        if pass_hook is None:
            whole = decoder.forward_lists(state, few, parents, pending, out, taps, tapped, features)
        else:
            arguments = (state, few, parents, pending, out, taps, tapped, features)
            whole = pass_hook(few, lambda: decoder.forward_lists(*arguments))
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

    def _logits_of(self, n: int, n_rows: int) -> NDArray[np.float32]:
        """Memory for n_rows rows of logits of a pass of n tokens: that of an earlier pass, where it is free.

        Not for the last row of many tokens, which is that of a prompt: a request keeps it while it decodes.
        """
        if n_rows > _ROWS or n_rows < n:
            return np.empty((n_rows, self._decoder.decoder_spec.n_logits), dtype=np.float32)
        return (self._row if n == 1 else self._rows).take(n_rows)

    def _open(self) -> _core.SequenceState:
        if self._state is None:
            raise EdgeInferError("this session is closed")
        self._decoder.check_open()
        return self._state


class NativeSession(NativeSequence, Session):
    """See edgeinfer.backends.base.BranchingSession."""

    def __init__(self, model: NativeModel, n_ctx: int, cache_type: CacheType) -> None:
        super().__init__(model, n_ctx, cache_type)
        self.model = model
        self._parked: dict[int, list[int]] = {}  # sequences that the state has parked, by its number

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

    @override
    def commit(self, path: ArrayLike) -> None:
        """See Session.commit. In a model with recurrent layers, a part of a long chain takes another pass.

        That pass may be interrupted: nothing is committed then, and nothing is pending.
        """
        n = len(path) if isinstance(path, (list, tuple, range)) else int(np.asarray(path).size)
        if not self._open().can_commit(n):
            self.forward([self._tokens[row] for row in check_path(path, self._parents).tolist()], logits=())
        super().commit(path)

    def checked(self, rows: Rows) -> SequenceRows:
        """Rows of this sequence, checked. Raises ShapeError, ContextOverflow, InvalidArgument."""
        if rows.features is not None:
            raise InvalidArgument("only rows of draft heads have features")
        return self._checked(rows, check_taps(rows.hidden, self.spec.n_layers), None)

    @override
    def reuse_prefix(self, tokens: ArrayLike) -> int:
        """See Session.reuse_prefix. Finds the last sequences too, as long as their memory was not needed for another.

        They share what they have in common, and take nothing beyond the planned cache.
        """
        state = self._open()
        ids = np.asarray(tokens).tolist()
        self._parents = []
        del self._sequence[state.n_past :]
        self._parked = {number: self._parked[number] for number in state.parked() if number in self._parked}
        n_common = common_length(self._sequence, ids)
        if len(self._sequence) - n_common >= WORTH_KEEPING:
            self._park()
        lengths = {
            number: state.reach_parked(number, common_length(sequence, ids))
            for number, sequence in self._parked.items()
        }
        best = max(lengths, key=lengths.__getitem__, default=-1)
        if lengths.get(best, 0) <= state.reach(n_common):
            n_reused = self.truncate(n_common)
        else:
            state.truncate(0)
            self._sequence = ids[: lengths[best]]
            n_reused = state.resume(best, lengths[best])
        state.mark()
        return n_reused

    def _park(self) -> None:
        """Park the committed sequence, unless a parked one can be cut to it; forget those that it can be cut to."""
        state, n_past = self._open(), len(self._sequence)
        lengths = {number: common_length(sequence, self._sequence) for number, sequence in self._parked.items()}
        if any(n == n_past and state.reach_parked(number, n) == n for number, n in lengths.items()):
            return
        for number, length in lengths.items():
            if length == len(self._parked[number]) and state.reach(length) == length:
                state.forget(number)
                del self._parked[number]
        self._parked[state.park()] = list(self._sequence)


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
