"""Interrupts of a session: from another thread, and out of the session's own calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import pytest


class Interruptible(Protocol):
    """A session of a model or of a head, or an engine."""

    def interrupt(self) -> object:
        """Stop what runs."""
        ...


@contextmanager
def interrupted_every(seconds: float, running: Interruptible) -> Iterator[None]:
    """Within, another thread interrupts again and again."""
    ended = threading.Event()

    def interrupt_until_the_end() -> None:
        while not ended.wait(seconds):
            running.interrupt()

    thread = threading.Thread(target=interrupt_until_the_end)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def raise_from(
    session: Any,
    where: Literal["forward", "before commit", "after commit"],
    call: int,
    kind: type[BaseException],
    patch: pytest.MonkeyPatch,
) -> None:
    """Have a session raise in one of its calls of `forward`, or before or after one of `commit`."""
    name = "forward" if where == "forward" else "commit"
    original, n_calls = getattr(session, name), 0

    def failing(*args: Any, **options: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls == call and where != "after commit":
            raise kind
        result = original(*args, **options)
        if n_calls == call:
            raise kind
        return result

    patch.setattr(session, name, failing)
