"""How much a load may take: a budget, or what is free less a margin."""

import pytest

from edgeinfer.common import devices
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.memory.limit import limit_of, margin_of, parse_budget

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "available_memory", lambda: 8 * GIB)
    monkeypatch.setattr(devices, "memory_within_limits", lambda n_threads: None)


@pytest.mark.parametrize(
    "budget, n_bytes",
    [
        ("2GiB", 2 * GIB),
        (1000, 1000),
        ("60%", int(0.6 * 8.5 * GIB)),  # of what is free and what the process has already
        ("100%", int(8.5 * GIB)),
        (None, int(8.5 * GIB) * 15 // 16),
        ("auto", int(8.5 * GIB) * 15 // 16),
        ("20GiB", int(8.5 * GIB)),  # more than there is
    ],
)
def test_a_budget_is_read_and_what_the_process_has_counts_in_it(budget: str | int | None, n_bytes: int) -> None:
    assert limit_of(parse_budget(budget), 512 * MIB, 2).n_bytes == n_bytes


def test_the_limits_of_the_process_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "memory_within_limits", lambda n_threads: GIB)
    assert limit_of(parse_budget("100%"), 512 * MIB, 2).n_bytes == GIB + 512 * MIB


def test_the_margin_is_a_sixteenth_within_bounds() -> None:
    assert margin_of(100 * MIB) == 32 * MIB and margin_of(8 * GIB) == 512 * MIB and margin_of(64 * GIB) == GIB
    assert str(limit_of(parse_budget(None), 0, 1)) == "available are 7.5 GiB (8.0 GiB less a margin of 512.0 MiB)"
    assert str(limit_of(parse_budget("2GiB"), 0, 1)) == "the budget is 2.0 GiB"


@pytest.mark.parametrize("budget", ["", "0", 0, "101%", "a lot", True, 1.5, []])
def test_what_is_no_size_is_refused(budget: object) -> None:
    with pytest.raises(InvalidArgument, match="budget must be"):
        parse_budget(budget)
