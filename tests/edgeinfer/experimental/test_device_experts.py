"""Experts on a second device: what it takes, what it holds, what happens when it fails, and how many fit."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from placement_simulation import assign, on_cpu, where_held
from steady_clock import SteadyClock

from edgeinfer.common.errors import BackendLost, BudgetExceeded, InvalidArgument
from edgeinfer.experimental import device_experts as module
from edgeinfer.experimental.device_experts import DeviceExperts, measured_seconds
from edgeinfer.experimental.device_experts_size import check_device, parse_bytes, slots_of
from edgeinfer.experimental.placement import (
    ExpertTimes,
    NeededExpert,
    assign_held,
)
from edgeinfer.offload.cache_size import parse

N_EMBD = 4
ON_GPU = ExpertTimes(cpu=lambda rows: 1.0 * rows, gpu=lambda rows: 0.01, transfer=float("inf"))


class FakeDevice:
    """Gives slot + 1 for each row. fails: names of the calls that lose the device."""

    def __init__(self, n_slots: int = 4) -> None:
        self.n_slots = n_slots
        self.fails: set[str] = set()
        self.slots: dict[int, tuple[int, int]] = {}
        self.is_closed = False
        self._running: list[tuple[int, int]] = []

    def _may_fail(self, call: str) -> None:
        if call in self.fails:
            raise BackendLost(f"{call} failed")

    def upload(self, slot: int, layer: int, expert: int) -> None:
        self._may_fail("upload")
        assert 0 <= slot < self.n_slots
        self.slots[slot] = layer, expert

    def start(self, layer: int, places: Sequence[tuple[int, int]], rows: np.ndarray) -> None:
        self._may_fail("start")
        assert all(self.slots[slot][0] == layer for slot, _ in places)
        self._running = list(places)

    def finish(self) -> np.ndarray:
        self._may_fail("finish")
        return np.repeat([slot + 1.0 for slot, _ in self._running], [n for _, n in self._running])[:, None]

    def close(self) -> None:
        self.is_closed = True
        self._may_fail("close")


def made(device: FakeDevice, times: ExpertTimes = ON_GPU, is_cached: bool = False) -> DeviceExperts:
    """Layers 1 and 3 of a model have experts, 4 and 3."""
    device_experts = DeviceExperts(device, "fake", {1: 4, 3: 3}, times, is_cached)
    device_experts.fill([])
    return device_experts


def run_pass(
    device_experts: DeviceExperts, experts: Sequence[int], rows: Sequence[int] | None = None, layer: int = 1
) -> object:
    """Whatever the device gives for the experts that it takes."""
    rows = [1] * len(experts) if rows is None else rows
    chosen = device_experts.choose(layer, experts, rows)
    if chosen:
        of_chosen = [rows[list(experts).index(expert)] for expert in chosen]
        device_experts.start(layer, chosen, of_chosen, np.zeros((sum(of_chosen), N_EMBD), np.float32))
    found = device_experts.finish() if chosen else "nothing"
    device_experts.adapt()
    return found


def test_the_device_begins_with_some_experts_of_each_layer_and_what_was_used_most_before() -> None:
    device = FakeDevice()
    made(device)
    assert list(device.slots.values()) == [(1, 0), (3, 0), (1, 1), (3, 1)]
    device = FakeDevice(3)
    DeviceExperts(device, "fake", {1: 4, 3: 3}, ON_GPU, False).fill([(3, 2), (1, 3)])
    assert list(device.slots.values()) == [(3, 2), (1, 3), (1, 0)]


def test_it_takes_what_it_holds_where_that_is_faster() -> None:
    device_experts = made(FakeDevice())
    assert set(device_experts.choose(1, [0, 1, 2], [1, 1, 1])) == {0, 1}
    assert not device_experts.choose(1, [2, 3], [1, 1]) and not device_experts.choose(3, [2], [9])
    slow = made(FakeDevice(), ExpertTimes(cpu=lambda rows: 1.0, gpu=lambda rows: 9.0, transfer=float("inf")))
    assert not slow.choose(1, [0, 1, 2], [1, 1, 1])
    assert (device_experts.stats.taken, device_experts.stats.left) == (2, 4)
    assert device_experts.describe() == "4 on fake, which computed 33% of those needed"


def test_what_is_not_in_memory_stays_with_the_device() -> None:
    slow = ExpertTimes(cpu=lambda rows: 1.0, gpu=lambda rows: 9.0, transfer=float("inf"))
    assert set(made(FakeDevice(), slow, is_cached=True).choose(1, [0, 1, 2], [1, 1, 1])) == {0, 1}


def test_outputs_come_in_the_order_of_the_experts() -> None:
    device_experts = made(FakeDevice())  # expert 0 of layer 1 is in slot 0, expert 1 in slot 2
    found = run_pass(device_experts, [1, 0], [3, 2])
    assert isinstance(found, np.ndarray) and sorted(found[:, 0].tolist()) == [1, 1, 3, 3, 3]


def test_experts_that_are_used_more_take_the_place_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UPLOAD_SHARE", float("inf"))
    device = FakeDevice()
    device_experts = made(device)
    for _ in range(30):
        run_pass(device_experts, [2, 3])
    held = {tuple(each) for each in device.slots.values()}
    assert {(1, 2), (1, 3)} <= held and len(held) == 4
    every = [(layer, expert) for layer, n in ((1, 4), (3, 3)) for expert in range(n)]
    assert {each for each in every if device_experts.holds(*each)} == held
    n_uploads = device_experts.stats.uploads
    for _ in range(30):
        run_pass(device_experts, [2, 3])
    assert device_experts.stats.uploads == n_uploads == 2
    assert set(device_experts.choose(1, [2, 3], [1, 1])) == {2, 3}


def test_uploads_take_a_share_of_the_time_of_passes() -> None:
    device_experts = made(FakeDevice())
    device_experts._upload_seconds = 1.0
    for _ in range(30):
        run_pass(device_experts, [2, 3])
    assert device_experts.stats.uploads == 0


@pytest.mark.parametrize("call", ["start", "finish"])
def test_a_device_that_fails_is_dropped_with_a_warning(call: str) -> None:
    device = FakeDevice()
    device_experts = made(device)
    run_pass(device_experts, [0, 1])
    device.fails = {call, "close"}
    with pytest.warns(RuntimeWarning, match=f"fake failed: {call} failed"):
        assert run_pass(device_experts, [0, 1]) is None
    assert device.is_closed and "fake failed" in device_experts.describe()
    assert device_experts.choose(1, [0, 1], [1, 1]) == () and not device_experts.holds(1, 0)
    device_experts.adapt()
    device_experts.close()


def test_a_device_that_fails_between_passes_is_dropped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UPLOAD_SHARE", float("inf"))
    device = FakeDevice()
    device_experts = made(device)
    device.fails = {"upload"}
    with pytest.warns(RuntimeWarning, match="upload failed"):
        for _ in range(30):
            run_pass(device_experts, [2, 3])
    assert device.is_closed and "fake failed" in device_experts.describe()


def test_passes_are_watched_around_what_watches_them_already() -> None:
    device, seen = FakeDevice(), []
    device_experts = made(device)

    def inner(tokens, forward):
        seen.append(list(tokens))
        return forward()

    assert device_experts.watch(inner)([1, 2], lambda: True) is True
    assert device_experts.watch(None)([1], lambda: None) is None
    assert seen == [[1, 2]]
    device_experts.close()
    assert device.is_closed


def test_a_device_is_timed_with_the_way_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "time", SteadyClock().as_module())
    device = FakeDevice()
    made(device)
    found = measured_seconds(device, 1, 0, N_EMBD, (1, 4))
    assert set(found) == {1, 4} and all(seconds > 0 for seconds in found.values())


# ---- the rule --------------------------------------------------------------------------------------------------------


def test_without_transfers_the_quick_rule_is_as_good_as_the_planner(rng: np.random.Generator) -> None:
    times = ExpertTimes(cpu=lambda rows: 1.0 * rows, gpu=lambda rows: 0.5 + 0.3 * rows, transfer=float("inf"))
    for _ in range(200):
        needed = [NeededExpert(expert, int(rng.integers(1, 9)), bool(rng.random() < 0.6)) for expert in range(8)]
        found = assign_held(needed, times)
        assert set(found.gpu) <= {of.expert for of in needed if of.on_gpu} and not found.transfers
        assert sorted(found.gpu + found.cpu) == list(range(8))
        assert found.seconds <= where_held(needed, times).seconds
        assert found.seconds <= 1.2 * assign(needed, times).seconds
    alone = [NeededExpert(0, 1, on_gpu=True)]
    assert assign_held(alone, ExpertTimes(lambda rows: 1.0, lambda rows: 2.0, 1.0)) == on_cpu(
        alone, ExpertTimes(lambda rows: 1.0, lambda rows: 2.0, 1.0)
    )


# ---- sizes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Buffers:
    """100 bytes an expert, 50 beside them."""

    n_experts: int = 16

    def total(self, n_slots: int) -> int:
        return 50 + 100 * n_slots


@pytest.mark.parametrize(
    "needed, room, n_slots",
    [("auto", 10_000, 16), ("auto", 500, 4), (None, 500, 4), (350, 500, 3), ("25%", 500, 4), (9_999, 2_000, 16)],
)
def test_slots(needed: object, room: int, n_slots: int) -> None:
    assert slots_of(parse_bytes(needed), Buffers(), room, "fake") == n_slots


def test_what_does_not_fit_is_refused_with_what_does() -> None:
    with pytest.raises(InvalidArgument, match=r"--expert-device-bytes 150 or more"):
        slots_of(parse(149), Buffers(), 10_000, "fake")
    with pytest.raises(BudgetExceeded, match="fake has room for 300 B of experts, 850 B"):
        slots_of(parse("50%"), Buffers(), 300, "fake")
    with pytest.raises(BudgetExceeded, match="fake has room for 0 B, and one expert with its buffers takes 150 B"):
        slots_of(parse("auto"), Buffers(), -7, "fake")
    with pytest.raises(InvalidArgument, match="expert_device_bytes must be"):
        parse_bytes("much")


@pytest.mark.parametrize("name", ["cpu", "auto", "onnx:0", "opencl", "opencl:x", "gpu:-1", ""])
def test_other_devices_are_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidArgument, match="gpu, gpu:N, opencl:N or None"):
        check_device(name)
