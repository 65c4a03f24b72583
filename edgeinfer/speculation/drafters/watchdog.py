"""Runs a drafter's calls in a thread of their own with a time limit: a device that hangs cannot block the answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition, Thread
from time import perf_counter
from typing import TypeVar

from edgeinfer.common.errors import BackendLost, Interrupted
from edgeinfer.common.overriding import override
from edgeinfer.common.types import Features, Logits
from edgeinfer.speculation.drafters.base import Context, FeatureDrafter, ModelBasedDrafter
from edgeinfer.speculation.tree import DraftTree

T = TypeVar("T")

# Time limit of a call: this many times its expected duration, and at least this long, as drivers compile kernels and
# GPUs leave their idle states.
TIMEOUT_FACTOR, MIN_TIMEOUT_SECONDS = 20.0, 5.0


class Clock:
    """Time in seconds, and waiting for other threads."""

    def __init__(self) -> None:
        self._changed = Condition()

    def now(self) -> float:
        """Seconds since an arbitrary point."""
        return perf_counter()

    def wait_for(self, is_true: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until is_true() holds, at most that long; returns whether it does. Checked at each `notify`."""
        with self._changed:
            return self._changed.wait_for(is_true, seconds)

    def notify(self) -> None:
        """Wake the threads that wait."""
        with self._changed:
            self._changed.notify_all()


@dataclass(slots=True)
class _Call:
    """A call of the watchdog's thread."""

    function: Callable[[], None]
    milliseconds: float  # expected
    since: float = 0.0  # when it began, or last called `expect`


class Watchdog:
    """Runs calls one after the other in its own thread, and raises BackendLost if one takes far longer than expected.

    device: of the calls, for messages.  min_timeout: shortest time limit of a call, in seconds.
    """

    def __init__(self, name: str, device: str, clock: Clock | None = None, min_timeout: float | None = None) -> None:
        self.clock = Clock() if clock is None else clock
        self._device = device
        self._min_timeout = MIN_TIMEOUT_SECONDS if min_timeout is None else min_timeout
        self._waiting: deque[_Call] = deque()
        self._running: _Call | None = None
        self._error: BaseException | None = None
        self._is_closed = False
        # A daemon thread: the program can end while a driver hangs.
        self._thread = Thread(target=self._work, name=f"edgeinfer-{name}", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], None], milliseconds: float = 0.0) -> None:
        """Queue a call. milliseconds: its expected duration."""
        self._waiting.append(_Call(function, milliseconds))
        self.clock.notify()

    def run(self, function: Callable[[], T], milliseconds: float = 0.0) -> T:
        """Queue a call and wait for it. Returns or raises what it does; raises BackendLost if it takes far too long."""
        results: list[T] = []
        errors: list[BaseException] = []

        def call() -> None:
            try:
                results.append(function())
            except BaseException as error:  # raised again in the thread that waits
                errors.append(error)

        self.submit(call, milliseconds)
        while not self.clock.wait_for(lambda: bool(results or errors), self._seconds_left()):
            self.check()
        if errors:
            raise errors[0]
        return results[0]

    def expect(self, milliseconds: float) -> None:
        """Set the expected duration of the running call from now on; it calls this itself."""
        if self._running is not None:
            self._running = _Call(self._running.function, milliseconds, self.clock.now())

    def check(self) -> None:
        """Raises what a queued call has raised since the last check, and BackendLost if one takes far too long."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        running = self._running
        seconds = 0.0 if running is None else self.clock.now() - running.since
        if running is not None and seconds > self._limit(running):
            raise BackendLost(
                f"{self._device} has not answered for {seconds:.1f} s: it hangs; use another device or the CPU "
                "(--draft-device)"
            )

    def close(self) -> bool:
        """End the thread after the running call. Returns whether it ended; one that hangs is abandoned."""
        self._waiting.clear()
        self._is_closed = True
        self.clock.notify()
        ended = self.clock.wait_for(lambda: self._running is None, self._seconds_left())
        if ended:
            self._thread.join()
        return ended

    def _seconds_left(self) -> float:
        """Seconds until the running call reaches its time limit, or without a call until the next check."""
        running = self._running
        if running is None:
            return self._min_timeout
        return max(0.0, running.since + self._limit(running) - self.clock.now()) + 0.01

    def _limit(self, call: _Call) -> float:
        return max(self._min_timeout, 1e-3 * TIMEOUT_FACTOR * call.milliseconds)

    def _work(self) -> None:
        while True:
            self.clock.wait_for(lambda: bool(self._waiting) or self._is_closed)
            if self._is_closed:
                return
            call = self._waiting[0]
            call.since = self.clock.now()
            self._running = call
            self._waiting.popleft()
            try:
                call.function()
            except Interrupted:
                pass
            except BaseException as error:  # raised by `check`
                self._error = error
            self._running = None
            self.clock.notify()


class WatchedDrafter(ModelBasedDrafter):
    """A drafter whose calls run in a watchdog's thread and are waited for, up to their time limit."""

    def __init__(self, drafter: ModelBasedDrafter, device: str) -> None:
        self.name = drafter.name
        self._drafter = drafter
        self._watchdog = Watchdog(drafter.name, device)
        self._cost = 0.0, 0.0

    @override
    def start(self, context: Context) -> None:
        self._watchdog.run(lambda: self._drafter.start(context))

    @override
    def propose(self, context: Context, limit: int) -> DraftTree:
        token_ms, prefill_ms = self._cost
        return self._watchdog.run(lambda: self._drafter.propose(context, limit), prefill_ms + limit * token_ms)

    @override
    def observe(self, context: Context, n_new: int, rows: Sequence[Logits]) -> None:
        self._watchdog.run(lambda: self._drafter.observe(context, n_new, rows))

    @override
    def cost(self, context: Context) -> tuple[float, float]:
        self._cost = self._watchdog.run(lambda: self._drafter.cost(context))
        return self._cost

    @override
    def prefill(self, context: Context) -> None:
        self._watchdog.run(lambda: self._drafter.prefill(context), sum(self._cost))

    @override
    def interrupt(self) -> None:
        self._drafter.interrupt()

    @override
    def close(self) -> None:
        """Close the drafter, and end the thread. Raises BackendLost where its device hangs: no memory is freed."""
        try:
            self._watchdog.run(self._drafter.close)
        finally:
            self._watchdog.close()


class WatchedFeatureDrafter(WatchedDrafter, FeatureDrafter):
    """The same for a FeatureDrafter."""

    def __init__(self, drafter: FeatureDrafter, device: str) -> None:
        super().__init__(drafter, device)
        self._feature_drafter = drafter
        self.taps = drafter.taps

    @override
    def observe_features(self, text: Sequence[int], first: int, features: Features) -> None:
        self._watchdog.run(lambda: self._feature_drafter.observe_features(text, first, features))


def watched(drafter: ModelBasedDrafter, device: str) -> WatchedDrafter:
    """The drafter with a watchdog for its calls. device: the drafter's, for messages."""
    if isinstance(drafter, FeatureDrafter):
        return WatchedFeatureDrafter(drafter, device)
    return WatchedDrafter(drafter, device)
