"""What constraints take of the memory: planned with the first one, within what the plan of the load leaves."""

from __future__ import annotations

from edgeinfer.common.arguments import human_bytes
from edgeinfer.common.errors import BudgetExceeded

# Measured with llguidance 1.9.1 and vocabularies of 49,000 to 152,000 tokens, 430 to 460 bytes a token; the library.
_LIBRARY_BYTES, _TOKEN_BYTES = 4 << 20, 480
_READER_BYTES = 32 << 20  # the process that reads grammars; it ends when nobody asks for a while
# Of a grammar, with what its masks keep: schemas of some kB took 1 to 5 MiB, one of 100 kB 20 MiB.
_GRAMMAR_BYTES, _CHARACTER_BYTES = 5 << 20, 192


def first_bytes(n_vocab: int) -> int:
    """What the first constraint takes, one of usual size: the library, the vocabulary in its form, the reader."""
    return vocabulary_bytes(n_vocab) + _READER_BYTES + _GRAMMAR_BYTES


def vocabulary_bytes(n_vocab: int) -> int:
    """The library, and a vocabulary in its form."""
    return _LIBRARY_BYTES + _TOKEN_BYTES * n_vocab


def grammar_bytes(n_characters: int) -> int:
    """A grammar whose source has so many characters, with what its masks keep."""
    return _GRAMMAR_BYTES + _CHARACTER_BYTES * n_characters


class Room:
    """What a budget leaves for constraints.

    n_bytes: beside the plan of the load; None where there is no budget.
    """

    def __init__(self, n_bytes: int | None, n_vocab: int) -> None:
        self._n_bytes = n_bytes
        self._vocabulary = vocabulary_bytes(n_vocab)

    def planned(self, n_characters: list[int]) -> int:
        """Bytes of the vocabulary and of grammars with so many characters each; 0 without any."""
        grammars = sum(map(grammar_bytes, n_characters))
        return self._vocabulary + _READER_BYTES + grammars if grammars else 0

    def has_room(self, n_characters: list[int]) -> bool:
        """Whether these may be kept at once."""
        return self._n_bytes is None or self.planned(n_characters) <= self._n_bytes

    def check(self, n_characters: int, what: str) -> None:
        """Raises BudgetExceeded if there is no room for a grammar, none other being kept. what: its title."""
        if not self.has_room([n_characters]):
            assert self._n_bytes is not None
            needed, left = human_bytes(self.planned([n_characters])), human_bytes(max(0, self._n_bytes))
            raise BudgetExceeded(
                f"{what} cannot be used within the budget: reading it takes {needed}, and {left} are left beside what "
                "the model takes; load with a larger budget or a smaller n_ctx"
            )
