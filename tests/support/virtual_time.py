"""A clock that no machine disturbs, a target and a drafter whose passes take as long as they are told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgeinfer.backends.base import Session
from edgeinfer.common.errors import Interrupted
from edgeinfer.common.types import Logits
from edgeinfer.speculation.drafters.base import Context
from edgeinfer.speculation.drafters.watchdog import Clock
from edgeinfer.speculation.tree import DraftTree


@dataclass
class _Waiter:
    is_true: Callable[[], bool]
    until: float | None
    is_released: bool = False


class VirtualClock(Clock):
    """Time that passes only while all threads wait, and then at once; one thread runs at a time.

    n_threads: of those that use it. After `end` it goes on as a real clock, for what is closed then.
    """

    def __init__(self, n_threads: int = 2) -> None:
        super().__init__()
        self._n_threads = n_threads
        self._time = 0.0
        self._waiters: list[_Waiter] = []
        self._ended = False
        self._ended_at = 0.0  # of the real clock

    def now(self) -> float:
        return self._time + (super().now() - self._ended_at if self._ended else 0.0)

    def sleep(self, seconds: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Let time pass, or less of it once that is so."""
        self.wait_for(is_over, seconds)

    def wait_for(self, is_true: Callable[[], bool], seconds: float | None = None) -> bool:
        with self._changed:
            if not self._ended and not is_true():
                waiter = _Waiter(is_true, None if seconds is None else self._time + seconds)
                self._waiters.append(waiter)
                self._changed.notify_all()
                self._release_one()
                is_over = self._changed.wait_for(lambda: waiter.is_released or self._ended, timeout=240)
                assert is_over, "another thread runs without end"
            return super().wait_for(is_true, None if self._ended else 0.0)

    def wait_for_the_other(self) -> None:
        """Return once another thread waits: one that begins late would run beside this one."""
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self._waiters), timeout=240)

    def end(self) -> None:
        with self._changed:
            self._ended_at = super().now()
            self._ended = True
            self._changed.notify_all()

    def _release_one(self) -> None:
        if len(self._waiters) < self._n_threads:
            return  # another thread runs
        ready = next((waiter for waiter in self._waiters if waiter.is_true()), None)
        if ready is None:
            ready = min(self._waiters, key=lambda waiter: float("inf") if waiter.until is None else waiter.until)
            if ready.until is None:
                raise AssertionError("all threads wait for each other")
            self._time = max(self._time, ready.until)
        self._waiters.remove(ready)
        ready.is_released = True
        self._changed.notify_all()


def slow_target(session: Session, seconds: Callable[[int], float], sleep: Callable[[float], None]) -> Session:
    """The session, whose passes take so many seconds by their number of tokens."""
    forward = session.forward

    def slow(tokens: Sequence[int], *arguments: Any, **options: Any) -> Any:
        out = forward(tokens, *arguments, **options)
        sleep(seconds(len(tokens)))
        return out

    session.forward = slow  # type: ignore[method-assign]
    return session


class SlowDrafter:
    """Knows the text, and takes its time for each token of it.

    is_right: whether it says the token of a place, or another one.  sleep: of seconds, or less once something is true.
    """

    name = "slow"

    def __init__(
        self,
        text: Sequence[int],
        is_right: Callable[[int], bool],
        seconds: float,
        sleep: Callable[[float, Callable[[], bool]], None],
    ) -> None:
        self._text, self._is_right, self._seconds, self._sleep = text, is_right, seconds, sleep
        self._interrupted = False
        self.reading = 0.0  # seconds for what of a text it has not read; lost where it is interrupted

    def start(self, context: Context) -> None: ...

    def propose(self, context: Context, limit: int) -> DraftTree:
        tokens: list[int] = []
        path_probabilities: list[float] = []
        while len(tokens) < limit and context.acceptance.should_extend(path_probabilities):
            self._interrupted = False
            self._sleep(self._seconds + self.reading, lambda: self._interrupted)
            if self._interrupted:
                raise Interrupted("stopped")
            self.reading = 0.0
            place = len(context.tokens) + len(tokens)
            known = self._text[place] if place < len(self._text) else 0
            tokens.append(known if self._is_right(place) else (known + 1) % 64)
            p = context.acceptance.probability(0, len(path_probabilities), 0.9)
            path_probabilities.append((path_probabilities[-1] if path_probabilities else 1.0) * p)
        n = len(tokens)
        return DraftTree(tokens, list(range(-1, n - 1)), [0.9] * n, [0] * n)

    def observe(self, context: Context, n_new: int, rows: Sequence[Logits]) -> None: ...

    def cost(self, context: Context) -> tuple[float, float]:
        return 1e3 * self._seconds, 0.0

    def prefill(self, context: Context) -> None: ...

    def interrupt(self) -> None:
        self._interrupted = True

    def close(self) -> None: ...


def every(share: float) -> Callable[[int], bool]:
    """True for that share of places, evenly and the same each time."""
    return lambda place: int((place + 1) * share) > int(place * share)


def in_another_thread(function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread
