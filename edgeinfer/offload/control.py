"""What is decided about the experts of a loaded model while it runs: told of each pass, it sets prefetch and learns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.base import Watcher, chained
from edgeinfer.common.other_work import LoadMeter, MachineClock
from edgeinfer.common.types import ExpertSizes
from edgeinfer.models.gguf import ModelFile
from edgeinfer.offload.prefetch import FirstLayerTable, PrefetchControl, WindowStats
from edgeinfer.offload.pressure import MemoryPressure, ResizableCache
from edgeinfer.offload.reads import ExpertReads, StoreStats, reads_of
from edgeinfer.offload.size_search import load_search, save_search, search_key
from edgeinfer.offload.usage import ExpertUsage, load_usage, save_usage, usage_key

_OBSERVED = 17  # passes, in one of which experts are predicted only to count; no multiple of a window's
_COLD = 16  # passes of one row after which a cache is warm enough for its speed to say something
_BLOCK = 8  # passes of one row that count together for the speed, or not, as other programs work meanwhile
_MOST_OF_OTHERS = 0.25  # cores that others may use while passes count


class ExpertCache(Protocol):
    """The experts of a loaded model, of which a cache holds some; layers are those of the model.

    n_bytes: of the cache.  record_bytes: by layer, of an expert in memory, 0 for a layer without experts.
    """

    n_bytes: int
    record_bytes: Sequence[int]

    def stats(self) -> StoreStats:
        """What the cache did since it was made."""
        ...

    def routing(self) -> NDArray[np.int32]:
        """The experts of the last pass, (n_layers, n_rows, n_used); -1 for none."""
        ...

    def hint(self, layer: int, experts: Sequence[int]) -> None:
        """A layer will probably want these, the most probable first."""
        ...

    def warm(self, experts: Sequence[tuple[int, int]]) -> None:
        """Read these (layer, expert) in the background into room that is free."""
        ...


@runtime_checkable
class PrefetchingCache(ExpertCache, Protocol):
    """A cache of a model that predicts the experts of its layers."""

    def set_prefetch(self, layer: int, n: int) -> None:
        """Read so many experts of a layer ahead, as its router predicts them from the input of the layer before."""
        ...

    def observe(self, every: int) -> None:
        """In every so many passes, predict layers too that are not read ahead, to count."""
        ...

    def predictions(self) -> Sequence[tuple[int, int]]:
        """By layer, how many experts were predicted, and how many of these were wanted."""
        ...


@runtime_checkable
class ExpertModel(Protocol):
    """A loaded model that may have an expert cache. watcher: see backends.base.Watcher."""

    watcher: Watcher | None

    @property
    def expert_cache(self) -> ExpertCache | None:
        """None where all experts are in memory."""
        ...


class _QuietSpeed:
    """The speed of passes of one row while other programs hardly work: they make any size of the cache look bad."""

    def __init__(self) -> None:
        self.n_passes, self.seconds = 0, 0.0  # that count
        self._n_open, self._open_seconds = 0, 0.0  # of the block that is not over yet
        self._meter = LoadMeter(MachineClock())

    def add(self, seconds: float) -> None:
        """A pass took so long."""
        self._n_open += 1
        self._open_seconds += seconds
        if self._n_open == _BLOCK:
            if self._meter.load() <= _MOST_OF_OTHERS:
                self.n_passes += self._n_open
                self.seconds += self._open_seconds
            self.begin()

    def begin(self) -> None:
        """Begin a block: what was not counted so far never is."""
        self._n_open, self._open_seconds = 0, 0.0
        self._meter = LoadMeter(MachineClock())


class ExpertControl:
    """Watches the passes of a model with an expert cache (`run`), and decides what is read ahead.

    It also counts which experts are used, for the next load, and how fast tokens are, for the size of the next cache.
    keys: of the usage and of the size search on disk, None to keep nothing.  share: of all experts that fit into the
    cache.
    """

    def __init__(
        self, cache: ExpertCache, sizes: ExpertSizes, n_threads: int, keys: tuple[str, str] | None = None
    ) -> None:
        self._n_threads, self._keys = n_threads, keys
        self._cache: ExpertCache | None = cache
        self._predicting = cache if isinstance(cache, PrefetchingCache) else None
        self.share = cache.n_bytes / max(sizes.total, 1)
        n_layers = len(cache.record_bytes)
        self._first = next((layer for layer, n_bytes in enumerate(cache.record_bytes) if n_bytes), 0)
        shape = n_layers, sizes.n_experts
        self._usage = ExpertUsage(*shape) if keys is None else load_usage(keys[0], *shape)
        self._prefetch = PrefetchControl(n_layers, sizes.n_used)
        self._amounts = [0] * n_layers
        self._table = FirstLayerTable()
        self._pressure = MemoryPressure(cache, sizes.least) if isinstance(cache, ResizableCache) else None
        self._window = cache.stats()
        self._window_began = time.perf_counter()
        self._n_passes = 0  # of one row
        self._speed = _QuietSpeed()
        self._final = ExpertReads(cache.n_bytes)

    @property
    def amounts(self) -> Sequence[int]:
        """By layer, how many experts are read ahead now."""
        return self._amounts

    def begin(self) -> None:
        """Have the experts read that were used most before, and the predictions of others counted."""
        if self._cache is None:
            return
        if self._predicting is not None:
            self._predicting.observe(_OBSERVED)
        if most := self._usage.most_used(self._cache.record_bytes, self._cache.n_bytes):
            self._cache.warm(most)

    def reads(self) -> ExpertReads:
        """What the cache did so far, or had done when this was closed."""
        if self._cache is None:
            return self._final
        return reads_of(self._cache.stats(), self._cache.n_bytes, self._n_threads)

    def run(self, tokens: Sequence[int], forward: Callable[[], bool | None]) -> bool | None:
        """Run a pass of these tokens, and learn from it if it was whole; see backends.base.Watcher."""
        if self._cache is None:
            return forward()
        if self._pressure is not None:
            self._pressure.between_passes()
        if self._amounts[self._first]:
            self._cache.hint(self._first, self._table.predict(tokens))
        started = time.perf_counter()
        is_whole = forward()
        if is_whole:
            self._learn(self._cache, tokens, time.perf_counter() - started)
        return is_whole

    def close(self) -> None:
        """Keep what was learnt, and let the cache go."""
        self._final, self._cache, self._predicting = self.reads(), None, None
        if self._keys is None:
            return
        save_usage(self._keys[0], self._usage)
        n_counted, seconds = self._speed.n_passes, self._speed.seconds
        had_its_size = self._pressure is None or not self._pressure.has_given_back
        if had_its_size and seconds > 0:
            search = load_search(self._keys[1])
            if search.tell(self._final.cache_bytes, n_counted / seconds, self._final.hit_rate, n_counted):
                save_search(self._keys[1], search)

    def _learn(self, cache: ExpertCache, tokens: Sequence[int], seconds: float) -> None:
        routing = cache.routing()
        n_rows = routing.shape[1]
        self._usage.add(routing.transpose(1, 0, 2))
        self._table.learn(tokens[len(tokens) - n_rows :], routing[self._first].tolist())
        if len(tokens) == 1:
            self._n_passes += 1
            if self._n_passes > _COLD:
                self._speed.add(seconds)
            elif self._n_passes == _COLD:
                self._speed.begin()
        if self._predicting is not None and self._prefetch.after_pass(seconds, len(tokens)):
            self._end_window(self._predicting)

    def _end_window(self, cache: PrefetchingCache) -> None:
        now, stats, before = time.perf_counter(), cache.stats(), self._window
        of_layers = list(zip(stats.layers, before.layers, strict=True))
        seconds = max(now - self._window_began, 1e-9)
        self._prefetch.tell_predictions(cache.predictions())
        waited = sum(after.seconds_waited - old.seconds_waited for after, old in of_layers)
        self._prefetch.end_window(
            WindowStats(
                [after.prefetches - old.prefetches for after, old in of_layers],
                [after.useful - old.useful for after, old in of_layers],
                waited / self._n_threads / seconds,
                (stats.busy_seconds - before.busy_seconds) / seconds,
            )
        )
        self._window, self._window_began = stats, now
        amounts = self._prefetch.amounts
        for layer, (n, set_before) in enumerate(zip(amounts, self._amounts, strict=True)):
            if n != set_before and cache.record_bytes[layer]:
                cache.set_prefetch(layer, n)
        self._amounts = amounts


def control_experts(model: object, file: ModelFile, sizes: ExpertSizes, n_threads: int) -> ExpertControl | None:
    """The control of a model that has just been loaded, which it watches from now on; None without an expert cache.

    What is known of earlier runs is used.
    """
    if not isinstance(model, ExpertModel) or (cache := model.expert_cache) is None:
        return None
    control = ExpertControl(cache, sizes, n_threads, (usage_key(file), search_key(file, n_threads)))
    model.watcher = chained(model.watcher, control.run)
    control.begin()
    return control
