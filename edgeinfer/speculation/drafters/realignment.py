"""Copies that survive edits: where a text leaves the source that it copies, the place after the difference is found.

Aggressive Decoding (Ge et al., arXiv:2205.10350) does this for corrections of a sentence. Here the source is any place
of the text, and differences are learnt: where the same words follow in the source, they are replaced the same way.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

_ENOUGH = 4  # a match of at least so many tokens is a copy
_LONGER = 8  # tokens by which another match must be longer than the copy since the last difference, to replace it
_WINDOW = 64  # tokens of the source that are searched for the place after a difference
_MOST_NEW, _MOST_OLD = 12, 24  # longest differences that are learnt, in tokens
_SHORT_GAP = 2  # in longer differences, only an agreeing token tells where the source continues
_MOST_GAP = 24  # longest difference, in tokens, before a copy is given up
_MOST_RULES, _MOST_RULE_TOKENS = 64, 512  # that are remembered, and the tokens of all of them
MOST_BYTES = 36 * _MOST_RULE_TOKENS + 300 * _MOST_RULES  # tokens as integers of their own; rules with their tuples
_LEAST_RIGHT, _MOST_RIGHT = -1, 3  # n_right of rules

# Buckets, from 0 on.
_RUNS = (2, 6)  # bounds of the classes of tokens copied since the last difference
_RATES = (0.004, 0.008, 0.015, 0.03, 0.06)  # bounds of the classes of differences per copied token
_N_COPIED = len(_RATES) + 1  # classes of rates for each class of a run
_RULE = _N_COPIED * (len(_RUNS) + 1)
RULE, SURE_RULE, INNER, RULE_LEFT, RULE_GAP = range(_RULE, _RULE + 5)
_GAPS = (1, 2, 4)  # bounds of the classes of tokens since a difference began
_AFTER = RULE_GAP + 1
SAME, NEAR, FAR, REPLACED, INSERTED, ONE = range(_AFTER, _AFTER + 6)  # for the shortest class of differences
_N_AFTER = 6
N_BUCKETS = _AFTER + _N_AFTER * (len(_GAPS) + 1)
_DECAY = 0.99  # of the numbers of copied tokens and of differences, with each token
# Prior acceptance probabilities of a bucket's first node, and of later ones.
FIRST = (
    *(0.85, 0.85, 0.8, 0.75, 0.7, 0.5),
    *(0.97, 0.96, 0.93, 0.9, 0.85, 0.75),
    *(0.99, 0.985, 0.97, 0.95, 0.9, 0.85),
    *(0.1, 0.8, 0.9, 0.4, 0.85),
    *(0.6, 0.5, 0.25, 0.35, 0.05, 0.1),
    *(0.6, 0.3, 0.3, 0.08, 0.03, 0.03),
    *(0.6, 0.2, 0.2, 0.04, 0.02, 0.02),
    *(0.4, 0.3, 0.15, 0.02, 0.01, 0.01),
)
LATER = (
    *(0.98, 0.97, 0.95, 0.94, 0.9, 0.8),
    *(0.985, 0.98, 0.97, 0.95, 0.92, 0.85),
    *(0.99, 0.985, 0.975, 0.96, 0.93, 0.88),
    *(0.4, 0.9, 0.95, 0.9, 0.95),
    *(0.85, 0.75, 0.6, 0.75, 0.7, 0.6) * 4,
)


@dataclass(slots=True)
class Rule:
    """A difference between the source and its copy. One of old and new may be empty."""

    old: tuple[int, ...]  # tokens of the source
    new: tuple[int, ...]  # tokens in their place
    before: int  # token of the source before the difference, which must be there again if old or new is empty; else -1
    n_right: int = 0  # how often the rule was right since, less how often it was wrong


@dataclass(slots=True)
class Guess:
    """Tokens that may follow the text."""

    tokens: list[int]
    buckets: list[int]  # of each token


class Realignment:
    """Tracks where a copy with changes is in its source. text: has both, and grows only at its end."""

    def __init__(self, text: array[int]) -> None:
        self._text = text
        self._place = -1  # of the source's next token, or of the difference; -1 where nothing is copied
        self._run = 0  # tokens copied since the last difference
        self._copied, self._n_differences = 0.0, 0.0  # from this source, decayed
        self._gap: list[int] = []  # tokens since the copy broke off, none while it goes on
        self._rules: dict[int, Rule] = {}  # by the token of the source at which they begin

    def follow(self, token: int, match_length: int, match_end: int) -> None:
        """Call for each token added to the text. match_length, match_end: see SuffixAutomaton, of the longest match."""
        if self._place >= 0:
            if not self._gap and self._text[self._place] == token:
                if self._rules:
                    self._count_wrong()
                self._place, self._run = self._place + 1, self._run + 1
                self._copied = _DECAY * self._copied + 1.0
                self._n_differences *= _DECAY
            else:
                self._n_differences += not self._gap
                self._gap.append(token)
                self._seek()
        if match_length < _ENOUGH or match_end + 1 == self._place:
            return
        if self._place < 0 or self._gap or match_length > self._run + _LONGER:
            self._place, self._run, self._gap = match_end + 1, match_length, []
            self._copied, self._n_differences = float(min(match_length, 20)), 0.0

    def leave(self) -> None:
        """Stop copying, as the text continues with something else."""
        self._place, self._run, self._gap = -1, 0, []

    @property
    def is_copying(self) -> bool:
        """Whether the last token was copied."""
        return self._place >= 0 and not self._gap

    def guesses(self, n: int) -> list[Guess]:
        """Guesses of at most n tokens each, the likeliest first; none if nothing is copied."""
        if self._place < 0:
            return []
        if self._gap:
            return self._after_difference(n)
        found = [self._copy(self._place, n, self._bucket())]
        if found[0].buckets[:1] in ([RULE], [SURE_RULE]):  # in case the source is copied unchanged
            found.append(self._copy(self._place, 2, RULE_LEFT, use_rules=False))
        return [guess for guess in found if guess.tokens]

    def _bucket(self) -> int:
        """The bucket of copied tokens, by the tokens since the last difference and by the rate of differences."""
        rate = (self._n_differences + 0.3) / (self._copied + 6.0)
        rates = sum(rate > bound for bound in _RATES)
        return _N_COPIED * sum(self._run > bound for bound in _RUNS) + rates

    # ---- Following ---------------------------------------------------------------------------------------------------

    def _seek(self) -> None:
        """Find the place after the difference, or give up."""
        text, place, gap = self._text, self._place, self._gap
        if len(gap) > _MOST_GAP:
            self.leave()
            return
        rule = self._rule_at(place)
        if rule is not None:
            after = place + len(rule.old)
            n_copied = len(gap) - len(rule.new)
            is_whole = n_copied >= (not rule.new) and tuple(gap[: len(rule.new)]) == rule.new
            if is_whole and text[after : after + n_copied].tolist() == gap[len(rule.new) :]:
                self._place, self._run, self._gap = after + n_copied, self._run + len(gap), []
                self._n_differences = max(0.0, self._n_differences - 1.0)  # the rule predicted it
                rule.n_right = min(rule.n_right + 1, _MOST_RIGHT)
                return
        if len(gap) < 2:
            return
        window, before, last = text[place : place + _WINDOW], gap[-2], gap[-1]
        best, at = _WINDOW, -1
        while True:
            try:
                at = window.index(last, at + 1)
            except ValueError:
                break
            if at > 0 and window[at - 1] == before and abs(at + 1 - len(gap)) < abs(best + 1 - len(gap)):
                best = at
        if best < _WINDOW and place + best < len(text) - len(gap):
            self._learn(window[: best - 1].tolist(), gap[:-2])
            self._place, self._run, self._gap = place + best + 1, 2, []

    def _count_wrong(self) -> None:
        """Call when the next token of the source was copied: a rule that would have replaced it was wrong."""
        rule = self._rule_at(self._place)
        if rule is not None and rule.old:
            rule.n_right -= 1
            if rule.n_right < _LEAST_RIGHT:
                del self._rules[self._text[self._place]]

    def _learn(self, old: Sequence[int], new: Sequence[int]) -> None:
        """Remember that the next tokens of the source were replaced."""
        while old and new and old[-1] == new[-1]:
            old, new = old[:-1], new[:-1]
        if not (old or new) or len(old) > _MOST_OLD or len(new) > _MOST_NEW:
            return
        before = self._text[self._place - 1] if self._place else -1
        key = self._text[self._place]
        self._rules.pop(key, None)
        self._rules[key] = Rule(tuple(old), tuple(new), -1 if old and new else before)
        n_tokens = sum(len(rule.old) + len(rule.new) for rule in self._rules.values())
        while len(self._rules) > _MOST_RULES or n_tokens > _MOST_RULE_TOKENS:
            oldest = self._rules.pop(next(iter(self._rules)))
            n_tokens -= len(oldest.old) + len(oldest.new)

    def _rule_at(self, place: int) -> Rule | None:
        """The rule for the tokens of the source from a place on."""
        text = self._text
        rule = self._rules.get(text[place]) if place < len(text) else None
        if rule is None or (rule.before != -1 and text[place - 1] != rule.before):
            return None
        return rule if tuple(text[place : place + len(rule.old)]) == rule.old else None

    # ---- Guessing ----------------------------------------------------------------------------------------------------

    def _copy(self, place: int, n: int, bucket: int, use_rules: bool = True) -> Guess:
        """The source from a place on, with replacements by rules. bucket: of copied tokens."""
        text, rules, tokens, buckets = self._text, self._rules if use_rules else {}, list[int](), list[int]()
        while len(tokens) < n and place < len(text) and text[place] >= 0:
            rule = self._rule_at(place) if text[place] in rules else None
            if rule is None:
                tokens.append(text[place])
                buckets.append(bucket)
                place += 1
                continue
            tokens += rule.new
            buckets += [SURE_RULE if rule.n_right > 0 else RULE, *[INNER] * (len(rule.new) - 1)][: len(rule.new)]
            place += len(rule.old)
            if not rule.old and place < len(text) and text[place] >= 0:  # else it would be inserted again
                tokens.append(text[place])
                buckets.append(bucket)
                place += 1
        return Guess(tokens[:n], buckets[:n])

    def _after_difference(self, n: int) -> list[Guess]:
        """Guesses after a difference that has not ended yet."""
        place, gap = self._place, self._gap
        found, rule = [], self._rule_at(place)
        if rule is not None and len(gap) < len(rule.new) and rule.new[: len(gap)] == tuple(gap):
            left = list(rule.new[len(gap) :])
            copied = self._copy(place + len(rule.old), n, RULE_GAP)
            found.append(Guess([*left, *copied.tokens][:n], [*[RULE_GAP] * len(left), *copied.buckets][:n]))
        places = [(place + len(gap), REPLACED), (place, INSERTED), (place + 1, ONE)] if len(gap) <= _SHORT_GAP else []
        agreeing = self._agreeing()
        if agreeing is not None:
            shift = abs(agreeing + 1 - len(gap))
            places.insert(0, (place + agreeing + 1, SAME if not shift else NEAR if shift < 5 else FAR))
        of_gap = _N_AFTER * sum(len(gap) > bound for bound in _GAPS)
        found += [self._copy(start, n, of_gap + bucket) for start, bucket in places]
        return [guess for guess in found if guess.tokens]

    def _agreeing(self) -> int | None:
        """Place of the last token in the source, counted from the difference; the one nearest to a shift of 0."""
        window, gap = self._text[self._place : self._place + _WINDOW], self._gap
        best, at = None, -1
        while True:
            try:
                at = window.index(gap[-1], at + 1)
            except ValueError:
                return best
            if best is None or abs(at + 1 - len(gap)) < abs(best + 1 - len(gap)):
                best = at
