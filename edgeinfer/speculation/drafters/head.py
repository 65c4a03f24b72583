"""Drafts with a head that goes on from the target's own hidden rows (EAGLE, Li et al., arXiv:2401.15077).

The head's cache holds what was computed from the target's own features alone; a draft's rows, which come from features
that the head predicts, are dropped. So each token of the text is read once, behind the features of the step that
accepted it, and the tree grows from there, level by level: the likeliest nodes of a level in one pass (EAGLE-2, Li et
al., arXiv:2406.16858). A device that makes trees by itself is asked for all levels at once where that is the cheaper
way to tokens that will be right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.base import DraftingHead, HeadSession
from edgeinfer.errors import Interrupted, NumericalError, ShapeError
from edgeinfer.speculation.cost import MAX_TOKENS, CostModel
from edgeinfer.speculation.drafters.base import Context
from edgeinfer.speculation.drafters.candidates import draft_candidates, greedy_candidates
from edgeinfer.speculation.drafters.device_drafting import DeviceDrafting
from edgeinfer.speculation.tree import DraftTree, no_draft
from edgeinfer.types import Features, Logits, Nodes, Output

_WIDTH = 4  # nodes of a level that are gone on from, at most
_CHILDREN = 3  # of a node
DEFAULT_WIDTH = 2  # nodes of a usual level, and of each that a device makes by itself
# Rows up to which the first pass of a draft takes what reading the weights takes, and what each one counts for.
_FEW_ROWS, _COLD_RATE = 8, 0.05


class _Node(NamedTuple):
    """A node that may be gone on from.

    place: in the tree.  reach: chance that it is text.  path: tokens of the tree up to it.  row: pending row of its
    parent, -1 for the text.  feature: (n_embd,), of the parent's position, predicted.
    """

    place: int
    path_probability: float
    path: list[int]
    row: int
    feature: Features


@dataclass(slots=True)
class _Growth:
    """A tree that grows. text: the context's, with a node's path behind it.  limit: most nodes.  n_pending: of rows."""

    context: Context
    text: list[int]
    limit: int
    n_pending: int = 0
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    p: list[float] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)

    def keep(self, whole: _Growth, path_probabilities: Sequence[float]) -> None:
        """Become the likeliest nodes of another tree, as many as there may be. reaches: of its nodes."""
        # A node is never likelier than its parent, and stands behind it; the sort is stable: what is kept is a tree.
        kept = sorted(
            sorted(range(len(path_probabilities)), key=path_probabilities.__getitem__, reverse=True)[: self.limit]
        )
        place = {node: i for i, node in enumerate(kept)} | {-1: -1}
        self.tokens = [whole.tokens[node] for node in kept]
        self.parents = [place[whole.parents[node]] for node in kept]
        self.p = [whole.p[node] for node in kept]
        self.buckets = [whole.buckets[node] for node in kept]

    def tree(self) -> DraftTree:
        """As it is now."""
        return DraftTree(self.tokens, self.parents, self.p, self.buckets)


class HeadDrafter:
    """A draft head, its KV cache, and the target's features of the text.

    n_vocab: tokens that the target has.  draft_vocab, taps: see DraftHeadSpec.  chains: of that session, with levels of
    DEFAULT_WIDTH nodes, if it makes any.
    """

    name = "head"

    def __init__(
        self,
        session: HeadSession,
        draft_vocab: NDArray[np.int32],
        n_vocab: int,
        costs: CostModel,
        taps: bool | tuple[int, ...] = True,
        device_drafting: DeviceDrafting[DraftingHead] | None = None,
    ) -> None:
        self.session = session
        self.taps = taps
        self._n_vocab = n_vocab
        self._device_drafting = device_drafting
        self._ids = draft_vocab[draft_vocab < n_vocab].astype(np.intp)
        self._costs = costs
        # Milliseconds that the first pass of a draft takes more than others: the target's weights have driven the
        # head's out of the caches.
        self._cold = 0.0
        self._features = np.empty((session.n_ctx, session.spec.n_embd), dtype=np.float32)  # by position
        self._level = np.empty((_WIDTH, session.spec.n_embd), dtype=np.float32)
        self._logits = np.full(n_vocab, -np.inf, dtype=np.float32)  # what the head has no row for is never drawn
        # The text of which features are known, from position _start on; row i of the cache is at position _start + i,
        # and is rotated as at i: attention sees differences of positions alone.
        self._tokens: list[int] = []
        self._start = 0
        self._text: Sequence[int] = ()  # the list that it came in
        self._last: tuple[Features, Logits] | None = None  # the feature and the logits of the last row of the cache

    @staticmethod
    def memory(n_ctx: int, n_batch: int, n_embd: int, n_vocab: int, n_rows: int = 0) -> int:
        """Bytes of the features that are kept, those of a batch that comes and of a level, and a row of logits.

        n_rows: numbers of the target's rows that a feature is made of, which come by layer and are put side by side.
        """
        return 4 * ((n_ctx + n_batch + _WIDTH) * n_embd + 2 * n_batch * n_rows + n_vocab)

    def start(self, context: Context) -> None:
        """A request begins, whose features have come."""
        if self._tokens == context.tokens:
            self._text = context.tokens

    def observe_features(self, text: Sequence[int], first: int, features: Features) -> None:
        """See FeatureDrafter. Where features before `first` are missing, it goes on from there with less behind it."""
        features = self.session.combine(features)
        known, last = self._tokens, first + len(features)
        should_extend = text is self._text and first == len(known)  # a text only grows: nothing to compare
        if not should_extend:
            if not self._start < first <= len(known) or known[:first] != list(text[:first]):
                self._start = first
                known[:] = text[:first]
            del known[first:]
            # The row of a position is made of the token behind it too.
            self._last = None
            self.session.truncate(max(0, min(self.session.n_past, first - 1 - self._start)))
            self._text = text
        self._features[first:last] = features
        known.extend(text[first:last])

    def cost(self, context: Context) -> tuple[float, float]:
        """See CostlyDrafter."""
        n_past = self.session.n_past
        now, n = self._costs.milliseconds(n_past), self._levels_per_call(context, MAX_TOKENS)
        each = (
            now[DEFAULT_WIDTH]
            if n == 1 or self._device_drafting is None
            else self._device_drafting.milliseconds()[n] / n
        )
        return each, max(0.0, self._costs.chain_ms(self._n_unread(context), n_past) - now[1]) + self._cold

    def prefill(self, context: Context) -> None:
        """See CostlyDrafter."""
        with self._sound():
            n = self._n_unread(context) - 1
            if n > 0:
                with self._timed(n):
                    self._read(context, n)

    def propose(self, context: Context, limit: int) -> DraftTree:
        """A tree of the likeliest nodes, as deep as it pays."""
        growth = _Growth(context, list(context.tokens), limit)
        if limit < 1 or not context.acceptance.should_extend(()):
            return no_draft()
        with self._sound():
            n = self._levels_per_call(context, self._n_useful_levels(context, limit))
            if n > 1 and self._device_drafting is not None:
                self._at_once(self._device_drafting, growth, n)
            else:
                self._level_by_level(growth)
        return growth.tree()

    def observe(self, context: Context, n_new: int, rows: Sequence[Logits]) -> None:
        """Nothing to do: what is new is read when it is needed."""

    def interrupt(self) -> None:
        """See CostlyDrafter."""
        self.session.interrupt()

    def close(self) -> None:
        """Give the head's memory back, and keep what was learnt of its costs."""
        self._costs.close()
        if self._device_drafting is not None:
            self._device_drafting.costs.close()
        self.session.close()

    # ---- The text ----------------------------------------------------------------------------------------------------

    def _n_unread(self, context: Context) -> int:
        """Rows of the text that are not in the cache; the last position has no feature yet, nor those assumed."""
        n_wanted = len(context.tokens) - context.n_unverified - 1
        if len(self._tokens) != n_wanted:
            raise ShapeError(f"features of {n_wanted} tokens are needed, {len(self._tokens)} are known")
        if not self.session.spec.decoder.n_layers:  # sees nothing but its own position
            return 1
        return len(self._tokens) - self._start - self.session.n_past

    def _with_last(self, context: Context) -> int:
        """Rows to read, at least the last one, whose outcome is not known."""
        if not self._n_unread(context):
            self.session.truncate(self.session.n_past - 1)
        return max(1, self._n_unread(context))

    def _read(self, context: Context, n: int) -> tuple[Features, Logits]:
        """Read and keep the next n rows; the feature and the logits of the last."""
        first = len(self._tokens) - self._n_unread(context)
        self._last = None
        for start in range(first, first + n, self.session.n_batch):
            end = min(first + n, start + self.session.n_batch)
            out = self.session.forward(context.tokens[start + 1 : end + 1], self._features[start:end])
            self.session.commit(list(range(end - start)) if self.session.spec.decoder.n_layers else [])
        self._last = _features(out)[-1], out.logits[-1]
        return self._last

    @contextmanager
    def _timed(self, n: int) -> Iterator[None]:
        """Around a pass of n rows and what is made of it."""
        n_past, started = self.session.n_past, perf_counter()
        yield
        self._costs.observe(n, n_past, 1e3 * (perf_counter() - started))

    @contextmanager
    def _timed_first(self, n: int) -> Iterator[None]:
        """Around the first pass of a draft, of n rows."""
        n_past, started = self.session.n_past, perf_counter()
        yield
        more = 1e3 * (perf_counter() - started) - self._costs.chain_ms(n, n_past)
        if n <= _FEW_ROWS:  # a hiccup counts as no more than two passes
            more = min(max(0.0, more), 2.0 * self._costs.chain_ms(n, n_past))
            self._cold += _COLD_RATE * (more - self._cold)

    @contextmanager
    def _sound(self) -> Iterator[None]:
        """Around passes: after a failure no feature is known, and the cache is cut with the next that come."""
        try:
            yield
        except Interrupted:
            raise
        except BaseException:
            self._tokens.clear()
            self._text = ()
            raise

    # ---- The tree ----------------------------------------------------------------------------------------------------

    def _level_by_level(self, growth: _Growth) -> None:
        """Let a tree grow as deep as it pays."""
        level, chain = self._first(growth), list[float]()
        while level:
            chain.append(level[0].path_probability)
            if self._device_drafting is not None:
                self._device_drafting.learn(chain[-1] / (chain[-2] if len(chain) > 1 else 1.0))
            level = self._deeper(growth, level, len(chain)) if growth.context.acceptance.should_extend(chain) else []

    def _levels_per_call(self, context: Context, most: int) -> int:
        """Levels that the device best makes in one call, 1 for levels that are chosen here. most: levels."""
        if self._device_drafting is None or not context.is_plain:
            return 1
        return self._device_drafting.best_n_levels(self._costs.milliseconds(self.session.n_past)[DEFAULT_WIDTH], most)

    def _n_useful_levels(self, context: Context, limit: int) -> int:
        """Levels of a tree that will pay, and that the head's context has room for."""
        if self._device_drafting is None:
            return 1
        room = self.session.n_ctx - self.session.n_past - self._n_unread(context) - context.n_unverified
        most = max(0, room // DEFAULT_WIDTH) + 1  # the last level is not read
        return self._device_drafting.n_useful_levels(min(most, limit), (), context.acceptance)

    def _at_once(self, device_drafting: DeviceDrafting[DraftingHead], growth: _Growth, n_levels: int) -> None:
        """Read what is new in the text, and let the device make the levels of a tree behind it."""
        context = growth.context
        n = self._with_last(context)
        first, n_past, started = len(self._tokens) - n, self.session.n_past, perf_counter()
        self._last = None
        nodes = device_drafting.session.draft(
            context.tokens[first + 1 : first + 1 + n],
            self._features[first : first + n],
            n_levels,
            DEFAULT_WIDTH,
            context.tokens[len(context.tokens) - context.n_unverified :],
            self._n_vocab,
        )
        if n == 1 and not context.n_unverified:
            device_drafting.costs.observe(n_levels, n_past, 1e3 * (perf_counter() - started))
        if not np.isfinite(nodes.probabilities).all():
            raise NumericalError("the head's logits are no numbers")
        self.session.commit(range(n) if self.session.spec.decoder.n_layers else ())
        self._take(device_drafting, growth, nodes)

    def _take(self, device_drafting: DeviceDrafting[DraftingHead], growth: _Growth, nodes: Nodes) -> None:
        """Make a tree of the likeliest tokens behind the text, and behind each node that is in the tree itself."""
        passed = [(-1, -1), *zip(nodes.parents.tolist(), nodes.tokens.tolist(), strict=True)]
        known = {passed[0]: (-1, 1.0, 0)}  # by parent and token: place, reach, depth of the children
        best: dict[int, float] = {}  # reach by depth
        whole, path_probabilities = _Growth(growth.context, growth.text, nodes.candidates.size), list[float]()
        rows = zip(nodes.candidates[:, :_CHILDREN].tolist(), nodes.probabilities[:, :_CHILDREN].tolist(), strict=True)
        for row, (ids, probabilities) in enumerate(rows):
            place, path_probability, depth = known.get(passed[row], (-1, 0.0, 0))
            if path_probability:  # else it was too unlikely beside its siblings
                found = greedy_candidates([(id, p) for id, p in zip(ids, probabilities, strict=True) if p > 0.0])
                for child, of_child in self._add(whole, place, path_probability, depth, found):
                    known[row - 1, whole.tokens[child]] = child, of_child, depth + 1
                    best[depth] = max(of_child, best.get(depth, 0.0))
                    path_probabilities.append(of_child)
        growth.keep(whole, path_probabilities)
        above = 1.0
        for path_probability in filter(None, best.values()):
            device_drafting.learn(path_probability / above)
            above = path_probability

    def _first(self, growth: _Growth) -> list[_Node]:
        """Read what is new in the text; gives the nodes right behind it, likeliest first."""
        context = growth.context
        n = self._with_last(context) if self._last is None else self._n_unread(context)
        if n or self._last is None:
            with self._timed_first(n):
                feature, logits = self._read(context, n)
        else:
            feature, logits = self._last
        root = _Node(-1, 1.0, [], -1, feature)
        for token in context.tokens[len(context.tokens) - context.n_unverified :]:
            if self._room(growth) < 1:
                return []
            out = self.session.forward([token], root.feature[None], [root.row], n_pending=growth.n_pending)
            root, logits = root._replace(row=growth.n_pending, feature=_features(out)[0]), out.logits[0]
            growth.n_pending += 1
        return self._children(growth, root, 0, logits)

    def _room(self, growth: _Growth) -> int:
        """Rows that may still be pending."""
        return min(self.session.n_ctx - self.session.n_past, self.session.n_batch) - growth.n_pending

    def _deeper(self, growth: _Growth, level: list[_Node], depth: int) -> list[_Node]:
        """Go on from the likeliest nodes of a level in one pass; gives the new ones, likeliest first."""
        session, n_pending, room = self.session, growth.n_pending, self._room(growth)
        if room < 1 or len(growth.tokens) >= growth.limit:
            return []
        chosen = self._worth_it(level[:room], growth.context.acceptance.min_probability)
        if not chosen:
            return []
        below: list[_Node] = []
        with self._timed(len(chosen)):
            before = self._level[: len(chosen)]
            for row, node in zip(before, chosen, strict=True):
                row[:] = node.feature
            tokens, parents = [node.path[-1] for node in chosen], [node.row for node in chosen]
            out = session.forward(tokens, before, parents, n_pending=n_pending, logits="all")
            growth.n_pending += len(chosen)
            for i, node in enumerate(chosen):
                above = node._replace(row=n_pending + i, feature=_features(out)[i])
                below += self._children(growth, above, depth, out.logits[i], is_drawn=i == 0)
        return sorted(below, key=lambda node: -node.path_probability)

    def _worth_it(self, level: Sequence[_Node], min_probability: float) -> list[_Node]:
        """The first nodes of a level, as long as each gives as much for its row in the pass as the first one does."""
        now = self._costs.milliseconds(self.session.n_past)
        chosen: list[_Node] = []
        for node in level[:_WIDTH]:
            n = len(chosen)
            if node.path_probability < min_probability or (
                n and node.path_probability * now[1] < level[0].path_probability * (now[n + 1] - now[n])
            ):
                break
            chosen.append(node)
        return chosen

    def _children(
        self, growth: _Growth, above: _Node, depth: int, logits: Logits, is_drawn: bool = True
    ) -> list[_Node]:
        """Add the likeliest tokens behind a node to the tree; gives them, likeliest first.

        above: as its children know it.  is_drawn: as the target draws, where that is not by the logits alone,
        which takes more time.
        """
        logits = logits[: len(self._ids)]
        drawn = self._draw(growth, above, logits) if is_drawn and not growth.context.is_plain else None
        found = draft_candidates(logits, drawn, growth.context.is_greedy, _CHILDREN)
        named = [(int(self._ids[index]), p, bucket) for index, p, bucket in found]
        new = [
            above._replace(place=place, path_probability=path_probability, path=[*above.path, growth.tokens[place]])
            for place, path_probability in self._add(growth, above.place, above.path_probability, depth, named)
        ]
        return sorted(new, key=lambda node: -node.path_probability)

    def _add(
        self, growth: _Growth, above: int, path_probability: float, depth: int, found: Sequence[tuple[int, float, int]]
    ) -> list[tuple[int, float]]:
        """Add tokens, with p and kind, behind a node; gives place and reach of each that there is room for.

        above, reach: place and reach of that node.  depth: of the new ones.
        """
        new: list[tuple[int, float]] = []
        for token, p, bucket in found[: growth.limit - len(growth.tokens)]:
            new.append((len(growth.tokens), path_probability * growth.context.acceptance.probability(bucket, depth, p)))
            growth.tokens.append(token)
            growth.parents.append(above)
            growth.p.append(p)
            growth.buckets.append(bucket)
        return new

    def _draw(self, growth: _Growth, above: _Node, logits: Logits) -> int:
        """Index in logits of what the target's way to draw takes there."""
        self._logits[self._ids] = logits
        growth.text[len(growth.context.tokens) :] = above.path
        return int(np.searchsorted(self._ids, growth.context.draw(self._logits, growth.text)))


def _features(out: Output) -> Features:
    """(n, n_embd) predicted features of the rows of a pass."""
    if out.hidden is None:
        raise ShapeError("a head gives the features that it predicts: found none")
    features: Features = out.hidden[0]
    return features
