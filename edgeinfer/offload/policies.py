"""Which experts a cache evicts, simulated on recorded routing.

All experts count as equally large. A cache is told the layers of each pass in order, with the experts that they want;
an expert that is wanted now is never evicted for another one of the same layer.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from edgeinfer.common.errors import InvalidArgument
from edgeinfer.common.overriding import override
from edgeinfer.offload.routing import Routing

_NEVER = 1 << 62


class CachePolicy(Protocol):
    """A cache of experts with a rule of eviction."""

    def begin(self, number: int, layer: int, wanted: Sequence[int]) -> list[tuple[int, int]]:
        """Have these experts of a layer in the cache; gives the (layer, expert) that were evicted, in order.

        number: of the pass, ascending.  wanted: each once.
        """
        ...

    def holds(self, layer: int, expert: int) -> bool:
        """Whether an expert is in the cache."""
        ...


class LeastRecent(CachePolicy):
    """Evicts what was wanted the longest time ago (LRU). capacity: experts."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: OrderedDict[tuple[int, int], None] = OrderedDict()

    @override
    def holds(self, layer: int, expert: int) -> bool:
        return (layer, expert) in self._held

    @override
    def begin(self, number: int, layer: int, wanted: Sequence[int]) -> list[tuple[int, int]]:
        missing = []
        for expert in wanted:
            if self.holds(layer, expert):
                self._held.move_to_end((layer, expert))
            else:
                missing.append(expert)
        evicted = []
        for expert in missing:
            if len(self._held) >= self._capacity:
                evicted.append(self._held.popitem(last=False)[0])
            self._held[layer, expert] = None
        return evicted


class PassRecency(CachePolicy):
    """Evicts what was not wanted the largest number of times that its layer was computed since its last use, as the
    native expert store does.

    Of equals it is the one of the layer that comes last in the cycle of layers from the present one on, so the layer
    that has just passed; and in a layer the expert with the lowest index. Plain LRU evicts in the order of layers: with
    a cache smaller than what one token wants it has evicted each expert just before it is wanted again.
    capacity: experts.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._last: dict[tuple[int, int], int] = {}  # pass that last wanted it
        self._passes: deque[int] = deque()  # ascending, with those that have an entry in _layers
        self._layers: dict[int, int] = {}  # by pass: one bit for each layer with experts last wanted then
        self._experts: dict[tuple[int, int], int] = {}  # by pass and layer: one bit for each of them

    @override
    def holds(self, layer: int, expert: int) -> bool:
        return (layer, expert) in self._last

    @override
    def begin(self, number: int, layer: int, wanted: Sequence[int]) -> list[tuple[int, int]]:
        missing = [expert for expert in wanted if not self.holds(layer, expert)]
        for expert in wanted:
            if self.holds(layer, expert):
                self._forget(layer, expert)
                self._note(number, layer, expert)
        evicted = []
        for expert in missing:
            if len(self._last) >= self._capacity:
                evicted.append(self._victim(layer))
                self._forget(*evicted[-1])
            self._note(number, layer, expert)
        return evicted

    def _victim(self, layer: int) -> tuple[int, int]:
        while self._passes[0] not in self._layers:
            self._passes.popleft()
        number = self._passes[0]
        passed, present = self._layers[number] & ((1 << layer) - 1), self._layers[number] & 1 << layer
        if not passed and not present:  # only layers ahead, which were computed in one pass fewer
            passed = self._layers.get(number + 1, 0) & ((1 << layer) - 1)
            number += 1 if passed else 0
        found = (passed or present or self._layers[number]).bit_length() - 1
        experts = self._experts[number, found]
        return found, (experts & -experts).bit_length() - 1

    def _note(self, number: int, layer: int, expert: int) -> None:
        self._last[layer, expert] = number
        if number not in self._layers and (not self._passes or self._passes[-1] != number):
            self._passes.append(number)
        self._layers[number] = self._layers.get(number, 0) | 1 << layer
        self._experts[number, layer] = self._experts.get((number, layer), 0) | 1 << expert

    def _forget(self, layer: int, expert: int) -> None:
        number = self._last.pop((layer, expert))
        self._experts[number, layer] &= ~(1 << expert)
        if not self._experts[number, layer]:
            del self._experts[number, layer]
            self._layers[number] &= ~(1 << layer)
            if not self._layers[number]:
                del self._layers[number]


class Farthest(CachePolicy):
    """Evicts what will be wanted last (Belady, IBM Systems Journal 5(2), 1966): no policy has more hits.

    It knows the routing, which begin must be told from its first pass on.  capacity: experts.
    """

    def __init__(self, capacity: int, routing: Routing) -> None:
        self._capacity = capacity
        self._now = -1
        self._uses: dict[tuple[int, int], list[int]] = defaultdict(list)  # the next one last
        for time, (layer, wanted) in enumerate(_steps(routing)):
            for expert in wanted:
                self._uses[layer, expert].append(time)
        for uses in self._uses.values():
            uses.reverse()
        self._next: dict[tuple[int, int], int] = {}  # of what is held
        self._heap: list[tuple[int, int, int]] = []  # (-next use, layer, expert), with entries that are out of date

    @override
    def holds(self, layer: int, expert: int) -> bool:
        return (layer, expert) in self._next

    @override
    def begin(self, number: int, layer: int, wanted: Sequence[int]) -> list[tuple[int, int]]:
        self._now += 1
        for expert in wanted:  # what is wanted now is no candidate
            self._next.pop((layer, expert), None)
        evicted = []
        while self._next and len(self._next) + len(wanted) > self._capacity:
            evicted.append(self._pop())
        for expert in wanted:
            uses = self._uses[layer, expert]
            while uses and uses[-1] <= self._now:
                uses.pop()
            self._next[layer, expert] = following = uses[-1] if uses else _NEVER
            heapq.heappush(self._heap, (-following, layer, expert))
        return evicted

    def _pop(self) -> tuple[int, int]:
        while True:
            following, layer, expert = heapq.heappop(self._heap)
            if self._next.get((layer, expert)) == -following:
                del self._next[layer, expert]
                return layer, expert


@dataclass(frozen=True)
class HitCounts:
    """Experts that passes wanted, and how many of them were in the cache."""

    wanted: int
    hits: int

    @property
    def hit_rate(self) -> float:
        """Hits over wanted ones, 1 where nothing was wanted."""
        return self.hits / self.wanted if self.wanted else 1.0


def count_hits(routing: Routing, cache: CachePolicy) -> HitCounts:
    """What an empty cache would have held when it was wanted, by the tokens behind the prompt.

    The prompt fills the cache and is not counted; what a pass wants of a layer counts once.
    """
    wanted = hits = 0
    for number, (is_prompt, layers) in enumerate(routing.passes()):
        for layer, experts in enumerate(layers):
            if not is_prompt:
                wanted += len(experts)
                hits += sum(cache.holds(layer, expert) for expert in experts)
            cache.begin(number, layer, experts)
    return HitCounts(wanted, hits)


def hit_rates(routing: Routing, capacity: int) -> dict[str, float]:
    """Hit rates of LRU, of the store's policy and of the best one that there can be ("lru", "ours", "belady").

    capacity: experts. Raises InvalidArgument where a pass wants more of a layer than that.
    """
    widest = max((len(experts) for _, layers in routing.passes() for experts in layers), default=0)
    if capacity < widest:
        raise InvalidArgument(f"a cache of {capacity} experts is too small: one pass wants {widest} of a layer")
    caches: dict[str, CachePolicy] = {
        "lru": LeastRecent(capacity),
        "ours": PassRecency(capacity),
        "belady": Farthest(capacity, routing),
    }
    return {name: count_hits(routing, cache).hit_rate for name, cache in caches.items()}


def _steps(routing: Routing) -> list[tuple[int, list[int]]]:
    """(layer, wanted) of all passes in the order in which they are asked for."""
    return [(layer, wanted) for _, layers in routing.passes() for layer, wanted in enumerate(layers)]
