"""Sizes of memory as callers write them: "3.5GiB", "800MB", a number of bytes, or a share such as "25%"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edgeinfer.arguments import shown
from edgeinfer.errors import InvalidArgument

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", 1)
    for base, ending in ((1000, "b"), (1024, "ib"))
}
_WANTED = 'must be "auto", a size such as "3.5GiB" or "800MB", bytes, a share such as "25%", or None'
_MOST_BYTES = 1 << 62


@dataclass(frozen=True)
class SizeRequest:
    """What a caller asked for: at most one of the two, neither for "auto".

    n_bytes: of memory.  share: of what there is, above 0, at most 1.
    """

    n_bytes: int | None = None
    share: float | None = None


AUTO = SizeRequest()


def parse_size(value: object, name: str, whole: str) -> SizeRequest:
    """The request that a value is: "auto", a number of bytes, a size ("3.5GiB", "800MB", "1000000") or a share ("25%").

    kB, MB, GB and TB are powers of 1000, KiB, MiB, GiB and TiB of 1024.  name: of the argument, whole: what a share is
    of, both for messages.  Raises InvalidArgument.
    """
    if isinstance(value, str):
        return _parsed(value, name, whole)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InvalidArgument(f"{name} {_WANTED}: found {shown(value)}")
    return _size(value.__index__(), value, name)


def _parsed(text: str, name: str, whole: str) -> SizeRequest:
    written = text.strip().lower()
    if written == "auto":
        return AUTO
    found = re.fullmatch(r"(\d{1,19}(?:\.\d{0,19})?|\.\d{1,19})\s*(%|[a-z]{0,3})", written, re.ASCII)
    if found is None or found[2] not in ("%", *_UNITS) or ("." in found[1] and not found[2]):
        raise InvalidArgument(f"{name} {_WANTED}: found {shown(text)}")
    number = float(found[1])
    if found[2] != "%":
        unit = _UNITS[found[2]]
        return _size(int(number * unit) if "." in found[1] else int(found[1]) * unit, text, name)
    if not 0 < number <= 100:
        raise InvalidArgument(f"{name} must be above 0 % and at most 100 % of {whole}: found {shown(text)}")
    return SizeRequest(share=number / 100)


def _size(n_bytes: int, given: object, name: str) -> SizeRequest:
    if not 0 < n_bytes <= _MOST_BYTES:
        raise InvalidArgument(f"{name} must be at least one byte, and no more than memory has: found {shown(given)}")
    return SizeRequest(n_bytes=n_bytes)
