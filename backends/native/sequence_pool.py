"""The memory that the sessions of a model share, and what was read before and is still held in it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

from edgeinfer.backends.checks import common_length
from edgeinfer.backends.native import _core

WORTH_KEEPING = 32  # tokens: a sequence that loses fewer to the next one is not parked


class Held(Protocol):
    """A session of the pool. held: its state and the tokens that are committed; None once it is closed."""

    @property
    def held(self) -> tuple[_core.SequenceState, list[int]] | None:
        """See Held."""
        ...


class SharedPool:
    """A pool of C++, and the tokens of the sequences in it.

    core: the pool.  n_sequences: that run at once.  Tokens of parked sequences are known by the number that the pool
    gave them; it may have dropped some since.
    """

    def __init__(self, core: _core.SequencePool, n_sequences: int) -> None:
        self.core = core
        self.n_sequences = n_sequences
        self._parked: dict[int, list[int]] = {}
        self._sessions: weakref.WeakSet[Held] = weakref.WeakSet()
        self._lock = threading.Lock()  # sessions may come and go in other threads

    def state(self, session: Held) -> _core.SequenceState:
        """The state of a new sequence, whose session others find their beginnings in."""
        with self._lock:
            self._sessions.add(session)
        return _core.SequenceState(self.core)

    def park(self, state: _core.SequenceState, tokens: Sequence[int]) -> None:
        """Park a committed sequence, unless a parked one can be cut to it; forget those that it can be cut to."""
        n_past = len(tokens)
        lengths = {number: common_length(parked, tokens) for number, parked in self._held().items()}
        if any(n == n_past and state.reach_parked(number, n) == n for number, n in lengths.items()):
            return
        for number, length in lengths.items():
            if length == len(self._parked[number]) and state.reach(length) == length:
                self.core.forget(number)
                del self._parked[number]
        self._parked[state.park()] = list(tokens)

    def forget_parked(self) -> None:
        """Forget all parked sequences."""
        for number in self.core.parked():
            self.core.forget(number)
        self._parked.clear()

    def share_prefix(self, session: Held, tokens: Sequence[int], more_than: int) -> int | None:
        """Make the longest beginning of tokens that a parked sequence or another session holds the committed sequence.

        Gives its length, or None where there is none of more than `more_than` tokens; the session is as before then.
        A session that another thread runs meanwhile may leave less of it.
        """
        assert session.held is not None
        state, best, take = session.held[0], more_than, None
        for number, parked in self._held().items():
            if len(parked) > best and (n := state.reach_parked(number, common_length(parked, tokens))) > best:
                best, take = n, partial(state.resume, number)
        with self._lock:
            sessions = list(self._sessions)
        for other in sessions:
            if other is session or (held := other.held) is None or len(held[1]) <= best:
                continue
            if (n := held[0].shared_reach(common_length(held[1], tokens))) > best:
                best, take = n, partial(state.share, held[0])
        return None if take is None else take(best)

    def _held(self) -> dict[int, list[int]]:
        """The parked sequences that the pool has not dropped."""
        self._parked = {number: self._parked[number] for number in self.core.parked() if number in self._parked}
        return self._parked


def full_pool(wants: Iterable[tuple[SharedPool, _core.SequenceState, int]], by_batches: bool) -> SharedPool | None:
    """The first pool that has no room for so many slots after the committed ones of these states; None where all have.

    by_batches: for slots that are committed n_batch at a time, rather than pending all at once.
    """
    of_pools: dict[SharedPool, list[tuple[_core.SequenceState, int]]] = {}
    for pool, state, n_slots in wants:
        of_pools.setdefault(pool, []).append((state, n_slots))
    return next((pool for pool, of_pool in of_pools.items() if not pool.core.has_free(of_pool, by_batches)), None)
