"""Drafts with a smaller model of the same vocabulary, with weights rounded for it.

It keeps a KV cache of its own, cut back to what the text became and fed with what it has not read: no token is decoded
twice. It draws with the target's noise for each place in the text: where both nearly agree, both draw the same token.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from edgeinfer.backends.base import Session
from edgeinfer.drafters.base import Context
from edgeinfer.drafters.choices import choices
from edgeinfer.speculation.cost import CostModel
from edgeinfer.speculation.tree import DraftTree
from edgeinfer.types import Logits


class ModelDrafter:
    """A draft model and its KV cache. n_vocab: tokens that the target has."""

    name = "model"

    def __init__(self, session: Session, n_vocab: int, costs: CostModel) -> None:
        self.session = session
        self._n_vocab = n_vocab
        self._costs = costs
        self._tokens: list[int] = []  # those behind session.n_past are not committed
        self._n_agreed = 0  # how many of them are known to be the text's

    def start(self, context: Context) -> None:
        """Another text: how much of it is in the cache is found out when it is needed."""
        self._n_agreed = 0

    def cost(self, context: Context) -> tuple[float, float]:
        """See CostlyDrafter."""
        return self._cost_of(context.tokens, context.n_assumed)

    def read(self, context: Context) -> None:
        """See CostlyDrafter."""
        text, n_assumed = self._text(context)
        n_past = self._align(text, n_assumed)
        if n_past < len(text) - 1:
            self._forward(text[n_past:-1])

    def propose(self, context: Context, limit: int) -> DraftTree:
        """A chain as long as it pays, with a second choice where it is unsure."""
        n_past = self._align(context.tokens, context.n_assumed)
        unread, text = context.tokens[n_past:], list(context.tokens)
        tokens: list[int] = []
        parents: list[int] = []
        p: list[float] = []
        kinds: list[int] = []
        reach: list[float] = []
        above = -1
        while len(tokens) < limit and len(text) < self.session.n_ctx and context.outlook.goes_on(reach):
            logits = self._forward(unread)
            token = context.draw(logits, text)
            chosen = choices(logits, token, context.is_greedy, 2)[: limit - len(tokens)]
            for id, of_id, kind in chosen:
                tokens.append(id)
                parents.append(above)
                p.append(of_id)
                kinds.append(kind)
            above = len(tokens) - len(chosen)
            depth = len(reach)
            reach.append((reach[-1] if reach else 1.0) * context.outlook.chance(kinds[above], depth, p[above]))
            text.append(token)
            unread = [token]
        return DraftTree(tokens, parents, p, kinds)

    def observe(self, context: Context, n_new: int, rows: Sequence[Logits]) -> None:
        """Nothing to do: the cache is aligned when it is needed."""

    def interrupt(self) -> None:
        """See CostlyDrafter."""
        self.session.interrupt()

    def close(self) -> None:
        """Give the model's memory back, and keep what was learnt of its costs."""
        self._costs.close()
        self.session.close()

    def _text(self, context: Context) -> tuple[list[int], int]:
        """The text in the draft model's tokens, and how many at its end may come otherwise."""
        return context.tokens, context.n_assumed

    def _cost_of(self, text: Sequence[int], n_assumed: int) -> tuple[float, float]:
        """Milliseconds for each token that is drafted behind a text, and for what of the text is not read yet."""
        n_past = self._align(text, n_assumed)
        one = self._costs.milliseconds(n_past)[1]
        return one, self._costs.of_chain(len(text) - n_past, n_past) - one

    def _align(self, text: Sequence[int], n_assumed: int) -> int:
        """Cut the cache back to what it shares with the text but its last token; gives its length.

        n_assumed: tokens at its end that may come otherwise.
        """
        del self._tokens[self.session.n_past :]
        own = self._tokens
        n = min(self._n_agreed, len(own))
        most = max(0, min(len(own), len(text) - 1))
        while n < most and own[n] == text[n]:
            n += 1
        n = min(n, most)
        if n < len(own):
            self.session.truncate(n)
            del own[n:]
        self._n_agreed = min(n, len(text) - n_assumed)
        return n

    def _forward(self, tokens: Sequence[int]) -> Logits:
        """Read and keep tokens; the logits of the last, (n_vocab,) or of the first tokens alone."""
        n_past, started = self.session.n_past, perf_counter()
        rows = self.session.forward(tokens).logits
        self._costs.observe(len(tokens), n_past, 1e3 * (perf_counter() - started))
        del self._tokens[self.session.n_past :]
        self._tokens.extend(tokens)  # the list first: it is cut to n_past when it is read
        self.session.commit(range(len(tokens)))
        return rows[0, : self._n_vocab]
