"""Models of the native engine with experts in memory or in a cache, as benchmarks open them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgeinfer.backends.native import NativeBackend, NativeModel
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device, MemoryPlan
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from expert_prefetch import set_expert_prefetch  # noqa: E402


def expert_sizes(path: Path) -> Any:
    """ExpertSizes of a model."""
    backend: Any = NativeBackend(tuned=False)
    with ModelFile.open(path) as file:
        return backend.expert_sizes(file, read_spec(file))


def cache_bytes(path: Path, cache: str) -> int | None:
    """Bytes of a cache that is "memory", "least" or a percentage of the experts."""
    if cache == "memory":
        return None
    sizes = expert_sizes(path)
    return int(sizes.least if cache == "least" else max(sizes.least, sizes.total * int(cache) // 100))


def plan_model(path: Path, n_ctx: int, n_batch: int, n_threads: int, expert_cache: int | None = None) -> MemoryPlan:
    """What a model would take. expert_cache: bytes, None for all experts in memory."""
    backend: Any = NativeBackend(tuned=False)
    with ModelFile.open(path) as file:
        return planned(backend, file, n_ctx, n_batch, n_threads, expert_cache)


def planned(
    backend: Any, file: ModelFile, n_ctx: int, n_batch: int, n_threads: int, expert_cache: int | None
) -> MemoryPlan:
    """The plan of an open file. expert_cache: bytes, None for all experts in memory."""
    settings = LoadSettings(n_ctx, n_batch=n_batch, n_threads=n_threads, expert_cache=expert_cache)
    plan: MemoryPlan = backend.plan(file, read_spec(file), settings)
    return plan


@contextmanager
def open_model(
    path: Path,
    n_ctx: int,
    n_batch: int,
    n_threads: int,
    expert_cache: int | None = None,
    prefetch: float | None = None,
    packed: bool = True,
) -> Iterator[NativeModel]:
    """A model in memory until the end of the block.

    expert_cache: bytes, None for all experts in memory.  prefetch: the share of a token's experts that is read ahead,
    None as the engine has it.  packed: whether what `edgeinfer pack` wrote is used.
    """
    backend: Any = NativeBackend(tuned=False, packed=packed)
    with ModelFile.open(path) as file:
        plan = planned(backend, file, n_ctx, n_batch, n_threads, expert_cache)
        model = backend.load(file, read_spec(file), plan, Device(n_threads))
        try:
            if prefetch is not None:
                set_expert_prefetch(model, prefetch)
            yield model
        finally:
            model.close()
