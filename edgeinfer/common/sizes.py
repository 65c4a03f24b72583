"""Sizes and rates as callers write them: "3.5GiB", "800MB", "4G", a number, a share such as "25%", "50GB/s"."""

from __future__ import annotations

import re
from dataclasses import dataclass
from numbers import Real

from edgeinfer.common.arguments import shown
from edgeinfer.common.errors import InvalidArgument

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", 1)
    for base, ending in ((1000, ""), (1000, "b"), (1024, "i"), (1024, "ib"))
}
_WANTED = 'must be "auto", a size such as "3.5GiB" or "800MB", bytes, a share such as "25%", or None'
_MOST_BYTES = 1 << 62
_MOST = 1e18


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

    kB, MB, GB and TB are powers of 1000, and so are k, M, G and T; KiB, MiB, GiB and TiB are of 1024.  name: of the
    argument, whole: what a share is of, both for messages.  Raises InvalidArgument.
    """
    if isinstance(value, str):
        return _parsed(value, name, whole)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InvalidArgument(f"{name} {_WANTED}: found {shown(value)}")
    return _size(value.__index__(), value, name)


def parse_amount(name: str, value: object) -> float | None:
    """A number above 0: of bytes, or bytes or operations a second. None is None.

    As text with a unit of parse_size: "4GiB", "50GB/s", "300G", "2.5e9".  name: of the argument, for the message.
    Raises InvalidArgument.
    """
    if value is None:
        return None
    found = 0.0
    if isinstance(value, str):
        text = value.strip().lower()
        parts = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?(?:e\d{1,2})?)\s*([a-z]{0,3})(?:/s)?", text, re.ASCII)
        if parts is not None and parts[2] in _UNITS:
            found = float(parts[1]) * _UNITS[parts[2]]
    elif isinstance(value, Real) and not isinstance(value, bool):
        found = float(value)
    if not 0.0 < found < _MOST:
        raise InvalidArgument(
            f'{name} must be a number or a text such as "4GiB", "50GB/s" or "300G": found {shown(value)}'
        )
    return found


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
