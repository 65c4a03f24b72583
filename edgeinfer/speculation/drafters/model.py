"""Drafts with a smaller model of the same vocabulary, whose weights may be rounded further.

It has a KV cache of its own, which is truncated to the accepted text and extended by the tokens that it has not seen:
no token is decoded twice. It samples with the target's noise at each position of the text, so where both models nearly
agree, both sample the same token. A device that drafts by itself makes several levels in one call where that is cheaper
(see device_drafting); otherwise n-gram lookup lets one pass make several levels (see lookup).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.base import DraftingSession, PooledModel, PooledSession, Rows, Session
from edgeinfer.common.errors import NumericalError
from edgeinfer.common.overriding import override
from edgeinfer.common.types import Logits, Output
from edgeinfer.speculation.cost import MAX_TOKENS, CostModel
from edgeinfer.speculation.drafters.base import (
    AcceptanceModel,
    Context,
    Drafting,
    HoldingDrafter,
    JointDrafter,
    MultiLevelDrafter,
    held_by,
)
from edgeinfer.speculation.drafters.candidates import draft_candidates, greedy_candidates
from edgeinfer.speculation.drafters.device_drafting import MAX_CALL_MS, DeviceDrafting, close_drafter
from edgeinfer.speculation.drafters.joint import draft_alone
from edgeinfer.speculation.drafters.lookup import NgramLookup
from edgeinfer.speculation.tree import DraftTree, no_draft

_N_CANDIDATES = 2  # of a level
_MAX_UNSEEN = 4  # tokens before the guesses of a pass, at most, as it computes the logits of all
_Level: TypeAlias = list[tuple[int, float, int]]  # token, probability and bucket of its nodes


@dataclass(slots=True)
class _Chain:
    """A growing chain with second candidates."""

    text: list[int]  # the context's tokens, then the chain
    tokens: list[int] = field(default_factory=list)  # by node, as the following
    parents: list[int] = field(default_factory=list)
    p: list[float] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)
    path_probabilities: list[float] = field(default_factory=list)  # of the chain's own nodes
    last: int = -1  # node that the next level follows

    def add(self, level: _Level, acceptance: AcceptanceModel) -> float:
        """Add a level, whose first node continues the chain; returns the acceptance probability of that node."""
        for id, of_id, bucket in level:
            self.tokens.append(id)
            self.parents.append(self.last)
            self.p.append(of_id)
            self.buckets.append(bucket)
        self.last = len(self.tokens) - len(level)
        (token, p, bucket), *_ = level
        probability = acceptance.probability(bucket, len(self.path_probabilities), p)
        self.path_probabilities.append((self.path_probabilities[-1] if self.path_probabilities else 1.0) * probability)
        self.text.append(token)
        return probability


class ModelDrafter(MultiLevelDrafter, JointDrafter, HoldingDrafter):
    """A draft model and its KV cache. It owns the session and its model; those for other texts own their session.

    n_vocab: size of the target's vocabulary.  device_drafting: of that session, if its device drafts by itself.
    draft_vocab: (n_logits,) ascending ids of the tokens that the model has logits for, None for the first ones.
    """

    name = "model"

    def __init__(
        self,
        session: Session,
        n_vocab: int,
        costs: CostModel,
        device_drafting: DeviceDrafting[DraftingSession] | None = None,
        draft_vocab: NDArray[np.int32] | None = None,
    ) -> None:
        self.session = session
        self._n_vocab = n_vocab
        self._costs = costs
        self._is_first = True  # it has the model, which those for other texts share
        self._is_alone = True  # the draft that is made is that of one text
        self._device_drafting = device_drafting
        self._tokens: list[int] = []  # in the KV cache; those from session.n_past on are not committed
        self._n_agreed = 0  # of them, known to be a prefix of the text
        self._lookup = NgramLookup()
        self._n_looked_up = 0  # tokens of the text that are in the lookup table
        self._draft_vocab = draft_vocab
        self._ids = None if draft_vocab is None else draft_vocab[draft_vocab < n_vocab].astype(np.intp)
        # Logits of all tokens, for the target's sampler, which never takes one that is not in draft_vocab.
        self._logits = np.full(0 if draft_vocab is None else n_vocab, -np.inf, dtype=np.float32)

    @staticmethod
    def memory(n_vocab: int) -> dict[str, int]:
        """Bytes beside the draft model by part. n_vocab: tokens of the target, 0 without a draft_vocab."""
        return {"rows": 4 * n_vocab, "tables": NgramLookup.memory()}

    @override
    def start(self, context: Context) -> None:
        """See Drafter. The KV cache is compared with the new text when a draft is requested."""
        self._n_agreed = self._n_looked_up = 0
        if self.can_join and not self._tokens and isinstance(self.session, PooledSession):
            text, _ = self._text(context)
            self._tokens = text[: self.session.reuse_prefix(text[:-1])]

    @override
    def cost(self, context: Context) -> tuple[float, float]:
        token_ms, prefill_ms = self.joint_cost(context, 1)
        n = self._levels_per_call(context, MAX_TOKENS)
        if n == 1 or self._device_drafting is None:
            return token_ms / self._lookup.levels_per_pass, prefill_ms
        return self._device_drafting.milliseconds()[n] / n, prefill_ms

    @property
    @override
    def can_join(self) -> bool:
        model = self.session.model
        return self._device_drafting is None and isinstance(model, PooledModel) and model.n_sequences > 1

    @override
    def beside(self) -> ModelDrafter | None:
        if not self.can_join:
            return None
        other = self._with_session(self.session.model.session())
        other._is_first = False
        return other

    @override
    def joint_cost(self, context: Context, n_texts: int) -> tuple[float, float]:
        text, n_unverified = self._text(context)
        n_past = self._align(text, n_unverified)
        token_ms = self._costs.chain_ms(n_texts, n_past) / n_texts
        return token_ms, self._costs.chain_ms(n_texts * (len(text) - n_past), n_past) / n_texts - token_ms

    @override
    def prefill(self, context: Context) -> None:
        text, n_unverified = self._text(context)
        n_past = self._align(text, n_unverified)
        if n_past < len(text) - 1:
            draft_alone(self._reading(text[n_past:-1]))

    @override
    def propose(self, context: Context, limit: int) -> DraftTree:
        """A chain of the best expected length, with a second candidate at each unsure level."""
        return draft_alone(self.drafting(context, limit))

    @override
    def drafting(self, context: Context, limit: int, is_alone: bool = True) -> Drafting:
        self._is_alone = is_alone
        unseen = context.tokens[self._align(context.tokens, context.n_unverified) :]
        unseen = yield from self._run_all_but_a_batch(unseen)
        chain, acceptance = _Chain(list(context.tokens)), context.acceptance
        self._lookup.add(context.tokens, self._n_looked_up)
        self._n_looked_up = len(context.tokens) - context.n_unverified
        while self._max_levels(chain, limit) and acceptance.should_extend(chain.path_probabilities):
            levels = yield from self._levels(context, chain, unseen, limit)
            for level in levels:
                if len(chain.tokens) < limit:
                    probability = chain.add(level[: limit - len(chain.tokens)], acceptance)
                    if self._device_drafting is not None:
                        self._device_drafting.learn(probability)
            unseen = chain.text[-1:]
        return DraftTree(chain.tokens, chain.parents, chain.p, chain.buckets)

    @override
    def levels_per_call(self, context: Context, milliseconds: float) -> int:
        return self._levels_per_call(context, MAX_TOKENS, min(milliseconds, MAX_CALL_MS))

    @override
    def observe(self, context: Context, n_new: int, rows: Sequence[Logits]) -> None:
        """See Drafter. The KV cache is brought up to date when a draft is requested."""

    @override
    def rest(self) -> None:
        if self.can_join and isinstance(self.session, PooledSession):
            self.session.park()
            self._tokens = []

    @override
    def held(self) -> dict[str, int]:
        parts = held_by(self.session.memory()) if self._is_first else {"rows": 0}  # the others' is that of the first
        return {**parts, "rows": parts["rows"] + self._logits.nbytes, "tables": self._lookup.memory()}

    @override
    def interrupt(self) -> None:
        self.session.interrupt()

    @override
    def close(self) -> None:
        """Free the session, and of the first one the draft model too, whose corrected cost curve is kept."""
        if not self._is_first:
            self.session.close()
            return
        close_drafter(self.session, self._costs, self._device_drafting)

    # ---- Levels ------------------------------------------------------------------------------------------------------

    def _max_levels(self, chain: _Chain, limit: int) -> int:
        """Most levels, by the limit and the room in the context."""
        return max(0, min(limit - len(chain.tokens), self.session.n_ctx - len(chain.text)))

    def _levels(
        self, context: Context, chain: _Chain, unseen: list[int], limit: int
    ) -> Generator[Rows, Output, list[_Level]]:
        """The next levels of a chain, in the best number for one call or pass, and no more than are worth making."""
        max_levels = self._max_levels(chain, limit)
        if self._device_drafting is not None:
            useful = self._device_drafting.n_useful_levels(max_levels, chain.path_probabilities, context.acceptance)
            n = self._levels_per_call(context, useful)
            if n > 1:
                return self._levels_of_device(self._device_drafting, unseen, n)
        levels = yield from self._levels_of_pass(context, chain.text, unseen, max_levels)
        return levels

    def _levels_per_call(self, context: Context, max_levels: int, max_ms: float = MAX_CALL_MS) -> int:
        """Best number of levels for one call of the device; 1 means a pass whose logits are read here."""
        if self._device_drafting is None or not context.is_plain:
            return 1
        one_ms = self._costs.milliseconds(self.session.n_past)[1]
        return self._device_drafting.best_n_levels(one_ms, max_levels, max_ms)

    def _levels_of_pass(
        self, context: Context, text: Sequence[int], unseen: list[int], max_levels: int
    ) -> Generator[Rows, Output, list[_Level]]:
        """The next level after a text, and those after accepted guesses, from one pass."""
        max_levels = min(max_levels, self.session.n_batch - len(unseen) + 1)
        costs = self._costs.milliseconds(self.session.n_past)[len(unseen) :]
        guesses = self._lookup.find(text, max_levels - 1, costs) if len(unseen) <= _MAX_UNSEEN else []
        tokens = [*unseen, *(guess.token for guess in guesses)]
        rows = yield from self._pass(tokens, 1 + len(guesses))
        levels: list[_Level] = []
        longer = list(text)
        for n, row in enumerate(rows):
            levels.append(self._candidates(context, row, longer))
            longer.append(levels[-1][0][0])
            if n < len(guesses) and guesses[n].token != longer[-1]:
                break
        self._commit(tokens[: len(unseen) + len(levels) - 1])
        self._lookup.learn(guesses, longer[len(text) :])
        self._lookup.add(longer, len(text))
        return levels

    def _candidates(self, context: Context, row: Logits, text: list[int]) -> _Level:
        """The level after a text, from its logits."""
        if self._ids is None:
            return draft_candidates(row, context.draw(row, text), context.is_greedy, _N_CANDIDATES)
        self._logits[self._ids] = row
        drawn = int(np.searchsorted(self._ids, context.draw(self._logits, text)))
        found = draft_candidates(row, drawn, context.is_greedy, _N_CANDIDATES)
        return [(self._token(index), p, bucket) for index, p, bucket in found]

    def _token(self, index: int) -> int:
        """The token of an index in a row of logits."""
        return index if self._ids is None else int(self._ids[index])

    def _levels_of_device(
        self, device_drafting: DeviceDrafting[DraftingSession], tokens: Sequence[int], n_levels: int
    ) -> list[_Level]:
        """The next levels, made by the device in one call that runs these tokens first. Commits what was run."""
        n_past, started = self.session.n_past, perf_counter()
        nodes = device_drafting.session.draft(tokens, n_levels, n_vocab=min(self._n_vocab, self.session.spec.n_vocab))
        if len(tokens) == 1:
            device_drafting.costs.observe(n_levels, n_past, 1e3 * (perf_counter() - started))
        if not all(map(math.isfinite, nodes.p.tolist())):
            raise NumericalError("the draft model's logits must be numbers: found others")
        self._commit([*tokens, *nodes.tokens[:-1].tolist()])
        ids, probabilities = (each[:, :_N_CANDIDATES].tolist() for each in (nodes.candidates, nodes.probabilities))
        return [greedy_candidates(list(zip(*level, strict=True))) for level in zip(ids, probabilities, strict=True)]

    def _with_session(self, session: Session) -> ModelDrafter:
        """The same for another text."""
        return ModelDrafter(session, self._n_vocab, self._costs, None, self._draft_vocab)

    # ---- The KV cache ------------------------------------------------------------------------------------------------

    def _text(self, context: Context) -> tuple[list[int], int]:
        """(the text in the draft model's tokens, how many at its end are not verified)."""
        return context.tokens, context.n_unverified

    def _align(self, text: Sequence[int], n_unverified: int) -> int:
        """Truncate the KV cache to what it shares with the text without its last token; returns its length.

        n_unverified: tokens at the end of the text that may still change.
        """
        del self._tokens[self.session.n_past :]
        own = self._tokens
        n = min(self._n_agreed, len(own))
        n_max = max(0, min(len(own), len(text) - 1))
        while n < n_max and own[n] == text[n]:
            n += 1
        n = min(n, n_max)
        if n < len(own):
            n = self.session.truncate(n)
            del own[n:]
        self._n_agreed = min(n, len(text) - n_unverified)
        return n

    def _reading(self, tokens: Sequence[int]) -> Drafting:
        """Run and commit tokens, and draft nothing."""
        self._is_alone = True
        yield from self._forward(tokens)
        return no_draft()

    def _forward(self, tokens: Sequence[int]) -> Generator[Rows, Output, Logits]:
        """Run and commit tokens; returns the logits after the last, (n_vocab,)."""
        last = yield from self._run_all_but_a_batch(tokens)
        rows = yield from self._pass(last, 1)
        self._commit(last)
        row: Logits = rows[0]
        return row

    def _run_all_but_a_batch(self, tokens: Sequence[int]) -> Generator[Rows, Output, list[int]]:
        """Run and commit tokens until the rest fits into one batch; returns the rest."""
        rest, n_batch = list(tokens), self.session.n_batch
        while len(rest) > n_batch:
            yield from self._pass(rest[:n_batch], 1)
            self._commit(rest[:n_batch])
            del rest[:n_batch]
        return rest

    def _pass(self, tokens: Sequence[int], n_rows: int) -> Generator[Rows, Output, Logits]:
        """Run tokens; returns the last logits, (n_rows, n_vocab) or fewer columns if the model has fewer."""
        n_past, started = self.session.n_past, perf_counter()
        out = yield Rows(self.session, tokens, logits="last" if n_rows == 1 else "all")
        if self._is_alone:
            self._costs.observe(len(tokens), n_past, 1e3 * (perf_counter() - started))
        return out.logits[-n_rows:, : self._n_vocab if self._ids is None else len(self._ids)]

    def _commit(self, tokens: Sequence[int]) -> None:
        """Commit the first rows of the last pass, a chain of these tokens."""
        del self._tokens[self.session.n_past :]
        self._tokens.extend(tokens)  # before the commit: _align cuts the list to n_past if that fails
        self.session.commit(range(len(tokens)))
