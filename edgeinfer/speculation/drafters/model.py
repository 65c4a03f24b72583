"""Drafts with a smaller model of the same vocabulary, with weights rounded for it.

It keeps a KV cache of its own, cut back to what the text became and fed with what it has not read: no token is decoded
twice. It draws with the target's noise for each place in the text: where both nearly agree, both draw the same token.
A device that makes chains by itself is asked for several tokens at once where that is the cheaper way to tokens that
will be right; any other makes several levels in a pass where what it will choose could be guessed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeAlias

from edgeinfer.backends.base import DraftingSession, Session
from edgeinfer.errors import NumericalError
from edgeinfer.speculation.cost import MAX_TOKENS, CostModel
from edgeinfer.speculation.drafters.base import AcceptanceModel, Context
from edgeinfer.speculation.drafters.candidates import draft_candidates, greedy_candidates
from edgeinfer.speculation.drafters.device_drafting import CALL, DeviceDrafting
from edgeinfer.speculation.drafters.lookup import NgramLookup
from edgeinfer.speculation.tree import DraftTree
from edgeinfer.types import Logits

_CHOICES = 2  # of a level
_FEW = 4  # tokens that are read in a pass with guesses behind them, which makes logits of all
_Level: TypeAlias = list[tuple[int, float, int]]  # token, probability and kind of its nodes


@dataclass(slots=True)
class _Chain:
    """A chain with second choices while it grows. text: the context's, and the chain.  reach: of its nodes."""

    text: list[int]
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    p: list[float] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)
    path_probability: list[float] = field(default_factory=list)
    above: int = -1

    def add(self, level: _Level, acceptance: AcceptanceModel) -> float:
        """Add nodes, the first of which is gone on from; gives its chance."""
        for id, of_id, bucket in level:
            self.tokens.append(id)
            self.parents.append(self.above)
            self.p.append(of_id)
            self.buckets.append(bucket)
        self.above = len(self.tokens) - len(level)
        (token, p, bucket), *_ = level
        probability = acceptance.probability(bucket, len(self.path_probability), p)
        self.path_probability.append((self.path_probability[-1] if self.path_probability else 1.0) * probability)
        self.text.append(token)
        return probability


class ModelDrafter:
    """A draft model and its KV cache. n_vocab: tokens that the target has.  chains: of that session, if it has any."""

    name = "model"

    def __init__(
        self,
        session: Session,
        n_vocab: int,
        costs: CostModel,
        device_drafting: DeviceDrafting[DraftingSession] | None = None,
    ) -> None:
        self.session = session
        self._n_vocab = n_vocab
        self._costs = costs
        self._device_drafting = device_drafting
        self._tokens: list[int] = []  # those behind session.n_past are not committed
        self._n_agreed = 0  # how many of them are known to be the text's
        self._guesses = NgramLookup()
        self._n_noted = 0  # tokens of the text that guesses are made from

    def start(self, context: Context) -> None:
        """Another text: how much of it is in the cache is found out when it is needed."""
        self._n_agreed = self._n_noted = 0

    def cost(self, context: Context) -> tuple[float, float]:
        """See CostlyDrafter."""
        each, before = self._cost_of(context.tokens, context.n_unverified)
        n = self._levels_per_call(context, MAX_TOKENS)
        if n == 1 or self._device_drafting is None:
            return each / self._guesses.levels_per_pass, before
        return self._device_drafting.milliseconds()[n] / n, before

    def prefill(self, context: Context) -> None:
        """See CostlyDrafter."""
        text, n_unverified = self._text(context)
        n_past = self._align(text, n_unverified)
        if n_past < len(text) - 1:
            self._forward(text[n_past:-1])

    def propose(self, context: Context, limit: int) -> DraftTree:
        """A chain as long as it pays, with a second choice where it is unsure."""
        unread = context.tokens[self._align(context.tokens, context.n_unverified) :]
        unread = self._read_all_but_a_batch(unread)
        chain, acceptance = _Chain(list(context.tokens)), context.acceptance
        self._guesses.note(context.tokens, self._n_noted)
        self._n_noted = len(context.tokens) - context.n_unverified
        while self._room(chain, limit) and acceptance.should_extend(chain.path_probability):
            for level in self._levels(context, chain, unread, limit):
                if len(chain.tokens) < limit:
                    probability = chain.add(level[: limit - len(chain.tokens)], acceptance)
                    if self._device_drafting is not None:
                        self._device_drafting.learn(probability)
            unread = chain.text[-1:]
        return DraftTree(chain.tokens, chain.parents, chain.p, chain.buckets)

    def levels_per_call(self, context: Context, milliseconds: float) -> int:
        """See MultiLevelDrafter."""
        return self._levels_per_call(context, MAX_TOKENS, min(milliseconds, CALL))

    def observe(self, context: Context, n_new: int, rows: Sequence[Logits]) -> None:
        """Nothing to do: the cache is aligned when it is needed."""

    def interrupt(self) -> None:
        """See CostlyDrafter."""
        self.session.interrupt()

    def close(self) -> None:
        """Give the model's memory back, and keep what was learnt of its costs."""
        self._costs.close()
        if self._device_drafting is not None:
            self._device_drafting.costs.close()
        self.session.close()

    def _room(self, chain: _Chain, limit: int) -> int:
        """Levels that the limit and the context leave room for."""
        return max(0, min(limit - len(chain.tokens), self.session.n_ctx - len(chain.text)))

    def _levels(self, context: Context, chain: _Chain, unread: list[int], limit: int) -> list[_Level]:
        """The next levels of a chain: as many as are best made at once, but no more than will be wanted."""
        room = self._room(chain, limit)
        if self._device_drafting is not None:
            wanted = self._device_drafting.n_useful_levels(room, chain.path_probability, context.acceptance)
            n = self._levels_per_call(context, wanted)
            if n > 1:
                return self._at_once(self._device_drafting, unread, n)
        return self._in_a_pass(context, chain.text, unread, room)

    def _levels_per_call(self, context: Context, most: int, milliseconds: float = CALL) -> int:
        """Levels that are best made in one call, 1 for a pass whose logits come here.

        most: levels.  milliseconds: that they may take.
        """
        if self._device_drafting is None or not context.is_plain:
            return 1
        one = self._costs.milliseconds(self.session.n_past)[1]
        return self._device_drafting.best_n_levels(one, most, milliseconds)

    def _text(self, context: Context) -> tuple[list[int], int]:
        """The text in the draft model's tokens, and how many at its end may come otherwise."""
        return context.tokens, context.n_unverified

    def _cost_of(self, text: Sequence[int], n_unverified: int) -> tuple[float, float]:
        """Milliseconds for each token that is drafted behind a text, and for what of the text is not read yet."""
        n_past = self._align(text, n_unverified)
        one = self._costs.milliseconds(n_past)[1]
        return one, self._costs.chain_ms(len(text) - n_past, n_past) - one

    def _align(self, text: Sequence[int], n_unverified: int) -> int:
        """Cut the cache back to what it shares with the text but its last token; gives its length.

        n_unverified: tokens at its end that may come otherwise.
        """
        del self._tokens[self.session.n_past :]
        own = self._tokens
        n = min(self._n_agreed, len(own))
        most = max(0, min(len(own), len(text) - 1))
        while n < most and own[n] == text[n]:
            n += 1
        n = min(n, most)
        if n < len(own):
            n = self.session.truncate(n)
            del own[n:]
        self._n_agreed = min(n, len(text) - n_unverified)
        return n

    def _in_a_pass(self, context: Context, text: Sequence[int], unread: list[int], most: int) -> list[_Level]:
        """The next level behind a text, and those behind tokens that were guessed right; at most so many."""
        costs = self._costs.milliseconds(self.session.n_past)[len(unread) :]
        most = min(most, self.session.n_batch - len(unread) + 1)
        guesses = self._guesses.behind(text, most - 1, costs) if len(unread) <= _FEW else []
        tokens = [*unread, *(guess.token for guess in guesses)]
        rows = self._pass(tokens, 1 + len(guesses))
        levels: list[_Level] = []
        longer = list(text)
        for n, row in enumerate(rows):
            levels.append(draft_candidates(row, context.draw(row, longer), context.is_greedy, _CHOICES))
            longer.append(levels[-1][0][0])
            if n < len(guesses) and guesses[n].token != longer[-1]:
                break
        self._keep(tokens[: len(unread) + len(levels) - 1])
        self._guesses.learn(guesses, longer[len(text) :])
        self._guesses.note(longer, len(text))
        return levels

    def _forward(self, tokens: Sequence[int]) -> Logits:
        """Read and keep tokens; the logits of the last, (n_vocab,) or of the first tokens alone."""
        last = self._read_all_but_a_batch(tokens)
        row: Logits = self._pass(last, 1)[0]
        self._keep(last)
        return row

    def _read_all_but_a_batch(self, tokens: Sequence[int]) -> list[int]:
        """Read and keep tokens until a pass has room for the rest; gives that."""
        rest, n_batch = list(tokens), self.session.n_batch
        while len(rest) > n_batch:
            self._pass(rest[:n_batch], 1)
            self._keep(rest[:n_batch])
            del rest[:n_batch]
        return rest

    def _pass(self, tokens: Sequence[int], n_rows: int) -> Logits:
        """Read tokens; the logits of the last n_rows, (n_rows, n_vocab) or of the first tokens alone."""
        n_past, started = self.session.n_past, perf_counter()
        rows = self.session.forward(tokens, logits="last" if n_rows == 1 else "all").logits
        self._costs.observe(len(tokens), n_past, 1e3 * (perf_counter() - started))
        return rows[-n_rows:, : self._n_vocab]

    def _at_once(
        self, device_drafting: DeviceDrafting[DraftingSession], tokens: Sequence[int], n_levels: int
    ) -> list[_Level]:
        """Read tokens, and make levels behind them on the device; keeps what was passed."""
        n_past, started = self.session.n_past, perf_counter()
        nodes = device_drafting.session.draft(tokens, n_levels, n_vocab=min(self._n_vocab, self.session.spec.n_vocab))
        if len(tokens) == 1:
            device_drafting.costs.observe(n_levels, n_past, 1e3 * (perf_counter() - started))
        if not all(map(math.isfinite, nodes.p.tolist())):
            raise NumericalError("the draft model's logits are no numbers")
        self._keep([*tokens, *nodes.tokens[:-1].tolist()])
        rows = zip(nodes.candidates[:, :_CHOICES].tolist(), nodes.probabilities[:, :_CHOICES].tolist(), strict=True)
        return [greedy_candidates(list(zip(ids, probabilities, strict=True))) for ids, probabilities in rows]

    def _keep(self, tokens: Sequence[int]) -> None:
        """Keep the first rows of the last pass, a chain of these tokens."""
        del self._tokens[self.session.n_past :]
        self._tokens.extend(tokens)  # the list first: it is cut to n_past when it is read
        self.session.commit(range(len(tokens)))
