# ruff: noqa: D102 -- the methods are those of str
"""Texts that know which of their characters may become special tokens.

A prompt mixes two kinds of text: what the chat template writes, whose "<|im_end|>" is that token, and what others
wrote, whose "<|im_end|>" is ten characters. Templates cut, trim, replace and join both, so the finished prompt does not
tell them apart: every character has to carry its origin.

Only marked characters are trusted. A plain str is untrusted; a Text has trusted characters. The operations written here
keep the marks; any other operation gives a plain str, whose control texts stay text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, SupportsIndex

_TRUSTED, _UNTRUSTED = b"\1", b"\0"
_MAX_PARTS = 1 << 16  # in which a text is cut or searched; of more, which would take long, none is trusted


class Text(str):
    """A str of which some characters are trusted: those of special tokens that the template or the model wrote.

    It compares, hashes, prints and is searched like the str that it is; slices, sums, loops and the methods below give
    texts that keep their trust. `trusted`, `joined` and `plain` make one, put several together, and take the trust off:

        answer = joined([trusted("<think>"), "hm, <|im_end|>?", trusted("</think>"), "Yes."])

    In a message for ChatTemplate.encode these tags become the special tokens of that name, if the vocabulary has them,
    and "<|im_end|>" does not.
    """

    __slots__ = ("_mask",)
    _mask: bytes | None  # a byte for each character, 1 if it is trusted; None: all are

    def __new__(cls, text: str = "", mask: bytes | None = None) -> Text:
        made = super().__new__(cls, text)
        made._mask = mask
        return made

    def __reduce__(self) -> tuple[type[Text], tuple[str, bytes | None]]:
        return Text, (plain(self), self._mask)

    def __sizeof__(self) -> int:
        return super().__sizeof__() + len(self._mask or b"")

    def __str__(self) -> str:
        return self

    def __format__(self, spec: str) -> str:
        return super().__format__(spec) if spec else self

    def __iter__(self) -> Iterator[str]:
        characters = str.__iter__(self)
        if self._mask is None:
            return map(Text, characters)
        return (Text(char) if own else char for char, own in zip(characters, self._mask, strict=True))

    def __getitem__(self, key: SupportsIndex | slice[Any, Any, Any]) -> str:
        part = super().__getitem__(key)
        if self._mask is None:
            return Text(part)
        return _masked(part, self._mask[key] if isinstance(key, slice) else bytes([self._mask[key]]))

    def __add__(self, other: str) -> str:
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> str:
        return _masked(super().__mul__(times), _mask_of(self) * times.__index__())

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        return _percent(self, values)

    def lower(self) -> str:
        return recased(self, str.lower, by_character=True)

    def upper(self) -> str:
        return recased(self, str.upper, by_character=True)

    def casefold(self) -> str:
        return recased(self, str.casefold, by_character=True)

    def swapcase(self) -> str:
        return recased(self, str.swapcase, by_character=True)

    def title(self) -> str:
        return recased(self, str.title)

    def capitalize(self) -> str:
        return recased(self, str.capitalize)

    def strip(self, chars: str | None = None, /) -> str:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> str:
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None, /) -> str:
        return self[: len(super().rstrip(chars))]

    def removeprefix(self, prefix: str, /) -> str:
        return self[len(self) - len(super().removeprefix(prefix)) :]

    def removesuffix(self, suffix: str, /) -> str:
        return self[: len(super().removesuffix(suffix))]

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        head, middle, _ = super().partition(sep)
        end = len(head) + len(middle)
        return self[: len(head)], self[len(head) : end], self[end:]

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        head, middle, _ = super().rpartition(sep)
        end = len(head) + len(middle)
        return self[: len(head)], self[len(head) : end], self[end:]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._parts(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._parts(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines = super().splitlines(keepends)
        if len(lines) > _MAX_PARTS:
            return lines
        found, start = [], 0
        for line, whole in zip(lines, super().splitlines(True), strict=True):
            found.append(self[start : start + len(line)])
            start += len(whole)
        return found

    def _parts(self, parts: list[str], sep: str | None) -> list[str]:
        """These parts of the text, which stand in it in this order, with their trust."""
        if len(parts) > _MAX_PARTS:
            return parts
        found, start = [], 0
        for part in parts:
            if sep is None:
                start = self.find(part, start)  # white space stands before it, which no part begins with but the first
            found.append(self[start : start + len(part)])
            start += len(part) + len(sep or "")
        return found

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        return replaced(self, old, new, count)

    def join(self, parts: Iterable[str], /) -> str:
        return joined(parts, self)


def trusted(text: str) -> Text:
    """The text with each character trusted."""
    return Text(text)


def plain(text: str) -> str:
    """The text with no character trusted: a str and nothing else."""
    return str.__str__(text)


def is_trusted(text: str, start: int = 0, end: int | None = None) -> bool:
    """Whether each character of the text, or of text[start:end], is trusted."""
    if not isinstance(text, Text):
        return False
    return text._mask is None or text._mask.find(_UNTRUSTED, start, len(text) if end is None else end) < 0


def joined(parts: Iterable[str], separator: str = "") -> str:
    """The parts one after the other, with the separator between them."""
    parts = list(parts)
    text = plain(separator).join(parts)
    if type(separator) is str and all(type(part) is str for part in parts):
        return text
    return _masked(text, _mask_of(separator).join(map(_mask_of, parts)))


def replaced(text: str, old: str, new: str, count: SupportsIndex = -1) -> str:
    """The text as str.replace makes it; what comes in has the trust of `new`."""
    written = plain(text).replace(old, new, count)
    if type(text) is str and type(new) is str:
        return written
    if old:
        whole, mask, own = plain(text), _mask_of(text), _mask_of(new)
        masks: list[bytes] = []
        start, left = 0, count.__index__()
        while left and (found := whole.find(old, start)) >= 0:
            masks += (mask[start:found], own)
            start, left = found + len(old), left - 1
        return _masked(written, b"".join([*masks, mask[start:]]))
    if len(text) > _MAX_PARTS:
        return written
    n = count.__index__()
    places = range(len(text) + 1 if n < 0 else min(n, len(text) + 1))
    return joined([part for place in places for part in (new, text[place : place + 1])] + [text[len(places) :]])


def recased(text: str, change: Callable[[str], str], by_character: bool = False) -> str:
    """The text changed by a function that writes at least one character for each.

    by_character: how many, it tells for a character alone as well. Where that is not so, and the text gets longer, it
    is untrusted.
    """
    changed = change(plain(text))
    if not isinstance(text, Text) or len(changed) == len(text):
        return _masked(changed, _mask_of(text))
    if not by_character or len(text) > _MAX_PARTS:
        return changed
    lengths = (len(change(char)) for char in plain(text))
    mask = b"".join(own * length for own, length in zip(_bytes(_mask_of(text)), lengths, strict=True))
    return _masked(changed, mask) if len(mask) == len(changed) else changed


_FIELD = re.compile(r"%(?:\(([^()]*)\))?([-#0 +]*[0-9]*(?:\.[0-9]*)?[hlL]?)(.)", re.DOTALL)


def _percent(pattern: Text, values: Any) -> str:
    """The % operator: the pattern's own characters and whole texts (%s) keep their trust."""
    written = plain(pattern) % values
    parts: list[str] = []
    following = iter(values if isinstance(values, tuple) else (values,))
    end = 0
    for field in _FIELD.finditer(pattern):
        parts.append(pattern[end : field.start()])
        end = field.end()
        key, form, kind = field.groups()
        if kind == "%":
            parts.append(pattern[end - 1 : end])
            continue
        value = next(following, "") if key is None else values[key] if isinstance(values, Mapping) else ""
        is_whole = kind == "s" and not form and isinstance(value, str)
        parts.append(value if is_whole else f"%{form}{kind}" % (value,))
    text = joined([*parts, pattern[end:]])
    return text if text == written else written


def _mask_of(text: str) -> bytes:
    if not isinstance(text, Text):
        return _UNTRUSTED * len(text)
    return _TRUSTED * len(text) if text._mask is None else text._mask


def _masked(text: str, mask: bytes) -> str:
    """The text with this mask; a plain str where that trusts no character."""
    if _TRUSTED not in mask:
        return plain(text)
    return Text(text, mask if _UNTRUSTED in mask else None)


def _bytes(mask: bytes) -> Iterator[bytes]:
    return (bytes([own]) for own in mask)
