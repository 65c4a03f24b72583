"""How large the expert cache of a model is to be: what a caller asked for, and what that is in bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edgeinfer.arguments import human_bytes, shown
from edgeinfer.errors import BudgetExceeded, InvalidArgument
from edgeinfer.types import ExpertSizes

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", 1)
    for base, ending in ((1000, "b"), (1024, "ib"))
}
_WANTED = 'must be "auto", a size such as "3.5GiB" or "800MB", bytes, a share such as "25%", or None'
_MOST_BYTES = 1 << 62
_FREE = 16  # where the model does not fit, auto leaves one part in so many of the available memory to others


@dataclass(frozen=True)
class CacheRequest:
    """What a caller asked for: at most one of the two, neither for what fits.

    n_bytes: of the cache.  share: of the bytes of all experts, above 0, at most 1.
    """

    n_bytes: int | None = None
    share: float | None = None


AUTO = CacheRequest()
ALL = CacheRequest(share=1.0)


def parse(value: object, name: str = "expert_cache") -> CacheRequest:
    """The request that a value is: "auto", a number of bytes, a size ("3.5GiB", "800MB", "1000000") or a share ("25%").

    kB, MB, GB and TB are powers of 1000, KiB, MiB, GiB and TiB of 1024; None is all experts.  name: of the argument,
    for messages. Raises InvalidArgument.
    """
    if value is None:
        return ALL
    if isinstance(value, str):
        return _parsed(value, name)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InvalidArgument(f"{name} {_WANTED}: found {shown(value)}")
    return _size(value.__index__(), value, name)


def _parsed(text: str, name: str) -> CacheRequest:
    if text.strip().lower() == "auto":
        return AUTO
    found = re.fullmatch(r"(\d{1,19}(?:\.\d{0,19})?|\.\d{1,19})\s*(%|[a-z]{0,3})", text.strip().lower(), re.ASCII)
    if found is None or found[2] not in ("%", *_UNITS) or ("." in found[1] and not found[2]):
        raise InvalidArgument(f"{name} {_WANTED}: found {shown(text)}")
    number = float(found[1])
    if found[2] != "%":
        return _size(
            int(number * _UNITS[found[2]]) if "." in found[1] else int(found[1]) * _UNITS[found[2]], text, name
        )
    if not 0 < number <= 100:
        raise InvalidArgument(f"{name} must be above 0 % and at most 100 % of the experts: found {shown(text)}")
    return CacheRequest(share=number / 100)


def _size(n_bytes: int, given: object, name: str) -> CacheRequest:
    if not 0 < n_bytes <= _MOST_BYTES:
        raise InvalidArgument(f"{name} must be at least one byte, and no more than memory has: found {shown(given)}")
    return CacheRequest(n_bytes=n_bytes)


def resolve(
    request: CacheRequest, sizes: ExpertSizes, available: int, others: int, measured: int | None = None
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
