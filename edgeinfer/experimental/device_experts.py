"""Experts on a second device, experimental: which of a layer's it computes, and which it holds (HybriMoE,
arXiv:2504.05897).

Within a pass nothing is moved to the device. Between passes experts that are used more take the place of those that are
used less, in a small share of the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.base import ExpertDevice, PassHook
from edgeinfer.common.errors import BackendLost, warn
from edgeinfer.common.overriding import override
from edgeinfer.experimental.placement import ExpertTimes, GpuCache, LayerScores, NeededExpert, assign_held

MEMORY = 0.99  # share of a score that stays from one pass to the next
_MOST_KNOWN = 1024  # decisions that are kept
UPLOAD_SHARE = 0.05  # of the time of passes, that uploads take at most


class ExpertSlots(Protocol):
    """Experts on a device, in slots. Whatever fails there raises BackendLost."""

    n_slots: int

    def upload(self, slot: int, layer: int, expert: int) -> None:
        """Put an expert into a slot, in place of another one."""
        ...

    def start(self, layer: int, places: Sequence[tuple[int, int]], rows: NDArray[np.float32]) -> None:
        """Begin to compute experts of a layer. places: (slot, number of its rows), in the order of the rows."""
        ...

    def finish(self) -> NDArray[np.float32]:
        """The outputs of what was started, a row for each."""
        ...

    def close(self) -> None:
        """Give the device's memory back."""
        ...


@dataclass
class DeviceExpertsStats:
    """What a device did."""

    # taken, left: experts of layers that it computed, and that were left to the CPU
    taken: int = 0
    left: int = 0
    waited_seconds: float = 0.0  # that the CPU waited for it
    uploads: int = 0  # between passes


class DeviceExperts(ExpertDevice):
    """See backends.base.ExpertDevice: experts of a loaded model on a device, which decides by measured times.

    title: of the device, for messages.  n_experts: by layer.  times: of one expert on CPU and device.  is_cached: the
    CPU would have to read from disk what the device holds.  n_slots: experts that the device holds.  A device that
    fails is dropped, with a warning.
    """

    def __init__(
        self, device: ExpertSlots, title: str, n_experts: Mapping[int, int], times: ExpertTimes, is_cached: bool
    ) -> None:
        self.title, self.times, self.n_slots = title, times, device.n_slots
        self.stats = DeviceExpertsStats()
        self._device: ExpertSlots | None = device
        self._layers = n_experts
        self._is_cached = is_cached
        self._cache = GpuCache(max(n_experts) + 1, max(n_experts.values()), device.n_slots, MEMORY)
        self._slots: dict[int, dict[int, int]] = {layer: {} for layer in n_experts}  # by layer and expert
        self._seen: list[LayerScores] = []  # by the pass that runs
        self._known: dict[tuple[tuple[int, bool], ...], Sequence[int]] = {}  # places of what is taken, see _taken
        self._pass_seconds = self._upload_seconds = 0.0
        self._reason: str | None = None  # why the device was dropped, until that is said

    def fill(self, first: Sequence[tuple[int, int]]) -> None:
        """Load the device: these (layer, expert) before others, then as many of each layer. Raises BackendLost."""
        assert self._device is not None
        most = max(self._layers.values())
        others = [(layer, expert) for expert in range(most) for layer, n in self._layers.items() if expert < n]
        for slot, (layer, expert) in enumerate(list(dict.fromkeys([*first, *others]))[: self._device.n_slots]):
            self._device.upload(slot, layer, expert)
            self._slots[layer][expert] = slot
            self._cache.keep(layer, expert)

    def describe(self) -> str:
        """A line for people: what it holds, and what it did since the model was loaded."""
        if self._device is None:
            return f"all computed by the CPU: {self.title} failed"
        n_needed = self.stats.taken + self.stats.left
        return (
            f"{self.n_slots} on {self.title}, which computed {self.stats.taken / max(1, n_needed):.0%} of those needed"
        )

    def holds(self, layer: int, expert: int) -> bool:
        """Whether the device holds an expert."""
        return expert in self._slots.get(layer, ())

    def watch(self, inner: PassHook | None) -> PassHook:
        """What is to run each pass of the model, around what runs it now."""

        def run(tokens: Sequence[int], forward: Callable[[], bool | None]) -> bool | None:
            started = time.perf_counter()
            try:
                return forward() if inner is None else inner(tokens, forward)
            finally:
                self._pass_seconds += time.perf_counter() - started
                self.adapt()

        return run

    def close(self) -> None:
        """Give the device's memory back."""
        if self._device is not None:
            self._drop("")
        self._reason = None

    # ---- in a layer --------------------------------------------------------------------------------------------------

    @override
    def choose(self, layer: int, experts: Sequence[int], rows: Sequence[int]) -> Sequence[int]:
        if self._device is None:
            return ()
        most, held = max(rows), self._slots[layer]
        self._seen.append((layer, experts, rows if most == 1 else [n / most for n in rows]))
        needs = tuple([(n, expert in held) for expert, n in zip(experts, rows, strict=True)])
        places = self._known.get(needs)
        if places is None:
            places = self._taken(needs)
            if len(self._known) < _MOST_KNOWN:
                self._known[needs] = places
        self.stats.taken += len(places)
        self.stats.left += len(experts) - len(places)
        return [experts[place] for place in places]

    def _taken(self, needs: Sequence[tuple[int, bool]]) -> Sequence[int]:
        """Which of these the device takes. needs: of each expert its rows, and whether the device holds it."""
        if not any(is_held for _, is_held in needs):
            return ()
        needed = [
            NeededExpert(place, n, is_held, not (is_held and self._is_cached))
            for place, (n, is_held) in enumerate(needs)
        ]
        return assign_held(needed, self.times).gpu

    @override
    def start(self, layer: int, experts: Sequence[int], rows: Sequence[int], inputs: NDArray[np.float32]) -> None:
        if self._device is None:
            return
        places = [(self._slots[layer][expert], n) for expert, n in zip(experts, rows, strict=True)]
        try:
            self._device.start(layer, places, inputs)
        except BackendLost as error:
            self._drop(str(error))

    @override
    def finish(self) -> NDArray[np.float32] | None:
        if self._device is None:
            return None
        started = time.perf_counter()
        try:
            return self._device.finish()
        except BackendLost as error:
            self._drop(str(error))
            return None
        finally:
            self.stats.waited_seconds += time.perf_counter() - started

    # ---- between passes ----------------------------------------------------------------------------------------------

    def adapt(self) -> None:
        """After a pass: move one expert to the device if that pays and there is time; say if the device failed."""
        if self._reason is not None:
            reason, self._reason = self._reason, None
            warn(f"the CPU computes all experts from now on: {self.title} failed: {reason}")
        if self._seen:
            self._cache.observe_pass(self._seen)
            self._seen.clear()
        if self._device is None or self._upload_seconds > UPLOAD_SHARE * self._pass_seconds:
            return
        if (swapped := self._cache.swap()) is None:
            return
        best, evicted = swapped
        assert evicted is not None  # fill left no room
        slot = self._slots[evicted[0]].pop(evicted[1])
        started = time.perf_counter()
        try:
            self._device.upload(slot, *best)
        except BackendLost as error:
            self._drop(str(error))
            return self.adapt()
        self._upload_seconds += time.perf_counter() - started
        self._slots[best[0]][best[1]] = slot
        self.stats.uploads += 1

    def _drop(self, reason: str) -> None:
        device, self._device, self._reason = self._device, None, reason
        for of_layer in self._slots.values():
            of_layer.clear()
        if device is not None:
            with suppress(BackendLost):
                device.close()


def measured_seconds(
    device: ExpertSlots, layer: int, slot: int, n_in: int, sizes: Sequence[int], n_tries: int = 3
) -> dict[int, float]:
    """Seconds that a device takes for one expert with so many rows, the best of some tries. Raises BackendLost.

    n_in: numbers of a row.
    The way there and back counts.
    """
    found = {}
    for n in sizes:
        rows = np.ones((n, n_in), np.float32)
        tries = []
        for _ in range(n_tries + 1):  # the first one may compile
            started = time.perf_counter()
            device.start(layer, [(slot, n)], rows)
            device.finish()
            tries.append(time.perf_counter() - started)
        found[n] = min(tries[1:])
    return found
