"""The cost model on a virtual clock: whatever other work does to passes, it is right again soon after."""

import random
from collections.abc import Callable

import pytest

from edgeinfer.speculation.cost import CostCurve, CostModel

Curve = Callable[[int], float]  # milliseconds of a pass of n tokens on the quiet machine

# Passes of real models, by number of tokens: the 1.5B on Zen 4, SmolLM2 on a Xeon with AVX-512 VBMI (head-xeon.json),
# and a made-up machine whose passes take what reading the weights takes until its multipliers are busy.
XEON = (3.42, 4.71, 5.24, 6.03, 6.39, 7.11, 8.0, 8.55, 10.03, 11.16, 12.29, 13.41, 14.06, 14.71, 15.36, 16.01)
CURVES: dict[str, Curve] = {
    "zen4": lambda n: 31.0 if n == 1 else 32.7 + 5.15 * (n - 2),
    "xeon": lambda n: XEON[n - 1] if n <= 16 else XEON[-1] + 0.815 * (n - 16),
    "flat": lambda n: max(10.0, 2.2 * n),
}
CALIBRATED = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)

# What other work makes of a pass: the factor on its time, by the number of the pass, its tokens and a random number.
DISTURBANCES: dict[str, Callable[[int, int, float], float]] = {
    "none": lambda i, n, x: 1.0,
    "another process": lambda i, n, x: 2.0,
    "spikes": lambda i, n, x: 6.0 if x < 0.15 else 1.0,
    "bursts": lambda i, n, x: 3.0 if i // 50 % 2 else 1.0,
    "of the multipliers": lambda i, n, x: 1.2 + 0.15 * min(n, 12),
    "throttling": lambda i, n, x: 1.0 + min(i, 1000) / 800,
    "at random": lambda i, n, x: 1.0 + 3.0 * x,
}
SIZES: dict[str, tuple[int, ...]] = {
    "one": (1,),
    "few": (1, 4, 6, 8),
    "small": (1, 2, 3),
    "all": tuple(range(1, 33)),
}


def calibrated(truth: Curve, factor: Callable[[int], float] = lambda n: 1.0) -> CostModel:
    """A model whose calibration took factor(n) times as long as it should have."""
    return CostModel(CostCurve(0, {n: 1e-3 * truth(n) * factor(n) for n in CALIBRATED}, 0, {}))


def run(
    costs: CostModel, truth: Curve, sizes: tuple[int, ...], n: int, disturbed: Callable[[int, int, float], float]
) -> None:
    """n passes of these sizes, whose times vary by 3 % even on a quiet machine."""
    rng = random.Random(n)
    for i in range(n):
        size = sizes[rng.randrange(len(sizes))]
        costs.observe(size, 0, truth(size) * rng.uniform(0.97, 1.03) * disturbed(i, size, rng.random()))


def worst(costs: CostModel, truth: Curve) -> tuple[float, int]:
    """The largest relative error, and the size that has it."""
    now = costs.milliseconds(0)
    return max((abs(now[n] / truth(n) - 1.0), n) for n in range(1, 33))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("disturbance", DISTURBANCES)
@pytest.mark.parametrize("curve", CURVES)
def test_after_an_hour_of_other_work_a_hundred_quiet_passes_make_all_costs_right(
    curve: str, disturbance: str, sizes: str
) -> None:
    truth = CURVES[curve]
    costs = calibrated(truth)
    run(costs, truth, SIZES[sizes], 3000, DISTURBANCES[disturbance])
    run(costs, truth, SIZES[sizes], 100, DISTURBANCES["none"])
    assert worst(costs, truth)[0] < 0.15, worst(costs, truth)


@pytest.mark.parametrize("sizes", ["few", "all"])
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("first", [1, 2, 4, 6])
def test_a_calibration_that_was_disturbed_from_some_size_on_heals(curve: str, sizes: str, first: int) -> None:
    truth = CURVES[curve]
    costs = calibrated(truth, lambda n: 2.5 if n >= first else 1.0)
    run(costs, truth, SIZES[sizes], 200, DISTURBANCES["none"])
    assert worst(costs, truth)[0] < 0.15, worst(costs, truth)
    run(costs, truth, SIZES[sizes], 2800, DISTURBANCES["none"])
    assert worst(costs, truth)[0] < 0.15, worst(costs, truth)


@pytest.mark.parametrize("curve", CURVES)
def test_while_others_work_the_costs_are_those_of_now(curve: str) -> None:
    truth = CURVES[curve]
    costs = calibrated(truth)
    run(costs, truth, SIZES["few"], 40, lambda i, n, x: 2.0)
    now = costs.milliseconds(0)
    assert all(now[n] == pytest.approx(2.0 * truth(n), rel=0.15) for n in range(1, 33))


@pytest.mark.parametrize("disturbance", DISTURBANCES)
@pytest.mark.parametrize("curve", CURVES)
def test_what_is_kept_is_the_quiet_machine(curve: str, disturbance: str) -> None:
    truth, kept = CURVES[curve], list[CostCurve]()
    costs = CostModel(CostCurve(0, {n: 1e-3 * truth(n) for n in CALIBRATED}, 0, {}), kept.append)
    run(costs, truth, SIZES["few"], 2000, DISTURBANCES[disturbance])
    costs.close()
    assert all(1e3 * kept[0].near[n] == pytest.approx(truth(n), rel=0.15) for n in range(1, 33))


def test_costs_never_fall_with_the_number_of_tokens() -> None:
    rng = random.Random(5)
    costs = calibrated(CURVES["xeon"], lambda n: rng.uniform(0.5, 2.0))
    for _ in range(2000):
        size = rng.randint(1, 32)
        costs.observe(size, rng.randrange(3) * 100, rng.lognormvariate(2.0, 1.0))
        now = costs.milliseconds(0)
        assert 0.0 < now[1] and all(now[n] <= now[n + 1] * (1 + 1e-9) for n in range(1, 32))
        assert all(now[n] <= (now[part] + now[n - part]) * (1 + 1e-9) for n in range(2, 33) for part in (1, n // 2))


def test_a_machine_that_is_known_to_be_disturbed_makes_no_size_slower_for_good() -> None:
    truth, kept = CURVES["zen4"], list[CostCurve]()
    costs = CostModel(CostCurve(0, {n: 1e-3 * truth(n) for n in CALIBRATED}, 0, {}), kept.append)
    for _ in range(200):
        costs.observe(1, 0, truth(1), is_disturbed=True)
        costs.observe(8, 0, 1.4 * truth(8), is_disturbed=True)
    costs.close()
    assert not kept
    for _ in range(200):
        costs.observe(1, 0, truth(1))
        costs.observe(8, 0, 1.4 * truth(8))
    costs.close()
    assert kept[0].near[8] == pytest.approx(1.4e-3 * truth(8), rel=0.05)
