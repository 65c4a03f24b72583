"""Which of a layer's experts the CPU computes and which the GPU, after HybriMoE (Zhong et al., arXiv:2504.05897).

All of it is arithmetic with times that were measured before: of an expert with some rows on either device, of moving
one to the GPU, of reading one from disk. The CPU, the GPU, the link between them and the disk work at the same time.
What is best by this model has been simulated on recorded routing (tests/support/placement_simulation.py), not measured
on a GPU.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import InvalidArgument

_CLEARLY = 1.5  # times as large a score is worth a transfer while the link is idle

Seconds = Callable[[int], float]  # of one expert, by the number of rows
LayerScores = tuple[int, Sequence[int], Sequence[float]]  # a layer, and its experts with a score for each


@dataclass(frozen=True)
class ExpertTimes:
    """Measured seconds."""

    # cpu, gpu: to compute one expert, by its rows
    cpu: Seconds
    gpu: Seconds
    transfer: float  # to move one from memory to the GPU
    read: float = 0.0  # to bring one from disk into memory


@dataclass(frozen=True)
class NeededExpert:
    """An expert that a layer needs now."""

    expert: int
    rows: int  # that need it
    # on_gpu, in_memory: where it is held; on disk it always is
    on_gpu: bool = False
    in_memory: bool = True


@dataclass(frozen=True)
class Assignment:
    """Who computes what in a layer, by index of expert, each in the order in which it is to be begun."""

    cpu: tuple[int, ...]
    gpu: tuple[int, ...]  # with those that are moved there
    transfers: tuple[int, ...]  # these
    # cpu_seconds, gpu_seconds: when either is expected to be done
    cpu_seconds: float
    gpu_seconds: float

    @property
    def seconds(self) -> float:
        """When the layer is done."""
        return max(self.cpu_seconds, self.gpu_seconds)


def interpolated(measured: Mapping[int, float]) -> Seconds:
    """Seconds by rows between measured numbers of rows, straight on beyond the last two. Raises InvalidArgument.

    measured: seconds by rows.
    """
    if not measured or min(measured) < 1 or min(measured.values()) < 0:
        raise InvalidArgument(f"seconds must be measured for one row or more: found {dict(measured)}")
    sizes = sorted(measured)

    def seconds(rows: int) -> float:
        if rows in measured or len(sizes) == 1 or rows < sizes[0]:
            return measured.get(rows, measured[sizes[0]])
        above = min(max(bisect_left(sizes, rows), 1), len(sizes) - 1)
        low, high = sizes[above - 1], sizes[above]
        slope = (measured[high] - measured[low]) / (high - low)
        return max(measured[low] + slope * (rows - low), 0.0)

    return seconds


def assign_held(needed: Sequence[NeededExpert], times: ExpertTimes) -> Assignment:
    """Who computes which of a layer's experts, where nothing can be moved to the GPU within a layer.

    The time to decide is linear in the experts. Of what the GPU holds, those with the fewest rows go to the CPU as long
    as that lets the layer end sooner: rows slow the GPU down less. What is not in memory stays with the GPU.
    """
    held = sorted((of for of in needed if of.on_gpu), key=lambda of: (of.rows, of.expert))
    on_gpu = frozenset(of.expert for of in held)
    cpu = sum(times.cpu(of.rows) for of in needed if not of.on_gpu)
    gpu = sum(times.gpu(of.rows) for of in held)
    for of in held:
        moved_cpu, moved_gpu = cpu + times.cpu(of.rows), gpu - times.gpu(of.rows)
        if of.in_memory and max(moved_cpu, moved_gpu) < max(cpu, gpu):
            cpu, gpu, on_gpu = moved_cpu, moved_gpu, on_gpu - {of.expert}
    return timed(on_gpu, needed, times)


def timed(on_gpu: frozenset[int], needed: Sequence[NeededExpert], times: ExpertTimes) -> Assignment:
    """The assignment in which the GPU computes these experts, with the times that it takes.

    Reads from disk come one after the other, those for the GPU first: they have the longer way. The GPU begins with
    what it holds, the CPU with what is in memory.
    """
    most_rows = sorted(needed, key=lambda of: (-of.rows, of.expert))
    moved = [of for of in most_rows if of.expert in on_gpu and not of.on_gpu]
    held = [of for of in most_rows if of.expert in on_gpu and of.on_gpu]
    left = [of for of in reversed(most_rows) if of.expert not in on_gpu]
    near, far = [of for of in left if of.in_memory], [of for of in left if not of.in_memory]
    disk = link = 0.0
    gpu = sum(times.gpu(of.rows) for of in held)
    moved.sort(key=lambda of: not of.in_memory)  # stable: those in memory first
    for of in moved:
        disk += 0.0 if of.in_memory else times.read
        link = max(link, 0.0 if of.in_memory else disk) + times.transfer
        gpu = max(gpu, link) + times.gpu(of.rows)
    cpu = sum(times.cpu(of.rows) for of in near)
    for of in far:
        disk += times.read
        cpu = max(cpu, disk) + times.cpu(of.rows)
    return Assignment(_names(near + far), _names(held + moved), _names(moved), cpu, gpu)


def _names(experts: Sequence[NeededExpert]) -> tuple[int, ...]:
    return tuple(of.expert for of in experts)


class GpuCache:
    """Which experts the GPU holds: those with the largest decayed scores (HybriMoE, section 4.4).

    n_layers, n_experts: of the model.  capacity: experts in the GPU's memory, of all layers together.  memory: share of
    a score that stays from one pass to the next.
    """

    def __init__(self, n_layers: int, n_experts: int, capacity: int, memory: float = 0.9) -> None:
        if not 0 <= capacity <= n_layers * n_experts or not 0 <= memory < 1:
            raise InvalidArgument(
                f"capacity must be 0..{n_layers * n_experts} and memory 0..1: found {capacity}, {memory}"
            )
        self.capacity = capacity
        self._memory = memory
        self._scores: NDArray[np.float64] = np.zeros((n_layers, n_experts))
        self._held = np.zeros((n_layers, n_experts), bool)

    def holds(self, layer: int, expert: int) -> bool:
        """Whether the GPU holds an expert."""
        return bool(self._held[layer, expert])

    def fill(self) -> list[tuple[int, int]]:
        """Hold the experts with the largest scores; gives the (layer, expert) that are new."""
        order = np.argsort(-self._scores, axis=None, kind="stable")[: self.capacity]
        chosen = np.zeros_like(self._held)
        chosen.reshape(-1)[order] = True
        new = np.argwhere(chosen & ~self._held)
        self._held = chosen
        return [(int(layer), int(expert)) for layer, expert in new]

    def observe(self, layer: int, experts: Sequence[int], scores: Sequence[float] | None = None) -> None:
        """A pass needed these experts of a layer. scores: by how much, such as the sum of the router's weights, None
        for 1 each.
        """
        of_layer = self._scores[layer]
        of_layer *= self._memory
        of_layer[list(experts)] += (1 - self._memory) * (1.0 if scores is None else np.asarray(scores))

    def observe_pass(self, layers: Sequence[LayerScores]) -> None:
        """The same of a whole pass, each layer once: its index, its experts, and the score of each."""
        rows = np.array([layer for layer, _, _ in layers])
        self._scores[rows] *= self._memory
        of_experts = np.repeat(rows, [len(experts) for _, experts, _ in layers])
        scores = np.concatenate([np.asarray(of_layer, np.float64) for _, _, of_layer in layers])
        experts = np.concatenate([np.asarray(of_layer) for _, of_layer, _ in layers])
        self._scores[of_experts, experts] += (1 - self._memory) * scores

    def swap(self) -> tuple[tuple[int, int], tuple[int, int] | None] | None:
        """The (layer, expert) to move to the GPU while the link is idle, and the one that makes room, None for no need.

        Both are taken as done. None where no expert scores clearly more than the one that would have to go.
        """
        if not self.capacity or self._held.all():
            return None
        inside = self._highest(np.where(self._held, -1.0, self._scores))
        if np.count_nonzero(self._held) < self.capacity:
            self._held[inside] = True
            return inside, None
        outside = self._highest(np.where(self._held, -self._scores, -np.inf))
        if self._scores[inside] <= _CLEARLY * self._scores[outside]:
            return None
        self._held[inside], self._held[outside] = True, False
        return inside, outside

    def keep(self, layer: int, expert: int) -> tuple[int, int] | None:
        """Offer an expert that was moved to the GPU; gives the (layer, expert) that makes room for it.

        That is the expert itself where all others score as much or more, and None where there is room or it is held.
        """
        if self._held[layer, expert]:
            return None
        if not self.capacity:
            return layer, expert
        evicted = None
        if np.count_nonzero(self._held) >= self.capacity:
            evicted = self._highest(np.where(self._held, -self._scores, -np.inf))
            if self._scores[evicted] >= self._scores[layer, expert]:
                return layer, expert
            self._held[evicted] = False
        self._held[layer, expert] = True
        return evicted

    def _highest(self, scores: NDArray[np.float64]) -> tuple[int, int]:
        """(layer, expert) of the largest of these; the first of equals."""
        layer, expert = divmod(int(scores.argmax()), scores.shape[1])
        return layer, expert
