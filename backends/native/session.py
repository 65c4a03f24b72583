"""The state of one sequence: layer states and pending rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
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
from edgeinfer.backends.native.passes import Listed, SequenceRows
from edgeinfer.backends.native.reused_rows import ReusedRows
from edgeinfer.backends.native.segments import NativeSegments, segments_of
from edgeinfer.backends.native.sequence_pool import WORTH_KEEPING, SharedPool, full_pool
from edgeinfer.common.errors import EdgeInferError, InvalidArgument, ShapeError
from edgeinfer.common.one_process import OfOneProcess
from edgeinfer.common.overriding import override
from edgeinfer.common.types import LogitsRows, MemoryUse, Output
from edgeinfer.models import ModelSpec

if TYPE_CHECKING:
    from edgeinfer.backends.native.model import NativeDecoder, NativeModel

_ROWS = 32  # of logits whose memory is used again: as many as a verify pass has


class NativeSequence(OfOneProcess, ABC):
    """The common part of sessions of models and of draft heads."""

    def __init__(self, decoder: NativeDecoder, n_ctx: int, pool: SharedPool) -> None:
        self.n_ctx = n_ctx
        self.n_batch: int = decoder.n_batch
        self._decoder = decoder
        self._pool = pool
        self._state: _core.SequenceState | None = pool.state(self)
        self._parents: list[int] = []  # of what is pending: forwarded and not committed
        self._tokens: list[int] = []
        self._sequence: list[int] = []  # committed
        n_logits = decoder.decoder_spec.n_logits
        self._row, self._rows = ReusedRows(1, n_logits), ReusedRows(_ROWS, n_logits)  # for logits
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
        """Bytes that the model and the pool of this sequence hold now."""
        self._open()
        use, pool = self._decoder.memory(), self._pool.core
        return replace(use, kv_cache=pool.used_bytes, windows=pool.window_bytes, states=pool.recurrent_bytes)

    @property
    def held(self) -> tuple[_core.SequenceState, list[int]] | None:
        """The state, and the tokens that are committed; None once this session is closed."""
        state = self._state
        return None if state is None else (state, self._sequence[: state.n_past])

    def add_committed(self, tokens: Sequence[int], commit: Callable[[], bool | None]) -> bool | None:
        """Note tokens that a function commits by other means than a pass; gives what that gives, True if it did."""
        self._parents = []
        del self._sequence[self.n_past :]
        self._sequence += tokens  # first, as in `commit`
        return commit()

    def has_room(self, n_slots: int) -> bool:
        """Whether so many slots after n_past can be had now, forgetting parked sequences where that is needed.

        Slots of pending rows count among them. Changes nothing.
        """
        return self.n_past + n_slots <= self.n_ctx and full_pool([self.want(n_slots)], by_batches=True) is None

    @property
    def state(self) -> _core.SequenceState:
        """What is kept of the sequence, which heads may read. Raises EdgeInferError once this is closed."""
        return self._open()

    def want(self, n_slots: int) -> tuple[SharedPool, _core.SequenceState, int]:
        """So many slots after n_past, as full_pool takes them."""
        return self._pool, self._open(), n_slots

    def interrupt(self) -> None:
        """See Session.interrupt. It stops the pass of any sequence of the model."""
        self._decoder.interrupt()

    def close(self) -> None:
        """Give the memory of this sequence back. Further calls raise. The model stays."""
        if self._state is not None:
            self._state.close()
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
            raise ShapeError(
                f"the model has recurrent layers, so a tree must fit into {state.most_rows_of_tree} tokens, "
                f"and of a chain of more that is pending all must stay or none: "
                f"found {len(links)} tokens, {n_pending} of them pending before"
            )
        given = None if features is None else check_features(features, len(ids), self._decoder.decoder_spec.n_embd)
        return SequenceRows(state, ids, links, is_chain, n_pending, requested, taps, given)

    def set_pending(self, rows: SequenceRows) -> None:
        """A pass has ended: its rows are pending, after those that they came after."""
        self._tokens = self._tokens[: rows.n_pending] + rows.tokens.tolist()
        self._parents = rows.links.tolist()

    def listed(
        self,
        tokens: ArrayLike,
        parents: ArrayLike | None,
        n_pending: int,
        logits: LogitsRows,
        taps: tuple[int, ...],
        features: Any = None,
    ) -> Listed | None:
        """What is usual, as C++ checks it in little time; None for what is not, and for what is wrong.

        A step of a small model takes some milliseconds, a pass of a head a tenth of one. The checks in Python, whose
        code the weights have driven out of the caches, would add a twentieth, and a quarter.
        """
        few: Any = tokens.tolist() if isinstance(tokens, np.ndarray) and tokens.ndim == 1 else tokens
        if type(few) is not list or type(logits) is not str or type(n_pending) is not int:
            return None
        if not 0 <= n_pending <= len(self._parents) or logits not in ("last", "all") or len(few) > self.n_batch:
            return None
        if features is not None and not _is_float32(features):
            return None
        n_embd = self._decoder.decoder_spec.n_embd
        tapped = np.empty((len(taps), len(few), n_embd), dtype=np.float32) if taps else None
        return self._open(), few, parents, self._parents[:n_pending], logits == "all", taps, tapped, features

    @abstractmethod
    def lists_of(self, rows: Rows) -> Listed | None:
        """See `listed`."""

    def begin(self) -> list[int]:
        """Drop all pending rows: a pass begins that may fail. Gives what `go_back` takes where it did not begin."""
        kept, self._parents = self._parents, []
        return kept

    def go_back(self, kept: list[int]) -> None:
        """What was pending is so still."""
        self._parents = kept

    def end(self, lists: Listed) -> None:
        """A pass has ended: its rows are pending, after those that they came after."""
        _, few, parents, pending, *_ = lists
        n_pending = len(pending)
        links: Any = range(n_pending - 1, n_pending + len(few) - 1) if parents is None else parents
        self._tokens = self._tokens[:n_pending] + few
        self._parents = [*pending, *links]

    def _forward_few(
        self,
        tokens: ArrayLike,
        parents: ArrayLike | None,
        n_pending: int,
        logits: LogitsRows,
        taps: tuple[int, ...],
        features: Any = None,
    ) -> Output | None:
        """The output of a pass of these rows alone; None where they are not as `listed` has them."""
        if (lists := self.listed(tokens, parents, n_pending, logits, taps, features)) is None:
            return None
        n = len(lists[1])
        out = self._logits_of(n, n if logits == "all" else 1)
        return Output(out, lists[6]) if self._decoder.run_lists([self], [lists], out) else None

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

    def __init__(self, model: NativeModel, n_ctx: int, pool: SharedPool) -> None:
        super().__init__(model, n_ctx, pool)
        self.model = model

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
        taps = self._taps_of(hidden)
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
        return self._checked(rows, self._taps_of(rows.hidden), None)

    @override
    def lists_of(self, rows: Rows) -> Listed | None:
        if rows.features is not None:
            return None
        return self.listed(rows.tokens, rows.parents, rows.n_pending, rows.logits, self._taps_of(rows.hidden))

    def _taps_of(self, hidden: bool | Sequence[int]) -> tuple[int, ...]:
        """See check_taps."""
        return () if hidden is False else check_taps(hidden, self.spec.n_layers)

    @override
    def reuse_prefix(self, tokens: ArrayLike) -> int:
        """See Session.reuse_prefix. Finds parked sequences and other sessions of the pool too.

        Sequences share what they have in common, and nothing beyond the planned cache is taken.
        """
        state = self._open()
        ids = np.asarray(tokens).tolist()
        self._parents = []
        del self._sequence[state.n_past :]
        n_common = common_length(self._sequence, ids)
        if len(self._sequence) - n_common >= WORTH_KEEPING:
            self._pool.park(state, self._sequence)
        n_reused = self._pool.share_prefix(self, ids, state.reach(n_common))
        if n_reused is None:
            n_reused = self.truncate(n_common)
        else:
            self._sequence = ids[:n_reused]
        state.mark()
        return n_reused

    @property
    def segments(self) -> NativeSegments | None:
        """See SegmentedSession.segments; None also for a session with a size or a type of its own."""
        cache_type = self.model.cache_type_of(self._pool)
        return None if cache_type is None else segments_of(self, self._open(), self.spec, cache_type)

    def park(self) -> None:
        """Keep the committed sequence for later requests, as long as its memory is not needed, and become empty."""
        state = self._open()
        self._parents = []
        del self._sequence[state.n_past :]
        if len(self._sequence) >= WORTH_KEEPING:
            self._pool.park(state, self._sequence)
        self.truncate(0)


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
