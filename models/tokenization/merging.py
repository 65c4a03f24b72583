"""Merging words into tokens: byte pair encoding and SentencePiece."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np

from edgeinfer.common.overriding import override
from edgeinfer.models._strings import Merger, StringIndex, StringTable, make_tokens_in_order
from edgeinfer.models.arrays import Strings
from edgeinfer.models.tokenization.pre_tokenizers import GEMMA4, LINES, SPACE_MARKED, cut, keeps_tokens
from edgeinfer.models.tokenization.vocabulary import Vocabulary, bytes_of

_FEW = 4096  # more tokens than there are single characters before the first merge


class WordMerger(ABC):
    """Words to ids: the two neighbours with the least cost are merged, the leftmost of equals first, until none can be.

    ids: by text. Each word is merged only once, so this is as fast as a compiled library, without construction.
    """

    _CACHED_WORDS = 1 << 11
    _CACHED_LENGTH = 64
    CACHE_BYTES = _CACHED_WORDS * 320  # a word with its ids and its place in a dict

    def __init__(self, ids: StringIndex, merger: Merger) -> None:
        self._ids = ids
        self._merged = merger.merged
        self._cache: dict[str, list[int]] = {}

    def hide(self, text: str) -> None:
        """From now on no text is merged into the token of this text."""
        self._ids.hide(text)
        self._cache.clear()

    def encode(self, text: str) -> list[int]:
        """Ids of a text without special tokens."""
        ids: list[int] = []
        for word in self._words(text):
            of_word = self._cache.get(word)
            ids += self._encode_word(word) if of_word is None else of_word
        return ids

    def _encode_word(self, word: str) -> list[int]:
        ids: list[int] = []
        for part in self._parts(word):
            id = self._ids.get(part)
            ids += self._spelled(part) if id is None else [id]
        if len(word) <= self._CACHED_LENGTH:
            if len(self._cache) >= self._CACHED_WORDS:
                self._cache.clear()
            self._cache[word] = ids
        return ids

    def _parts(self, word: str) -> list[str]:
        return self._merged(word)

    @abstractmethod
    def length(self, text: str) -> int:
        """Of a text, in what the characters of tokens stand for, without what no token has."""

    @abstractmethod
    def is_lossless(self, vocabulary: Vocabulary) -> bool:
        """Whether surely each part of a text that `length` counts is in one of its tokens."""

    @abstractmethod
    def _words(self, text: str) -> Iterable[str]:
        """What is merged on its own."""

    @abstractmethod
    def _spelled(self, part: str) -> list[int]:
        """Ids of a part that is no token."""

    @abstractmethod
    def piece(self, text: str) -> bytes:
        """What a normal token of this text stands for."""


def index_bytes(n: int) -> int:
    """Bytes of a StringIndex of n texts, see strings.cpp."""
    slots = 2
    while slots < 2 * n:
        slots *= 2
    return 4 * slots


def makes_in_order(tokens: Strings, merges: Strings) -> bool:
    """Whether surely no index of merges is needed, see _by_rank. What comes before the merges is not looked at far."""
    first_made = merges[0].replace(" ", "")
    first = next((i for i, text in enumerate(tokens[:_FEW].tolist()) if text == first_made), None)
    return first is not None and make_tokens_in_order(merges.table, tokens.table, first)


def _by_rank(vocabulary: Vocabulary, required: bool) -> Merger:
    """Merging by a file's merges, "left right"; the first of equals counts. Raises TokenizerError.

    As in llama.cpp one that is no such pair has no effect, and one whose text is no token has: see `_spelled`.
    """
    metadata = vocabulary.metadata
    if not required and metadata.get("merges") is None:
        return Merger.by_merges(StringIndex(StringTable.of([])))
    merges = metadata.strings("merges")
    # Most vocabularies list the tokens in the order of the merges that make them: one comparison instead of 150,000,
    # and the id of a token tells the rank of its merge.
    first = vocabulary.ids.get(merges[0].replace(" ", "")) or 0
    if make_tokens_in_order(merges.table, vocabulary.tokens.table, first):
        return Merger.in_order(vocabulary.ids, merges.table, first)
    return Merger.by_merges(StringIndex(merges.table))


def _all_made(vocabulary: Vocabulary) -> bool:
    """Whether each of a file's merges makes a token that a text may have."""
    merges = vocabulary.metadata.get("merges")
    return merges is None or vocabulary.ids.first_unmade(vocabulary.metadata.strings("merges").table) is None


def _byte_alphabet() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2, Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


_CHAR_OF_BYTE = _byte_alphabet()
_BYTE_OF_CHAR = {char: byte for byte, char in _CHAR_OF_BYTE.items()}


class ByteLevel(WordMerger):
    """Byte pair encoding over bytes that are written as printable characters."""

    def __init__(self, vocabulary: Vocabulary, pre: str) -> None:
        super().__init__(vocabulary.ids, _by_rank(vocabulary, required=pre != "kimi-k2"))
        self._keeps_tokens = keeps_tokens(pre)
        self._pre = pre

    @override
    def _words(self, text: str) -> Iterable[str]:
        return cut(self._pre, text)

    @override
    def _parts(self, word: str) -> list[str]:
        written = word.encode().decode("latin-1").translate(_CHAR_OF_BYTE)
        return [written] if self._keeps_tokens and written in self._ids else self._merged(written)

    @override
    def length(self, text: str) -> int:
        lost = bytes(byte for byte, char in _CHAR_OF_BYTE.items() if char not in self._ids)  # those no text has, mostly
        return len(text.encode(errors="replace").translate(None, lost))

    @override
    def is_lossless(self, vocabulary: Vocabulary) -> bool:
        return _all_made(vocabulary)

    @override
    def _spelled(self, part: str) -> list[int]:
        # As llama.cpp has it: bytes of the written form, so that all but printable ASCII is lost.
        return [self._ids[char] for char in part if char.isascii() and char in self._ids]

    @override
    def piece(self, text: str) -> bytes:
        try:
            return bytes([_BYTE_OF_CHAR[char] for char in text])
        except KeyError:  # plain text, though its type says otherwise
            return bytes_of(text)


class SpaceMarked(WordMerger):
    """Byte pair encoding over the characters of a line, with "▁" for a space and byte tokens for what is no token."""

    def __init__(self, vocabulary: Vocabulary, pre: str) -> None:
        super().__init__(vocabulary.ids, _by_rank(vocabulary, required=True))
        self._keeps_line_ends = pre in GEMMA4  # a run of them is a token that no merges make

    @override
    def _words(self, text: str) -> Iterable[str]:
        return re.findall(LINES, text.replace(" ", "▁"))

    @override
    def _parts(self, word: str) -> list[str]:
        keeps = self._keeps_line_ends and word[0] == "\n" and word in self._ids
        return [word] if keeps else self._merged(word)

    @override
    def length(self, text: str) -> int:
        return len(text)

    @override
    def is_lossless(self, vocabulary: Vocabulary) -> bool:
        return all(f"<0x{byte:02X}>" in self._ids for byte in range(256))

    @override
    def _spelled(self, part: str) -> list[int]:
        names = (f"<0x{byte:02X}>" for byte in part.encode())
        return [self._ids[name] for name in names if name in self._ids]

    @override
    def piece(self, text: str) -> bytes:
        return bytes_of(text.replace("▁", " "))


class ByScore(WordMerger):
    """SentencePiece's merging (Kudo and Richardson, arXiv:1808.06226): neighbours that make the best-scored token."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        metadata, n_vocab = vocabulary.metadata, len(vocabulary.tokens)
        scores = metadata.numbers("scores", "fiu", n_vocab)
        if scores is None:
            metadata.warn("tokenizer.ggml.scores is missing: all tokens count alike, and texts may be cut into others")
            scores = np.zeros(n_vocab)
        if np.isnan(scores).any():
            raise metadata.error("scores", "an array of numbers", f"NaN for token {int(np.isnan(scores).argmax())}")
        with np.errstate(over="ignore"):
            super().__init__(vocabulary.ids, Merger.by_costs(vocabulary.ids, np.negative(scores, dtype=np.float32)))
        self._bytes = _byte_ids(vocabulary)
        # Where no token has a "▁" after another character, a word can be merged without the word before it.
        apart = not vocabulary.tokens.table.has_inside("▁")
        self._pattern = re.compile("▁*[^▁]+|▁+" if apart else "(?s:.+)")

    @override
    def _words(self, text: str) -> Iterable[str]:
        return self._pattern.findall(text.replace(" ", "▁"))

    @override
    def length(self, text: str) -> int:
        return len(text)

    @override
    def is_lossless(self, vocabulary: Vocabulary) -> bool:
        return True

    @override
    def _spelled(self, part: str) -> list[int]:
        return [self._bytes[byte] for byte in part.encode()]

    @override
    def piece(self, text: str) -> bytes:
        return bytes_of(text.replace("▁", " "))


def _byte_ids(vocabulary: Vocabulary) -> list[int]:
    """The token of each byte (256,): <0x41>, else A, else the unknown token. Raises TokenizerError."""
    unknown = vocabulary.metadata.token_id("unknown", len(vocabulary.tokens))
    ids = []
    for byte in range(256):
        names = [f"<0x{byte:02X}>", *([chr(byte)] if byte < 128 else [])]
        id = next((vocabulary.ids[name] for name in names if name in vocabulary.ids), unknown)
        if id is None:
            raise vocabulary.metadata.error("tokens", f"with {names[0]} where there is no unknown_token_id", "none")
        ids.append(id)
    return ids


def merger_of(vocabulary: Vocabulary, model: str, pre: str) -> WordMerger:
    """The merging of a vocabulary. model, pre: see kind_of."""
    if model == "llama":
        return ByScore(vocabulary)
    return SpaceMarked(vocabulary, pre) if pre in SPACE_MARKED else ByteLevel(vocabulary, pre)
