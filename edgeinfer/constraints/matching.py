"""Matchers of llguidance along tokens.

They go forward only, and are copied to look ahead: with 1.9.1 a mask after `rollback` may have tokens too many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from edgeinfer.common.errors import ConstraintError
from edgeinfer.constraints.library import one_line
from edgeinfer.constraints.mask import Mask


class Source(Protocol):
    """What makes matchers: edgeinfer.constraints.constraint.Constraint."""

    n_vocab: int

    def matcher(self) -> Any:
        """An LLMatcher before the first token, which shares what it learns about the grammar with the others."""

    def new_matcher(self) -> Any:
        """An LLMatcher that shares nothing."""


class MatcherPath:
    """A matcher that has consumed some tokens, and consumes more of them, or others from the beginning."""

    def __init__(self, source: Source, matcher: Any = None, consumed: Sequence[int] = ()) -> None:
        """matcher: that has consumed these tokens, None for a new one."""
        self._source = source
        self._matcher = source.matcher() if matcher is None else matcher
        self._consumed = list(consumed)

    def mask(self, tokens: list[int]) -> Mask:
        """The tokens that may follow these. Raises ConstraintError where that cannot be told."""
        if self.follows(tokens):
            bits = self._matcher.compute_bitmask()
            if not self._matcher.is_error():
                return Mask(bits, self._source.n_vocab)
        return self._mask_anew(tokens)

    @property
    def is_accepting(self) -> bool:
        """Whether the tokens of the last mask are a whole text."""
        return bool(self._matcher.is_accepting())

    def reaches(self, tokens: list[int]) -> bool:
        """Whether these tokens continue those that were consumed."""
        return tokens[: len(self._consumed)] == self._consumed

    def follows(self, tokens: list[int]) -> bool:
        """Bring the matcher to the end of these tokens; gives whether it got there."""
        if not self.reaches(tokens):
            self._matcher, self._consumed = self._source.matcher(), []
        new = tokens[len(self._consumed) :]
        self._consumed = list(tokens)
        return not new or bool(self._matcher.consume_tokens(new))

    def copy(self) -> MatcherPath:
        """The same, which goes on by itself."""
        return MatcherPath(self._source, self._matcher.deep_copy(), self._consumed)

    def _mask_anew(self, tokens: list[int]) -> Mask:
        """The same from a matcher that has seen nothing else, as its limits depend on what it has seen."""
        self._matcher = self._source.new_matcher()
        self._consumed = list(tokens)
        for token in tokens:
            self._matcher.compute_bitmask()
            self._matcher.consume_token(token)
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            message = one_line(self._matcher.get_error())
            self._matcher, self._consumed = self._source.matcher(), []
            raise ConstraintError(f"what may follow token {len(tokens)} of the answer cannot be told: {message}")
        return Mask(bits, self._source.n_vocab)


class LookAhead:
    """Masks after tokens that may follow a text; they are kept for the draw."""

    def __init__(self, at: MatcherPath) -> None:
        """at: the matcher of the text."""
        self._at = at
        self._base: list[int] = []
        self._known: dict[tuple[int, ...], Mask] = {}
        self._branch: MatcherPath | None = None  # a copy somewhere after the base

    def start(self, tokens: list[int]) -> None:
        """Look ahead from these tokens."""
        if tokens != self._base or not self._known:
            self._base, self._known, self._branch = tokens, {}, None
            self._at.follows(tokens)

    def known(self, tokens: list[int]) -> Mask | None:
        """The mask after these tokens, if it was looked at from where this one started."""
        n = len(self._base)
        return self._known.get(tuple(tokens[n:])) if self._known and tokens[:n] == self._base else None

    def mask(self, path: tuple[int, ...]) -> Mask:
        """The mask after some tokens that follow the text. Raises ConstraintError where that cannot be told."""
        mask = self._known.get(path)
        if mask is None:
            tokens = [*self._base, *path]
            if not path:
                mask = self._at.mask(tokens)
            else:
                if self._branch is None or not self._branch.reaches(tokens):
                    self._branch = self._at.copy()
                mask = self._branch.mask(tokens)
            self._known[path] = mask
        return mask
