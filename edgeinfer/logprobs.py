"""Log probabilities of tokens, of the model's own distribution: before temperature, penalties and filters."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edgeinfer import _sampler
from edgeinfer.backends.base import Session, run_sequence
from edgeinfer.common.arguments import check_integer
from edgeinfer.common.errors import NumericalError
from edgeinfer.common.types import Logits
from edgeinfer.repetition import Breakers
from edgeinfer.sampling import SamplingParams, adjusted, candidates

MOST_ALTERNATIVES = 1000


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the model found a token."""

    token: int
    logprob: float  # natural logarithm of its probability, -inf for one that it excludes
    # the most likely tokens at this place with theirs, the most likely one first
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Score:
    """How likely the model finds a continuation of a prompt."""

    tokens: tuple[TokenLogprob, ...]  # of the continuation, with the log probability of each, given all before it
    is_greedy: bool  # whether each of them is the most likely one at its place, so that greedy decoding gives this text

    @property
    def logprob(self) -> float:
        """Of the whole continuation: the sum over its tokens."""
        return float(sum(token.logprob for token in self.tokens))


def check_alternatives(value: object) -> int | None:
    """The argument `logprobs`. Raises InvalidArgument."""
    return None if value is None else check_integer("logprobs", value, 0, MOST_ALTERNATIVES)


def token_logprob(logits: Logits, token: int, n_top: int = 0) -> TokenLogprob:
    """The log probability of a token, and of the n_top most likely ones. logits: (n_vocab,) of tokens that exist.

    Raises NumericalError where the logits are no numbers.
    """
    logits = np.ascontiguousarray(logits)
    if not np.isfinite(logits.max()):
        raise NumericalError("logits are not numbers: the model file is damaged, or its hyper-parameters are wrong")
    total = _sampler.log_total(logits)
    ids = _sampler.candidates(logits, n_top, 1.0, 0.0) if 0 < n_top < len(logits) else _in_order(logits, n_top)
    return TokenLogprob(token, float(logits[token]) - total, tuple((id, float(logits[id]) - total) for id in ids))


def sampled_logprob(
    logits: Logits,
    token: int,
    n_top: int,
    params: SamplingParams,
    previous: Sequence[int],
    breakers: Breakers | None = None,
) -> TokenLogprob:
    """The same of the distribution that the token was drawn from: after bias, penalties, filters and temperature.

    logits: (n_vocab,) as for token_logprob.  previous, breakers: as for `sample`.  `top` has no token that could not
    be drawn, so it may have fewer than n_top.
    """
    if params.is_greedy:
        return TokenLogprob(token, 0.0, ((token, 0.0),) if n_top else ())
    changed = adjusted(np.ascontiguousarray(logits), params, previous, breakers)
    ids = candidates(changed, params)
    scaled = changed[ids].astype(np.float64) / params.temperature
    scaled -= scaled.max()
    scaled -= math.log(float(np.exp(scaled).sum()))
    order = np.lexsort((ids, -scaled))[:n_top]
    of_token = scaled[ids == token]
    return TokenLogprob(
        token,
        float(of_token[0]) if len(of_token) else -math.inf,
        tuple((int(ids[at]), float(scaled[at])) for at in order if math.exp(scaled[at]) > 0),
    )


def score_continuations(
    session: Session,
    prompt: Sequence[int],
    after_prompt: Logits,
    continuations: Sequence[Sequence[int]],
    n_vocab: int,
    n_rows: int,
    before_pass: Callable[[], None],
) -> list[Score]:
    """Score several continuations, each of at least one token, of the prompt, which is committed before and after.

    after_prompt: (>= n_vocab,) logits of its last token.  n_vocab: tokens that exist.  n_rows: most rows of logits at a
    time. Short continuations go through a pass together, as branches of a tree that share what they have in common.
    before_pass: may raise, which ends this.
    """
    of_short: dict[tuple[int, ...], Score] = {}
    # In order, those that begin alike go through the same pass.
    waiting = deque(sorted({tuple(each) for each in continuations if len(each) <= n_rows}))
    while waiting:
        before_pass()
        tree, taken = _Tree(), []
        while waiting and tree.add(waiting[0], n_rows):
            taken.append(waiting.popleft())
        of_short |= tree.scores(session, after_prompt, taken, n_vocab)
    scores = []
    for tokens in continuations:
        found = of_short.get(tuple(tokens))
        if found is None:
            before_pass()
            found = _score_long(session, prompt, after_prompt, tokens, n_vocab, n_rows)
        scores.append(found)
    return scores


class _Tree:
    """Continuations as branches of one tree. The last token of each needs no row: nothing follows it."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, ...], int] = {}  # row of the last token of each beginning
        self._tokens: list[int] = []
        self._parents: list[int] = []

    def add(self, continuation: tuple[int, ...], n_rows: int) -> bool:
        """Add one if there is room for it in so many rows."""
        beginnings = [continuation[:n] for n in range(1, len(continuation))]
        missing = [each for each in beginnings if each not in self._rows]
        if len(self._tokens) + len(missing) > n_rows:
            return False
        for each in missing:
            self._parents.append(self._rows[each[:-1]] if len(each) > 1 else -1)
            self._rows[each] = len(self._tokens)
            self._tokens.append(each[-1])
        return True

    def scores(
        self, session: Session, after_prompt: Logits, continuations: Sequence[tuple[int, ...]], n_vocab: int
    ) -> Mapping[tuple[int, ...], Score]:
        """Run the tree, without committing it."""
        rows: Sequence[Logits] = ()
        if self._tokens:
            rows = list(session.forward(self._tokens, self._parents, logits="all").logits)
        found = {}
        for tokens in continuations:
            of_place = [after_prompt, *(rows[self._rows[tokens[:n]]] for n in range(1, len(tokens)))]
            found[tokens] = _score_of([row[:n_vocab] for row in of_place], tokens)
        if self._tokens:
            session.commit([])
        return found


def _score_long(
    session: Session,
    prompt: Sequence[int],
    after_prompt: Logits,
    tokens: Sequence[int],
    n_vocab: int,
    n_rows: int,
) -> Score:
    """Score one that takes several passes, which commit it."""
    parts = [_score_of([after_prompt[:n_vocab]], tokens[:1])]
    for first in range(1, len(tokens), n_rows):
        chunk = tokens[first : first + n_rows]
        rows = run_sequence(session, tokens[first - 1 : first - 1 + len(chunk)], logits="all").logits
        parts.append(_score_of([row[:n_vocab] for row in rows], chunk))
    n_left = session.truncate(len(prompt))
    if n_left < len(prompt):  # a window no longer has what it needs there
        run_sequence(session, prompt[n_left:], logits="none")
    return Score(tuple(token for part in parts for token in part.tokens), all(part.is_greedy for part in parts))


def _score_of(rows: Sequence[Logits], tokens: Sequence[int]) -> Score:
    """rows: the logits at the places of the tokens."""
    found = tuple(token_logprob(row, token, 1) for row, token in zip(rows, tokens, strict=True))
    is_greedy = all(each.top[0][0] == each.token for each in found)
    return Score(found, is_greedy)


def _in_order(logits: Logits, n: int) -> list[int]:
    """All tokens, or none, the most likely first, equal ones by id."""
    return [] if n == 0 else [int(id) for id in np.argsort(-logits, kind="stable")]
