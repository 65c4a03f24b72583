"""The refusal before loading, on a backend that only plans."""

from types import SimpleNamespace

import pytest

from edgeinfer.errors import BudgetExceeded
from edgeinfer.memory.plan import human_bytes, largest_n_ctx, plan_within
from edgeinfer.types import MemoryPlan, MemoryUse

FILE = SimpleNamespace(path="some.gguf")


class Planner:
    """1000 bytes of weights, 10 a position, 5 a token of a batch."""

    def plan(self, model, spec, n_ctx, n_batch, n_threads, cache_type):
        return MemoryPlan(n_ctx, n_batch, MemoryUse(weights=1000, kv_cache=10 * n_ctx, activations=5 * n_batch))


def planned(budget_bytes, n_ctx=100, n_batch=20):
    return plan_within(Planner(), FILE, None, n_ctx=n_ctx, n_batch=n_batch, n_threads=1, budget_bytes=budget_bytes)


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
    found = largest_n_ctx(Planner(), FILE, None, n_ctx=1000, n_batch=20, n_threads=1, budget_bytes=budget)
    assert found == (n_ctx if n_ctx < 1000 else 960)


@pytest.mark.parametrize(
    "n_bytes, text", [(0, "0 B"), (999, "999 B"), (1024, "1.0 KiB"), (1 << 20, "1.0 MiB"), (3435973837, "3.2 GiB")]
)
def test_bytes_are_written_in_a_readable_unit(n_bytes, text):
    assert human_bytes(n_bytes) == text
