"""The texts of one request: a thread reads each of them, and hands its pieces to the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from types import TracebackType
from typing import TypeAlias

from edgeinfer.completion import Completion, Piece
from edgeinfer.server.problem import Problem
from edgeinfer.stream import Stream

Make: TypeAlias = Callable[[], Sequence[Stream]]

_GLANCE = 0.2  # seconds after which a thread with a slow client looks whether the text is still wanted


@dataclass(frozen=True, slots=True)
class Ended:
    """A text has ended with this completion."""

    completion: Completion


@dataclass(frozen=True, slots=True)
class PromptRead:
    """So much of a prompt is read, as a share of what the cache lacked."""

    share: float


Event: TypeAlias = Piece | PromptRead | Ended


@dataclass(frozen=True, slots=True)
class _Failed:
    error: BaseException


class Run:
    """Texts that run for a request, from their beginning to the end of their threads. An async context manager.

    Left early, it ends its texts and waits until their places are free.
    """

    def __init__(self, pool: Executor, canceller: Executor, n_unread: int) -> None:
        """pool: threads that prepare and read.  canceller: a thread that ends texts, which may wait for a lock."""
        self._pool, self._canceller, self._n_unread = pool, canceller, n_unread
        self._loop = asyncio.get_running_loop()
        self._arrived: deque[tuple[int, Event | _Failed]] = deque()
        self._came = asyncio.Event()
        self._is_told = False
        self._streams: Sequence[Stream] = ()
        self._rooms: list[threading.Semaphore] = []
        self._n_threads = 0  # that work for it; of the event loop
        self._none_left = asyncio.Event()
        self._is_cancelled = False

    async def prepare(self, make: Make) -> Sequence[Stream]:
        """Make streams in a thread, ask the engine for their texts, and read them. Raises what making them raises."""
        await self._in_thread(lambda: self._start(make))
        streams = self._streams
        self._rooms = [threading.Semaphore(self._n_unread) for _ in streams]
        if not self._is_cancelled:
            for number, stream in enumerate(streams):
                self._begin(lambda number=number, stream=stream: self._read(number, stream))  # type: ignore[misc]
        return streams

    async def call(self, work: Callable[[], object]) -> object:
        """What a function gives that runs in a thread."""
        return await self._in_thread(work)

    async def events(self, seconds: float) -> AsyncIterator[list[tuple[int, Event]]]:
        """What texts brought, with their numbers, as it comes; nothing where so many seconds brought nothing.

        Ends when all texts have ended. Raises the error of one that failed.
        """
        n_left = len(self._streams)
        while n_left:
            self._came.clear()
            found: list[tuple[int, Event]] = []
            error: BaseException | None = None
            while self._arrived and error is None:
                number, event = self._arrived.popleft()
                if isinstance(event, _Failed):
                    error = event.error
                    continue
                if isinstance(event, Ended):
                    n_left -= 1
                elif isinstance(event, Piece):
                    self._rooms[number].release()
                found.append((number, event))
            if found:
                yield found
            if error is not None:
                raise error
            if n_left and not self._arrived:
                try:
                    # wait_for of Python 3.11 loses a cancellation that comes together with an event
                    async with asyncio.timeout(seconds):
                        await self._came.wait()
                except TimeoutError:
                    yield []

    def tell_read(self, number: int, share: float) -> None:
        """So much of a prompt is read; from the thread that reads the text."""
        self._put(number, PromptRead(share))

    def fail(self, problem: Problem) -> None:
        """End with an error, from the event loop."""
        self._arrived.appendleft((-1, _Failed(problem)))
        self._came.set()
        self._cancel()

    async def __aenter__(self) -> Run:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._cancel()
        if self._n_threads:
            await asyncio.shield(self._none_left.wait())

    # ---- Threads -----------------------------------------------------------------------------------------------------

    def _cancel(self) -> None:
        if not self._is_cancelled:
            self._is_cancelled = True
            if self._n_threads:
                self._canceller.submit(self._end_texts)

    def _end_texts(self) -> None:
        for stream in self._streams:
            stream.cancel()

    async def _in_thread(self, work: Callable[[], object]) -> object:
        future: asyncio.Future[object] = self._loop.create_future()

        def done(result: object, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def run() -> None:
            try:
                result = work()
            except BaseException as error:
                self._tell(done, None, error)
            else:
                self._tell(done, result, None)

        self._begin(run)
        return await future

    def _begin(self, work: Callable[[], None]) -> None:
        """Let a thread work; the run does not end before."""

        def whole() -> None:
            try:
                work()
            finally:
                self._tell(self._left)

        self._n_threads += 1
        self._none_left.clear()
        self._pool.submit(whole)

    def _left(self) -> None:
        self._n_threads -= 1
        if not self._n_threads:
            self._none_left.set()

    def _tell(self, call: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:  # the loop has ended, with all that would be told
            pass

    def _start(self, make: Make) -> None:
        """Make streams and ask the engine for their texts. Those of a request that is refused end at once."""
        streams: list[Stream] = []
        try:
            for stream in make():
                streams.append(stream)
                stream.start()
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        self._streams = streams  # before it is looked whether the client has gone, who looks for them after that
        if self._is_cancelled:
            for stream in streams:
                stream.close()

    def _read(self, number: int, stream: Stream) -> None:
        room = self._rooms[number]
        try:
            for piece in stream:
                while not room.acquire(timeout=_GLANCE):
                    if self._is_cancelled:
                        return
                self._put(number, piece)
            self._put(number, Ended(stream.completion))
        except BaseException as error:
            self._put(number, _Failed(error))
        finally:
            stream.close()

    def _put(self, number: int, event: Event | _Failed) -> None:
        self._arrived.append((number, event))
        if not self._is_told:
            self._is_told = True
            self._tell(self._arrive)

    def _arrive(self) -> None:
        self._is_told = False
        self._came.set()
