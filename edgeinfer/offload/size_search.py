"""The size of an expert cache by measured throughput, found over several runs of a model on a machine.

A larger cache always has a higher hit rate, but where it takes the memory that the system needs, the speed collapses
while the hit rate goes on rising. So sizes are compared by tokens a second, and of sizes that are about equally fast
the smallest is kept.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgeinfer.common.devices import cpu_name
from edgeinfer.models.gguf import ModelFile
from edgeinfer.record_cache import read_record, record_folder, record_key, write_record

STEP = 0.8  # of one size to the next smaller one
PAYS = 0.05  # a larger cache must be faster by this share
LEAST_TOKENS = 32  # of a run that counts
_KEPT_RUNS = 5  # of each size, the last ones
_KEPT_SIZES = 16
_MOST_BYTES = 1 << 62  # more, from a damaged record, are no size
_SAME = 0.05  # sizes that differ by less are one
_FORMAT = 1


@dataclass(frozen=True)
class Run:
    """What was measured with a cache of some bytes: decoded tokens a second, and the share of hits."""

    tokens_per_second: float
    hit_rate: float


@dataclass
class CacheSizeSearch:
    """The runs of a model on a machine so far, by bytes of the cache, the last ones of each.

    It is deterministic: the same runs and limits give the same size.
    """

    runs: dict[int, list[Run]] = field(default_factory=dict)

    def tell(self, cache_bytes: int, tokens_per_second: float, hit_rate: float, n_tokens: int) -> bool:
        """Take a run into account; gives whether it counts. One of a few tokens only says how warm the cache was."""
        if n_tokens < LEAST_TOKENS or not math.isfinite(tokens_per_second + hit_rate):
            return False
        if not 0 < cache_bytes <= _MOST_BYTES:
            return False
        if tokens_per_second <= 0:
            return False
        size = self._near(cache_bytes) or cache_bytes
        self.runs[size] = [*self.runs.get(size, ()), Run(tokens_per_second, hit_rate)][-_KEPT_RUNS:]
        while len(self.runs) > _KEPT_SIZES:  # the slowest says least
            del self.runs[min(self.runs, key=self.speed)]
        return True

    def speed(self, size: int) -> float:
        """Median of the tokens a second of a size that was measured."""
        return statistics.median(run.tokens_per_second for run in self.runs[size])

    def best(self, largest: int) -> int | None:
        """The smallest measured size up to `largest` that no larger one is faster than by more than PAYS."""
        sizes = sorted(size for size in self.runs if size <= largest)
        if not sizes:
            return None
        most = max(map(self.speed, sizes))
        return next(size for size in sizes if self.speed(size) * (1 + PAYS) >= most)

    def next_size(self, least: int, largest: int) -> int:
        """Bytes of the cache of the next run, between the two limits, in bytes.

        The first run has the largest. As long as the best size so far is the smallest measured one, the next is a step
        smaller; where the limit has grown by more than a step above the largest one measured, and the best is that one,
        it is the limit. Otherwise the best size stays.
        """
        best = self.best(largest)
        if best is None:
            return largest
        measured = sorted(size for size in self.runs if size <= largest)
        if best == measured[-1] and best < STEP * largest:
            return largest
        smaller = max(least, int(best * STEP))
        if best == measured[0] and smaller < best * (1 - _SAME) and self._near(smaller) is None:
            return smaller
        return max(least, best)

    def as_record(self) -> dict[str, Any]:
        """All of it, for JSON."""
        runs = {str(size): [[run.tokens_per_second, run.hit_rate] for run in of] for size, of in self.runs.items()}
        return {"format": _FORMAT, "runs": runs}

    @classmethod
    def from_record(cls, record: object) -> CacheSizeSearch:
        """What `as_record` gave; empty for anything else."""
        search = cls()
        if not isinstance(record, Mapping) or record.get("format") != _FORMAT:
            return search
        try:
            for size, of in record["runs"].items():
                for speed, hit_rate in of[-_KEPT_RUNS:]:
                    search.tell(int(size), float(speed), float(hit_rate), LEAST_TOKENS)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return cls()
        return search

    def _near(self, n_bytes: int) -> int | None:
        """The measured size that is the same for all purposes, None if there is none."""
        near = [size for size in self.runs if abs(size - n_bytes) <= _SAME * size]
        return min(near, key=lambda size: abs(size - n_bytes), default=None)


def search_key(file: ModelFile, n_threads: int) -> str:
    """Name of the runs of a model on this machine."""
    return record_key(file, "expert cache", _FORMAT, cpu_name(), n_threads)


def load_search(key: str) -> CacheSizeSearch:
    """The runs of that key so far."""
    return CacheSizeSearch.from_record(read_record(record_folder("expert-cache"), key))


def save_search(key: str, search: CacheSizeSearch) -> None:
    """Keep them. Where nothing can be written, the next run begins anew."""
    write_record(record_folder("expert-cache"), key, search.as_record())
