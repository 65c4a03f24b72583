"""NgramLookup of what a draft model will choose, so that one of its passes makes several levels of a draft.

What followed the same three, two or one tokens the last time, in the text or in a draft, as prompt lookup and the pool
of Lookahead Decoding have it (Fu et al., arXiv:2402.02057). The draft model checks them as the target checks drafts:
what it chooses behind a guess is its next level where the guess is what it chose itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

_N_ROWS = 65_536
_ORDERS = (3, 2, 1)  # tokens that a guess is looked for behind, in this order
_COUNTS = ((4.0, 6.0), (3.0, 5.0), (2.0, 5.0))  # of each: guesses that were right, and all, before any is known
_DECAY = 0.98  # of all counts, with each new one
_BESIDE = 0.03  # of a pass of one token: what a guess takes beside its share of the pass


class LookupToken(NamedTuple):
    """A token, and which of _ORDERS it was found by."""

    token: int
    order: int


class NgramLookup:
    """What followed, and how often that was right."""

    def __init__(self) -> None:
        self._keys = array("q", [-1]) * _N_ROWS  # keys that meet in one row take it from each other
        self._tokens = array("i", [-1]) * _N_ROWS
        self._counts = [*_COUNTS]
        self._levels, self._passes = 4.0, 4.0  # that were made, decayed

    @staticmethod
    def memory() -> int:
        """Bytes of the table."""
        return _N_ROWS * (array("q").itemsize + array("i").itemsize)

    @property
    def levels_per_pass(self) -> float:
        """Mean number of levels that a pass has made lately."""
        return self._levels / self._passes

    def note(self, text: Sequence[int], first: int) -> None:
        """The tokens of a text from that one on are new."""
        for i in range(max(first, 1), len(text)):
            for order in _ORDERS:
                if i >= order:
                    key = hash(tuple(text[i - order : i]))
                    self._keys[key % _N_ROWS] = key
                    self._tokens[key % _N_ROWS] = text[i]

    def behind(self, text: Sequence[int], most: int, milliseconds: Sequence[float]) -> list[LookupToken]:
        """At most that many tokens behind a text, each as long as a pass longer by it takes less than it may save.

        milliseconds: of a pass, by number of guesses.
        """
        end, found, path_probability = list(text[-max(_ORDERS) :]), list[LookupToken](), 1.0
        for n in range(min(most, len(milliseconds) - 1)):
            guess = self._find(end)
            if guess is None:
                break
            right, all_ = self._counts[guess.order]
            path_probability *= right / all_
            if path_probability * milliseconds[0] < milliseconds[n + 1] - milliseconds[n] + _BESIDE * milliseconds[0]:
                break
            found.append(guess)
            end = [*end[-max(_ORDERS) + 1 :], guess.token]
        return found

    def learn(self, guesses: Sequence[LookupToken], chosen: Sequence[int]) -> None:
        """A pass with these guesses made levels, whose first choices are given: one more than guesses were right."""
        self._levels = _DECAY * self._levels + len(chosen)
        self._passes = _DECAY * self._passes + 1.0
        for guess, token in zip(guesses, chosen, strict=False):
            right, all_ = self._counts[guess.order]
            self._counts[guess.order] = _DECAY * right + (guess.token == token), _DECAY * all_ + 1.0

    def _find(self, end: Sequence[int]) -> LookupToken | None:
        """What followed the last tokens."""
        for i, order in enumerate(_ORDERS):
            if order <= len(end):
                key = hash(tuple(end[-order:]))
                if self._keys[key % _N_ROWS] == key:
                    return LookupToken(self._tokens[key % _N_ROWS], i)
        return None
