"""How large the expert cache of a model is to be: what a caller asked for, and what that is in bytes."""

from __future__ import annotations

from edgeinfer.arguments import human_bytes
from edgeinfer.errors import BudgetExceeded, InvalidArgument
from edgeinfer.sizes import AUTO, SizeRequest, parse_size
from edgeinfer.types import ExpertSizes

ALL = SizeRequest(share=1.0)
_FREE = 16  # where the model does not fit, one part in so many of the memory is left to drafters and others

__all__ = ["ALL", "AUTO", "largest_cache", "parse", "resolve"]


def parse(value: object, name: str = "expert_cache") -> SizeRequest:
    """The request that a value is, see parse_size; None is all experts. name: of the argument, for messages."""
    return ALL if value is None else parse_size(value, name, "the experts")


def resolve(
    request: SizeRequest, sizes: ExpertSizes, available: int, others: int, measured: int | None = None
) -> int | None:
    """Bytes of the expert cache, None for all experts in memory.

    available: bytes of memory.  others: bytes of the plan without experts.  measured: of the cache that measurements
    ask for (CacheSizeSearch), for auto only. Auto is all experts where they fit, then the measured size, and at first
    the largest that leaves a sixteenth of the memory free.
    Raises InvalidArgument for a request below what a pass needs, with the number that works, BudgetExceeded where
    memory has no room for that much.
    """
    if request.n_bytes is not None:
        wanted = request.n_bytes
    elif request.share is not None:
        wanted = int(sizes.total * request.share)
    else:
        return _fitting(sizes, available, others, measured)
    if wanted >= sizes.total:
        return None
    if wanted < sizes.least:
        raise InvalidArgument(
            f"an expert cache of {human_bytes(wanted)} is too small: a pass needs {human_bytes(sizes.least)} "
            f"({sizes.n_used} experts of a layer); use --expert-cache {sizes.least} or more"
        )
    return wanted


def _fitting(sizes: ExpertSizes, available: int, others: int, measured: int | None) -> int | None:
    """Bytes of the cache in memory that there is, None where all experts fit."""
    if sizes.total + others <= available:
        return None
    largest = largest_cache(sizes, available, others)
    if largest < sizes.least:
        raise BudgetExceeded(
            f"the model needs {human_bytes(others + sizes.least)} at least (experts {human_bytes(sizes.least)} of "
            f"{human_bytes(sizes.total)}, all else {human_bytes(others)}), available are {human_bytes(available)}"
        )
    return largest if measured is None else max(sizes.least, min(measured, largest))


def largest_cache(sizes: ExpertSizes, available: int, others: int) -> int:
    """Bytes of the largest cache that auto takes where not all experts fit; may be below what a pass needs."""
    free = available // _FREE
    return max(min(available - others - free, sizes.total - 1), min(sizes.least, available - others))
