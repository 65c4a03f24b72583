"""Codes of a few bits in words of 32 bits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.exporters.checkpoint.safetensors import StoredTensor

Words = NDArray[np.uint32]
Codes = NDArray[np.uint8]


@dataclass(frozen=True)
class Places:
    """Where codes lie: code i in bits shift[i].. of word[i], and on in the next word."""

    bits: int
    word: NDArray[np.int64]
    shift: NDArray[np.int64]

    def codes(self, words: Words) -> Codes:
        """(n_words, m) words to codes (n, m)."""
        shift = self.shift.astype(np.uint32)[:, None]
        codes = words[self.word] >> shift
        over = np.flatnonzero(self.shift + self.bits > 32)
        if over.size:
            codes[over] |= words[self.word[over] + 1] << (np.uint32(32) - shift[over])
        return (codes & np.uint32((1 << self.bits) - 1)).astype(np.uint8)

    def part(self, first: int, last: int) -> Places:
        """Of codes first..last-1."""
        return Places(self.bits, self.word[first:last], self.shift[first:last])


def in_a_stream(n: int, bits: int) -> Places:
    """One code after the other, the lowest bits first, across the ends of words: GPTQ, compressed-tensors 0.20."""
    at = np.arange(n) * bits
    return Places(bits, at >> 5, at & 31)


def whole_in_words(n: int, bits: int) -> Places:
    """As many codes as fit into each word: compressed-tensors before 0.20."""
    index = np.arange(n)
    return Places(bits, index // (32 // bits), index % (32 // bits) * bits)


def words_of_stream(n: int, bits: int) -> int:
    """Words that in_a_stream needs."""
    return -(-n * bits // 32)


def words_of_whole(n: int, bits: int) -> int:
    """Words that whole_in_words needs."""
    return -(-n // (32 // bits))


def interleaved(n: int) -> Places:
    """Four bits each; a word has 0 2 4 6 1 3 5 7 of its eight codes, from the lowest on: AWQ's."""
    index = np.arange(n)
    return Places(4, index // 8, np.array([0, 4, 1, 5, 2, 6, 3, 7])[index % 8] * 4)


def as_words(stored: StoredTensor) -> Words:
    """A whole tensor of 32-bit integers as unsigned words, in its shape. Raises ModelFileError."""
    found: Words = stored.read().view("<u4").astype(np.uint32, copy=False).reshape(stored.shape)
    return found
