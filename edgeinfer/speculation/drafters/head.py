"""Drafts with a head that continues the target's own hidden states (EAGLE, Li et al., arXiv:2401.15077).

The head's KV cache holds only rows computed from the target's features; rows of a draft, which come from predicted
features, are dropped after it. So each token of the text passes through the head once, with the feature of the step
that accepted it. From there the tree grows level by level: the most probable nodes of a level in one pass (EAGLE-2, Li
et al., arXiv:2406.16858). A device that drafts by itself makes all levels in one call where that is cheaper.

A head that reads the target's keys and values has no cache: each row is one of the text's end, and only the feature of
the last token is kept.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.base import DraftingHead, HeadSession, JointHeadModel, Rows, Session, TargetReader
from edgeinfer.common.errors import CacheFull, Interrupted, NumericalError, ShapeError
from edgeinfer.common.overriding import override
from edgeinfer.common.types import Features, Logits, Nodes, Output
from edgeinfer.speculation.cost import MAX_TOKENS, CostModel
from edgeinfer.speculation.drafters.base import Context, Drafting, JointDrafter, TargetDrafter, held_by
from edgeinfer.speculation.drafters.candidates import draft_candidates, greedy_candidates
from edgeinfer.speculation.drafters.device_drafting import DeviceDrafting, close_drafter
from edgeinfer.speculation.drafters.growing_tree import GrowingTree, Node
from edgeinfer.speculation.drafters.joint import draft_alone
from edgeinfer.speculation.drafters.known_text import SEGMENT, FeatureMemory, KnownText, LastKnown, n_segments_of
from edgeinfer.speculation.tree import DraftTree, no_draft

_WIDTH = 4  # most nodes of a level that get children
_N_CANDIDATES = 3  # children of a node
DEFAULT_WIDTH = 2  # nodes of a usual level, and of each level that a device makes by itself
# Most rows of a first pass whose extra cost is observed, and the weight of one observation.
_FEW_ROWS, _COLD_RATE = 8, 0.05


class _Guess(NamedTuple):
    """What a head gives after a row."""

    logits: Logits  # (n,), of tokens that exist
    ids: NDArray[np.intp]  # (n,) these tokens; ascending where they are the same after every row


class HeadDrafter(JointDrafter, TargetDrafter):
    """A draft head, its KV cache, and the target's features of the text. It owns the session and its model; those for
    other texts own their session.

    n_vocab: size of the target's vocabulary.  draft_vocab, taps: see HeadSpec.  device_drafting: of that session, with
    levels of DEFAULT_WIDTH nodes, if its device drafts by itself.  first: the first drafter of the head, whose memory
    for features all its texts share; None for that first one.
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
        first: HeadDrafter | None = None,
    ) -> None:
        self.session = session
        self._is_first = first is None  # it has the model, which those for other texts share
        self._is_alone = True  # the draft that is made is that of one text
        self.taps = taps
        self._n_vocab = n_vocab
        self._device_drafting = device_drafting
        self._draft_vocab = draft_vocab
        self._ids = draft_vocab[draft_vocab < n_vocab].astype(np.intp)
        self._costs = costs
        # Milliseconds by which the first pass of a draft is slower than later ones, as the target's weights have
        # evicted the head's from the CPU caches.
        self._cold_ms = 0.0
        self._level = np.empty((_WIDTH, session.spec.n_embd), dtype=np.float32)
        self._logits = np.full(n_vocab, -np.inf, dtype=np.float32)  # tokens outside draft_vocab are never sampled
        # The text whose features are known. Row i of the KV cache is that of position `start` + i, rotated as that of
        # position i: attention depends on differences of positions only.
        self._keeps_rows = session.spec.keeps_rows
        self._known: KnownText | LastKnown
        if isinstance(session, TargetReader):
            self._known = LastKnown(session.spec.n_embd)
        else:
            of_first = None if first is None else first._known
            memory = of_first.memory if isinstance(of_first, KnownText) else None
            memory = memory or FeatureMemory(session.n_ctx, session.spec.n_embd, _n_texts(session))
            self._known = KnownText(memory, lambda: self.session.truncate(0))
        self._text: Sequence[int] = ()  # the list that it came in
        # predicted feature of the last row of the text, and what the head gives after it
        self._last: tuple[Features, _Guess] | None = None

    @staticmethod
    def memory(
        n_ctx: int,
        n_batch: int,
        n_embd: int,
        n_vocab: int,
        n_rows: int = 0,
        n_logits: int | None = None,
        n_texts: int = 1,
        reads_target: bool = False,
    ) -> dict[str, int]:
        """Bytes of features (of all texts and of a batch), and of rows: for each text a level, the logits of one pass
        and of the last row, and the logits over the whole vocabulary.

        n_rows: numbers that a feature is projected from, the rows of the target's layers; 0 without a projection.
        n_logits: of the head, None for all tokens.  reads_target: of a text one feature is kept, and with the logits of
        two passes, which take turns, come their tokens.
        """
        n_positions = n_texts if reads_target else SEGMENT * n_segments_of(n_ctx, n_texts)
        features = 4 * ((n_positions + n_batch) * n_embd + 2 * n_batch * n_rows)
        of_pass = (3 * _WIDTH if reads_target else 1 + _WIDTH) * (n_vocab if n_logits is None else n_logits)
        return {"features": features, "rows": 4 * n_texts * (_WIDTH * n_embd + n_vocab + of_pass)}

    @override
    def follow(self, session: Session) -> None:
        if isinstance(self.session, TargetReader):
            self.session.follow(session)

    @override
    def start(self, context: Context) -> None:
        """See Drafter. The features of the prompt have been observed."""
        self._known.set_idle(False)
        if self._known.tokens == context.tokens:
            self._text = context.tokens

    def observe_features(self, text: Sequence[int], first: int, features: Features) -> None:
        """See FeatureDrafter. Without features before `first`, the head starts there with a shorter context."""
        features = self.session.combine(features)
        known, last = self._known, first + len(features)
        known.set_idle(False)
        is_continued = text is self._text and first == len(known.tokens)  # a text only grows: nothing to compare
        if not is_continued:
            if not known.start < first <= len(known.tokens) or known.tokens[:first] != list(text[:first]):
                known.begin(text, first)
            known.cut(first)
            # The row of a position depends on the token after it too.
            self._last = None
            self.session.truncate(max(0, min(self.session.n_past, first - 1 - known.start)))
            self._text = text
        known.extend(text[first:last], features)

    @override
    def cost(self, context: Context) -> tuple[float, float]:
        n_past = self.session.n_past
        now, n = self._costs.milliseconds(n_past), self._levels_per_call(context, MAX_TOKENS)
        device_drafting = self._device_drafting
        token_ms = now[DEFAULT_WIDTH] if n == 1 or device_drafting is None else device_drafting.milliseconds()[n] / n
        return token_ms, self.joint_cost(context, 1)[1]

    @override
    def joint_cost(self, context: Context, n_texts: int) -> tuple[float, float]:
        n_past, costs = self.session.n_past, self._costs
        of_first = costs.chain_ms(n_texts * self._n_unseen(context), n_past) - costs.chain_ms(n_texts, n_past)
        return costs.chain_ms(n_texts * DEFAULT_WIDTH, n_past) / n_texts, max(0.0, of_first) / n_texts + self._cold_ms

    @property
    @override
    def can_join(self) -> bool:
        return self._device_drafting is None and _n_texts(self.session) > 1

    @override
    def beside(self) -> HeadDrafter | None:
        if not self.can_join:
            return None
        session = self.session.model.session()
        return HeadDrafter(session, self._draft_vocab, self._n_vocab, self._costs, self.taps, first=self)

    @override
    def prefill(self, context: Context) -> None:
        with self._forgetting_on_failure():
            n = self._n_unseen(context) - 1
            if n > 0:
                with self._timed(n):
                    draft_alone(self._reading(context, n))

    @override
    def propose(self, context: Context, limit: int) -> DraftTree:
        """A tree of the most probable nodes, of the best expected depth."""
        return draft_alone(self.drafting(context, limit))

    @override
    def drafting(self, context: Context, limit: int, is_alone: bool = True) -> Drafting:
        self._is_alone = is_alone
        tree = GrowingTree(context, list(context.tokens), limit)
        if limit < 1 or not context.acceptance.should_extend(()):
            return no_draft()
        with self._forgetting_on_failure():
            n = self._levels_per_call(context, self._n_useful_levels(context, limit))
            if n > 1 and self._device_drafting is not None:
                self._grow_on_device(self._device_drafting, tree, n)
            else:
                yield from self._grow_by_levels(tree)
        return tree.tree()

    @override
    def observe(self, context: Context, n_new: int, rows: Sequence[Logits]) -> None:
        """See Drafter. New tokens pass through the head when a draft is requested."""

    def held(self) -> dict[str, int]:
        """See HoldingDrafter. Features count where they were written: the rest of their memory is untouched."""
        rows = self._level.nbytes + self._logits.nbytes
        of_text = {"features": self._known.n_bytes} if isinstance(self._known, LastKnown) else {}
        if not self._is_first:  # the rest is that of the first
            return {"rows": rows, **of_text}
        own = held_by(self.session.memory())
        if isinstance(self._known, KnownText):
            of_text = {"features": self._known.memory.n_bytes}
        return {**own, "rows": own["rows"] + rows, **of_text}

    @override
    def rest(self) -> None:
        self._known.set_idle(True)

    @override
    def interrupt(self) -> None:
        self.session.interrupt()

    @override
    def close(self) -> None:
        """Free the session, and of the first one the head too, whose corrected cost curve is kept."""
        if not self._is_first:
            self.session.close()
            return
        close_drafter(self.session, self._costs, self._device_drafting)

    # ---- The text ----------------------------------------------------------------------------------------------------

    def _n_unseen(self, context: Context) -> int:
        """Rows of the text that are not in the cache. The last token has no feature yet, nor have unverified ones."""
        n_expected = len(context.tokens) - context.n_unverified - 1
        if len(self._known.tokens) != n_expected:
            raise ShapeError(f"expected features of {n_expected} tokens, found {len(self._known.tokens)}")
        if not self._keeps_rows:  # a row is that of the last position, whatever was run before
            return 1
        return len(self._known.tokens) - self._known.start - self.session.n_past

    def _n_to_run(self, context: Context) -> int:
        """Rows to run: those not in the cache, or if there are none, the last one again, to know its result."""
        if not self._n_unseen(context):
            self.session.truncate(self.session.n_past - 1)
        return self._n_unseen(context)

    def _reading(self, context: Context, n: int) -> Drafting:
        """Run the next n rows, and draft nothing."""
        self._is_alone = True
        yield from self._run_text(context, n)
        return no_draft()

    def _run_text(self, context: Context, n: int) -> Generator[Rows, Output, tuple[Features, _Guess]]:
        """Run and commit the next n rows; returns the predicted feature of the last, and what comes after it."""
        first = len(self._known.tokens) - self._n_unseen(context)
        self._last = None
        for start in range(first, first + n, self.session.n_batch):
            end = min(first + n, start + self.session.n_batch)
            features = self._known.features(start, end)
            out = yield Rows(self.session, context.tokens[start + 1 : end + 1], features=features)
            self.session.commit(list(range(end - start)) if self._keeps_rows else [])
        self._last = _features(out)[-1], self._guess(out, -1)
        return self._last

    def _guess(self, out: Output, row: int) -> _Guess:
        """What a pass gives after one of the rows whose logits it has."""
        if out.tokens is None:
            return _Guess(out.logits[row][: len(self._ids)], self._ids)
        ids = out.tokens[row].astype(np.intp)
        return _Guess(np.where(ids < self._n_vocab, out.logits[row], np.float32(-np.inf)), ids)

    @contextmanager
    def _timed(self, n: int) -> Iterator[None]:
        """Observe the cost of a pass of n rows and of the work on its results."""
        n_past, started = self.session.n_past, perf_counter()
        yield
        if self._is_alone:
            self._costs.observe(n, n_past, 1e3 * (perf_counter() - started))

    @contextmanager
    def _timed_first(self, n: int) -> Iterator[None]:
        """Observe the extra cost of the first pass of a draft, of n rows."""
        n_past, started = self.session.n_past, perf_counter()
        yield
        expected = self._costs.chain_ms(n, n_past)
        if n <= _FEW_ROWS and self._is_alone:  # an outlier counts as no more than two passes
            extra = min(max(0.0, 1e3 * (perf_counter() - started) - expected), 2.0 * expected)
            self._cold_ms += _COLD_RATE * (extra - self._cold_ms)

    @contextmanager
    def _forgetting_on_failure(self) -> Iterator[None]:
        """After a failure all features are forgotten, and the cache is truncated when the next ones come."""
        try:
            yield
        except (Interrupted, CacheFull, GeneratorExit):  # nothing has changed
            raise
        except BaseException:
            self._known.begin((), 0)  # without its session, which may be lost
            self._text = ()
            raise

    # ---- A tree in one call ------------------------------------------------------------------------------------------

    def _levels_per_call(self, context: Context, max_levels: int) -> int:
        """Best number of levels for one call of the device; 1 means that nodes are selected here."""
        if self._device_drafting is None or not context.is_plain:
            return 1
        level_ms = self._costs.milliseconds(self.session.n_past)[DEFAULT_WIDTH]
        return self._device_drafting.best_n_levels(level_ms, max_levels)

    def _n_useful_levels(self, context: Context, limit: int) -> int:
        """Levels that are worth making, and that the head's context has room for."""
        if self._device_drafting is None:
            return 1
        room = self.session.n_ctx - self.session.n_past - self._n_unseen(context) - context.n_unverified
        max_levels = max(0, room // DEFAULT_WIDTH) + 1  # the last level does not pass through the head
        return self._device_drafting.n_useful_levels(min(max_levels, limit), (), context.acceptance)

    def _grow_on_device(self, device_drafting: DeviceDrafting[DraftingHead], tree: GrowingTree, n_levels: int) -> None:
        """Run the new tokens of the text, and let the device make the levels of a tree after it."""
        context = tree.context
        n = self._n_to_run(context)
        first, n_past, started = len(self._known.tokens) - n, self.session.n_past, perf_counter()
        self._last = None
        nodes = device_drafting.session.draft(
            context.tokens[first + 1 : first + 1 + n],
            self._known.features(first, first + n),
            n_levels,
            DEFAULT_WIDTH,
            context.tokens[len(context.tokens) - context.n_unverified :],
            self._n_vocab,
        )
        if n == 1 and not context.n_unverified:
            device_drafting.costs.observe(n_levels, n_past, 1e3 * (perf_counter() - started))
        if not np.isfinite(nodes.probabilities).all():
            raise NumericalError("the head's logits must be numbers: found others")
        self.session.commit(range(n) if self._keeps_rows else ())
        self._take_nodes(device_drafting, tree, nodes)

    def _take_nodes(self, device_drafting: DeviceDrafting[DraftingHead], tree: GrowingTree, nodes: Nodes) -> None:
        """Make a tree of the candidates after the text, and after each node that is itself in the tree."""
        rows_of = [(-1, -1), *zip(nodes.parents.tolist(), nodes.tokens.tolist(), strict=True)]
        known = {rows_of[0]: (-1, 1.0, 0)}  # by (parent, token): place, path probability, depth of the children
        best: dict[int, float] = {}  # path probability by depth
        whole, path_probabilities = GrowingTree(tree.context, tree.text, nodes.candidates.size), list[float]()
        ids_of, p_of = (each[:, :_N_CANDIDATES].tolist() for each in (nodes.candidates, nodes.probabilities))
        for row, (ids, ps) in enumerate(zip(ids_of, p_of, strict=True)):
            place, path_probability, depth = known.get(rows_of[row], (-1, 0.0, 0))
            if path_probability:  # else its parent was not among the candidates taken
                found = greedy_candidates([(id, p) for id, p in zip(ids, ps, strict=True) if p > 0.0])
                for child, of_child in whole.add(place, path_probability, depth, found):
                    known[row - 1, whole.tokens[child]] = child, of_child, depth + 1
                    best[depth] = max(of_child, best.get(depth, 0.0))
                    path_probabilities.append(of_child)
        tree.take_best(whole, path_probabilities)
        before = 1.0
        for path_probability in filter(None, best.values()):
            device_drafting.learn(path_probability / before)
            before = path_probability

    # ---- A tree level by level ---------------------------------------------------------------------------------------

    def _grow_by_levels(self, tree: GrowingTree) -> Generator[Rows, Output, None]:
        """Add levels to a tree as long as each is worth making."""
        level, chain = (yield from self._first_level(tree)), list[float]()
        while level:
            chain.append(level[0].path_probability)
            if self._device_drafting is not None:
                self._device_drafting.learn(chain[-1] / (chain[-2] if len(chain) > 1 else 1.0))
            is_longer = tree.context.acceptance.should_extend(chain)
            level = (yield from self._next_level(tree, level, len(chain))) if is_longer else []

    def _first_level(self, tree: GrowingTree) -> Generator[Rows, Output, list[Node]]:
        """Run the new and the unverified tokens of the text; returns the nodes after them, most probable first."""
        context = tree.context
        n = self._n_to_run(context) if self._last is None else self._n_unseen(context)
        if n or self._last is None:
            with self._timed_first(n):
                feature, guess = yield from self._run_text(context, n)
        else:
            feature, guess = self._last
        root = Node(-1, 1.0, [], -1, feature)
        for token in context.tokens[len(context.tokens) - context.n_unverified :]:
            if self._n_free_rows(tree) < 1:
                return []
            out = yield Rows(self.session, [token], [root.row], n_pending=tree.n_pending, features=root.feature[None])
            root, guess = root._replace(row=tree.n_pending, feature=_features(out)[0]), self._guess(out, 0)
            tree.n_pending += 1
        return self._children(tree, root, 0, guess)

    def _n_free_rows(self, tree: GrowingTree) -> int:
        """Rows of the session that the tree may still take."""
        return min(self.session.n_ctx - self.session.n_past, self.session.n_batch) - tree.n_pending

    def _next_level(self, tree: GrowingTree, level: list[Node], depth: int) -> Generator[Rows, Output, list[Node]]:
        """Run the most probable nodes of a level in one pass; returns their children, most probable first."""
        session, n_pending, n_free = self.session, tree.n_pending, self._n_free_rows(tree)
        if n_free < 1 or len(tree.tokens) >= tree.limit:
            return []
        chosen = self._useful_nodes(level[:n_free], tree.context.acceptance.min_probability)
        if not chosen:
            return []
        children: list[Node] = []
        with self._timed(len(chosen)):
            features = self._level[: len(chosen)]
            for row, node in zip(features, chosen, strict=True):
                row[:] = node.feature
            tokens, parents = [node.path[-1] for node in chosen], [node.row for node in chosen]
            out = yield Rows(session, tokens, parents, "all", n_pending=n_pending, features=features)
            tree.n_pending += len(chosen)
            for i, node in enumerate(chosen):
                parent = node._replace(row=n_pending + i, feature=_features(out)[i])
                children += self._children(tree, parent, depth, self._guess(out, i), is_sampled=i == 0)
        return sorted(children, key=lambda node: -node.path_probability)

    def _useful_nodes(self, level: Sequence[Node], min_probability: float) -> list[Node]:
        """The first nodes of a level, as long as each adds as much per millisecond of the pass as the first one."""
        now = self._costs.milliseconds(self.session.n_past)
        chosen: list[Node] = []
        for node in level[:_WIDTH]:
            n = len(chosen)
            added_ms = now[n + 1] - now[n]
            if node.path_probability < min_probability:
                break
            if n and node.path_probability * now[1] < level[0].path_probability * added_ms:
                break
            chosen.append(node)
        return chosen

    def _children(
        self, tree: GrowingTree, parent: Node, depth: int, guess: _Guess, is_sampled: bool = True
    ) -> list[Node]:
        """Add the candidates after a node to the tree; returns the new nodes, most probable first.

        parent: with the row and the feature that its children continue.  is_sampled: use the target's sampler, which is
        slower, unless the target takes the largest logit.
        """
        drawn = self._sample(tree, parent, guess) if is_sampled and not tree.context.is_plain else None
        found = draft_candidates(guess.logits, drawn, tree.context.is_greedy, _N_CANDIDATES)
        named = [(int(guess.ids[index]), p, bucket) for index, p, bucket in found]
        new = [
            parent._replace(place=place, path_probability=of_node, path=[*parent.path, tree.tokens[place]])
            for place, of_node in tree.add(parent.place, parent.path_probability, depth, named)
        ]
        return sorted(new, key=lambda node: -node.path_probability)

    def _sample(self, tree: GrowingTree, parent: Node, guess: _Guess) -> int | None:
        """Index in logits of the token that the target's sampler takes after a node; None for one without a logit."""
        tree.text[len(tree.context.tokens) :] = parent.path
        if guess.ids is self._ids:
            self._logits[guess.ids] = guess.logits
            return int(np.searchsorted(guess.ids, tree.context.draw(self._logits, tree.text)))
        there = guess.ids < self._n_vocab
        self._logits[guess.ids[there]] = guess.logits[there]
        drawn = tree.context.draw(self._logits, tree.text)
        self._logits[guess.ids[there]] = -np.inf
        found = np.flatnonzero(guess.ids == drawn)
        return int(found[0]) if found.size else None


def _features(out: Output) -> Features:
    """(n, n_embd) predicted features of the rows of a pass."""
    if out.hidden is None:
        raise ShapeError("a head must return the features that it predicts: found none")
    features: Features = out.hidden[0]
    return features


def _n_texts(session: HeadSession) -> int:
    """How many texts at once the memory of a head is planned for."""
    return session.model.n_sequences if isinstance(session.model, JointHeadModel) else 1
