"""The tokens of a vocabulary by id, as they go into a file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from edgeinfer.common.errors import warn
from edgeinfer.models.gguf import MetadataValue

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type, and SentencePiece's
BYTE_TEXT = re.compile("<0x[0-9A-F]{2}>")
PAD_SCORE, ADDED_SCORE = -10000.0, -1000.0

# What llama.cpp takes for a control token though not marked so: of Gemma, DeepSeek, Command R.
_CONTROLS = frozenset(["<pad>", "<mask>", "<2mass>", "[@BOS@]"])
_CONTROL_TEXT = re.compile(r"<\|.*\|>|<\uff5c.*\uff5c>|<unused.*>", re.DOTALL)


@dataclass(frozen=True)
class AddedToken:
    """A token that is cut out of a text before anything else. special: not shown to users."""

    id: int
    text: str
    special: bool

    @property
    def is_control(self) -> bool:
        """Whether it stands for no text of its own, by its mark or by its look."""
        return self.special or self.text in _CONTROLS or _CONTROL_TEXT.fullmatch(self.text) is not None

    def with_spaces(self) -> AddedToken:
        """As it stands in texts, where "\u2581" is a space; a control token as it is."""
        return self if self.is_control else replace(self, text=self.text.replace("\u2581", " "))


@dataclass
class Entries:
    """Texts, types and scores by id."""

    texts: dict[int, str] = field(default_factory=dict)
    types: dict[int, int] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)

    def set(self, id: int, text: str, type: int, score: float = 0.0) -> None:
        """Add a token, or replace it."""
        self.texts[id], self.types[id], self.scores[id] = text, type, score

    def add(self, tokens: Iterable[AddedToken], n_rows: int, where: str) -> None:
        """Add tokens that lie within n_rows; there are models without rows for those of pictures."""
        outside = []
        for token in tokens:
            if token.id >= n_rows:
                outside.append(token.text)
            else:
                self.set(token.id, token.text, CONTROL if token.is_control else USER_DEFINED, ADDED_SCORE)
        if outside:
            more = f" and {len(outside) - 1} more tokens" if len(outside) > 1 else ""
            warn(f"{where}: {outside[0]!r:.80}{more} have no row of embeddings: left out")

    def keys(self, n_rows: int, scored: bool) -> dict[str, MetadataValue]:
        """The keys of the arrays, with a token for each of n_rows; scored: with scores."""
        ids = range(n_rows)
        found: dict[str, MetadataValue] = {"tokens": [self.texts.get(id, f"[PAD{id}]") for id in ids]}
        if scored:
            found["scores"] = [float(self.scores.get(id, PAD_SCORE)) for id in ids]
        return found | {"token_type": [self.types.get(id, UNUSED) for id in ids]}


def by_text(entries: Mapping[int, str]) -> dict[str, int]:
    """Ids by text, the first of equals."""
    found: dict[str, int] = {}
    for id in sorted(entries):
        found.setdefault(entries[id], id)
    return found


@dataclass(frozen=True)
class Draft:
    """A vocabulary before it is checked.

    keys: of tokenizer.ggml besides those of the entries.  roles: ids that the vocabulary itself names, by GGUF's words.
    """

    entries: Entries
    keys: dict[str, MetadataValue]
    scored: bool
    roles: Mapping[str, int] = field(default_factory=dict)
