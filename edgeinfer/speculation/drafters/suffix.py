"""Drafts what followed the last time: the longest end of the text that was there before, and what came after it.

A suffix automaton (Blumer et al. 1985, as used for drafts by Hu et al., SAM Decoding, arXiv:2411.10666) is extended by
each token in O(1) amortised. The suffix link of its last state is the longest end of the text that occurs earlier, so
there is nothing to search.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgeinfer.speculation.drafters.base import Context
from edgeinfer.speculation.tree import DraftTree, no_draft
from edgeinfer.types import Logits

BYTES_PER_TOKEN = 800  # of the automaton; tests/edgeinfer/speculation/drafters/test_drafters.py measures it
_OVERLAP = 8  # tokens of a new request repeated before its first new one, so that matches may reach back over the cut

# Classes of matches: the first bound that the length does not exceed, and what has followed: several tokens, one token
# once, one token more often. Chances of each before anything is learnt, for the first node and for those behind it, as
# 70 greedy answers of two models to prompts of all kinds had them.
_BOUNDS = (1, 2, 3, 4, 6, 8, 12, 20)
_CLASS = [next((i for i, bound in enumerate(_BOUNDS) if length <= bound), len(_BOUNDS)) for length in range(32)]
_SEVERAL, _ONCE, _OFTEN = range(3)
_FIRST = (
    (0.15, 0.22, 0.2, 0.2, 0.2, 0.2, 0.25, 0.3, 0.5),
    (0.3, 0.43, 0.6, 0.7, 0.75, 0.8, 0.82, 0.91, 0.97),
    (0.55, 0.85, 0.78, 0.85, 0.9, 0.92, 0.95, 0.95, 0.97),
)
_LATER = (
    (0.5, 0.5, 0.6, 0.7, 0.8, 0.8, 0.85, 0.9, 0.95),
    (0.55, 0.7, 0.74, 0.77, 0.81, 0.83, 0.88, 0.93, 0.975),
    (0.55, 0.62, 0.65, 0.7, 0.75, 0.8, 0.9, 0.93, 0.97),
)
_OTHER_FIRST = 0.05
_OTHER = 3 * len(_FIRST[0])  # kinds from here on: another token that has followed


class SuffixAutomaton:
    """All substrings of a text that grows at its end.

    State 0 is the empty string. A state stands for strings that end at the same places; `length` is that of the
    longest of them, and `link` leads to the longest end of it that occurs at more places.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self.next: list[dict[int, int]] = [{}]
        self.end: list[int] = [-1]  # where the strings of a state ended last, as far as was noticed
        self.seen: list[int] = [0]  # how often a state was the match
        self._length = [0]
        self._link = [-1]
        self._last = 0
        self.match = 0  # state of the longest end of the text that occurs earlier
        self.match_end = -1  # where it ended then

    @property
    def match_length(self) -> int:
        """Number of tokens of the match."""
        return self._length[self.match]

    def append(self, token: int) -> None:
        """Add a token to the end of the text."""
        next_, link, length = self.next, self._link, self._length
        state = self._add_state(length[self._last] + 1, {}, 0, len(self.text))
        self.text.append(token)
        before = self._last
        while before >= 0 and token not in next_[before]:
            next_[before][token] = state
            before = link[before]
        if before >= 0:
            link[state] = self._state_of(before, token)
        self._last = state
        match = self.match = link[state]
        self.match_end = self.end[match]
        self.end[match] = len(self.text) - 1
        self.seen[match] += 1

    def _state_of(self, before: int, token: int) -> int:
        """State of the longest string of `before` and the token, split off from longer ones if need be."""
        next_, link, length = self.next, self._link, self._length
        state = next_[before][token]
        if length[before] + 1 == length[state]:
            return state
        shorter = self._add_state(length[before] + 1, next_[state].copy(), link[state], self.end[state])
        while before >= 0 and next_[before].get(token) == state:
            next_[before][token] = shorter
            before = link[before]
        link[state] = shorter
        return shorter

    def _add_state(self, length: int, following: dict[int, int], link: int, end: int) -> int:
        self.next.append(following)
        self._length.append(length)
        self._link.append(link)
        self.end.append(end)
        self.seen.append(0)
        return len(self.next) - 1


class SuffixDrafter:
    """Copies from the prompt, the output and earlier requests."""

    name = "suffix"

    def __init__(self, n_ctx: int) -> None:
        self._max_tokens = _max_tokens(n_ctx)
        self._automaton = SuffixAutomaton()
        self._last: list[int] = []  # the last request's tokens, all of which the automaton has
        self._n_cuts = 0

    @staticmethod
    def memory(n_ctx: int) -> int:
        """Bytes that it takes at most for contexts of n_ctx tokens."""
        return BYTES_PER_TOKEN * _max_tokens(n_ctx)

    def start(self, context: Context) -> None:
        """Take in the prompt, as far as it is new."""
        prompt = context.tokens
        if prompt[: len(self._last)] == self._last:
            self._extend(prompt[len(self._last) :])
            return
        shared = next((i for i, (a, b) in enumerate(zip(prompt, self._last, strict=False)) if a != b), len(prompt))
        new = prompt[max(0, min(shared, len(prompt) - 1) - _OVERLAP) :]
        self._last = prompt[: len(prompt) - len(new)]
        self._n_cuts += 1
        self._automaton.append(-1 - self._n_cuts)  # no token: nothing matches over it
        self._extend(new)

    def propose(self, context: Context, limit: int) -> DraftTree:
        """What followed the match, and another token that has followed it."""
        self._extend(context.tokens[len(self._last) :])
        automaton = self._automaton
        length = automaton.match_length
        if length == 0 or limit == 0:
            return no_draft()
        match_class = _CLASS[length] if length < len(_CLASS) else len(_BOUNDS)
        state = automaton.match
        followers = _SEVERAL if len(automaton.next[state]) > 1 else _ONCE if automaton.seen[state] == 1 else _OFTEN
        bucket, first, later = (
            3 * match_class + followers,
            _FIRST[followers][match_class],
            _LATER[followers][match_class],
        )
        tokens = self._copy(automaton.match_end + 1, max(1, limit - (followers == _SEVERAL)))
        n = self._n_that_may_pay(context, bucket, first, later, len(tokens))
        tree = DraftTree(tokens[:n], list(range(-1, n - 1)), [first, *[later] * (n - 1)][:n], [bucket] * n)
        other = self._other_follower(tokens[:1]) if followers == _SEVERAL and n < limit else None
        if other is not None:
            bucket = _OTHER + match_class
            tree = DraftTree(
                [*tree.tokens, other], [*tree.parents, -1], [*tree.p, _OTHER_FIRST], [*tree.buckets, bucket]
            )
        return tree

    def observe(self, context: Context, n_new: int, rows: Sequence[Logits]) -> None:
        """Nothing to do: the text is read when a draft is wanted."""

    def close(self) -> None:
        """Forget everything."""
        self._automaton = SuffixAutomaton()
        self._last = []

    def _extend(self, tokens: Sequence[int]) -> None:
        self._last.extend(tokens)
        if len(self._automaton.text) + len(tokens) > self._max_tokens:
            self._automaton = SuffixAutomaton()
            tokens = self._last[-(self._max_tokens // 2) :]
        for token in tokens:
            self._automaton.append(token)

    def _copy(self, start: int, n: int) -> list[int]:
        """n tokens of the text from start on; where it ends they go on with themselves, as a repetition does."""
        text = self._automaton.text
        tokens = text[start : start + n]
        period = len(tokens)
        while len(tokens) < n:
            tokens.append(tokens[-period])
        for i, token in enumerate(tokens):
            if token < 0:  # the cut between two requests
                return tokens[:i]
        return tokens

    def _n_that_may_pay(self, context: Context, bucket: int, first: float, later: float, most: int) -> int:
        """Length of the chain before it becomes too unlikely; at least 1, from which the policy learns."""
        probability, min_probability = context.acceptance.probability, context.acceptance.min_probability
        path_probability = probability(bucket, 0, first)
        for depth in range(1, most):
            path_probability *= probability(bucket, depth, later)
            if path_probability < min_probability:
                return depth
        return most

    def _other_follower(self, drafted: list[int]) -> int | None:
        """The token that has followed the match, other than the drafted one, and after which it went on most often."""
        seen, following = self._automaton.seen, self._automaton.next[self._automaton.match]
        others = [token for token in following if token >= 0 and token not in drafted]
        return max(others, key=lambda token: seen[following[token]], default=None)


def _max_tokens(n_ctx: int) -> int:
    """Tokens that are kept: four contexts, but where that is much, two."""
    return max(min(4 * n_ctx, 32768), 2 * n_ctx)
