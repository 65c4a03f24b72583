"""Repetition: DRY, which makes it less likely, and the loop guard, which ends it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from edgeinfer import _sampler
from edgeinfer.models.tokenizer import Tokenizer

Breakers: TypeAlias = Mapping[int, Sequence[tuple[int, ...]]]
"""Sequence breakers as tokens: the first token of each, and what may follow it, which is () for a breaker of one."""

# Of the loop guard: tokens of a run, and how often a window must hold each of its runs on average. Longer runs, in
# longer windows, need not be as frequent: docs/sampling.md has the measurements.
_RUN, _OFTEN, _LONG_RUN, _OFTEN_IF_LONG = 12, 16, 32, 8
_NUMBER = -1  # stands for every number where numbers are taken for one another
_BASE, _PRIME = 0x9E3779B97F4A7C1, (1 << 61) - 1

_MAX_BREAKER_BYTES, _MAX_TAIL = 40, 20  # as in llama.cpp
_LARGEST_FLOAT = float(np.finfo(np.float32).max)


def dry_penalties(
    text: Sequence[int], multiplier: float, base: float, allowed_length: int, last_n: int, breakers: Breakers
) -> dict[int, float]:
    """The DRY penalties of tokens, as llama.cpp defines them; see SamplingParams for the arguments.

    text: ids so far. The penalty of a token that would continue a repetition of n tokens is multiplier * base ** (n -
    allowed_length), at most the largest float32.
    """
    recent = text if last_n < 0 else text[-last_n:]
    if len(recent) <= allowed_length:
        return {}
    most = _since_breaker(recent, breakers)
    if most < allowed_length:
        return {}
    continued = _sampler.continuations(np.array(recent, dtype=np.int32), allowed_length, most)
    return {
        token: min(multiplier * _power(base, n - allowed_length), _LARGEST_FLOAT)
        for token, n in continued
        if () not in breakers.get(token, ())
    }


def _since_breaker(recent: Sequence[int], breakers: Breakers) -> int:
    """Tokens after the last sequence breaker; all, if there is none."""
    n = len(recent)
    for i in range(n - 1, -1, -1):
        tails = breakers.get(recent[i], ())
        found = [len(tail) for tail in tails if tuple(recent[i + 1 : i + 1 + len(tail)]) == tail]
        if found:
            return n - 1 - i - max(found)
    return n


def _power(base: float, exponent: int) -> float:
    """base ** exponent by squaring: the same bits on every machine, which pow of a C library does not guarantee."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def breakers_of(texts: Sequence[str], tokenizer: Tokenizer) -> Breakers:
    """Every way in which tokens can spell the texts: a token that holds one, or that ends with its beginning and the
    tokens of the rest. As in llama.cpp, no more than 40 bytes of a text and 20 tokens of a rest count.
    """
    found: dict[int, list[tuple[int, ...]]] = {}
    requested = [text.encode(errors="replace")[:_MAX_BREAKER_BYTES] for text in texts]
    for id in range(tokenizer.n_vocab):
        piece = tokenizer.token_bytes(id)
        for breaker in requested:
            if breaker in piece:
                found.setdefault(id, []).append(())
                continue
            for length in range(1, min(len(piece), len(breaker) - 1) + 1):
                if piece.endswith(breaker[:length]):
                    rest = breaker[length:].decode(errors="replace")
                    found.setdefault(id, []).append(tuple(tokenizer.encode(rest, add_special=False)[:_MAX_TAIL]))
    return found


class LoopGuard:
    """Detects an answer that only repeats itself, from its tokens, in constant time per token.

    n: length of the repetition, at least 64; see SamplingParams.loop_guard. Tokens repeat themselves if they have few
    different runs of k tokens; a text with a period of p tokens has p different runs. If at least half of the tokens
    are words, n tokens are enough for a period of up to n / 16, and 2 n for one of up to n / 4; in the short windows
    all counting numbers are the same, so that a counter does not hide a loop. Tables, code and data have long stretches
    of the same characters too: there a period of up to 3/16 n needs 3 n tokens, one of up to n / 2 or 3/4 n needs 4 n
    or 6 n.
    """

    def __init__(self, n: int, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._kinds: dict[int, tuple[bool, bool]] = {}
        self._alike, self._exact, self._long = _Runs(_RUN), _Runs(_RUN), _Runs(_LONG_RUN)
        self._of_alike = [_Window(k * n, _RUN, _OFTEN, of_words=True) for k in (1, 2)]
        self._of_exact = [_Window(3 * n, _RUN, _OFTEN)]
        self._of_long = [_Window(k * n, _LONG_RUN, _OFTEN_IF_LONG, of_words=k == 2) for k in (2, 4, 6)]
        self._number = ""  # digits of one that may go on
        self._recent: deque[int] = deque(maxlen=6)  # numbers

    def push(self, token: int) -> bool:
        """Whether the answer repeats itself with this token as its last one."""
        is_number, is_word = self._kind(token)
        added = [(self._exact.push(token), self._of_exact), (self._long.push(token), self._of_long)]
        repeats = False
        if is_number:  # 1, 23 and 456 may have one, two and three tokens
            self._number += self._tokenizer.token_bytes(token).decode(errors="ignore").strip()
        else:
            if self._number:
                run = self._alike.push(self._counted(int(self._number[-18:])))
                repeats = any([window.push(run, False) for window in self._of_alike])
                self._number = ""
            added.append((self._alike.push(token), self._of_alike))
        for run, windows in added:
            for window in windows:
                repeats |= window.push(run, is_word)
        return repeats

    def _counted(self, number: int) -> int:
        """What stands for a number: the same for all that repeat a recent one or count on from it. Data does not, and
        what counts down ends by itself."""
        goes_on = number in self._recent or number - 1 in self._recent
        self._recent.append(number)
        return _NUMBER if goes_on else -3 - number

    def _kind(self, token: int) -> tuple[bool, bool]:
        """(whether a token is a number or a part of one, whether it has a letter)"""
        kind = self._kinds.get(token)
        if kind is None:
            text = self._tokenizer.token_bytes(token).decode(errors="ignore")
            kind = self._kinds[token] = text.strip().isdecimal(), any(map(str.isalpha, text))
        return kind


class _Runs:
    """The last n tokens as one number, by which runs are compared: a polynomial in _BASE, modulo a prime of 61 bits."""

    def __init__(self, n: int) -> None:
        self._tokens = deque([0] * n, maxlen=n)
        self._leaves = pow(_BASE, n, _PRIME)
        self._value = 0

    def push(self, token: int) -> int:
        token += 2  # _NUMBER is 1
        self._value = (self._value * _BASE + token - self._tokens[0] * self._leaves) % _PRIME
        self._tokens.append(token)
        return self._value


class _Window:
    """The runs within the last n tokens: how many different ones, and how many end with a word.

    often: average number of times that each run must occur for the tokens to count as a repetition.  of_words: only if
    half of the tokens are words.
    """

    def __init__(self, n: int, run: int, often: int, *, of_words: bool = False) -> None:
        self._to_skip, self._n_runs, self._most = run - 1, n - run + 1, n // often
        self._least_words = self._n_runs / 2 if of_words else 0
        self._runs: deque[tuple[int, bool]] = deque()
        self._counts: dict[int, int] = {}
        self._n_words = 0

    def push(self, run: int, is_word: bool) -> bool:
        """Add a run; gives whether there are n tokens that repeat themselves."""
        if self._to_skip:  # before there are enough tokens for a run
            self._to_skip -= 1
            return False
        counts = self._counts
        self._runs.append((run, is_word))
        counts[run] = counts.get(run, 0) + 1
        self._n_words += is_word
        if len(self._runs) < self._n_runs:
            return False
        if len(self._runs) > self._n_runs:
            first, was_word = self._runs.popleft()
            self._n_words -= was_word
            counts[first] -= 1
            if not counts[first]:
                del counts[first]
        return len(counts) <= self._most and self._n_words >= self._least_words
