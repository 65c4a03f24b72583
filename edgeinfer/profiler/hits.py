"""The share of experts that an expert cache of some size will have, as far as that can be said beforehand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.types import ExpertSizes
from edgeinfer.models.gguf import ModelFile
from edgeinfer.offload.size_search import CacheSizeSearch, load_search, search_key
from edgeinfer.offload.usage import load_usage, usage_key

# Hit rates of this engine's eviction by the share of the experts in memory: means over the recorded routing of three
# models (docs/measurements/hit-rates.json). Nothing in memory hits nothing.
_SHARES = (0.0, 0.10, 0.25, 0.50, 1.0)
_RATES = (0.0, 0.565, 0.817, 0.939, 1.0)
_NEAR = 0.1  # of a size that was run: a size that differs by less has its hit rate
_LEAST_USES = 1000  # of all experts, before the counts say something


@dataclass(frozen=True)
class HitRate:
    """A share of the wanted experts that is in the cache, and where the figure is from.

    origin: "measured" in runs of this model here, "usage" computed from how often each expert was used here, "traces"
    from the recorded routing of other models, "all" where every expert is in memory.
    """

    share: float
    origin: str


def hit_rates(file: ModelFile, sizes: ExpertSizes, n_threads: int) -> Callable[[int], HitRate]:
    """The hit rate to expect by bytes of the cache, from the best source that this machine has for the model."""
    runs = load_search(search_key(file, n_threads))
    counts = load_usage(usage_key(file), sizes.n_layers, sizes.n_experts).counts

    def of(cache_bytes: int) -> HitRate:
        share = cache_bytes / sizes.total
        if share >= 1.0:
            return HitRate(1.0, "all")
        measured = _measured(runs, cache_bytes)
        if measured is not None:
            return HitRate(measured, "measured")
        if counts.sum() >= _LEAST_USES:
            return HitRate(recency_hit_rate(counts, share, sizes.n_used), "usage")
        return HitRate(float(np.interp(share, _SHARES, _RATES)), "traces")

    return of


def _measured(runs: CacheSizeSearch, cache_bytes: int) -> float | None:
    """The median hit rate of runs with a cache of about this size."""
    near = [size for size in runs.runs if abs(size - cache_bytes) <= _NEAR * cache_bytes]
    if not near:
        return None
    of_nearest = runs.runs[min(near, key=lambda size: abs(size - cache_bytes))]
    return float(np.median([run.hit_rate for run in of_nearest]))


def recency_hit_rate(counts: NDArray[np.float64], share: float, n_used: int) -> float:
    """Hit rate of a least-recently-used cache that holds a share of all experts, for independent tokens.

    The characteristic time t solves the equation that the expected number of experts used within t tokens is the
    number that the cache holds (Che et al., IEEE JSAC 2002); an expert is hit if it was used within t. Tokens of a real
    text repeat experts, so the true rate is mostly higher.  counts: (n_layers, n_experts), of uses.
    """
    of_layer = counts.sum(axis=1, keepdims=True)
    chances: NDArray[np.float64] = np.minimum(n_used * counts / np.maximum(of_layer, 1.0), 1.0 - 1e-9)
    rates = -np.log1p(-chances)  # an expert is used at this rate a token
    held = share * chances.size
    low, high = 0.0, 1.0
    while high < 1e9 and float((-np.expm1(-rates * high)).sum()) < held:
        high *= 2.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if float((-np.expm1(-rates * middle)).sum()) < held else (low, middle)
    hits = (chances * -np.expm1(-rates * high)).sum() / max(float(chances.sum()), 1e-9)
    return min(1.0, float(hits))


def union_of(n_tokens: int, n_experts: int, n_used: int) -> float:
    """Experts of a layer that n independent tokens want together, over those of one. Real tokens share more of them."""
    if not 0 < n_used < n_experts:
        return 1.0
    return n_experts / n_used * (1.0 - math.pow(1.0 - n_used / n_experts, n_tokens))


def shares_of(sizes: ExpertSizes, shares: Sequence[float] = (0.10, 0.25, 0.50, 0.75)) -> list[int]:
    """Bytes of caches that are worth a row of a table, the smallest that a pass can run with first."""
    return sorted({sizes.least, *(size for share in shares if (size := int(share * sizes.total)) > sizes.least)})
