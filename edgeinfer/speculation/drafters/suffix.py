"""Drafts by suffix match: finds the longest suffix of the text that occurs earlier, and copies what followed it there.

A suffix automaton (Blumer et al. 1985, as used for drafts by Hu et al., SAM Decoding, arXiv:2411.10666) is extended by
each token in O(1) amortised. The suffix link of its last state is the longest suffix that occurs earlier, so nothing is
searched.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from edgeinfer.common.overriding import override
from edgeinfer.common.types import Logits
from edgeinfer.speculation.drafters.base import Context, HoldingDrafter, SharedDrafter
from edgeinfer.speculation.drafters.chains import Chains
from edgeinfer.speculation.drafters.foresight import Foresight, foresight_of
from edgeinfer.speculation.drafters.realignment import FIRST, LATER, N_BUCKETS, Realignment
from edgeinfer.speculation.drafters.realignment import MOST_BYTES as REALIGNMENT_BYTES
from edgeinfer.speculation.tree import DraftTree, no_draft

BYTES_PER_TOKEN = 250  # of the automaton; tests/edgeinfer/speculation/drafters/test_drafters.py measures it
LEAST_TOKENS = 256  # of a useful automaton: code and prose of 3000 tokens then have 3/4 of the gain, with 128 half
_BESIDE = 4  # the automaton of a text beside others is so many times smaller
_BYTES_PER_LAST = 36  # per token of the last request: a place in a list, and an integer
_NONE = -(1 << 31)  # no token
_OVERLAP = 8  # tokens repeated before the first new one of a request, so that matches may span the cut

# Buckets: the class of the match length (the first bound that it does not exceed), and what has followed the match:
# several tokens, one token once, one token more often. Prior acceptance probabilities of the first node and of later
# ones, as measured on 70 greedy answers of two models to prompts of all kinds.
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
_OTHER = 3 * len(_FIRST[0])  # first bucket of the second most frequent follower
_REALIGNED = _OTHER + len(_FIRST[0])  # first bucket of edgeinfer.speculation.drafters.realignment
_PENALISED = _REALIGNED + N_BUCKETS  # added to those below _REALIGNED, where a penalty makes a token less likely


class SuffixAutomaton:
    """All substrings of a text that grows at its end.

    State 0 is the empty string. A state stands for strings that end at the same positions; `length` is that of the
    longest of them, and `link` the state of its longest suffix that occurs at more positions. Most states have one
    follower, which is in two arrays; only the others have a dict.
    """

    def __init__(self) -> None:
        self.text = array("i")
        self.end = array("i", [-1])  # last known position at which the strings of a state end
        self.seen = array("i", [0])  # how often a state was the match
        self._token = array("i", [_NONE])  # the first token that follows a state, and the state that it leads to
        self._next = array("i", [0])
        self._more: dict[int, dict[int, int]] = {}  # the other tokens, by state
        self._length = array("i", [0])
        self._link = array("i", [-1])
        self._last = 0
        self.match = 0  # state of the longest suffix of the text that occurs earlier
        self.match_end = -1  # last position of that earlier occurrence

    @property
    def match_length(self) -> int:
        """Number of tokens of the match."""
        return self._length[self.match]

    def has_several(self, state: int) -> bool:
        """Whether more than one token follows a state."""
        return state in self._more

    def followers(self, state: int) -> list[tuple[int, int]]:
        """The tokens that follow a state, the first one first, and the states that they lead to."""
        if self._token[state] == _NONE:
            return []
        return [(self._token[state], self._next[state]), *self._more.get(state, {}).items()]

    def append(self, token: int) -> None:
        """Add a token to the end of the text."""
        tokens, link = self._token, self._link
        state = self._add_state(self._length[self._last] + 1, 0, len(self.text))
        self.text.append(token)
        before = self._last
        while before >= 0 and tokens[before] != token:
            if tokens[before] == _NONE:
                tokens[before], self._next[before] = token, state
            else:
                more = self._more.get(before)
                if more is None:
                    self._more[before] = {token: state}
                elif token in more:
                    break
                else:
                    more[token] = state
            before = link[before]
        if before >= 0:
            link[state] = self._state_of(before, token)
        self._last = state
        match = self.match = link[state]
        self.match_end = self.end[match]
        self.end[match] = len(self.text) - 1
        self.seen[match] += 1

    def _state_of(self, before: int, token: int) -> int:
        """State of the longest string of `before` extended by the token, cloned if longer strings share its state."""
        link, length = self._link, self._length
        state = self._follower(before, token)
        if length[before] + 1 == length[state]:
            return state
        shorter = self._add_state(length[before] + 1, link[state], self.end[state])
        self._token[shorter], self._next[shorter] = self._token[state], self._next[state]
        if state in self._more:
            self._more[shorter] = self._more[state].copy()
        while before >= 0 and self._follower(before, token) == state:
            if self._token[before] == token:
                self._next[before] = shorter
            else:
                self._more[before][token] = shorter
            before = link[before]
        link[state] = shorter
        return shorter

    def _follower(self, state: int, token: int) -> int:
        """The state that a token leads to, -1 where it does not follow."""
        if self._token[state] == token:
            return self._next[state]
        return self._more[state].get(token, -1) if state in self._more else -1

    def _add_state(self, length: int, link: int, end: int) -> int:
        self._token.append(_NONE)
        self._next.append(0)
        self._length.append(length)
        self._link.append(link)
        self.end.append(end)
        self.seen.append(0)
        return len(self.end) - 1


class SuffixDrafter(HoldingDrafter, SharedDrafter):
    """Copies from the prompt, the output and earlier requests. max_tokens: most tokens of the automaton."""

    name = "suffix"

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._automaton = SuffixAutomaton()
        self._realignment = Realignment(self._automaton.text)
        self._last: list[int] = []  # the last request's tokens, all of which the automaton has
        self._n_cuts = 0

    @staticmethod
    def most_tokens(n_ctx: int) -> int:
        """Useful max_tokens with contexts of n_ctx tokens: four contexts, or two if these are long."""
        return max(min(4 * n_ctx, 32768), 2 * n_ctx)

    @staticmethod
    def memory(max_tokens: int, n_ctx: int, n_texts: int = 1) -> int:
        """Most bytes of the automaton, of what was learnt of changed copies, and of the last request.

        n_texts: that run at once, each of which has those of its own.
        """
        n_tokens = max_tokens + (n_texts - 1) * _beside(max_tokens)
        return BYTES_PER_TOKEN * n_tokens + n_texts * (REALIGNMENT_BYTES + _BYTES_PER_LAST * n_ctx)

    def start(self, context: Context) -> None:
        """Add the new part of the prompt."""
        prompt = context.tokens
        if prompt[: len(self._last)] == self._last:
            self._extend(prompt[len(self._last) :])
            return
        shared = next((i for i, (a, b) in enumerate(zip(prompt, self._last, strict=False)) if a != b), len(prompt))
        new = prompt[max(0, min(shared, len(prompt) - 1) - _OVERLAP) :]
        self._last = prompt[: len(prompt) - len(new)]
        self._n_cuts += 1
        self._automaton.append(-1 - self._n_cuts)  # no token: nothing matches over it
        self._realignment.leave()
        self._extend(new)

    def propose(self, context: Context, limit: int) -> DraftTree:
        """The rest of the copy, what followed the match, and the match's second most frequent follower."""
        self._extend(context.tokens[len(self._last) :])
        length = self._automaton.match_length
        if limit == 0:
            return no_draft()
        chains, foresight = Chains(context, limit), foresight_of(context)
        guesses = self._realignment.guesses(limit)
        if length and not self._realignment.is_copying:
            self._add_match(chains, length, limit, foresight)
        for guess in guesses:
            tokens = _without_banned(guess.tokens, foresight)
            buckets = guess.buckets[: len(tokens)]
            priors = [_first_or_later(bucket) for bucket in buckets]
            chains.add(tokens, [_REALIGNED + bucket for bucket in buckets], priors)
        if length and self._realignment.is_copying:
            self._add_match(chains, length, limit, foresight)
        return chains.tree()

    def _add_match(self, chains: Chains, length: int, limit: int, foresight: Foresight | None) -> None:
        """Add what followed the longest match, which has that length."""
        automaton = self._automaton
        match_class = _CLASS[length] if length < len(_CLASS) else len(_BOUNDS)
        state = automaton.match
        followers = _SEVERAL if automaton.has_several(state) else _ONCE if automaton.seen[state] == 1 else _OFTEN
        bucket = 3 * match_class + followers
        tokens = self._copy(automaton.match_end + 1, max(1, limit - (followers == _SEVERAL)))
        first, later = _FIRST[followers][match_class], _LATER[followers][match_class]
        tokens = _without_banned(tokens, foresight)
        chains.add(tokens, _of_tokens(bucket, tokens, foresight), [(first, later)] * len(tokens))
        other = self._other_follower(tokens[:1]) if followers == _SEVERAL else None
        if other is not None:
            others = _without_banned([other], foresight)
            chains.add(
                others,
                _of_tokens(_OTHER + match_class, others, foresight),
                [(_OTHER_FIRST, _OTHER_FIRST)] * len(others),
            )

    def observe(self, context: Context, n_new: int, rows: Sequence[Logits]) -> None:
        """See Drafter. The text is added when a draft is requested."""

    @override
    def beside(self) -> SuffixDrafter:
        return SuffixDrafter(_beside(self._max_tokens))

    @override
    def held(self) -> dict[str, int]:
        return {"tables": self.memory(len(self._automaton.text), len(self._last))}

    def close(self) -> None:
        """Free the automaton."""
        self._automaton = SuffixAutomaton()
        self._last = []

    def _extend(self, tokens: Sequence[int]) -> None:
        self._last.extend(tokens)
        if len(self._automaton.text) + len(tokens) > self._max_tokens:
            self._automaton = SuffixAutomaton()
            self._realignment = Realignment(self._automaton.text)
            tokens = self._last[-(self._max_tokens // 2) :]
        automaton, realignment = self._automaton, self._realignment
        for token in tokens:
            automaton.append(token)
            realignment.follow(token, automaton.match_length, automaton.match_end)

    def _copy(self, start: int, n: int) -> list[int]:
        """n tokens of the text from start on; at its end the copied tokens repeat, as in a periodic text."""
        text = self._automaton.text
        tokens = text[start : start + n].tolist()
        period = len(tokens)
        while len(tokens) < n:
            tokens.append(tokens[-period])
        for i, token in enumerate(tokens):
            if token < 0:  # the cut between two requests
                return tokens[:i]
        return tokens

    def _other_follower(self, drafted: list[int]) -> int | None:
        """The most frequent follower of the match besides the drafted token."""
        seen, followers = self._automaton.seen, self._automaton.followers(self._automaton.match)
        others = {token: seen[state] for token, state in followers if token >= 0 and token not in drafted}
        return max(others, key=others.__getitem__, default=None)


def _beside(max_tokens: int) -> int:
    """Tokens of the automaton of a text beside others."""
    return max(LEAST_TOKENS, max_tokens // _BESIDE)


def _first_or_later(bucket: int) -> tuple[float, float]:
    """Prior probabilities of a node of a realigned copy, (as the first of a draft, elsewhere)."""
    return FIRST[bucket], LATER[bucket]


def _without_banned(tokens: list[int], foresight: Foresight | None) -> list[int]:
    """A chain up to the first token that the request bans."""
    if foresight is None:
        return tokens
    return tokens[: next((i for i, token in enumerate(tokens) if foresight.is_banned(token)), len(tokens))]


def _of_tokens(bucket: int, tokens: Sequence[int], foresight: Foresight | None) -> list[int]:
    """The bucket of each token of a chain: another one where a penalty makes it less likely."""
    if foresight is None:
        return [bucket] * len(tokens)
    return [bucket + _PENALISED * foresight.is_penalised(token, tokens[:place]) for place, token in enumerate(tokens)]
