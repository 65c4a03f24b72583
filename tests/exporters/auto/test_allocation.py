"""Which formats are chosen, against all that could be."""

import itertools

import numpy as np
import pytest

from edgeinfer.common.errors import BudgetExceeded
from edgeinfer.exporters.auto.allocation import Options, allocate, margins


def options(rng: np.random.Generator, n_tensors: int = 6, n_options: int = 4) -> Options:
    sizes = np.sort(rng.uniform(1, 9, (n_tensors, n_options)), axis=1)
    losses = np.sort(rng.exponential(1, (n_tensors, n_options)), axis=1)[:, ::-1].copy()
    losses[0, 1] = np.inf
    return Options(losses, sizes, sizes * rng.uniform(0.5, 1.5, sizes.shape))


def sums(of: Options, chosen: tuple[int, ...]) -> tuple[float, float, float]:
    rows = range(len(chosen))
    return tuple(float(values[rows, chosen].sum()) for values in (of.losses, of.n_bytes, of.seconds))  # type: ignore[return-value]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("has_time", [False, True])
def test_a_mix_fits_and_is_near_the_best_of_all(seed: int, has_time: bool) -> None:
    of = options(np.random.default_rng(seed))
    every = [sums(of, chosen) for chosen in itertools.product(range(4), repeat=6) if chosen[0] != 1]
    n_bytes = float(np.median([each[1] for each in every]))
    seconds = float(np.quantile([each[2] for each in every], 0.4)) if has_time else np.inf
    best = min(loss for loss, size, time in every if size <= n_bytes and time <= seconds)
    loss, size, time = sums(of, tuple(allocate(of, n_bytes, seconds).chosen))
    assert size <= n_bytes and time <= seconds
    assert loss <= 1.35 * best, (loss, best)  # what one multiplier leaves open in six tensors; 0 to 30 % here


def test_with_room_for_all_every_tensor_has_its_least_loss() -> None:
    of = options(np.random.default_rng(1))
    assert allocate(of, 1e9).chosen.tolist() == of.losses.argmin(axis=1).tolist()


def test_what_cannot_fit_is_refused() -> None:
    of = options(np.random.default_rng(2))
    with pytest.raises(BudgetExceeded, match="the smallest formats take"):
        allocate(of, 1.0)
    with pytest.raises(BudgetExceeded, match="the fastest formats take"):
        allocate(of, 1e9, 1e-3)


def test_the_closest_decision_is_the_one_with_two_equal_options() -> None:
    losses, n_bytes = np.array([[1.0, 0.2], [1.0, 0.999]]), np.array([[1.0, 2.0], [1.0, 2.0]])
    of = Options(losses, n_bytes, n_bytes)
    allocation = allocate(of, 3.0)
    gaps, others = margins(of, allocation)
    assert allocation.chosen.tolist() == [1, 0]
    assert gaps.argmin() in (0, 1) and others.tolist() == [0, 1]


def test_limits_that_exclude_each_other_are_refused() -> None:
    losses = np.array([[2.0, 1.0], [2.0, 1.0]])
    small_is_slow = Options(losses, np.array([[1.0, 2.0]] * 2), np.array([[2.0, 1.0]] * 2))
    with pytest.raises(BudgetExceeded, match="both the bytes and the time"):
        allocate(small_is_slow, 2.5, 2.5)
    assert sorted(allocate(small_is_slow, 3.0, 3.0).chosen.tolist()) == [0, 1]


def test_a_tensor_that_is_most_of_the_whole_leaves_no_gap() -> None:
    """One of ten is as large as all others; between its formats lies what multipliers alone do not reach."""
    rng = np.random.default_rng(3)
    n_bytes = np.sort(rng.uniform(1, 2, (10, 3)), axis=1)
    losses = np.sort(rng.uniform(0, 1, (10, 3)), axis=1)[:, ::-1].copy()
    n_bytes[0], losses[0] = [9.0, 14.0, 19.0], [1.3, 1.1, 0.0]
    of = Options(losses, n_bytes, n_bytes)
    every = np.array(list(itertools.product(range(3), repeat=10)))
    of_all = [values[np.arange(10), every].sum(axis=1) for values in (losses, n_bytes)]
    for limit in np.linspace(23.0, 36.0, 8):
        best = of_all[0][of_all[1] <= limit].min()
        found = losses[np.arange(10), allocate(of, limit).chosen].sum()
        assert found <= 1.1 * best + 0.05, (limit, found, best)
