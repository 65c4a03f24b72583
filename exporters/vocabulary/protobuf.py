"""Protocol buffers on the wire (https://protobuf.dev/programming-guides/encoding): fields of a message, unpacked."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TypeAlias

Value: TypeAlias = "int | float | memoryview"

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MOST_VARINT_BYTES = 10


class BadMessage(ValueError):
    """The bytes are no message."""


def fields(message: memoryview) -> Iterator[tuple[int, Value]]:
    """(number, value) of each field in order: a varint as an unsigned integer, four bytes as a float, eight as an
    integer, others as bytes. Raises BadMessage.
    """
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield number, value
        elif kind == _BYTES:
            length, at = _varint(message, at)
            yield number, _slice(message, at, length)
            at += length
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
            yield number, struct.unpack("<f" if size == 4 else "<Q", _slice(message, at, size))[0]
            at += size
        else:
            raise BadMessage(f"byte {at}: a field of kind {kind}, which there is not")


def signed(value: int) -> int:
    """A varint of type int32 as an integer that may be negative."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for place in range(_MOST_VARINT_BYTES):
        if at >= len(message):
            raise BadMessage(f"byte {at}: ends within a number")
        value |= (message[at] & 0x7F) << 7 * place
        at += 1
        if message[at - 1] < 0x80:
            return value & (1 << 64) - 1, at
    raise BadMessage(f"byte {at}: a number of more than {_MOST_VARINT_BYTES} bytes")


def _slice(message: memoryview, at: int, length: int) -> memoryview:
    if length > len(message) - at:
        raise BadMessage(f"byte {at}: a field of {length} bytes, of which there are {len(message) - at}")
    return message[at : at + length]
