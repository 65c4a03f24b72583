"""Control of prefetch on a simulated disk: on where it helps, and never much slower than without."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from edgeinfer.offload.prefetch import FirstLayerTable, PrefetchControl, WindowStats

N_LAYERS, N_USED = 8, 8


@dataclass(frozen=True)
class Disk:
    """A layer takes `compute` seconds, its missing experts `read` each; passes wait for what is not hidden."""

    compute: float = 1.0
    read: float = 0.5
    misses: float = 2.0  # of a layer, in the mean
    precision: float = 0.85  # of what is read ahead
    useless: float = 0.3  # share of the wrong guesses that is not in memory yet, and is read
    noise: float = 0.1  # of a pass

    def run(self, amounts: list[int], rng: np.random.Generator) -> tuple[float, list[int], list[int], float, float]:
        """(seconds of a pass, issued and useful by layer, seconds waited, seconds that the disk read)."""
        seconds = waited = busy = 0.0
        issued, useful = [0] * N_LAYERS, [0] * N_LAYERS
        for layer, n in enumerate(amounts):
            missing = int(min(rng.poisson(self.misses), N_USED))
            right = int(rng.binomial(missing, self.precision * n / N_USED)) if n else 0
            wrong = int(rng.binomial(n, (1 - self.precision) * self.useless)) if n else 0
            issued[layer], useful[layer] = right + wrong, right
            ahead = max(0.0, (right + wrong) * self.read - self.compute)  # after the layer before
            wait = ahead + (missing - right) * self.read
            seconds, waited = seconds + self.compute + wait, waited + wait
            busy += (missing + wrong) * self.read
        return seconds * float(np.exp(self.noise * rng.normal())), issued, useful, waited, busy


def simulated(
    disk_at: Callable[[int], Disk], n_passes: int, seed: int, forced: int | None = None
) -> tuple[float, list[int]]:
    """(seconds of all passes, level of each), under control, or with so many read ahead always."""
    control, rng, levels, total = PrefetchControl(N_LAYERS, N_USED), np.random.default_rng(seed), [], 0.0
    issued, useful, sums = np.zeros(N_LAYERS, int), np.zeros(N_LAYERS, int), np.zeros(3)
    for number in range(n_passes):
        amounts = control.amounts if forced is None else [forced] * N_LAYERS
        seconds, new, right, waited, busy = disk_at(number).run(amounts, rng)
        total += seconds
        levels.append(control.level)
        issued, useful, sums = issued + new, useful + right, sums + (seconds, waited, busy)
        if forced is None and control.after_pass(seconds, 1):
            control.end_window(WindowStats(issued.tolist(), useful.tolist(), *(sums[1:] / sums[0])))
            issued, useful, sums = issued * 0, useful * 0, sums * 0
    return total, levels


HELPS = Disk()
HURTS = Disk(precision=0.55, useless=1.0, misses=0.8, read=0.9)
SLOW = Disk(precision=0.55, useless=1.0, misses=1.0, read=2.5, compute=3.0)
SATURATED = Disk(read=10.0)
WRONG = Disk(precision=0.2, useless=0.8)
IN_MEMORY = Disk(misses=0.0)


def speedup(disk_at: Callable[[int], Disk], n_passes: int, forced: int | None = None) -> float:
    """Mean over several texts of the time without prefetch over that under control."""
    plain = [simulated(disk_at, n_passes, seed, 0)[0] for seed in range(4)]
    ours = [simulated(disk_at, n_passes, seed, forced)[0] for seed in range(4)]
    return sum(plain) / sum(ours)


def test_where_prefetch_helps_it_is_on() -> None:
    always = speedup(lambda number: HELPS, 1000, 8)
    assert always > 1.2
    assert speedup(lambda number: HELPS, 1000) > 1 + 0.6 * (always - 1)
    _, levels = simulated(lambda number: HELPS, 1000, 1)
    assert set(levels[:32]) == {0} and np.mean([level > 0 for level in levels[500:]]) > 0.8


@pytest.mark.parametrize(
    "disk", [HURTS, SLOW, SATURATED, WRONG, IN_MEMORY], ids=["hurts", "slow", "busy", "wrong", "hot"]
)
@pytest.mark.parametrize("noise", [0.02, 0.3])
@pytest.mark.parametrize("n_passes", [128, 1000])
def test_it_is_never_much_slower_than_without(disk: Disk, noise: float, n_passes: int) -> None:
    assert speedup(lambda number: replace(disk, noise=noise), n_passes) > 0.98


def test_what_hurts_would_hurt_without_control() -> None:
    assert speedup(lambda number: HURTS, 200, 8) < 0.95 and speedup(lambda number: SLOW, 200, 8) < 0.9


def test_where_the_disk_is_busy_or_nothing_waits_it_is_not_even_tried() -> None:
    assert set(simulated(lambda number: SATURATED, 500, 2)[1]) == {0}
    assert set(simulated(lambda number: IN_MEMORY, 500, 2)[1]) == {0}


def test_with_a_text_that_changes_it_goes_off_and_comes_on() -> None:
    def disk_at(number: int) -> Disk:
        return HELPS if number < 600 or number >= 1800 else HURTS

    assert speedup(disk_at, 3000) > 1.0
    _, levels = simulated(disk_at, 3000, 3)
    on = [level > 0 for level in levels]
    assert np.mean(on[300:600]) > 0.7 and np.mean(on[1200:1800]) < 0.3 and np.mean(on[2600:]) > 0.7


def test_a_layer_whose_guesses_are_wrong_is_left_out() -> None:
    control = PrefetchControl(3, 8)
    control.level = control._kept_level = 1
    for _ in range(4):
        control.after_pass(1.0, 1)
    assert control.end_window(WindowStats([10, 10, 0], [9, 4, 0], 0.2, 0.5))
    assert control.amounts == [5, 0, 5]


def test_passes_of_several_rows_say_nothing() -> None:
    control = PrefetchControl(3, 8)
    assert not any(control.after_pass(1.0, 4) for _ in range(100))
    assert [control.after_pass(1.0, 1) for _ in range(4)] == [False, False, False, True]


def test_the_same_figures_give_the_same_answers() -> None:
    assert simulated(lambda number: HELPS, 300, 9) == simulated(lambda number: HELPS, 300, 9)


def test_a_table_learns_what_tokens_used_in_the_first_layer_and_forgets_the_oldest() -> None:
    table = FirstLayerTable(2)
    table.learn([5, 6], [[1, 2], [2, 3]])
    assert table.predict([5, 6, 7]) == [1, 2, 3]
    table.learn([5], [[4, 1]])
    table.learn([8], [[0, 9]])
    assert table.predict([5]) == [4, 1] and table.predict([6]) == [] and len(table) == 2
