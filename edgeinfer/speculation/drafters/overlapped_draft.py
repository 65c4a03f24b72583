"""A draft that a drafter's thread makes while the target verifies: as a chain of levels, or as one tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Lock
from typing import Protocol

from edgeinfer.common.overriding import override
from edgeinfer.speculation.drafters.base import AcceptanceModel, Context
from edgeinfer.speculation.tree import DraftTree, no_draft

_LEVEL = 4  # most nodes of a level of a chain: the one that continues it, and other candidates
_MAX_CALL_WAITS = 5.0  # longest call for several levels, in max_wait_ms; its levels come at its end, all together


class OverlappedAcceptance:
    """The AcceptanceModel of a drafter that works while the target does: its drafts cost nothing.

    n_levels: after these it stops; None: only `is_stopped` ends it.
    """

    def __init__(self, acceptance: AcceptanceModel, n_levels: int | None = None) -> None:
        self.min_probability = acceptance.min_probability
        self.max_wait_ms = acceptance.max_wait_ms
        self.probability = acceptance.probability
        self.is_stopped = False
        self._n_levels = n_levels

    def should_extend(self, path_probabilities: Sequence[float]) -> bool:
        """See AcceptanceModel."""
        if self._n_levels is not None and len(path_probabilities) >= self._n_levels:
            return False
        return not self.is_stopped and (not path_probabilities or path_probabilities[-1] >= self.min_probability)


class OverlappedDraft(Protocol):
    """A draft that the thread makes, and that other threads read meanwhile."""

    is_running: bool  # the thread works on it, or will
    is_stopped: bool  # it is not needed any more

    def rebase(self, text: Sequence[int], path: Sequence[int], limit: int) -> bool:
        """Become the draft after that text and a path that is being verified; False if it does not continue them.

        limit: most nodes after the token that follows the path.
        """
        ...

    def resume(self) -> bool:
        """Run again if another step is useful. Returns whether it was not running, and now is."""
        ...

    def tree(self, text: Sequence[int]) -> DraftTree:
        """The nodes after a text so far."""
        ...

    def is_in(self, text: Sequence[int]) -> bool:
        """Whether the tokens that the drafter runs for it now are a prefix of that text."""
        ...

    def step(self, levels_per_call: Callable[[Context, float], int]) -> tuple[Context, int, int] | None:
        """(context, most nodes, most levels) for the drafter's next call; None if there is none, and it stops running.

        levels_per_call: see MultiLevelDrafter.
        """
        ...

    def add(self, tree: DraftTree) -> None:
        """Add the drafter's proposal of the last step."""
        ...


class OverlappedChain(OverlappedDraft):
    """A draft that grows level by level, each after the first node of the one before, while its tokens are accepted."""

    def __init__(self, context: Context, path: Sequence[int], limit: int) -> None:
        self.is_running, self.is_stopped = True, False
        self._context, self._acceptance, self._limit = context, context.acceptance, limit
        self._text = [*context.tokens, *path]  # before the levels
        self._n_verified = len(context.tokens)  # tokens of _text
        self._levels: list[DraftTree] = []
        self._n_path = 0  # how many levels, from the first on, are the path that is being verified
        self._is_at_end = False  # of the drafter's context
        self._lock = Lock()

    @override
    def rebase(self, text: Sequence[int], path: Sequence[int], limit: int) -> bool:
        with self._lock:
            if self.is_stopped or not self._advance(text) or self._chain(len(path)) != list(path):
                return False
            self._n_path, self._limit = len(path), limit
            return True

    @override
    def resume(self) -> bool:
        with self._lock:
            if self.is_running or not self._is_level_useful():
                return False
            self.is_running = True
            return True

    @override
    def tree(self, text: Sequence[int]) -> DraftTree:
        with self._lock:
            levels = list(self._levels) if self._advance(text) else []
        tree, parent = no_draft(), -1
        for level in levels:
            tree, parent = _with_level(tree, level, parent), len(tree)
        return tree

    @override
    def is_in(self, text: Sequence[int]) -> bool:
        with self._lock:
            own = [*self._text, *self._chain(len(self._levels))]
        return own == list(text[: len(own)])

    @override
    def step(self, levels_per_call: Callable[[Context, float], int]) -> tuple[Context, int, int] | None:
        """See OverlappedDraft. One level, or the best number for one call."""
        with self._lock:
            if self.is_stopped or not self._is_level_useful():
                self.is_running = False
                return None
            tokens = [*self._text, *self._chain(len(self._levels))]
            context = replace(self._context, tokens=tokens, n_unverified=len(tokens) - self._n_verified)
        n_levels = levels_per_call(context, _MAX_CALL_WAITS * self._acceptance.max_wait_ms)
        context.acceptance = OverlappedAcceptance(self._acceptance, n_levels)
        return context, n_levels * _LEVEL, n_levels

    @override
    def add(self, tree: DraftTree) -> None:
        """See OverlappedDraft. An empty tree means the end of the drafter's context."""
        with self._lock:
            self._levels += levels_of(tree)
            self._is_at_end = not len(tree)

    def _advance(self, text: Sequence[int]) -> bool:
        """Become the draft after a longer text; False if that text does not follow the chain."""
        n = len(self._text)
        path = list(text[n:])
        if len(text) < n or self._chain(len(path)) != path or self._text != list(text[:n]):
            return False
        self._text += path
        self._n_verified = len(self._text)
        self._n_path = max(0, self._n_path - len(path))
        del self._levels[: len(path)]
        return True

    def _chain(self, n: int) -> list[int]:
        """Tokens of the first nodes of the first n levels."""
        return [level.tokens[0] for level in self._levels[:n]]

    def _is_level_useful(self) -> bool:
        """Whether one more level may be useful."""
        levels = self._levels[self._n_path :]
        path_probability = 1.0
        for depth, level in enumerate(levels):
            path_probability *= self._acceptance.probability(level.buckets[0], depth, level.p[0])
        is_useful = path_probability >= self._acceptance.min_probability
        return len(levels) <= self._limit and is_useful and not self._is_at_end


class OverlappedTree(OverlappedDraft):
    """A draft that is made in one call, by a drafter that cannot continue an earlier draft."""

    def __init__(self, context: Context, path: Sequence[int], limit: int) -> None:
        self.is_running, self._limit = True, limit
        self._acceptance = OverlappedAcceptance(context.acceptance)
        self._context = replace(context, tokens=[*context.tokens, *path], n_unverified=len(path))
        self._context.acceptance = self._acceptance
        self._result: DraftTree | None = None

    @property
    @override
    def is_stopped(self) -> bool:
        return self._acceptance.is_stopped

    @is_stopped.setter
    def is_stopped(self, value: bool) -> None:
        self._acceptance.is_stopped = value

    @override
    def rebase(self, text: Sequence[int], path: Sequence[int], limit: int) -> bool:
        """See OverlappedDraft. A tree cannot continue a path."""
        return not path and self.is_in(text) and (self.is_running or len(self.tree(text)) > 0)

    @override
    def resume(self) -> bool:
        return False

    @override
    def tree(self, text: Sequence[int]) -> DraftTree:
        if self._result is None or not self.is_in(text):
            return no_draft()
        return subtree_after(self._result, text[len(self._context.tokens) :]) or no_draft()

    @override
    def is_in(self, text: Sequence[int]) -> bool:
        own = self._context.tokens
        return own == list(text[: len(own)])

    @override
    def step(self, levels_per_call: Callable[[Context, float], int]) -> tuple[Context, int, int] | None:
        """See OverlappedDraft. One call makes the whole tree."""
        if self.is_stopped or self._result is not None:
            self.is_running = False
            return None
        return self._context, self._limit, self._limit

    @override
    def add(self, tree: DraftTree) -> None:
        self._result = tree
        self.is_running = False


def subtree_after(tree: DraftTree, path: Sequence[int]) -> DraftTree | None:
    """The part of a tree after a path of tokens from its root; None if it has no such path, or nothing after it."""
    top = -1
    for token in path:
        nodes = enumerate(zip(tree.tokens, tree.parents, strict=True))
        top = next((node for node, (id, parent) in nodes if parent == top and id == token), -2)
    places = {top: -1}
    kept: list[int] = []
    for node, parent in enumerate(tree.parents):
        if parent in places:
            places[node] = len(kept)
            kept.append(node)
    if not kept:
        return None
    return DraftTree(
        [tree.tokens[node] for node in kept],
        [places[tree.parents[node]] for node in kept],
        [tree.p[node] for node in kept],
        [tree.buckets[node] for node in kept],
    )


def levels_of(tree: DraftTree) -> list[DraftTree]:
    """The levels along a tree's first chain. The children of the first node of a level are the next level."""
    levels: list[DraftTree] = []
    parent_node = -1
    while nodes := [node for node, parent in enumerate(tree.parents) if parent == parent_node]:
        tokens, buckets = ([each[node] for node in nodes] for each in (tree.tokens, tree.buckets))
        levels.append(DraftTree(tokens, [-1] * len(nodes), [tree.p[node] for node in nodes], buckets))
        parent_node = nodes[0]
    return levels


def _with_level(tree: DraftTree, level: DraftTree, parent: int) -> DraftTree:
    """A tree with one more level, whose nodes are children of `parent`."""
    parents = [*tree.parents, *[parent] * len(level)]
    return DraftTree([*tree.tokens, *level.tokens], parents, [*tree.p, *level.p], [*tree.buckets, *level.buckets])
