"""The models that a server answers with."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version

from edgeinfer.common.errors import TemplateError
from edgeinfer.engine import Engine
from edgeinfer.server.about import About, about
from edgeinfer.server.problem import Problem

_SAMPLES = 16  # of a file, that tell models apart


@dataclass
class Served:
    """A loaded model.

    id: as clients name it.  aliases: its other names.  created: seconds since 1970.  until: by time.monotonic, how long
    it is kept without requests.  kept: seconds that it is kept after each.
    """

    engine: Engine
    id: str
    aliases: frozenset[str] = frozenset()
    created: int = field(default_factory=lambda: int(time.time()))
    until: float = math.inf
    kept: float = math.inf

    @cached_property
    def fingerprint(self) -> str:
        """What an answer depends on beside its request: this version, the model's file by samples, the template."""
        digest = hashlib.blake2b(version("edgeinfer").encode(), digest_size=6)
        try:
            digest.update(self.engine.template.source.encode(errors="replace"))
        except TemplateError:
            pass  # a model that completes texts only
        with suppress(OSError), self.engine.path.open("rb") as file:
            n_bytes = file.seek(0, os.SEEK_END)
            digest.update(str(n_bytes).encode())
            for number in range(_SAMPLES):
                file.seek(n_bytes * number // _SAMPLES)
                digest.update(file.read(4096))
        return f"b{digest.hexdigest()}"

    def is_called(self, name: str) -> bool:
        """Whether a name is one of its own; ":latest" and capitals make no difference."""
        plain = name.casefold().removesuffix(":latest")
        return plain in {each.casefold().removesuffix(":latest") for each in (self.id, *self.aliases)}


class Models:
    """The one model of a server.  any_name: whether it answers to every name."""

    def __init__(self, served: Served, any_name: bool = False) -> None:
        self._served, self.any_name = served, any_name
        self._about = about(served.engine.path)

    @property
    def loaded(self) -> Sequence[Served]:
        """Those that are in memory."""
        return [self._served]

    def names(self) -> Sequence[str]:
        """Ids of all models."""
        return [self._served.id]

    def find(self, name: str | None) -> str:
        """The id of the model that a name means. Raises Problem where there is none."""
        if name is not None and not self.any_name and not self._served.is_called(name):
            raise Problem(
                404,
                f"there is no model {name!r}: this server has {', '.join(self.names())}; with --any-model it answers "
                "to every name",
                code="model_not_found",
                param="model",
            )
        return self._served.id

    def about(self, id: str) -> About:
        """What the file of a model says."""
        return self._about

    def keep(self, served: Served, seconds: float | None) -> None:
        """Keep a model so long after its last request; None changes nothing. The only one is always kept."""

    async def drop(self, id: str) -> None:
        """Give back the memory of a model. The only one is always kept."""

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[Served]:
        """A model, which stays loaded within. Raises Problem for a name that none has."""
        self.find(name)
        yield self._served
