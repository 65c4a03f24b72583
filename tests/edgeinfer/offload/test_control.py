"""What is decided while a model runs, with a cache that is a table of counts."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from edgeinfer.common.types import ExpertSizes
from edgeinfer.offload import control
from edgeinfer.offload.control import ExpertControl, control_experts
from edgeinfer.offload.size_search import load_search
from edgeinfer.offload.usage import load_usage

SIZES = ExpertSizes(total=800, least=20, a_token=40, n_layers=2, n_experts=4, n_used=2)


@dataclass(frozen=True)
class OfLayer:
    lookups: int = 0
    hits: int = 0
    bytes_read: int = 0
    prefetches: int = 0
    useful: int = 0
    seconds_waited: float = 0.0


@dataclass(frozen=True)
class Stats:
    layers: tuple[OfLayer, ...] = (OfLayer(), OfLayer(), OfLayer())
    busy_seconds: float = 0.0


@dataclass
class FakeCache:
    """Three layers, the first without experts. Prefetch hides half of each pass; time is the test's."""

    n_bytes: int = 40
    record_bytes: Sequence[int] = (0, 10, 10)
    is_of_use: bool = True
    now: float = 0.0
    others: float = 0.0  # CPU seconds of other programs
    load: float = 0.0  # cores that they use
    prefetch: dict[int, int] = field(default_factory=dict)
    hints: list[tuple[int, list[int]]] = field(default_factory=list)
    warmed: list[tuple[int, int]] = field(default_factory=list)
    counts: Stats = field(default_factory=Stats)
    observed_every: int = 0
    n_predicted: int = 0
    right: int = 90  # of a hundred predictions
    chosen: tuple[list[int], ...] = ([-1, -1], [1, 2], [0, 3])

    def stats(self) -> Stats:
        return self.counts

    def routing(self) -> np.ndarray:
        return np.array([[row] * self.n_rows for row in self.chosen], np.int32)

    def set_prefetch(self, layer: int, n: int) -> None:
        self.prefetch[layer] = n

    def observe(self, every: int) -> None:
        self.observed_every = every

    def predictions(self) -> list[tuple[int, int]]:
        return [(0, 0), *[(self.n_predicted, self.n_predicted * self.right // 100)] * 2]

    def hint(self, layer: int, experts: Sequence[int]) -> None:
        self.hints.append((layer, list(experts)))

    def warm(self, experts: Sequence[tuple[int, int]]) -> None:
        self.warmed += experts

    def forward(self, n_rows: int = 1) -> bool:
        self.n_rows = n_rows
        is_on = any(self.prefetch.values())
        faster = is_on == self.is_of_use
        seconds = 0.5 if is_on and faster else 1.0 if faster or not is_on else 1.5
        self.now += seconds
        self.others += self.load * seconds
        counted = OfLayer(2, 1, 10, int(is_on), int(is_on), 0.2)
        self.counts = Stats(
            (OfLayer(), *(_sum(of, counted) for of in self.counts.layers[1:])), self.counts.busy_seconds + 0.4
        )
        return True


def _sum(of: OfLayer, added: OfLayer) -> OfLayer:
    return replace(of, **{name: value + getattr(added, name) for name, value in vars(of).items()})


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCache:
    made = FakeCache()
    monkeypatch.setattr(control, "time", SimpleNamespace(perf_counter=lambda: made.now))
    clock = SimpleNamespace(now=lambda: made.now, own=lambda: made.now, all=lambda: made.now + made.others)
    monkeypatch.setattr(control, "MachineClock", lambda: clock)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return made


def run(cache: FakeCache, watched: ExpertControl, n: int, token: int = 7) -> None:
    for _ in range(n):
        assert watched.run([token], cache.forward)


def test_prefetch_comes_on_where_passes_are_faster_with_it(cache: FakeCache) -> None:
    watched = ExpertControl(cache, SIZES, 2)
    run(cache, watched, 300)
    assert cache.prefetch[1] == cache.prefetch[2] == 2 and 0 not in cache.prefetch
    assert cache.hints[-1] == (1, [1, 2])  # what token 7 used in the first layer with experts


def test_prefetch_goes_off_where_passes_are_slower_with_it(cache: FakeCache) -> None:
    cache.is_of_use = False
    watched = ExpertControl(cache, SIZES, 2)
    run(cache, watched, 400)
    plain = FakeCache()
    for _ in range(400):
        plain.forward()
    assert plain.now / cache.now > 0.98 and not any(cache.prefetch.values()) and cache.prefetch


def test_where_most_predictions_are_wrong_nothing_is_tried(cache: FakeCache) -> None:
    watched = ExpertControl(cache, SIZES, 2)
    watched.begin()
    assert cache.observed_every > 1
    cache.n_predicted, cache.right = 100, 40
    run(cache, watched, 300)
    assert not cache.prefetch and not cache.hints
    cache.right = 60
    run(cache, watched, 1000)
    assert cache.prefetch[1] == cache.prefetch[2] == 2


def test_a_layer_whose_predictions_become_wrong_is_switched_off(cache: FakeCache) -> None:
    watched = ExpertControl(cache, SIZES, 2)
    run(cache, watched, 300)
    assert any(watched.amounts)
    cache.n_predicted, cache.right = 100, 40
    run(cache, watched, 8)
    assert not any(watched.amounts) and not any(cache.prefetch.values())


def test_the_next_load_reads_first_what_was_used_most(cache: FakeCache) -> None:
    first = ExpertControl(cache, SIZES, 2, ("usage", "search"))
    first.begin()
    assert cache.warmed == []
    run(cache, first, 5)
    cache.chosen = ([-1, -1], [3, 2], [0, 1])
    run(cache, first, 2)
    first.close()
    ExpertControl(cache, SIZES, 2, ("usage", "search")).begin()
    assert cache.warmed == [(1, 2), (2, 0), (1, 1), (2, 3)]  # four fit
    assert load_usage("usage", 3, 4).counts[1].tolist() == pytest.approx([0, 5, 7, 2], abs=0.05)


def test_the_speed_of_a_long_run_counts_for_the_size_of_the_next_cache(cache: FakeCache) -> None:
    for n_passes, n_runs in ((40, 0), (60, 1)):
        watched = ExpertControl(cache, SIZES, 2, ("usage", "search"))
        run(cache, watched, n_passes)
        watched.close()
        assert len(load_search("search").runs) == n_runs
    ((size, (of_run,)),) = load_search("search").runs.items()
    assert size == 40 and of_run.hit_rate == 0.5 and of_run.tokens_per_second >= 1.0


def test_passes_beside_other_programs_say_nothing_of_the_size(cache: FakeCache) -> None:
    for load, n_runs in ((0.5, 0), (0.1, 1)):
        cache.load = load
        watched = ExpertControl(cache, SIZES, 2, ("usage", "search"))
        run(cache, watched, 80)
        watched.close()
        assert len(load_search("search").runs) == n_runs
    watched = ExpertControl(cache, SIZES, 2, ("usage", "search"))
    cache.load = 0.0

    def beside_others() -> bool:
        cache.now, cache.others = cache.now + 9.0, cache.others + 9.0
        return cache.forward()

    run(cache, watched, 56)
    for _ in range(16):
        watched.run([7], beside_others)
    run(cache, watched, 40)
    watched.close()
    (runs,) = load_search("search").runs.values()
    assert len(runs) == 2 and runs[1].tokens_per_second > 0.8  # 0.4 with all passes


def test_passes_of_several_rows_are_learnt_from_and_not_timed(cache: FakeCache) -> None:
    watched = ExpertControl(cache, SIZES, 2, ("usage", "search"))
    for _ in range(100):
        watched.run([4, 5, 6], lambda: cache.forward(3))
    watched.run([1, 2, 3], lambda: cache.forward(2))  # the last of its passes had two rows
    watched.close()
    assert not cache.prefetch and not load_search("search").runs
    assert load_usage("usage", 3, 4).counts[2, 0] > 250
    cache.counts = Stats()  # as of another cache: nothing is asked of it any more
    assert watched.reads().wanted == 404 and watched.reads().hit_rate == 0.5


def test_a_pass_that_was_stopped_or_not_begun_says_nothing(cache: FakeCache) -> None:
    watched = ExpertControl(cache, SIZES, 2, ("usage", "search"))
    for result in (None, False):
        assert watched.run([1], lambda result=result: result) is result  # type: ignore[misc]
    watched.close()
    assert not load_usage("usage", 3, 4).counts.any()
    assert watched.run([1], lambda: True) is True  # closed: there is nothing to learn from


def test_a_model_without_a_cache_is_not_watched(cache: FakeCache) -> None:
    model = SimpleNamespace(watcher=None, expert_cache=None)
    assert control_experts(model, SimpleNamespace(tensors={}), SIZES, 2) is None and model.watcher is None
    model.expert_cache = cache
    watched = control_experts(model, SimpleNamespace(tensors={}), SIZES, 2)
    assert watched is not None and model.watcher == watched.run
