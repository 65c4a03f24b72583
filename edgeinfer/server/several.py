"""Several models, loaded when they are asked for, inside one budget; those that were not asked for longest go first."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from edgeinfer.common.errors import BudgetExceeded
from edgeinfer.common.overriding import override
from edgeinfer.engine import Engine
from edgeinfer.server.about import About, about
from edgeinfer.server.problem import Problem
from edgeinfer.server.served import Models, Served

Load: TypeAlias = "Callable[[Path, int | None], Engine]"
"""Loads a model into so many bytes, None for what the machine has. Raises BudgetExceeded and others."""


@dataclass
class _Entry:
    """A model of the server.  n_users: requests that use it.  used: when the last one came, by time.monotonic."""

    served: Served | None
    path: Path
    id: str
    aliases: frozenset[str]
    about: About
    n_users: int = 0
    used: float = 0.0
    timer: asyncio.TimerHandle | None = None

    def is_called(self, name: str) -> bool:
        plain = name.casefold().removesuffix(":latest")
        return plain in {each.casefold().removesuffix(":latest") for each in (self.id, *self.aliases)}


class SeveralModels(Models):
    """Models by name.  budget: bytes of all together, None for what the machine has."""

    def __init__(
        self, files: Mapping[str, Path], load: Load, budget: int | None, loader: Executor, first: Served | None = None
    ) -> None:
        """files: by their ids.  loader: a thread that loads.  first: the model of requests that name none, loaded.

        Raises ModelFileError, OSError for a file that is no model.
        """
        self.any_name = False
        self._load, self._budget, self._loader = load, budget, loader
        self._entries = [
            _Entry(None, path, id, frozenset({path.name, path.stem}), about(path)) for id, path in files.items()
        ]
        self._first: _Entry | None = None
        if first is not None:
            path = first.engine.path
            self._first = _Entry(first, path, first.id, first.aliases, about(path), used=time.monotonic())
            self._entries = [self._first, *(each for each in self._entries if not each.path.samefile(path))]
        self._changing = asyncio.Lock()
        self._freed = asyncio.Condition()

    @property
    @override
    def loaded(self) -> Sequence[Served]:
        return [each.served for each in self._entries if each.served is not None]

    @override
    def names(self) -> Sequence[str]:
        return [each.id for each in self._entries]

    @override
    def find(self, name: str | None) -> str:
        return self._entry(name).id

    @override
    def about(self, id: str) -> About:
        return self._entry(id).about

    @override
    def keep(self, served: Served, seconds: float | None) -> None:
        if seconds is not None:
            served.kept = seconds

    @override
    async def drop(self, id: str) -> None:
        entry = self._entry(id)
        async with self._changing:
            if entry.served is not None and not entry.n_users:
                await self._unload(entry)

    @asynccontextmanager
    @override
    async def use(self, name: str | None) -> AsyncIterator[Served]:
        entry = self._entry(name)
        loop = asyncio.get_running_loop()
        taking = loop.create_task(self._take(entry))
        try:
            served = await asyncio.shield(taking)
        except asyncio.CancelledError:  # a client that goes leaves the load to those who wait for it too
            taking.add_done_callback(lambda done: done.exception() or loop.create_task(self._give_back(entry)))
            raise
        try:
            yield served
        finally:
            await self._give_back(entry)

    def close(self) -> None:
        """Give the memory of all models back, when no request runs any more."""
        for entry in self._entries:
            if entry.served is not None:
                entry.served.engine.close()

    def _entry(self, name: str | None) -> _Entry:
        if name is None:
            if self._first is not None or len(self._entries) == 1:
                return self._first or self._entries[0]
            raise Problem(400, f"name a model: there are {', '.join(self.names())}", param="model")
        found = next((each for each in self._entries if each.is_called(name)), None)
        if found is None:
            names = ", ".join(self.names())
            raise Problem(404, f"there is no model {name!r}: there are {names}", code="model_not_found", param="model")
        return found

    async def _take(self, entry: _Entry) -> Served:
        """A model for a request, loaded now if need be; meanwhile no other one is taken, so that all get their turn."""
        async with self._changing:
            if entry.timer is not None:
                entry.timer.cancel()
            if entry.served is None:
                await self._bring(entry)
            entry.n_users += 1
            entry.used = time.monotonic()
            assert entry.served is not None
            return entry.served

    async def _give_back(self, entry: _Entry) -> None:
        """A request has ended: others may need the memory, and the model may be kept for some time only."""
        entry.n_users -= 1
        async with self._freed:
            self._freed.notify_all()
        served = entry.served
        if served is None or entry.n_users or served.kept == math.inf:
            return
        served.until = time.monotonic() + served.kept
        loop = asyncio.get_running_loop()
        entry.timer = loop.call_later(served.kept, lambda: loop.create_task(self._expire(entry, served)))

    async def _expire(self, entry: _Entry, served: Served) -> None:
        async with self._changing:
            if entry.served is served and not entry.n_users:
                await self._unload(entry)

    async def _bring(self, entry: _Entry) -> None:
        """Load a model, after others were unloaded where there is no room. Raises Problem and what loading raises."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                engine = await loop.run_in_executor(self._loader, self._load, entry.path, self._left_bytes())
            except BudgetExceeded as error:
                if not await self._make_room(entry):
                    raise Problem(503, f"{entry.id}: {error}", code="no_memory") from None
                continue
            entry.served = Served(engine, entry.id, entry.aliases)
            return

    def _left_bytes(self) -> int | None:
        """Bytes of the budget without what loaded models do not hold yet; what they hold is memory of the process."""
        if self._budget is None:
            return None
        items = [item for each in self.loaded for item in each.engine.memory.items if item.purpose != "process"]
        return max(1, self._budget - sum(max(0, item.planned - (item.taken or 0)) for item in items))

    async def _make_room(self, entry: _Entry) -> bool:
        """Unload the model that was not asked for longest, when its requests have ended; whether there was one."""
        others = [each for each in self._entries if each.served is not None and each is not entry]
        if not others:
            return False
        async with self._freed:
            await self._freed.wait_for(lambda: any(not each.n_users for each in others))
        await self._unload(min((each for each in others if not each.n_users), key=lambda each: each.used))
        return True

    async def _unload(self, entry: _Entry) -> None:
        served, entry.served = entry.served, None
        if served is not None:
            await asyncio.get_running_loop().run_in_executor(self._loader, served.engine.close)
