"""Rules that place experts on CPU and GPU, simulated on recorded routing: what a text would take by measured times.

Nothing is computed.
Transfers that a layer waits for are not hidden behind other layers; what the GPU holds is also in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from edgeinfer.experimental.placement import Assignment, ExpertTimes, GpuCache, NeededExpert, timed
from edgeinfer.offload.policies import PassRecency
from edgeinfer.offload.routing import NONE, Routing

Rule = Callable[[Sequence[NeededExpert], ExpertTimes], Assignment]


def assign(needed: Sequence[NeededExpert], times: ExpertTimes) -> Assignment:
    """Who computes which of a layer's experts, by a greedy rule.

    At first the GPU has those that it holds and the CPU the others. Then one expert at a time changes sides, that whose
    change lets the layer end soonest, as long as one does: experts with many rows go to the GPU, which rows slow down
    less, with the transfer hidden behind what it computes, and those with few rows to a CPU that would be idle. Of
    equals it is the first one. Never slower, by these times, than the CPU alone.
    """
    best = _climb(frozenset(of.expert for of in needed if of.on_gpu), needed, times)
    alone = on_cpu(needed, times)
    return alone if alone.seconds < best.seconds else best


def on_cpu(needed: Sequence[NeededExpert], times: ExpertTimes) -> Assignment:
    """All on the CPU."""
    return timed(frozenset(), needed, times)


def where_held(needed: Sequence[NeededExpert], times: ExpertTimes) -> Assignment:
    """The GPU computes what it holds and the CPU all else; nothing is moved."""
    return timed(frozenset(of.expert for of in needed if of.on_gpu), needed, times)


def best_of_all(needed: Sequence[NeededExpert], times: ExpertTimes) -> Assignment:
    """The fastest of all 2^n ways to divide n experts, for tests with few of them."""
    experts = [of.expert for of in needed]
    ways = (frozenset(part) for n in range(len(experts) + 1) for part in combinations(experts, n))
    return min((timed(way, needed, times) for way in ways), key=lambda found: found.seconds)


def _climb(on_gpu: frozenset[int], needed: Sequence[NeededExpert], times: ExpertTimes) -> Assignment:
    """Change sides of one expert after the other, as long as that lets the layer end sooner."""
    best = timed(on_gpu, needed, times)
    while True:
        ways = (on_gpu ^ {of.expert} for of in _one_of_each(needed, on_gpu))
        found = min(((timed(way, needed, times), way) for way in ways), key=lambda at: _end(at[0]), default=None)
        if found is None or _end(found[0]) >= _end(best):
            return best
        best, on_gpu = found


def _end(found: Assignment) -> tuple[float, float]:
    """What is to be small: the end of the layer, then the time of both devices together."""
    return found.seconds, found.cpu_seconds + found.gpu_seconds


def _one_of_each(needed: Sequence[NeededExpert], on_gpu: frozenset[int]) -> Iterable[NeededExpert]:
    """Of experts that differ in nothing but their index, the first one."""
    kinds: dict[tuple[object, ...], NeededExpert] = {}
    for of in needed:
        kinds.setdefault((of.rows, of.on_gpu, of.in_memory, of.expert in on_gpu), of)
    return kinds.values()


@dataclass(frozen=True)
class Simulated:
    """Seconds of the experts of all tokens after the prompt."""

    seconds: float
    # transfers, swaps: experts that were moved to the GPU because a token needed them, and while the link was idle
    transfers: int
    swaps: int = 0


def simulate(routing: Routing, times: ExpertTimes, on_gpu: int, in_memory: int | None = None) -> dict[str, Simulated]:
    """The text with all experts on the CPU ("cpu"), with those that the GPU holds on the GPU ("static"), and with
    `assign` and a cache by score ("ours").

    on_gpu, in_memory: experts that fit there, None for all. All three begin with what the prompt used most on the GPU.
    """
    return {
        "cpu": _run(routing, times, 0, in_memory, on_cpu),
        "static": _run(routing, times, on_gpu, in_memory, where_held),
        "ours": _run(routing, times, on_gpu, in_memory, assign),
    }


def _run(routing: Routing, times: ExpertTimes, on_gpu: int, in_memory: int | None, rule: Rule) -> Simulated:
    capacity = min(on_gpu, routing.n_layers * routing.n_experts)
    gpu, memory = GpuCache(routing.n_layers, routing.n_experts, capacity), PassRecency(in_memory or 1)
    seconds, transfers, swaps, was_prompt, idle = 0.0, 0, 0, True, 0.0
    for number, (is_prompt, layers) in enumerate(_passes(routing)):
        if was_prompt and not is_prompt:
            gpu.fill()
        was_prompt = is_prompt
        for layer, rows in enumerate(layers):
            needed = [
                NeededExpert(expert, n, gpu.holds(layer, expert), in_memory is None or memory.holds(layer, expert))
                for expert, n in rows.items()
            ]
            gpu.observe(layer, list(rows))
            if in_memory is not None:
                memory.begin(number, layer, list(rows))
            if is_prompt:
                continue
            found = rule(needed, times)
            seconds += found.seconds
            transfers += len(found.transfers)
            for expert in found.transfers:
                gpu.keep(layer, expert)
            idle += found.seconds - len(found.transfers) * times.transfer
            if rule is assign and idle >= times.transfer:
                idle = 0.0
                swaps += gpu.swap() is not None
    return Simulated(seconds, transfers, swaps)


def _passes(routing: Routing) -> list[tuple[bool, list[dict[int, int]]]]:
    """Of each pass: whether it is of the prompt, and by layer the rows of each expert that it needs, ascending."""
    found, first = [], 0
    for length in routing.pass_lengths or [1] * routing.n_tokens:
        rows = routing.chosen[first : first + length]
        counts = [Counter(rows[:, layer].reshape(-1).tolist()) for layer in routing.layers]
        found.append((first < routing.n_prompt, [{e: of[e] for e in sorted(of) if e != NONE} for of in counts]))
        first += length
    return found
