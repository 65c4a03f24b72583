"""What all requests of a server share: models, threads, places, counters."""

from __future__ import annotations

import asyncio
import math
import time
import traceback
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from edgeinfer.server.access import Access
from edgeinfer.server.exchange import Exchange
from edgeinfer.server.limits import Limits
from edgeinfer.server.metrics import Metrics, Summary
from edgeinfer.server.problem import Problem
from edgeinfer.server.run import Run
from edgeinfer.server.served import Models

_MOST_RETRY = 60  # seconds


def n_threads(n_parallel: int, limits: Limits) -> int:
    """Threads of a server: one for each text that runs or waits, some that prepare others, and one that ends texts."""
    return n_parallel + limits.queue + 8 + 1


@dataclass(frozen=True)
class Shown:
    """What a server shows beside answers.

    page: at /.  slots: at /slots.  prompts: with each answer of OpenAI's dialect.  tags: of its own model.
    """

    page: bool = True
    slots: bool = True
    prompts: bool = False
    tags: Sequence[str] = ()


class Server:
    """State of a server, of its event loop.

    n_parallel: texts that run at once.  log: called with a line for each request, and of errors.  is_draining: whether
    it takes no more requests.  shown: what it shows beside answers.
    """

    def __init__(
        self,
        models: Models,
        limits: Limits,
        access: Access,
        n_parallel: int,
        log: Callable[[str], None],
        shown: Shown = Shown(),
    ) -> None:
        self.models, self.limits, self.access, self.log, self.shown = models, limits, access, log, shown
        self.metrics = Metrics()
        self.started = int(time.time())
        self.n_parallel = n_parallel
        self.n_texts = 0
        self.is_draining = False
        self.document: dict[str, Any] = {}  # that describes the paths
        self._seconds = Summary()  # that texts took
        self._runs: set[Run] = set()
        self._of_key: dict[int, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(limits.of_key))
        self._pool = ThreadPoolExecutor(n_threads(n_parallel, limits) - 1, "edgeinfer-text")
        self._canceller = ThreadPoolExecutor(1, "edgeinfer-end")

    @property
    def most_texts(self) -> int:
        """Texts that run or wait at most."""
        return self.n_parallel + self.limits.queue

    @asynccontextmanager
    async def running(self, exchange: Exchange, n_texts: int) -> AsyncIterator[Run]:
        """A run of so many texts, or, with 0, of other work. Raises Problem where there is no place for it."""
        if self.is_draining:
            raise Problem(503, "the server is shutting down", code="shutting_down", retry_after=5)
        with self._admitted(n_texts):
            async with AsyncExitStack() as opened:
                if exchange.key is not None and len(self.access.keys) > 1:
                    await opened.enter_async_context(self._of_key[exchange.key])
                run = await opened.enter_async_context(Run(self._pool, self._canceller, self.limits.unread))
                self._runs.add(run)
                opened.callback(self._runs.discard, run)
                yield run

    @contextmanager
    def _admitted(self, n_texts: int) -> Iterator[None]:
        if n_texts > self.most_texts:
            raise Problem(400, f"a request may have {self.most_texts} texts here: found {n_texts}", param="n")
        if self.n_texts + max(1, n_texts) > self.most_texts:
            raise Problem(
                429,
                f"{self.n_texts} texts run or wait already: ask again later",
                code="queue_full",
                retry_after=self._retry_seconds(),
            )
        self.n_texts += n_texts
        try:
            yield
        finally:
            self.n_texts -= n_texts

    def _retry_seconds(self) -> int:
        """Until some of those that wait will have ended."""
        mean = self._seconds.total / self._seconds.n if self._seconds.n else 1.0
        return max(1, min(_MOST_RETRY, math.ceil(mean * max(1, self.n_texts - self.n_parallel) / self.n_parallel / 4)))

    def count_seconds(self, seconds: float) -> None:
        """A request with texts took so long."""
        self._seconds.add(seconds)

    def fail_all(self, problem: Problem) -> None:
        """End all that runs with an error."""
        for run in list(self._runs):
            run.fail(problem)

    def close(self) -> None:
        """Wait for the threads."""
        self._pool.shutdown()
        self._canceller.shutdown()

    def log_request(self, exchange: Exchange, seconds: float) -> None:
        """A line without anything of the request but its path."""
        tokens = f" {exchange.n_prompt}+{exchange.n_made} tokens" if exchange.n_prompt else ""
        key = "" if exchange.key is None else f" key {exchange.key + 1}"
        self.log(
            f"{exchange.client} {exchange.method} {quote(exchange.path)[:200]} {exchange.status or 'gone'}{tokens} "
            f"{seconds:.3f} s{key} {exchange.id}"
        )

    def log_error(self, exchange: Exchange, error: BaseException) -> None:
        """Where an error of this program came from; its text may hold parts of a prompt."""
        lines = traceback.format_list(traceback.extract_tb(error.__traceback__))
        self.log(f"{exchange.id} {type(error).__name__} (a bug)\n{''.join(lines).rstrip()}")
