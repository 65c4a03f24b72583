"""What the passes of a model with experts want: how many different experts, and how many of them are not in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from edgeinfer.backends.native import NativeModel
from edgeinfer.common.overriding import override
from edgeinfer.models import Experts, ModelSpec


@dataclass(frozen=True, slots=True)
class PassExperts:
    """What a pass wanted, in units of the bytes that the experts of one token have.

    union: its experts, each once.  missing: those of them that were not in memory.  waited_ms: for them.
    """

    union: float
    missing: float = 0.0
    waited_ms: float = 0.0


class ExpertPasses(Protocol):
    """Where to learn that; see PassesOf."""

    @property
    def is_cached(self) -> bool:
        """Whether some experts are read from disk."""
        ...

    @property
    def byte_share(self) -> float:
        """Of the bytes that a pass of one token reads, those of experts."""
        ...

    @property
    def disk_ms(self) -> float:
        """Milliseconds in which the disk reads the experts of one token, as measured so far; 0 if nothing was read."""
        ...

    def last(self) -> PassExperts:
        """The last pass."""
        ...


class PassesOf(ExpertPasses):
    """The passes of a loaded model with experts. See ExpertPasses."""

    def __init__(self, model: NativeModel) -> None:
        self._model = model
        self._cache = model.expert_cache
        self._bytes_of_token = model.expert_bytes_of_token

    @property
    @override
    def is_cached(self) -> bool:
        return self._cache is not None

    @property
    @override
    def byte_share(self) -> float:
        return self._bytes_of_token / (self._bytes_of_token + self._model.decoder().weight_bytes)

    @property
    @override
    def disk_ms(self) -> float:
        if self._cache is None:
            return 0.0
        stats = self._cache.stats()
        n_read = sum(layer.bytes_read for layer in stats.layers)
        return 1e3 * stats.busy_seconds * self._bytes_of_token / n_read if n_read else 0.0

    @override
    def last(self) -> PassExperts:
        union = self._model.expert_union()
        if self._cache is None:
            return PassExperts(union)
        stats = self._cache.pass_stats()
        share = 1.0 - stats.hits / stats.lookups if stats.lookups else 0.0
        return PassExperts(union, share * union, 1e3 * stats.seconds_stalled)


def experts_in(spec: ModelSpec) -> dict[int, int]:
    """Experts that a token uses in each layer that has any."""
    return {i: layer.ffn.n_used for i, layer in enumerate(spec.layers) if isinstance(layer.ffn, Experts)}
