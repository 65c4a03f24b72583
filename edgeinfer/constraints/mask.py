"""A mask: which tokens may follow."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.types import Logits


class Mask:
    """Which of n_vocab tokens may follow. bits: one for each token, the lowest bit of a byte first."""

    def __init__(self, bits: bytes, n_vocab: int) -> None:
        self._bits = bits
        self.n_vocab = n_vocab

    @classmethod
    def of(cls, ids: Iterable[int], n_vocab: int) -> Mask:
        """The mask of these tokens."""
        flags = np.zeros(n_vocab, dtype=bool)
        flags[list(ids)] = True
        return cls(np.packbits(flags, bitorder="little").tobytes(), n_vocab)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and bool(np.array_equal(self.flags, other.flags))

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def flags(self) -> NDArray[np.bool_]:
        """(n_vocab,) whether each token may follow."""
        bits = np.frombuffer(self._bits, dtype=np.uint8)
        return np.unpackbits(bits, count=self.n_vocab, bitorder="little").view(np.bool_)

    @cached_property
    def count(self) -> int:
        """How many tokens may follow."""
        return int.from_bytes(self._bits, "little").bit_count()

    @cached_property
    def only(self) -> int | None:
        """The token, where only one may follow."""
        return int.from_bytes(self._bits, "little").bit_length() - 1 if self.count == 1 else None

    @cached_property
    def key(self) -> int:
        """A number that masks of the same tokens share, and hardly any others, in this process."""
        return hash(self._bits)

    def allows(self, id: int) -> bool:
        """Whether a token may follow."""
        return 0 <= id < 8 * len(self._bits) and bool(self._bits[id >> 3] >> (id & 7) & 1)

    def is_within(self, other: Mask) -> bool:
        """Whether only tokens of another mask may follow."""
        return int.from_bytes(self._bits, "little") & ~int.from_bytes(other._bits, "little") == 0

    def __or__(self, other: Mask) -> Mask:
        return Mask(np.packbits(self.flags | other.flags, bitorder="little").tobytes(), self.n_vocab)

    def __invert__(self) -> Mask:
        return Mask(np.packbits(~self.flags, bitorder="little").tobytes(), self.n_vocab)

    def apply(self, logits: Logits) -> Logits:
        """Copy of the logits (n_vocab,) in which all other tokens have -inf; of a drafter, for the first tokens."""
        return np.where(self.flags[: logits.size], logits, np.float32(-np.inf))
