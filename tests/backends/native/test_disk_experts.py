"""The cache of experts that files hold: what it gives, what it keeps, and what it says when a file cannot be read."""

import os
import random
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from expert_files import LARGE, SMALL, ExpertFiles, Kind, write_experts
from resident_pages import resident_bytes
from waiting import wait_until

from edgeinfer.backends.native import _core

KINDS: tuple[Kind, ...] = ("packed", "unpacked", "split")


def cache_of(files: ExpertFiles, n_slots: int, n_used: int = 2, n_readers: int = 2) -> _core.DiskExperts:
    return _core.DiskExperts(files.source, files.bytes_of(n_slots), n_used, n_readers)


def run_layer(experts: _core.DiskExperts, files: ExpertFiles, layer: int, needed: Sequence[int]) -> int:
    """One thread computes a layer: the records are those of the file. Gives how many were in memory."""
    order, n_in_memory = experts.begin(layer, list(needed))
    assert sorted(order) == sorted(needed)
    for expert in order:
        record = experts.wait(layer, expert)
        assert record is not None, experts.error
        assert record.tobytes() == files.records[layer, expert]
        experts.done(layer, expert)
    return n_in_memory


# ---- what it gives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_slots", [2, 5, 24])
def test_records_are_those_of_the_file(tmp_path: Path, kind: Kind, n_slots: int) -> None:
    files = write_experts(tmp_path, kind)
    experts = cache_of(files, n_slots)
    rng = random.Random(n_slots)
    for _ in range(20):
        experts.begin_pass()
        for layer in files.layers:
            run_layer(experts, files, layer, rng.sample(range(files.n_experts), rng.randint(1, files.n_experts)))
    stats = experts.stats()
    assert stats.n_in_memory <= n_slots == stats.n_slots
    assert sum(each.lookups - each.hits for each in stats.layers) == sum(each.reads for each in stats.layers)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_different_sizes_and_layers_without_experts(tmp_path: Path, kind: Kind) -> None:
    files = write_experts(tmp_path, kind, [None, SMALL, LARGE, None, SMALL])
    n_bytes = _core.DiskExperts.least_bytes(files.layout, 3)
    experts = _core.DiskExperts(files.source, n_bytes, 3, 2)
    assert experts.stats().n_slots == 6  # three of each size
    rng = random.Random(1)
    for _ in range(20):
        experts.begin_pass()
        for layer in files.layers:
            run_layer(experts, files, layer, rng.sample(range(files.n_experts), rng.randint(1, files.n_experts)))
    with pytest.raises(ValueError, match="no such layer"):
        experts.begin(0, [1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_readers", [1, 4])
@pytest.mark.parametrize("n_slots", [2, 7])
def test_threads_that_take_experts_as_they_come(tmp_path: Path, kind: Kind, n_readers: int, n_slots: int) -> None:
    files = write_experts(tmp_path, kind)
    experts = cache_of(files, n_slots, n_readers=n_readers)
    rng = random.Random(n_readers)
    wrong: list[tuple[int, int]] = []

    def compute(layer: int, tickets: list[int], lock: threading.Lock) -> None:
        while True:
            with lock:
                if not tickets:
                    return
                expert = tickets.pop(0)
            record = experts.wait(layer, expert)
            if record is None or record.tobytes() != files.records[layer, expert]:
                wrong.append((layer, expert))
            experts.done(layer, expert)

    for _ in range(15):
        experts.begin_pass()
        for layer in files.layers:
            order, _ = experts.begin(layer, rng.sample(range(files.n_experts), rng.randint(1, files.n_experts)))
            experts.hint(rng.choice(files.layers), rng.sample(range(files.n_experts), 3))
            lock = threading.Lock()
            threads = [threading.Thread(target=compute, args=(layer, order, lock)) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert wrong == []


def test_a_cache_that_shrinks_keeps_what_was_used_last_and_gives_memory_back(tmp_path: Path) -> None:
    files = write_experts(tmp_path, layers=[LARGE], n_experts=64)
    experts = cache_of(files, 64)
    for _ in range(2):  # shrinks, and grows again
        for expert in range(64):
            experts.begin_pass()
            run_layer(experts, files, 0, [expert])
        full, record = resident_bytes(), files.bytes_of(1)
        experts.resize(files.bytes_of(5) + 100)
        assert experts.slot_bytes == files.bytes_of(5) and experts.stats().n_slots == 5
        assert sorted(experts.in_memory()) == [(0, expert) for expert in range(59, 64)]
        assert 57 * record < full - resident_bytes() < 61 * record
        for _ in range(10):  # more than there are slots
            experts.begin_pass()
            run_layer(experts, files, 0, [*range(30, 60)])
        assert len(experts.in_memory()) == 5
        experts.resize(0)
        assert experts.slot_bytes == files.bytes_of(2)  # what a pass needs
        experts.resize(files.bytes_of(1000))
        assert experts.slot_bytes == files.bytes_of(64)


def test_what_is_being_read_while_the_cache_shrinks_stays_within_it(tmp_path: Path) -> None:
    files = write_experts(tmp_path, "unpacked", [SMALL, LARGE, SMALL], n_experts=16)
    experts = cache_of(files, 48)
    rng = random.Random(1)
    for _ in range(60):
        experts.begin_pass()
        for layer in files.layers:
            experts.hint(rng.choice(files.layers), rng.sample(range(16), 8))
            run_layer(experts, files, layer, rng.sample(range(16), rng.randint(1, 16)))
        experts.warm([(layer, expert) for layer in files.layers for expert in range(16)])
        experts.resize(files.bytes_of(rng.randint(0, 50)))
    experts.resize(0)
    wait_until(lambda: len(experts.in_memory()) <= experts.stats().n_slots == 4)


def test_experts_in_memory_come_first_and_the_others_in_the_order_of_the_file(tmp_path: Path) -> None:
    files = write_experts(tmp_path)
    experts = cache_of(files, 8)
    experts.begin_pass()
    run_layer(experts, files, 1, [6, 2])
    assert experts.begin(1, [7, 6, 5, 2, 0]) == ([2, 6, 0, 5, 7], 2)


def test_what_an_interrupted_pass_left_is_given_up(tmp_path: Path) -> None:
    files = write_experts(tmp_path)
    experts = cache_of(files, 2)
    for _ in range(20):
        experts.begin_pass()
        order, _ = experts.begin(0, list(range(8)))
        experts.wait(0, order[0])  # and nothing is done
    experts.begin_pass()
    assert run_layer(experts, files, 1, range(8)) == 0


def test_a_cache_that_is_closed_while_it_reads(tmp_path: Path) -> None:
    for _ in range(20):
        files = write_experts(tmp_path)
        experts = cache_of(files, 24)
        experts.begin_pass()
        experts.begin(0, list(range(8)))
        experts.hint(1, list(range(8)))
        del experts


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_a_cache_smaller_than_a_layer_needs_is_refused_with_the_number_that_works(tmp_path: Path) -> None:
    files = write_experts(tmp_path)
    least = _core.DiskExperts.least_bytes(files.layout, 4)
    assert least == files.bytes_of(4)
    with pytest.raises(ValueError, match=f"{least} are needed"):
        _core.DiskExperts(files.source, least - 1, 4, 2)
    assert _core.DiskExperts.least_bytes(files.layout, 1) == files.bytes_of(2)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_known_before(tmp_path: Path, kind: Kind) -> None:
    files = write_experts(tmp_path, kind, [SMALL, LARGE, SMALL])
    n_bytes = files.layout.n_bytes // 2
    planned = _core.DiskExperts.planned_bytes(files.layout, files.source.buffer_bytes, n_bytes, 2, 3)
    buffers = 3 * files.source.buffer_bytes
    assert 0 <= planned - buffers - n_bytes < 8192 or planned - buffers < n_bytes
    experts = _core.DiskExperts(files.source, n_bytes, 2, 3)
    assert experts.n_bytes == planned


def test_slots_are_divided_as_the_bytes_of_the_layers_are(tmp_path: Path) -> None:
    files = write_experts(tmp_path, layers=[SMALL, LARGE, SMALL], n_experts=16)
    experts = _core.DiskExperts(files.source, files.layout.n_bytes // 2, 2, 1)
    for _ in range(2):
        experts.begin_pass()
        for layer in files.layers:
            run_layer(experts, files, layer, range(16))
    held = [layer for layer, _ in experts.in_memory()]
    assert (held.count(0) + held.count(2), held.count(1)) == (16, 8)


def test_a_cache_of_all_experts_reads_each_once(tmp_path: Path) -> None:
    files = write_experts(tmp_path, "split", [SMALL, LARGE])
    experts = _core.DiskExperts(files.source, files.layout.n_bytes, 2, 2)
    for _ in range(3):
        experts.begin_pass()
        for layer in files.layers:
            run_layer(experts, files, layer, range(8))
    assert [each.reads for each in experts.stats().layers] == [8, 8]
    assert [each.evictions for each in experts.stats().layers] == [0, 0]


# ---- what it keeps ---------------------------------------------------------------------------------------------------


class PassRecency:
    """The rule in the plainest form: of all that are in memory, the one that goes first."""

    def __init__(self, n_slots: int, n_layers: int) -> None:
        self.n_slots = n_slots
        self.n_layers = n_layers
        self.last: dict[tuple[int, int], int] = {}
        self.before: dict[tuple[int, int], int] = {}
        self.held: set[tuple[int, int]] = set()

    def use(self, key: tuple[int, int], number: int) -> None:
        if self.last.get(key, 0) != number:
            self.before[key] = self.last.get(key, 0)
            self.last[key] = number

    def forget(self, key: tuple[int, int], number: int) -> None:
        if self.last.get(key, 0) == number:
            self.last[key] = self.before[key]

    def begin(self, number: int, layer: int, needed: Sequence[int]) -> int:
        keys = [(layer, expert) for expert in sorted(needed)]
        absent = [key for key in keys if key not in self.held]
        for key in keys:
            self.use(key, number)
        for key in absent:
            if len(self.held) == self.n_slots:
                self.held.remove(min(self.held - set(keys), key=lambda each: self._order(each, layer)))
            self.held.add(key)
        return len(keys) - len(absent)

    def _order(self, key: tuple[int, int], layer: int) -> tuple[int, int, int]:
        ahead = (key[0] - layer) % self.n_layers
        return self.last.get(key, 0) + (key[0] > layer), -ahead, key[1]


@pytest.mark.parametrize("n_slots", [4, 9, 17])
def test_evicts_by_passes_and_of_equals_the_layer_that_comes_last(tmp_path: Path, n_slots: int) -> None:
    files = write_experts(tmp_path, layers=[SMALL] * 5, n_experts=8)
    experts, model = cache_of(files, n_slots, n_used=4), PassRecency(n_slots, 5)
    rng = random.Random(n_slots)
    for number in range(1, 60):
        experts.begin_pass()
        for layer in files.layers:
            needed = [expert for expert in range(8) if rng.random() < 0.6 / (expert + 1) + 0.1][:4]
            assert run_layer(experts, files, layer, needed) == model.begin(number, layer, needed)
            assert set(experts.in_memory()) == model.held
        forgotten = rng.sample(range(8), 2)
        layer = rng.choice(files.layers)
        experts.forget_use(layer, forgotten)
        for expert in forgotten:
            model.forget((layer, expert), number)
    assert sum(each.evictions for each in experts.stats().layers) > 100


def test_what_only_a_rejected_draft_needed_goes_first(tmp_path: Path) -> None:
    files = write_experts(tmp_path)
    experts = cache_of(files, 4)
    for needed in ([0, 1], [2, 3]):
        experts.begin_pass()
        run_layer(experts, files, 0, needed)
    experts.forget_use(0, [2, 3])
    experts.begin_pass()
    run_layer(experts, files, 1, [5, 6])
    assert experts.in_memory() == [(0, 0), (0, 1), (1, 5), (1, 6)]


def test_a_cache_smaller_than_one_token_needs_still_hits(tmp_path: Path) -> None:
    files = write_experts(tmp_path, layers=[SMALL] * 4)
    experts = cache_of(files, 5)
    hits = 0
    for _ in range(6):
        experts.begin_pass()
        hits += sum(run_layer(experts, files, layer, [1, 4]) for layer in files.layers)
    assert hits == 21  # LRU has none


# ---- what is read ahead ----------------------------------------------------------------------------------------------


def test_what_was_hinted_is_there_when_it_is_needed(tmp_path: Path) -> None:
    files = write_experts(tmp_path, "unpacked")
    experts = cache_of(files, 8)
    experts.begin_pass()
    run_layer(experts, files, 0, [1, 2])
    experts.hint(1, [3, 7])
    wait_until(lambda: len(experts.in_memory()) == 4)
    assert run_layer(experts, files, 1, [3, 4]) == 1
    layer = experts.stats().layers[1]
    assert (layer.lookups, layer.hits, layer.prefetches, layer.useful, layer.dropped) == (2, 1, 2, 1, 0)


def test_a_hint_keeps_what_is_there(tmp_path: Path) -> None:
    files = write_experts(tmp_path)
    experts = cache_of(files, 4)
    experts.begin_pass()
    run_layer(experts, files, 1, [0, 1])
    experts.begin_pass()
    run_layer(experts, files, 0, [0, 1])
    experts.hint(1, [0])
    experts.begin_pass()
    run_layer(experts, files, 0, [2])
    assert experts.in_memory() == [(0, 0), (0, 1), (0, 2), (1, 0)]  # without it the first to go


def test_hints_for_a_layer_that_has_come_are_dropped(tmp_path: Path) -> None:
    files = write_experts(tmp_path)
    experts = cache_of(files, 2, n_readers=1)
    experts.begin_pass()
    order, _ = experts.begin(0, [0, 1, 2])
    experts.wait(0, 1)  # both slots are taken, the third expert waits: no hint is looked at
    experts.hint(1, [3, 4])
    for expert in order:
        experts.wait(0, expert)
        if expert == 2:
            break
        experts.done(0, expert)
    experts.begin_pass()
    assert run_layer(experts, files, 1, [5, 6]) == 0
    layer = experts.stats().layers[1]
    assert layer.prefetches + layer.dropped == 2


def test_a_warm_start_fills_free_slots_and_no_others(tmp_path: Path) -> None:
    files = write_experts(tmp_path, "split")
    experts = cache_of(files, 4)
    experts.begin_pass()
    run_layer(experts, files, 2, [7])
    experts.warm([(2, 1), (0, 3), (1, 0), (0, 1)])
    wait_until(lambda: len(experts.in_memory()) == 4)
    assert experts.in_memory() == [(0, 1), (0, 3), (1, 0), (2, 7)]
    assert run_layer(experts, files, 0, [3, 1]) == 2


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_a_file_that_was_cut_off_is_an_error_that_says_where(tmp_path: Path) -> None:
    files = write_experts(tmp_path, "unpacked")
    experts = cache_of(files, 24)
    experts.begin_pass()
    run_layer(experts, files, 0, [0])
    size, place = files.paths[0].stat().st_size, r"blk\.2\.ffn_gate_exps\.weight, expert 3 at byte \d+"
    os.truncate(files.paths[0], size // 2)
    experts.begin_pass()
    experts.begin(2, [3])
    assert experts.wait(2, 3) is None
    assert str(files.paths[0]) in experts.error
    assert re.search(place, experts.error), experts.error
    experts.done(2, 3)
    assert experts.in_memory() == [(0, 0)]
    experts.begin_pass()
    assert experts.error == ""
    assert run_layer(experts, files, 0, [0]) == 1


def test_a_file_that_was_written_to_is_an_error(tmp_path: Path) -> None:
    files = write_experts(tmp_path)
    experts = cache_of(files, 24)
    experts.begin_pass()
    run_layer(experts, files, 0, [0, 1])
    time.sleep(0.02)  # file systems count time in steps
    with files.paths[0].open("r+b") as file:
        file.write(b"x")
    for _ in range(2):
        experts.begin_pass()
        experts.begin(1, [1])
        assert experts.wait(1, 1) is None
        assert "experts of layer 1, expert 1 at byte" in experts.error
        assert "has changed since the model was loaded" in experts.error


def test_a_file_of_the_same_name_changes_nothing(tmp_path: Path) -> None:
    files = write_experts(tmp_path)
    experts = cache_of(files, 2)
    other = tmp_path / "other"
    other.write_bytes(b"x" * files.paths[0].stat().st_size)
    other.replace(files.paths[0])
    experts.begin_pass()
    run_layer(experts, files, 0, range(8))


def test_a_file_that_is_not_there_is_an_error_with_its_name(tmp_path: Path) -> None:
    layout = write_experts(tmp_path).layout
    with pytest.raises(RuntimeError, match=r"missing\.gguf: experts cannot be read: No such file"):
        _core.ExpertSource.packed(layout, str(tmp_path / "missing.gguf"), 0, ["", "", ""])
