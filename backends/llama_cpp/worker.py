"""The thread that talks with the process of llama.cpp, and the byte that stops what that does."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TypeVar

from edgeinfer.backends.llama_cpp.shared import Writable

_T = TypeVar("_T")

_STOP_SECONDS = 10.0  # that what runs may take to stop before it is killed
_MEANWHILE_SECONDS = 0.05
# A signal that comes just before a wait starts does not end it, and its handler runs after it: no wait is without end.
_SIGNAL_SECONDS = 0.5


class Worker:
    """One thread that calls functions one after the other, and the flag that stops the one that runs.

    flag: memory of which the first byte is set to stop.  kill: ends what does not stop, from any thread.
    """

    def __init__(self, flag: Writable, kill: Callable[[], None]) -> None:
        self.flag = flag
        self._kill = kill
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="llama.cpp")

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called since the last function was."""
        return bool(self.flag[0])

    def stop(self) -> None:
        """Ask the function that runs to stop; from any thread and signal handler."""
        self.flag[0] = 1

    def call(self, function: Callable[..., _T], *args: object, meanwhile: Callable[[], None] | None = None) -> _T:
        """What the function gives or raises. What is raised here meanwhile, Ctrl-C above all, stops and awaits it.

        meanwhile: called in this thread every 50 ms.
        """
        seconds = _SIGNAL_SECONDS if meanwhile is None else _MEANWHILE_SECONDS
        self.flag[0] = 0
        future: Future[_T] = Future()  # there before the function runs: Ctrl-C may come out of submit
        try:
            self._threads.submit(_run, future, function, args)
            while not wait([future], seconds).done:
                if meanwhile is not None:
                    meanwhile()
            return future.result()
        except BaseException:
            self.stop()
            patience = time.monotonic() + _STOP_SECONDS
            while not future.cancel() and not future.done():
                with suppress(KeyboardInterrupt):
                    if not wait([future], _STOP_SECONDS).done and time.monotonic() > patience:
                        self._kill()
            raise

    def close(self) -> None:
        """Stop what runs; the thread ends after it."""
        self.stop()
        self._threads.shutdown(wait=False)  # this may be that thread


def _run(future: Future[_T], function: Callable[..., _T], args: tuple[object, ...]) -> None:
    """Put what the function gives or raises into the future, unless nobody waits for it any more."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(*args))
    except BaseException as error:
        future.set_exception(error)
        del future  # the error holds this frame: no ring of both
