"""N-gram lookup for a draft model: guessed tokens that it verifies itself, so that one of its passes makes several
levels of a draft.

A guess is what followed the same three, two or one tokens the last time, in the text or in a draft, as in prompt lookup
and in the n-gram pool of Lookahead Decoding (Fu et al., arXiv:2402.02057). The draft model verifies guesses as the
target verifies drafts: what it chooses after a guess is its next level if it chose the guess itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

_N_ROWS = 65_536
_ORDERS = (3, 2, 1)  # numbers of tokens that are looked up, in this order
_PRIORS = ((4.0, 6.0), (3.0, 5.0), (2.0, 5.0))  # by order: accepted guesses and all guesses before any is observed
_DECAY = 0.98  # of all counts, with each new one
_OVERHEAD = 0.03  # cost of a guess beside its part of the pass, in passes of one token


class LookupToken(NamedTuple):
    """A guessed token."""

    token: int
    order: int  # index in _ORDERS of the length of the n-gram that it follows


class NgramLookup:
    """A table from the last one to three tokens to the token that followed, and the acceptance rate of each order."""

    def __init__(self) -> None:
        self._keys = array("q", [-1]) * _N_ROWS  # n-grams whose hashes collide replace each other
        self._tokens = array("i", [-1]) * _N_ROWS
        self._counts = [*_PRIORS]
        self._levels, self._passes = 4.0, 4.0  # made so far, decayed

    @staticmethod
    def memory() -> int:
        """Bytes of the table."""
        return _N_ROWS * (array("q").itemsize + array("i").itemsize)

    @property
    def levels_per_pass(self) -> float:
        """Mean number of levels of recent passes."""
        return self._levels / self._passes

    def add(self, text: Sequence[int], first: int) -> None:
        """Add the n-grams that end at text[first] or later."""
        for i in range(max(first, 1), len(text)):
            for order in _ORDERS:
                if i >= order:
                    key = hash(tuple(text[i - order : i]))
                    self._keys[key % _N_ROWS] = key
                    self._tokens[key % _N_ROWS] = text[i]

    def find(self, text: Sequence[int], max_tokens: int, milliseconds: Sequence[float]) -> list[LookupToken]:
        """Guesses for the next tokens of a text, as long as each is expected to save more than it costs.

        milliseconds: of a pass, by number of guesses in it.
        """
        end, found, path_probability = list(text[-max(_ORDERS) :]), list[LookupToken](), 1.0
        for n in range(min(max_tokens, len(milliseconds) - 1)):
            guess = self._find_one(end)
            if guess is None:
                break
            accepted, all_ = self._counts[guess.order]
            path_probability *= accepted / all_
            if path_probability * milliseconds[0] < milliseconds[n + 1] - milliseconds[n] + _OVERHEAD * milliseconds[0]:
                break
            found.append(guess)
            end = [*end[-max(_ORDERS) + 1 :], guess.token]
        return found

    def learn(self, guesses: Sequence[LookupToken], chosen: Sequence[int]) -> None:
        """Compare the guesses of a pass with the tokens that the draft model chose, one more than it accepted."""
        self._levels = _DECAY * self._levels + len(chosen)
        self._passes = _DECAY * self._passes + 1.0
        for guess, token in zip(guesses, chosen, strict=False):
            accepted, all_ = self._counts[guess.order]
            self._counts[guess.order] = _DECAY * accepted + (guess.token == token), _DECAY * all_ + 1.0

    def _find_one(self, end: Sequence[int]) -> LookupToken | None:
        """What followed the last tokens, by the longest n-gram in the table."""
        for i, order in enumerate(_ORDERS):
            if order <= len(end):
                key = hash(tuple(end[-order:]))
                if self._keys[key % _N_ROWS] == key:
                    return LookupToken(self._tokens[key % _N_ROWS], i)
        return None
