"""The planner of experts on CPU and GPU against all ways that there are, and its simulation on recorded routing."""

from collections.abc import Sequence

import numpy as np
import pytest
from placement_simulation import assign, best_of_all, on_cpu, simulate, where_held

from edgeinfer.common.errors import InvalidArgument
from edgeinfer.experimental.placement import (
    Assignment,
    ExpertTimes,
    GpuCache,
    NeededExpert,
    interpolated,
    timed,
)
from edgeinfer.offload.routing import Routing

TIMES = ExpertTimes(cpu=lambda rows: 1.0 * rows, gpu=lambda rows: 0.25 + 0.05 * rows, transfer=1.5, read=3.0)


def random_layer(rng: np.random.Generator, n: int) -> list[NeededExpert]:
    """A layer of a pass of several rows, with some experts on the GPU and some on disk only."""
    return [
        NeededExpert(expert, int(rng.integers(1, 9)), bool(rng.random() < 0.4), bool(rng.random() < 0.8))
        for expert in range(n)
    ]


def test_the_times_of_an_assignment_by_hand() -> None:
    """GPU: expert 0 0..0.45; 1 is read 0..3, moved 3..4.5, computed 4.5..4.8. CPU: 2 0..2; 3 is read 3..6, 6..7."""
    needed = [
        NeededExpert(0, 4, on_gpu=True),
        NeededExpert(1, 1, in_memory=False),
        NeededExpert(2, 2),
        NeededExpert(3, 1, in_memory=False),
    ]
    found = timed(frozenset({0, 1}), needed, TIMES)
    assert (found.cpu, found.gpu, found.transfers) == ((2, 3), (0, 1), (1,))
    assert found.cpu_seconds == pytest.approx(7.0) and found.gpu_seconds == pytest.approx(4.8)
    assert found.seconds == found.cpu_seconds


def test_transfers_overlap_what_the_gpu_computes() -> None:
    slow = ExpertTimes(cpu=lambda rows: 10.0, gpu=lambda rows: 2.0, transfer=1.0)
    needed = [NeededExpert(0, 1, on_gpu=True), NeededExpert(1, 1), NeededExpert(2, 1)]
    found = assign(needed, slow)
    assert found.gpu == (0, 1, 2) and found.transfers == (1, 2) and found.seconds == pytest.approx(6.0)


def test_experts_with_many_rows_go_to_the_gpu_and_those_with_few_to_an_idle_cpu() -> None:
    needed = [NeededExpert(expert, rows) for expert, rows in enumerate((1, 8, 1, 6))]
    found = assign(needed, TIMES)
    assert set(found.gpu) == {1, 3} and set(found.cpu) == {0, 2}
    held = [NeededExpert(expert, 1, on_gpu=True) for expert in range(8)]
    shared = assign(held, ExpertTimes(cpu=lambda rows: 1.0, gpu=lambda rows: 1.0, transfer=1.0))
    assert len(shared.cpu) == len(shared.gpu) == 4 and not shared.transfers


@pytest.mark.parametrize("transfer, read", [(0.2, 0.5), (1.5, 3.0), (20.0, 1.0)])
def test_the_greedy_rule_is_near_the_best_of_all_ways(transfer: float, read: float) -> None:
    rng = np.random.default_rng(5)
    times = ExpertTimes(TIMES.cpu, TIMES.gpu, transfer, read)
    ratios = []
    for _ in range(60):
        needed = random_layer(rng, int(rng.integers(1, 9)))
        found, best = assign(needed, times), best_of_all(needed, times)
        assert best.seconds <= found.seconds <= min(on_cpu(needed, times).seconds, where_held(needed, times).seconds)
        assert sorted(found.cpu + found.gpu) == [of.expert for of in needed]
        ratios.append(found.seconds / best.seconds)
    assert np.mean(ratios) < 1.02 and max(ratios) < 1.3


def test_the_same_layer_gets_the_same_assignment_and_none_is_nothing() -> None:
    needed = random_layer(np.random.default_rng(1), 40)
    assert assign(needed, TIMES) == assign(list(needed), TIMES)
    assert assign([], TIMES) == Assignment((), (), (), 0.0, 0.0)


def test_measured_times_are_interpolated() -> None:
    seconds = interpolated({1: 1.0, 4: 2.5, 8: 3.5})
    assert [seconds(rows) for rows in (1, 2, 4, 6, 8, 12)] == pytest.approx([1.0, 1.5, 2.5, 3.0, 3.5, 4.5])
    assert interpolated({4: 2.0})(1) == interpolated({4: 2.0})(9) == 2.0
    with pytest.raises(InvalidArgument, match="one row or more"):
        interpolated({})


def test_the_gpu_keeps_the_experts_with_the_largest_scores() -> None:
    cache = GpuCache(2, 4, capacity=2, memory=0.5)
    for experts in ([0, 1], [0, 1], [0, 2]):
        cache.observe(0, experts)
    assert cache.fill() == [(0, 0), (0, 2)] and cache.holds(0, 2) and not cache.holds(0, 1)
    assert cache.keep(0, 2) is None and cache.keep(1, 3) == (1, 3)  # which scored nothing
    cache.observe(1, [3], [4.0])
    assert cache.keep(1, 3) == (0, 2) and cache.holds(1, 3) and not cache.holds(0, 2)
    assert GpuCache(2, 4, 0).keep(0, 0) == (0, 0)
    cache.observe(0, [1], [9.0])
    assert cache.swap() == ((0, 1), (0, 0)) and cache.swap() is None  # the others do not score clearly more
    assert GpuCache(1, 2, 1).swap() == ((0, 0), None) and GpuCache(1, 2, 0).swap() is None
    with pytest.raises(InvalidArgument, match=r"0\.\.8"):
        GpuCache(2, 4, 9)


def recorded(n_rows: int) -> Routing:
    """A text whose favourite experts drift, with checks of n_rows tokens after the prompt."""
    rng = np.random.default_rng(7)
    n_tokens, liking = 24 + 24 * n_rows, 2.0 * rng.normal(size=(4, 16))
    chosen = np.empty((n_tokens, 4, 4), np.int32)
    for token in range(n_tokens):
        liking += 0.15 * rng.normal(size=liking.shape)
        chosen[token] = np.argsort(-(liking + rng.gumbel(size=liking.shape)), axis=1)[:, :4]
    return Routing(chosen, 16, n_prompt=24, pass_lengths=[24] + [n_rows] * 24)


@pytest.mark.parametrize("n_rows, in_memory", [(1, None), (4, None), (4, 40)])
def test_on_recorded_routing_ours_is_faster_than_a_static_split_and_the_cpu_alone(
    n_rows: int, in_memory: int | None
) -> None:
    times = ExpertTimes(TIMES.cpu, TIMES.gpu, transfer=0.6, read=0.5)
    found = simulate(recorded(n_rows), times, on_gpu=16, in_memory=in_memory)
    assert found["ours"].seconds < found["static"].seconds < found["cpu"].seconds
    assert found["cpu"].transfers == found["static"].transfers == 0 < found["ours"].transfers


def test_without_a_gpu_worth_using_all_ways_are_the_cpu() -> None:
    times = ExpertTimes(TIMES.cpu, lambda rows: 100.0, transfer=100.0)
    found = simulate(recorded(2), times, on_gpu=16)
    assert found["ours"].seconds == found["cpu"].seconds < found["static"].seconds and not found["ours"].transfers


def test_the_simulation_counts_the_rows_of_a_pass_by_expert() -> None:
    chosen = np.array([[[0]], [[1]], [[1]], [[-1]]], np.int32)
    seconds: Sequence[float] = [
        simulate(Routing(chosen, 2, 1, lengths), TIMES, 0)["cpu"].seconds for lengths in ([1, 3], None)
    ]
    assert seconds == [2.0, 2.0]
