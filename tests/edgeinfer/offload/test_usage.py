"""Counts of used experts, and what they say at the next load; figures of a cache."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.offload.reads import ExpertReads, reads_of
from edgeinfer.offload.usage import HALF_LIFE, ExpertUsage, load_usage, save_usage


def used(n_tokens: int, experts: list[list[int]]) -> np.ndarray:
    """The same experts by layer, token after token."""
    return np.tile(np.array(experts, np.int32), (n_tokens, 1, 1))


def test_the_most_used_experts_that_fit_come_first() -> None:
    usage = ExpertUsage(2, 4)
    usage.add(used(3, [[0, 1], [2, 3]]))
    usage.add(used(2, [[1, 2], [-1, 3]]))
    assert usage.most_used([10, 10], 1000) == [(0, 1), (1, 3), (0, 0), (1, 2), (0, 2)]
    assert usage.most_used([10, 30], 45) == [(0, 1), (1, 3)]
    assert ExpertUsage(2, 4).most_used([10, 10], 1000) == []


def test_what_was_used_long_ago_counts_less() -> None:
    usage = ExpertUsage(1, 3)
    usage.add(used(100, [[0, 1]]))
    for _ in range(HALF_LIFE // 64):
        usage.add(used(64, [[2, 2]]))
    assert usage.counts[0, 0] == pytest.approx(50, rel=0.1)
    for _ in range(100):
        usage.add(used(HALF_LIFE, [[2, 2]]))
    assert usage.counts.max() < 5 * HALF_LIFE and usage.counts[0, 0] < 1e-9


def test_counts_are_kept_on_disk_and_damaged_files_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    usage = ExpertUsage(2, 4)
    usage.add(used(5, [[0, 3], [1, 2]]))
    save_usage("key", usage)
    np.testing.assert_allclose(load_usage("key", 2, 4).counts, usage.counts, atol=0.01)
    for n_layers, n_experts, key in ((2, 5, "key"), (3, 4, "key"), (2, 4, "other")):
        assert not load_usage(key, n_layers, n_experts).counts.any()
    (path,) = tmp_path.rglob("key.json")
    whole = path.read_text()
    for text in (
        "",
        whole[:-5],
        whole.replace("0", '"x"', 1),
        whole.replace("[[", "[[-", 1),
        "[]",
        "3",
        '{"format": 1}',
    ):
        path.write_text(text)
        assert not load_usage("key", 2, 4).counts.any()


def test_without_a_folder_it_begins_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.record_cache.cache_folder", lambda: None)
    save_usage("key", ExpertUsage(1, 1))
    assert not load_usage("key", 1, 1).counts.any()


@dataclass
class OfLayer:
    lookups: int = 8
    hits: int = 6
    bytes_read: int = 200
    prefetches: int = 3
    useful: int = 2
    seconds_waited: float = 0.5


@dataclass
class OfStore:
    layers: list[OfLayer] = field(default_factory=lambda: [OfLayer(), OfLayer(hits=4)])
    busy_seconds: float = 2.0


def test_the_figures_of_a_request_are_what_was_added() -> None:
    before = reads_of(OfStore(), 4096, 2)
    assert before == ExpertReads(4096, 16, 10, 400, 6, 4, 0.5, 2.0) and before.hit_rate == 0.625
    later = reads_of(OfStore([OfLayer(10, 8, 260, 4, 3, 0.75), OfLayer(10, 5)], 2.5), 4096, 2)
    assert later.since(before) == ExpertReads(4096, 4, 3, 60, 1, 1, 0.125, 0.5)
    assert ExpertReads(1).hit_rate == 1.0
