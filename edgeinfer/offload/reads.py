"""What an expert cache did for a request: hits, bytes read, and the time that was waited for the disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol


class LayerStats(Protocol):
    """What the expert cache of the native engine counts of a layer, since it was made."""

    @property
    def lookups(self) -> int:
        """Experts that passes needed."""
        ...

    @property
    def hits(self) -> int:
        """Of these, in memory."""
        ...

    @property
    def bytes_read(self) -> int:
        """From disk."""
        ...

    @property
    def prefetches(self) -> int:
        """Experts read ahead."""
        ...

    @property
    def useful(self) -> int:
        """Of these, needed before they were evicted."""
        ...

    @property
    def seconds_waited(self) -> float:
        """By threads that compute, added up."""
        ...


class StoreStats(Protocol):
    """What it counts in all."""

    @property
    def layers(self) -> Sequence[LayerStats]:
        """By layer."""
        ...

    @property
    def n_slots(self) -> int:
        """Experts that fit into the cache."""
        ...

    @property
    def busy_seconds(self) -> float:
        """While at least one read was under way."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertReads:
    """Figures of an expert cache over some passes."""

    cache_bytes: int  # its size
    needed: int = 0  # experts that passes needed, each once in a layer of a pass
    hits: int = 0  # those that were in memory
    bytes_read: int = 0  # from disk
    # prefetches, useful: experts that were read ahead, and those of them that were needed
    prefetches: int = 0
    useful: int = 0
    waited_seconds: float = 0.0  # of a thread that computes, on average
    busy_seconds: float = 0.0  # in which the disk read

    @property
    def hit_rate(self) -> float:
        """Hits over needed ones, 1 where nothing was needed."""
        return self.hits / self.needed if self.needed else 1.0

    def since(self, before: ExpertReads) -> ExpertReads:
        """What was added since other figures of the same cache."""
        rest = {f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(self)[1:]}
        return ExpertReads(self.cache_bytes, **rest)


def reads_of(stats: StoreStats, cache_bytes: int, n_threads: int) -> ExpertReads:
    """The figures of a cache since it was made. n_threads: that compute."""
    layers = stats.layers
    return ExpertReads(
        cache_bytes,
        sum(of.lookups for of in layers),
        sum(of.hits for of in layers),
        sum(of.bytes_read for of in layers),
        sum(of.prefetches for of in layers),
        sum(of.useful for of in layers),
        sum(of.seconds_waited for of in layers) / n_threads,
        stats.busy_seconds,
    )
