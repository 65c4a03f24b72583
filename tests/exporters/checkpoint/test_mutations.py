"""Some of the damaged checkpoints of tests/benchmarks/fuzz_checkpoints.py."""

from collections import Counter

import pytest
from checkpoint_trials import BYTES, Outcome, outcomes

N_FAMILIES = 15


@pytest.fixture(scope="module")
def found() -> list[Outcome]:
    return [outcome for _, outcome in outcomes(2 * N_FAMILIES, seed=3)]


def test_a_damaged_checkpoint_is_read_or_refused_with_a_typed_error(found: list[Outcome]) -> None:
    assert [outcome for outcome in found if outcome.crash] == []
    assert Counter(outcome.family for outcome in found) == dict.fromkeys({outcome.family for outcome in found}, 2)
    assert len({outcome.family for outcome in found}) == N_FAMILIES
    assert sum(not outcome.error for outcome in found) < len(found) / 2 < len(found) - 3


def test_nothing_outside_of_the_folder_is_opened(found: list[Outcome]) -> None:
    assert [outcome for outcome in found if outcome.outside] == []


def test_a_small_file_takes_little_memory(found: list[Outcome]) -> None:
    assert max(outcome.n_bytes for outcome in found) < BYTES / 16
