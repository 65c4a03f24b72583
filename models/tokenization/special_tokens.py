"""Special tokens: which texts they are found in, and which of them no user may write."""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from dataclasses import dataclass
from operator import add

from edgeinfer.models.provenance import is_trusted, plain

_WHITE = " \t\n\v\f\r"  # what C's isspace knows

# Keys of tokens that have a role; no user writes one.
NAMED_KEYS = (
    "bos unknown seperator separator padding mask cls fim_pre fim_suf fim_mid fim_pad fim_rep fim_sep prefix suffix "
    "middle"
).split()
# What parts of a conversation begin and end with, whatever type a file gives it: <|im_start|>, <turn|>, [/INST],
# <start_of_turn>, <SPECIAL_10>.
_TURN_MARK = re.compile(
    r"<\|.+>|<.+\|>|\[\|.+\|\]|<\uff5c.+\uff5c>|\[/?[A-Z][A-Z0-9_]*\]|</?[a-z]+_of_[a-z]+>|<[A-Z]+_[A-Z0-9_]+>"
    r"|[<\[]/?(?:assistant|system|user|model|human|gpt|bot)[>\]]",
    re.DOTALL,
)
_WORD_AND_SIGN = re.compile(r"(?=.*[^\W\d_])(?=.*[^\w\s])", re.DOTALL)  # no white space, digits, emoji or lone word


@dataclass(frozen=True, slots=True)
class Special:
    """A token that is looked for in the text itself; strips_*: it swallows the white space on that side."""

    text: str
    id: int
    only_if_parsed: bool
    strips_left: bool
    strips_right: bool


def turn_marks(specials: Iterable[Special], template: str, stop_ids: Set[int], named_ids: Set[int]) -> list[Special]:
    """The special tokens that no user may write in a conversation with this template; see Tokenizer.protected.

    template: its source.  stop_ids, named_ids: tokens that end a generation, and those of NAMED_KEYS.
    """
    named = _tags_alike(template)
    pairs = _pairs(named)
    return [
        special
        for special in specials
        if special.only_if_parsed
        or special.id in stop_ids
        or special.id in named_ids
        and _WORD_AND_SIGN.match(special.text)
        or _TURN_MARK.fullmatch(special.text)
        or (special.text[-2:] in pairs and _WORD_AND_SIGN.match(special.text))
        and _tags_alike(special.text) in named
    ]


def _tags_alike(text: str) -> str:
    """The text with its closing tags written as the opening ones."""
    return text.replace("</", "<")


def _pairs(text: str) -> set[str]:
    """All pairs of characters that stand side by side in the text."""
    return set(map(add, text, text[1:]))


def specials_in(specials: list[Special], text: str) -> list[Special]:
    """Those whose texts are in the text."""
    if len(specials) < 500:
        return [special for special in specials if special.text in text]
    text = plain(text)
    pairs = _pairs(text)  # Gemma has 6,000 special tokens: to search a long text for each takes a second
    return [
        special for special in specials if special.text[:2] in pairs or len(special.text) == 1 if special.text in text
    ]


def with_ids(parts: list[int | str], special: Special, trusted_only: bool = False) -> list[int | str]:
    """The parts of a text with the id of a special token for its text; what is left between two ids is one string."""
    return [
        piece for part in parts for piece in ([part] if isinstance(part, int) else _cut(part, special, trusted_only))
    ]


def _cut(text: str, special: Special, trusted_only: bool) -> list[int | str]:
    parts: list[int | str] = []
    start = end = 0
    while (found := text.find(special.text, end)) >= 0:
        end = found + len(special.text)
        if trusted_only and not is_trusted(text, found, end):
            end = found + 1
            continue
        left = text[start:found]
        if special.strips_left:
            left = left.rstrip(_WHITE)
        parts += [left, special.id] if left else [special.id]
        if special.strips_right:
            end = len(text) - len(text[end:].lstrip(_WHITE))
        start = end
    if start < len(text):
        parts.append(text[start:])
    return parts
