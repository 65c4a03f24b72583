"""Times of kernels that are kept, the load under which they were taken, and what the search says while it measures."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny_models import write_tiny_model

from edgeinfer.backends.native import _core
from edgeinfer.common import devices
from edgeinfer.common.other_work import LoadMeter
from edgeinfer.exporters.auto import speed
from edgeinfer.exporters.auto.candidates import subjects_of
from edgeinfer.exporters.auto.progress import Pace
from edgeinfer.exporters.source import GgufSource
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import GGMLType, ModelFile

SHAPE, FORMATS = (32, 64), (GGMLType.Q4_0, GGMLType.Q8_0)


class FakeMachine:
    """A clock that products move on. others: cores that other programs take, which slows each product down."""

    def __init__(self) -> None:
        self.seconds = self.cpu = self.of_all = self.others = 0.0
        self.n_timed = 0

    def time_products(self, group: Sequence[object], isa: str, n_threads: int, n: int) -> float:
        seconds = 1e-3 * (1 + self.others) * len(group)
        self.seconds += seconds
        self.cpu += seconds
        self.of_all += seconds * (1 + self.others)
        self.n_timed += 1
        return seconds

    def now(self) -> float:
        return self.seconds

    def own(self) -> float:
        return self.cpu

    def all(self) -> float:
        return self.of_all


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeMachine:
    fake = FakeMachine()
    monkeypatch.setattr(_core, "time_products", fake.time_products)
    monkeypatch.setattr(speed, "record_folder", lambda kind: tmp_path / kind)
    of = speed.measure
    monkeypatch.setattr(speed, "measure", lambda *arguments: of(*arguments, clock=fake))
    return fake


def test_times_of_a_busy_machine_are_measured_again_and_others_are_not(machine: FakeMachine) -> None:
    def seconds() -> float:
        return speed.Speeds(2).matrix(SHAPE, FORMATS, 4)[GGMLType.Q4_0]

    machine.others = 1.0
    assert seconds() == pytest.approx(2e-3)
    n_timed = machine.n_timed
    machine.others = 3.0
    assert seconds() == pytest.approx(2e-3) and machine.n_timed == 2 * n_timed  # again, and slower
    machine.others = 0.1
    assert seconds() == pytest.approx(1.1e-3) and machine.n_timed == 3 * n_timed
    machine.others = 0.0
    assert seconds() == pytest.approx(1.1e-3) and machine.n_timed == 3 * n_timed  # that was quiet enough


def test_records_of_another_form_are_no_times() -> None:
    times = speed.Times({GGMLType.Q4_0: 1e-3, GGMLType.Q8_0: 2e-3}, 0.5)
    assert speed.times_of(speed.record_of(times), FORMATS) == times
    without_load = {"Q4_0": 1e-3, "Q8_0": 2e-3}
    for record in (None, without_load, {"seconds": {"Q4_0": 1.0}, "load": 0.0}, {"seconds": without_load, "load": "?"}):
        assert speed.times_of(record, FORMATS) is None


def test_the_load_is_what_others_take(machine: FakeMachine, tmp_path: Path) -> None:
    meter = LoadMeter(machine)
    machine.seconds, machine.cpu, machine.of_all = 2.0, 3.0, 4.5
    assert meter.load() == pytest.approx(0.75)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text("cpu  100 20 30 4000 500 6 7 8 9 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    ticks = 100 + 20 + 30 + 6 + 7 + 8
    assert devices.busy_seconds(tmp_path) == pytest.approx(ticks / os.sysconf("SC_CLK_TCK"))


def test_the_tokens_of_a_pass_are_those_that_drafting_verifies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flat_up_to_four = {n: 1.0 if n <= 4 else 0.4 * n for n in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)}
    assert speed.best_pass(flat_up_to_four) == 4
    assert speed.best_pass({n: 1.0 + 1e-3 * n for n in flat_up_to_four}) > 12
    source = GgufSource(ModelFile.open(write_tiny_model(tmp_path / "m.gguf", "llama", "F16", tied=True)))
    subjects, asked = subjects_of(source, read_spec(source.file)), set()

    def measure(shape: tuple[int, int], formats: Sequence[GGMLType], n: int, n_threads: int, isa: str) -> speed.Times:
        asked.update(formats)
        return speed.Times(dict.fromkeys(formats, max(1.0, n / 5)), 0.0)

    monkeypatch.setattr(speed, "measure", measure)
    monkeypatch.setattr(speed, "record_folder", lambda kind: None)
    assert speed.drafted_tokens(subjects, 1 << 30, speed.Speeds(1)) == 5
    assert asked == {GGMLType.Q8_0}  # the largest that fits


def test_the_search_tells_what_is_done_and_the_seconds_left() -> None:
    told, now = list[tuple[str, float]](), [0.0]
    pace = Pace(
        "losses", "tensors", [4.0, 4.0, 2.0, 2.0], lambda what, share: told.append((what, share)), lambda: now[0]
    )
    pace.done(was_known=True)
    now[0] = 8.0
    pace.done()
    now[0] = 12.0
    pace.done()
    pace.done(was_known=True)
    assert told == [
        ("losses: 1 of 4 tensors", 0.25),
        ("losses: 2 of 4 tensors, 8 s left", 0.5),
        ("losses: 3 of 4 tensors, 4 s left", 0.75),
        ("losses: 4 of 4 tensors", 1.0),
    ]
