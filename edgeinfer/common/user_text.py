"""Text files that people wrote: UTF-8, with or without a byte order mark in front."""

from __future__ import annotations

import codecs
from pathlib import Path

from edgeinfer.common.errors import InvalidArgument

_OTHER_MARKS = (  # the longer ones first: one of UTF-32 begins as one of UTF-16 does
    ("UTF-32", codecs.BOM_UTF32_LE),
    ("UTF-32", codecs.BOM_UTF32_BE),
    ("UTF-16", codecs.BOM_UTF16_LE),
    ("UTF-16", codecs.BOM_UTF16_BE),
)


def without_mark(data: bytes, what: object) -> bytes:
    """The bytes behind a byte order mark of UTF-8. Raises InvalidArgument for UTF-16 and UTF-32; what: in messages."""
    for name, mark in _OTHER_MARKS:
        if data.startswith(mark):
            raise _other_encoding(what, name)
    first, second = data[0::2], data[1::2]
    zeros, few = (first.count(0), second.count(0)), len(second) // 4
    if min(zeros) <= few < len(second) // 2 < max(zeros):
        raise _other_encoding(what, "UTF-16")  # without a mark: of Latin letters each other byte is zero
    return data.removeprefix(codecs.BOM_UTF8)


def decoded(data: bytes, what: object) -> str:
    """The text of a file, without a byte order mark. Raises InvalidArgument for what is no UTF-8."""
    try:
        return without_mark(data, what).decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{what} must be UTF-8 text: {error}") from None


def sample_of(path: Path) -> str:
    """The text of a file that is only counted or measured: line ends are "\\n", what is no UTF-8 becomes U+FFFD.

    Raises InvalidArgument for UTF-16 and UTF-32, OSError.
    """
    text = without_mark(path.read_bytes(), path).decode(errors="replace")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _other_encoding(what: object, name: str) -> InvalidArgument:
    return InvalidArgument(
        f"{what} must be UTF-8 text: found {name}; save it as UTF-8, or convert it (iconv -f {name} -t UTF-8)"
    )
