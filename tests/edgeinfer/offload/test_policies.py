"""Recorded routing, and caches simulated on it, against the rules written out as scans."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from route_traces import read_trace

from edgeinfer.common.errors import InvalidArgument
from edgeinfer.offload.policies import CachePolicy, Farthest, LeastRecent, PassRecency, count_hits, hit_rates
from edgeinfer.offload.routing import NONE, Routing

TRACE = """\
# route_trace v1
# model=/models/tiny.gguf arch=qwen3moe n_layer=2 n_expert=4 n_expert_used=2
# layer=0 expert_bytes=100 dense_bytes=7
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
0,0,0,0,0,3,0.7,0,100
0,0,0,0,1,1,0.3,0,100
0,1,1,0,0,2,0.6,0,100
0,1,1,0,1,3,0.4,1,0
0,1,1,1,0,0,0.6,0,100
0,1,1,1,1,1,0.4,0,100
"""


def routed(n_tokens: int, n_layers: int, n_experts: int, n_used: int, seed: int) -> Routing:
    """Routing with favourites that drift."""
    rng = np.random.default_rng(seed)
    liking = rng.normal(size=(n_layers, n_experts))
    chosen = np.empty((n_tokens, n_layers, n_used), np.int32)
    for token in range(n_tokens):
        liking += 0.3 * rng.normal(size=liking.shape)
        chosen[token] = np.argsort(-(liking + rng.gumbel(size=liking.shape)), axis=1)[:, :n_used]
    return Routing(chosen, n_experts, n_prompt=n_tokens // 4)


class ScannedRecency:
    """The rule of PassRecency by a look at every expert that is held."""

    def __init__(self, capacity: int, n_layers: int) -> None:
        self.capacity, self.n_layers = capacity, n_layers
        self.last: dict[tuple[int, int], int] = {}

    def holds(self, layer: int, expert: int) -> bool:
        return (layer, expert) in self.last

    def begin(self, number: int, layer: int, wanted: list[int]) -> list[tuple[int, int]]:
        missing = [expert for expert in wanted if not self.holds(layer, expert)]
        self.last |= {(layer, expert): number for expert in wanted if expert not in missing}
        evicted = []
        for expert in missing:
            if len(self.last) >= self.capacity:
                ages = {
                    held: (number - last - (held[0] > layer), (held[0] - layer) % self.n_layers, -held[1])
                    for held, last in self.last.items()
                }
                evicted.append(max(ages, key=ages.__getitem__))
                del self.last[evicted[-1]]
            self.last[layer, expert] = number
        return evicted


def test_a_trace_is_read_as_tokens_by_layers_by_slots(tmp_path: Path) -> None:
    path = tmp_path / "tiny.route.csv"
    path.write_text(TRACE)
    routing = read_trace(path)
    assert routing.chosen.tolist() == [[[3, 1], [NONE, NONE]], [[2, 3], [0, 1]]]
    assert (routing.n_experts, routing.n_prompt) == (4, 1)
    assert list(routing.passes()) == [(True, [[1, 3], []]), (False, [[2, 3], [0, 1]])]


@pytest.mark.parametrize(
    "found, instead, said",
    [
        ("n_expert_used=2", "", "n_expert_used"),
        ("0,1,1,1,0,0,0.6", "0,1,1,x,0,0,0.6", "tiny.csv:9"),
        ("0,1,1,1,0,0,0.6", "0,1,1,-1,0,0,0.6", "tiny.csv:9"),
        ("0,1,1,1,0,0,0.6", "0,1,1,5,0,0,0.6", "layers or slots"),
        ("0,1,1,1,0,0,0.6", "0,1,1,1,0,4,0.6", "experts 0..3"),
    ],
)
def test_a_damaged_trace_is_refused(tmp_path: Path, found: str, instead: str, said: str) -> None:
    path = tmp_path / "tiny.csv"
    path.write_text(TRACE.replace(found, instead))
    with pytest.raises(InvalidArgument, match=said):
        read_trace(path)


def test_rows_of_one_pass_want_an_expert_once() -> None:
    chosen = np.array([[[0, 1]], [[1, 2]], [[3, 1]]], np.int32)
    assert list(Routing(chosen, 4, 2, [2, 1]).passes()) == [(True, [[0, 1, 2]]), (False, [[1, 3]])]
    with pytest.raises(InvalidArgument, match="all 3 tokens"):
        Routing(chosen, 4, 0, [1, 1])


@pytest.mark.parametrize("capacity", [3, 7, 12, 25, 40])
@pytest.mark.parametrize("seed", range(4))
def test_the_policy_evicts_what_a_scan_for_its_rule_finds(capacity: int, seed: int) -> None:
    routing = routed(40, 5, 12, 3, seed)
    fast, plain = PassRecency(capacity), ScannedRecency(capacity, 5)
    for number, (_, layers) in enumerate(routing.passes()):
        for layer, wanted in enumerate(layers):
            assert fast.begin(number, layer, wanted) == plain.begin(number, layer, wanted)
            assert all(fast.holds(layer, expert) for expert in wanted)


def test_lru_evicts_what_was_wanted_first() -> None:
    cache = LeastRecent(3)
    assert cache.begin(0, 0, [1, 2]) == [] and cache.begin(0, 1, [1]) == []
    assert cache.begin(1, 0, [1, 5]) == [(0, 2)]
    assert cache.begin(1, 1, [7]) == [(1, 1)]


def test_a_cache_below_one_token_has_hits_with_whole_passes_and_none_with_lru() -> None:
    chosen = np.tile(np.array([[0, 1]], np.int32), (20, 4, 1))  # eight experts, again and again
    routing = Routing(chosen, 4)
    assert count_hits(routing, LeastRecent(6)).hits == 0
    assert count_hits(routing, PassRecency(6)).hit_rate > 0.4


@pytest.mark.parametrize("seed", range(6))
def test_belady_has_as_many_hits_as_the_best_of_all_ways_to_evict(seed: int) -> None:
    routing = routed(7, 2, 4, 1, seed)
    steps = [(layer, wanted[0]) for _, layers in routing.passes() for layer, wanted in enumerate(layers)]

    @cache
    def most_hits(time: int, held: frozenset[tuple[int, int]]) -> int:
        if time == len(steps):
            return 0
        now = steps[time]
        if now in held:
            return 1 + most_hits(time + 1, held)
        kept = [held] if len(held) < 3 else [held - {evicted} for evicted in held]
        return max(most_hits(time + 1, rest | {now}) for rest in kept)

    whole = Routing(routing.chosen, routing.n_experts)  # without a prompt
    assert count_hits(whole, Farthest(3, whole)).hits == most_hits(0, frozenset())


@pytest.mark.parametrize("capacity", [6, 10, 24, 48])
def test_no_policy_has_more_hits_than_belady(capacity: int) -> None:
    routing = routed(120, 6, 16, 4, 3)
    rates = hit_rates(routing, capacity)
    assert rates["lru"] <= rates["belady"] and rates["ours"] <= rates["belady"]
    assert rates["belady"] > 0


@pytest.mark.parametrize("make", [LeastRecent, PassRecency, lambda n: Farthest(n, routed(60, 4, 8, 2, 1))])
def test_a_cache_never_holds_more_than_it_may_and_all_of_a_pass(make: Callable[[int], CachePolicy]) -> None:
    routing, cache = routed(60, 4, 8, 2, 1), make(9)
    held: set[tuple[int, int]] = set()
    for number, (_, layers) in enumerate(routing.passes()):
        for layer, wanted in enumerate(layers):
            evicted = cache.begin(number, layer, wanted)
            held = (held | {(layer, expert) for expert in wanted}) - set(evicted)
            assert len(held) <= 9 and all((layer, expert) in held for expert in wanted)


def test_with_room_for_all_only_first_uses_miss() -> None:
    routing = routed(50, 3, 8, 2, 5)
    rates = hit_rates(routing, 24)
    assert rates["lru"] == rates["ours"] == rates["belady"] < 1.0


def test_the_prompt_fills_the_cache_and_is_not_counted() -> None:
    chosen = np.array([[[0, 1]], [[0, 1]]], np.int32)
    counts = count_hits(Routing(chosen, 4, n_prompt=1), PassRecency(2))
    assert (counts.wanted, counts.hits, counts.hit_rate) == (2, 2, 1.0)


def test_a_cache_below_what_a_pass_wants_is_refused_with_the_number_that_works() -> None:
    with pytest.raises(InvalidArgument, match="wants 3"):
        hit_rates(routed(4, 2, 8, 3, 0), 2)
