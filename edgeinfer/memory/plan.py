"""The plan before anything loads: what a model will take, and a refusal that says what would fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgeinfer.arguments import human_bytes
from edgeinfer.errors import BudgetExceeded
from edgeinfer.types import MemoryPlan

__all__ = ["human_bytes", "largest_n_ctx", "plan_within"]


def plan_within(path: Path, plan_of: Callable[[int], MemoryPlan], n_ctx: int, budget_bytes: int) -> MemoryPlan:
    """The plan for a context of n_ctx.

    path: of the model, for the message.  plan_of: a backend's plan for the model, by n_ctx.
    Raises BudgetExceeded if it is above the budget, or a device's own that plan_of knows, with the shortfall and the
    largest n_ctx that fits.
    """
    advice = "a smaller model or free memory"
    try:
        plan = plan_of(n_ctx)
    except BudgetExceeded as error:
        shortfall = str(error)
    else:
        use = plan.use
        if use.total <= budget_bytes:
            return plan
        shortfall = (
            f"{path} needs {human_bytes(use.total)} (weights {human_bytes(use.weights)}, KV cache "
            f"{human_bytes(use.kv_cache)} at n_ctx {n_ctx}, activations {human_bytes(use.activations)}"
            f"{f', experts {human_bytes(use.experts)}' if use.experts else ''}), available are "
            f"{human_bytes(budget_bytes)}, {human_bytes(use.total - budget_bytes)} too few"
        )
        if use.experts:
            advice = f"a smaller expert cache (--expert-cache auto takes what fits), {advice}"
    fitting = largest_n_ctx(plan_of, n_ctx, budget_bytes)
    fits = f"n_ctx {fitting} fits (-c {fitting})" if fitting else f"no n_ctx fits; use {advice}"
    raise BudgetExceeded(f"{shortfall}: {fits}")


def largest_n_ctx(plan_of: Callable[[int], MemoryPlan], n_ctx: int, budget_bytes: int) -> int:
    """Largest number of positions up to n_ctx whose plan keeps to the budget, 0 if there is none.

    Rounded down to a multiple of 64 where that leaves any.
    """
    fits, too_many = 0, n_ctx + 1
    while too_many - fits > 1:  # more positions never take fewer bytes
        middle = (fits + too_many) // 2
        if _fits(plan_of, middle, budget_bytes):
            fits = middle
        else:
            too_many = middle
    return fits - fits % 64 if fits >= 64 else fits


def _fits(plan_of: Callable[[int], MemoryPlan], n_ctx: int, budget_bytes: int) -> bool:
    try:
        return plan_of(n_ctx).use.total <= budget_bytes
    except BudgetExceeded:
        return False
