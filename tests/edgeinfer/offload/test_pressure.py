"""An expert cache that gives memory back while the machine is short of it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from steady_clock import steady_machine
from tiny_experts import write_tiny_experts

import edgeinfer
from edgeinfer.offload import control
from edgeinfer.offload.pressure import MachineMemory, MemoryPressure

MIB = 1 << 20
PLENTY = MachineMemory(4096 * MIB, 8192 * MIB)
SHORT = MachineMemory(100 * MIB, 8192 * MIB)  # 28 below the floor of 128 MiB


@dataclass
class FakeCache:
    n_bytes: int = 1600 * MIB
    sizes: list[int] = field(default_factory=list)

    def resize(self, n_bytes: int) -> int:
        self.sizes.append(n_bytes // MIB)
        return n_bytes


@dataclass
class Machine:
    """A machine whose memory and time are the test's."""

    memory: MachineMemory = PLENTY
    now: float = 0.0

    def pressure(self, cache: FakeCache) -> MemoryPressure:
        return MemoryPressure(cache, 300 * MIB, lambda: self.memory, lambda: self.now)

    def passes(self, pressure: MemoryPressure, seconds: float) -> None:
        for _ in range(round(10 * seconds)):
            self.now += 0.1
            pressure.between_passes()


def test_a_cache_shrinks_while_memory_is_short_and_grows_when_it_was_not_for_some_time() -> None:
    machine, cache = Machine(), FakeCache()
    pressure = machine.pressure(cache)
    machine.passes(pressure, 60)
    assert cache.sizes == []  # it has its size
    machine.memory = SHORT
    with pytest.warns(
        RuntimeWarning, match=r"short of memory, 100.0 MiB are available: the expert cache gives memory"
    ) as said:
        machine.passes(pressure, 10)
    assert cache.sizes == [1400, 1200, 1000, 800, 600, 400, 300] and len(said) == 1
    cache.sizes.clear()
    machine.memory = PLENTY
    machine.passes(pressure, 29)
    assert cache.sizes == []
    machine.passes(pressure, 60)
    assert cache.sizes == [*range(350, 1600, 50), 1600]


def test_it_gives_back_what_is_missing_and_grows_only_into_memory_that_stays_free() -> None:
    machine, cache = Machine(), FakeCache()
    pressure = machine.pressure(cache)
    machine.memory = MachineMemory(1 * MIB, 64 << 30)  # 511 below the floor
    with pytest.warns(RuntimeWarning):
        machine.passes(pressure, 0.6)
    assert cache.sizes == [1600 - 511]
    machine.memory = MachineMemory(1024 * MIB, 64 << 30)
    machine.passes(pressure, 60)
    assert len(cache.sizes) == 1
    machine.memory = MachineMemory(1044 * MIB, 64 << 30)
    machine.passes(pressure, 0.5)
    assert cache.sizes[1:] == [1600 - 511 + 20]


@pytest.mark.parametrize("share, shrinks", [(0.05, False), (0.2, True)])
@pytest.mark.filterwarnings("ignore:the machine is short")
def test_waiting_for_memory_is_shortness_too(share: float, shrinks: bool) -> None:
    machine, cache = Machine(), FakeCache()
    pressure = machine.pressure(cache)
    for _ in range(20):
        machine.memory = MachineMemory(4096 * MIB, 8192 * MIB, stalled=share * machine.now)
        machine.passes(pressure, 0.5)
    assert bool(cache.sizes) == shrinks


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Path]:
    yield write_tiny_experts(tmp_path / "model.gguf", "qwen3moe", "Q8_0", n_experts=32)


@pytest.fixture
def steady(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """How many passes a text takes depends on what drafts seem to cost."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with steady_machine():
        yield


@pytest.mark.filterwarnings("ignore:the machine is short")
def test_the_text_is_the_same_with_a_cache_that_changes_its_size(
    model: Path, monkeypatch: pytest.MonkeyPatch, steady: None
) -> None:
    texts, sizes = [], set()
    for is_short in (False, True):
        machine = Machine()

        def pressure(cache: object, least: int, machine: Machine = machine) -> MemoryPressure:
            return MemoryPressure(cache, least, lambda: machine.memory, lambda: machine.now)  # type: ignore[arg-type]

        monkeypatch.setattr(control, "MemoryPressure", pressure)
        with edgeinfer.load(model, expert_cache="50%", n_ctx=128, draft="suffix") as engine:
            stream = engine.stream("ab", max_tokens=100, temperature=0.8, seed=1, loop_guard=0)
            tokens = []
            for number, piece in enumerate(stream):
                tokens += piece.tokens
                sizes.add(engine.session.memory().experts)
                machine.now += 10
                machine.memory = SHORT if is_short and number // 20 % 2 == 0 else PLENTY
            texts.append(tokens)
    assert texts[0] == texts[1] and len(texts[0]) > 60
    assert len(sizes) > 3
