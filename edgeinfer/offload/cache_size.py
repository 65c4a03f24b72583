"""How large the expert cache of a model is to be: what a caller asked for, and what that is in bytes."""

from __future__ import annotations

from edgeinfer.common.arguments import human_bytes
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.common.sizes import AUTO, SizeRequest, parse_size
from edgeinfer.common.types import ExpertSizes

ALL = SizeRequest(share=1.0)
_FREE = 16  # where the model does not fit, one part in so many of the memory is left to drafters and others

__all__ = ["ALL", "AUTO", "fitting_bytes", "largest_cache", "parse", "wanted_bytes"]


def parse(value: object, name: str = "expert_cache") -> SizeRequest:
    """The request that a value is, see parse_size; None is all experts. name: of the argument, for messages."""
    return ALL if value is None else parse_size(value, name, "the experts")


def wanted_bytes(request: SizeRequest, sizes: ExpertSizes) -> int | None:
    """Bytes of the cache that is asked for, None for all experts in memory, which auto wants too.

    Raises InvalidArgument for a request below what a pass needs, with the number that works.
    """
    if request == AUTO:
        return None
    wanted = int(sizes.total * request.share) if request.n_bytes is None and request.share else request.n_bytes or 0
    if wanted >= sizes.total:
        return None
    if wanted < sizes.least:
        raise InvalidArgument(
            f"an expert cache of {human_bytes(wanted)} is too small: a pass needs {human_bytes(sizes.least)} "
            f"({sizes.n_used} experts of a layer); use --expert-cache {sizes.least} or more"
        )
    return wanted


def largest_cache(sizes: ExpertSizes, limit: int, others: int) -> int:
    """Bytes of the largest cache to take where what is wanted does not fit; may be below what a pass needs.

    limit: bytes of memory.  others: bytes of the plan without experts. A sixteenth of the memory stays free, in which
    drafters find room.
    """
    return max(min(limit - others - limit // _FREE, sizes.total - 1), min(sizes.least, limit - others))


def fitting_bytes(sizes: ExpertSizes, wanted: int | None, largest: int, measured: int | None) -> int:
    """Bytes of the cache where what is wanted does not fit.

    largest: of largest_cache, at least what a pass needs.  measured: what measurements ask for (CacheSizeSearch).
    """
    found = largest if measured is None else min(measured, largest)
    return max(sizes.least, found if wanted is None else min(found, wanted))
