"""Texts for asyncio: a thread reads each of them, and hands its pieces to the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Protocol

from edgeinfer.completion import Piece

_MOST_READERS = 256  # threads; more texts than that take turns


class Readable(Protocol):
    """A Stream or an Answer."""

    def __next__(self) -> Piece:
        """The next piece. Raises StopIteration."""
        ...

    def cancel(self) -> None:
        """End the text, from any thread."""
        ...

    def close(self) -> None:
        """Stop reading."""
        ...


@cache
def _readers() -> ThreadPoolExecutor:
    """Threads that read. Not those of the loop: there are few, and a text may have one for long."""
    return ThreadPoolExecutor(_MOST_READERS, "edgeinfer-reader")


async def pieces_of(stream: Readable) -> AsyncIterator[Piece]:
    """The pieces of a stream. A task that is cancelled, or leaves early, ends the text and waits until it has ended."""
    loop, reading = asyncio.get_running_loop(), threading.Lock()

    def following() -> Piece | None:
        with reading:
            return next(stream, None)

    def close() -> None:
        with reading:  # no generator is closed while it runs
            stream.close()

    try:
        while (piece := await loop.run_in_executor(_readers(), following)) is not None:
            yield piece
    finally:
        stream.cancel()
        await asyncio.shield(loop.run_in_executor(_readers(), close))
