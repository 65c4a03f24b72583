"""The refusal before loading, by a plan without a model."""

from pathlib import Path

import pytest

from edgeinfer.errors import BudgetExceeded
from edgeinfer.memory.plan import human_bytes, largest_n_ctx, plan_within
from edgeinfer.types import MemoryPlan, MemoryUse


def plan_of(n_ctx):
    """1000 bytes of weights, 10 a position, 5 for each of the 20 tokens of a batch."""
    return MemoryPlan(n_ctx, 20, MemoryUse(weights=1000, kv_cache=10 * n_ctx, activations=5 * 20))


def planned(budget_bytes):
    return plan_within(Path("some.gguf"), plan_of, 100, budget_bytes)


def test_a_plan_of_exactly_the_budget_fits():
    assert planned(2100).use.total == 2100


def test_one_byte_less_is_refused_with_the_shortfall_and_what_fits():
    with pytest.raises(BudgetExceeded) as caught:
        planned(2099)
    message = str(caught.value)
    for part in ("some.gguf needs 2.1 KiB", "weights 1.0 KiB", "KV cache 1.0 KiB at n_ctx 100", "activations 100 B"):
        assert part in message
    assert "1 B too few" in message and "n_ctx 64 fits (-c 64)" in message


def test_weights_above_the_budget_leave_no_n_ctx():
    with pytest.raises(BudgetExceeded, match="no n_ctx fits"):
        planned(1100)


@pytest.mark.parametrize("budget, n_ctx", [(1109, 0), (1110, 1), (1730, 63), (1740, 64), (1750, 64), (10**9, 1000)])
def test_the_largest_n_ctx_keeps_to_the_budget(budget, n_ctx):
    assert largest_n_ctx(plan_of, 1000, budget) == (n_ctx if n_ctx < 1000 else 960)


def test_what_fits_is_found_in_few_plans():
    asked = []

    def counted(n_ctx):
        asked.append(n_ctx)
        return plan_of(n_ctx)

    with pytest.raises(BudgetExceeded, match=r"n_ctx 99840 fits \(-c 99840\)"):
        plan_within(Path("some.gguf"), counted, 2**31 - 1, 1_000_000)
    assert len(asked) <= 33


def test_what_a_device_refuses_is_refused_with_what_fits_too():
    def of_a_device(n_ctx):
        if n_ctx > 200:
            raise BudgetExceeded(f"{n_ctx} are too many for the device")
        return plan_of(n_ctx)

    with pytest.raises(BudgetExceeded, match=r"^1000 are too many for the device: n_ctx 192 fits \(-c 192\)$"):
        plan_within(Path("some.gguf"), of_a_device, 1000, 10**9)
    with pytest.raises(BudgetExceeded, match="too many for the device: no n_ctx fits"):
        plan_within(Path("some.gguf"), of_a_device, 1000, 10)


@pytest.mark.parametrize(
    "n_bytes, text", [(0, "0 B"), (999, "999 B"), (1024, "1.0 KiB"), (1 << 20, "1.0 MiB"), (3435973837, "3.2 GiB")]
)
def test_bytes_are_written_in_a_readable_unit(n_bytes, text):
    assert human_bytes(n_bytes) == text
