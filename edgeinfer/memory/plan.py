"""The plan before anything loads: what a model will take, and a refusal that says what would fit."""

from __future__ import annotations

from edgeinfer.backends.base import Backend
from edgeinfer.errors import BudgetExceeded
from edgeinfer.gguf import ModelFile
from edgeinfer.models import ModelSizes
from edgeinfer.types import CacheType, MemoryPlan


def plan_within(
    backend: Backend,
    file: ModelFile,
    spec: ModelSizes,
    *,
    n_ctx: int,
    n_batch: int,
    n_threads: int,
    budget_bytes: int,
    cache_type: CacheType = "f16",
) -> MemoryPlan:
    """The backend's plan for these sizes.

    Raises BudgetExceeded if it is above the budget, with the shortfall and the largest n_ctx that fits.
    """
    plan = backend.plan(file, spec, n_ctx, n_batch, n_threads, cache_type)
    if plan.use.total <= budget_bytes:
        return plan
    fitting = largest_n_ctx(
        backend,
        file,
        spec,
        n_ctx=n_ctx,
        n_batch=n_batch,
        n_threads=n_threads,
        budget_bytes=budget_bytes,
        cache_type=cache_type,
    )
    use = plan.use
    raise BudgetExceeded(
        f"{file.path} needs {human_bytes(use.total)} (weights {human_bytes(use.weights)}, KV cache "
        f"{human_bytes(use.kv_cache)} at n_ctx {n_ctx}, activations {human_bytes(use.activations)}), available are "
        f"{human_bytes(budget_bytes)}, {human_bytes(use.total - budget_bytes)} too few: "
        + (f"n_ctx {fitting} fits (-c {fitting})" if fitting else "no n_ctx fits; use a smaller model or free memory")
    )


def largest_n_ctx(
    backend: Backend,
    file: ModelFile,
    spec: ModelSizes,
    *,
    n_ctx: int,
    n_batch: int,
    n_threads: int,
    budget_bytes: int,
    cache_type: CacheType = "f16",
) -> int:
    """Largest number of positions up to n_ctx whose plan keeps to the budget, 0 if there is none.

    Rounded down to a multiple of 64 where that leaves any.
    """
    fits, too_many = 0, n_ctx + 1
    while too_many - fits > 1:  # more positions never take fewer bytes
        middle = (fits + too_many) // 2
        if backend.plan(file, spec, middle, n_batch, n_threads, cache_type).use.total <= budget_bytes:
            fits = middle
        else:
            too_many = middle
    return fits - fits % 64 if fits >= 64 else fits


def human_bytes(n_bytes: int) -> str:
    """Bytes in a unit that leaves one to three digits before the point: "812 B", "3.2 GiB"."""
    value, unit = float(n_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    return f"{n_bytes} B" if unit == "B" else f"{value:.1f} {unit}"
