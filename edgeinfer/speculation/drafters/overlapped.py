"""Overlapped drafting: the drafter works in a thread of its own while the target verifies (PEARL, Liu et al.,
arXiv:2408.11850).

While a draft is verified, the drafter continues it along its most probable path, as if that path were accepted already
(post-verify). If it was accepted, the continuation is the next draft; otherwise it is dropped. The target waits for a
draft at most `AcceptanceModel.max_wait_ms`. Without a draft it makes its next step alone, and the drafter gets ahead
meanwhile (pre-verify). Only for drafters that do not run on the target's cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Protocol

from edgeinfer.errors import Interrupted
from edgeinfer.speculation.drafters.base import (
    AcceptanceModel,
    Context,
    CostlyDrafter,
    FeatureDrafter,
    MultiLevelDrafter,
)
from edgeinfer.speculation.drafters.cross_vocabulary import CrossVocabularyDrafter
from edgeinfer.speculation.drafters.watchdog import Clock, Watchdog
from edgeinfer.speculation.timeline import Timeline
from edgeinfer.speculation.tree import DraftTree, no_draft
from edgeinfer.types import Features, Logits

_MARGIN = 0.8  # of the patience: what should come later may come too late
_LEVEL = 4  # nodes of a level of a chain: the one that is gone on from, and others
_CALL = 5.0  # of the patience, that a call may take which makes several levels: none of them is there before


class _Step:
    """The outlook of a drafter that goes on ahead: drafting costs nothing while the target works.

    n_levels: after which it ends, None where only `is_stopped` ends it.
    """

    def __init__(self, acceptance: AcceptanceModel, n_levels: int | None = None) -> None:
        self.min_probability = acceptance.min_probability
        self.max_wait_ms = acceptance.max_wait_ms
        self.probability = acceptance.probability
        self.is_stopped = False
        self._n_levels = n_levels

    def should_extend(self, path_probability: Sequence[float]) -> bool:
        """See AcceptanceModel."""
        if self._n_levels is not None and len(path_probability) >= self._n_levels:
            return False
        return not self.is_stopped and (not path_probability or path_probability[-1] >= self.min_probability)


class _Draft(Protocol):
    """A draft that the thread makes, and others look at meanwhile.

    is_running: the thread is at it, or will be.  is_stopped: nobody wants it any more.
    """

    is_running: bool
    is_stopped: bool

    def rebase(self, text: Sequence[int], path: Sequence[int], limit: int) -> bool:
        """Be the draft behind that text and a path that is checked; False where it is none.

        limit: most nodes that are wanted behind the token which follows the path.
        """
        ...

    def resume(self) -> bool:
        """Whether it did not run, and now will."""
        ...

    def tree(self, text: Sequence[int]) -> DraftTree:
        """What there is by now behind a text."""
        ...

    def is_in(self, text: Sequence[int]) -> bool:
        """Whether all tokens that the drafter reads for it now are of that text."""
        ...

    def step(self, levels_per_call: Callable[[Context, float], int]) -> tuple[Context, int, int] | None:
        """What the drafter is to be asked next, and for how many nodes in how many levels at most.

        n_at_once: see MultiLevelDrafter. None: nothing, and it runs no more.
        """
        ...

    def take(self, tree: DraftTree) -> None:
        """What the drafter said to the last step."""
        ...


class _Chain:
    """A draft that grows level by level behind the first node of each, for as long as its text comes true."""

    def __init__(self, context: Context, path: Sequence[int], limit: int) -> None:
        self.is_running, self.is_stopped = True, False
        self._context, self._acceptance, self._limit = context, context.acceptance, limit
        self._text = [*context.tokens, *path]  # that the levels follow
        self._n_known = len(context.tokens)  # of them that are no guess
        self._levels: list[DraftTree] = []
        self._n_checked = 0  # levels of the path that is checked
        self._is_at_end = False  # of the drafter's context
        self._lock = Lock()

    def rebase(self, text: Sequence[int], path: Sequence[int], limit: int) -> bool:
        """See _Draft."""
        with self._lock:
            if self.is_stopped or not self._advance(text) or self._first(len(path)) != list(path):
                return False
            self._n_checked, self._limit = len(path), limit
            return True

    def resume(self) -> bool:
        """See _Draft."""
        with self._lock:
            if self.is_running or not self._is_wanted():
                return False
            self.is_running = True
            return True

    def tree(self, text: Sequence[int]) -> DraftTree:
        """See _Draft."""
        with self._lock:
            levels = list(self._levels) if self._advance(text) else []
        tree, above = no_draft(), -1
        for level in levels:
            tree, above = _joined(tree, level, above), len(tree)
        return tree

    def is_in(self, text: Sequence[int]) -> bool:
        """See _Draft."""
        with self._lock:
            own = [*self._text, *self._first(len(self._levels))]
        return own == list(text[: len(own)])

    def step(self, levels_per_call: Callable[[Context, float], int]) -> tuple[Context, int, int] | None:
        """See _Draft. One level, or as many as are best made in one call."""
        with self._lock:
            if self.is_stopped or not self._is_wanted():
                self.is_running = False
                return None
            tokens = [*self._text, *self._first(len(self._levels))]
            context = replace(self._context, tokens=tokens, n_unverified=len(tokens) - self._n_known)
        n_levels = levels_per_call(context, _CALL * self._acceptance.max_wait_ms)
        context.acceptance = _Step(self._acceptance, n_levels)
        return context, n_levels * _LEVEL, n_levels

    def take(self, tree: DraftTree) -> None:
        """See _Draft. Nothing is said at the end of the drafter's context."""
        with self._lock:
            self._levels += _levels_of(tree)
            self._is_at_end = not len(tree)

    def _advance(self, text: Sequence[int]) -> bool:
        """Become the draft behind a text that this one leads to; False where it does not."""
        n = len(self._text)
        path = list(text[n:])
        if len(text) < n or self._first(len(path)) != path or self._text != list(text[:n]):
            return False
        self._text += path
        self._n_known = len(self._text)
        self._n_checked = max(0, self._n_checked - len(path))
        del self._levels[: len(path)]
        return True

    def _first(self, n: int) -> list[int]:
        """Tokens of the nodes that the first n levels were gone on from."""
        return [level.tokens[0] for level in self._levels[:n]]

    def _is_wanted(self) -> bool:
        """Whether one more level may be of use."""
        ahead = self._levels[self._n_checked :]
        path_probability = 1.0
        for depth, level in enumerate(ahead):
            path_probability *= self._acceptance.probability(level.buckets[0], depth, level.p[0])
        return (
            len(ahead) <= self._limit and path_probability >= self._acceptance.min_probability and not self._is_at_end
        )


class _Tree:
    """A draft that is made in one piece, by a drafter that would have to begin anew to go on."""

    def __init__(self, context: Context, path: Sequence[int], limit: int) -> None:
        self.is_running, self._limit = True, limit
        self._acceptance = _Step(context.acceptance)
        self._context = replace(context, tokens=[*context.tokens, *path], n_unverified=len(path))
        self._context.acceptance = self._acceptance
        self._result: DraftTree | None = None

    @property
    def is_stopped(self) -> bool:
        """See _Draft."""
        return self._acceptance.is_stopped

    @is_stopped.setter
    def is_stopped(self, value: bool) -> None:
        self._acceptance.is_stopped = value

    def rebase(self, text: Sequence[int], path: Sequence[int], limit: int) -> bool:
        """See _Draft. Behind another path it would be another draft."""
        return not path and self.is_in(text) and (self.is_running or len(self.tree(text)) > 0)

    def resume(self) -> bool:
        """See _Draft."""
        return False

    def tree(self, text: Sequence[int]) -> DraftTree:
        """See _Draft."""
        if self._result is None or not self.is_in(text):
            return no_draft()
        return behind(self._result, text[len(self._context.tokens) :]) or no_draft()

    def is_in(self, text: Sequence[int]) -> bool:
        """See _Draft."""
        own = self._context.tokens
        return own == list(text[: len(own)])

    def step(self, levels_per_call: Callable[[Context, float], int]) -> tuple[Context, int, int] | None:
        """See _Draft. All of it at once."""
        if self.is_stopped or self._result is not None:
            self.is_running = False
            return None
        return self._context, self._limit, self._limit

    def take(self, tree: DraftTree) -> None:
        """See _Draft."""
        self._result = tree
        self.is_running = False


class OverlappedDrafter:
    """A drafter with a thread in which it drafts on; see the module. The other drafter is closed with this one.

    device: what it drafts on, for messages.  timeline: where its drafts are noted, None for nowhere. `observe` is not
    passed on: what it learns comes with the text that it is asked behind.
    """

    def __init__(
        self,
        drafter: CostlyDrafter,
        device: str = "the draft device",
        clock: Clock | None = None,
    ) -> None:
        self.name = drafter.name
        self.timeline: Timeline | None = None
        self._drafter = drafter
        # A node of a translated draft may be several of the draft model's, or a part of one: no level to go on from.
        self._kind = _Tree if isinstance(drafter, (FeatureDrafter, CrossVocabularyDrafter)) else _Chain
        self._watchdog = Watchdog(drafter.name, device, clock)
        self._clock = self._watchdog.clock
        self._draft: _Draft | None = None
        self._milliseconds = 0.0  # of a drafted token
        self._due = 0.0  # when the thread should have more of the draft

    def start(self, context: Context) -> None:
        """See Drafter."""
        self._drop()
        self._watchdog.check()
        self._watchdog.submit(lambda: self._drafter.start(context))

    def start_drafting(self, context: Context, path: Sequence[int], limit: int) -> None:
        """See BackgroundDrafter."""
        self._watchdog.check()
        if self._draft is None or not self._draft.rebase(context.tokens, path, limit):
            self._drop([*context.tokens, *path])
            self._draft = self._kind(context, path, limit)
            self._submit(self._draft)
        elif self._draft.resume():
            self._submit(self._draft)

    def propose(self, context: Context, limit: int) -> DraftTree:
        """What there is behind the text by now, or as soon as it is worth waiting for."""
        self.start_drafting(context, (), limit)
        max_wait_ms, now = 1e-3 * context.acceptance.max_wait_ms, self._clock.now()
        draft, deadline, last_due = self._draft, now + max_wait_ms, now + _MARGIN * max_wait_ms
        tree = no_draft() if draft is None else draft.tree(context.tokens)
        while draft is not None and draft.is_running and self._due <= last_due and _is_short(tree, context.acceptance):
            n_nodes, left = len(tree), deadline - self._clock.now()
            if left <= 0.0 or not self._clock.wait_for(partial(_has_more, draft, context, n_nodes), left):
                break
            tree = draft.tree(context.tokens)
        self._watchdog.check()
        return _first_part(tree, limit)

    def observe(self, context: Context, n_new: int, rows: Sequence[Logits]) -> None:
        """See Drafter."""

    def cost(self, context: Context) -> tuple[float, float]:
        """See CostlyDrafter. What of the text is not read yet is read while the target works."""
        return self._milliseconds, 0.0

    def prefill(self, context: Context) -> None:
        """See CostlyDrafter. It is read when drafting begins."""

    def interrupt(self) -> None:
        """See CostlyDrafter."""
        draft = self._draft
        if draft is not None:
            draft.is_stopped = True
        self._drafter.interrupt()

    def close(self) -> None:
        """End the thread, and close the drafter. Raises BackendLost where its device hangs: nothing is given back."""
        self._drop()
        try:
            self._watchdog.run(self._drafter.close)
        finally:
            self._watchdog.close()

    # ---- In the thread -----------------------------------------------------------------------------------------------

    def _submit(self, draft: _Draft) -> None:
        self._due = self._clock.now() + 1e-3 * self._milliseconds
        self._watchdog.submit(lambda: self._grow(draft), self._milliseconds)

    def _grow(self, draft: _Draft) -> None:
        """Ask the drafter for step after step of a draft."""
        try:
            while (step := draft.step(self._levels_per_call)) is not None:
                self._make(draft, *step)
                self._clock.notify()
        finally:
            if draft.is_running:  # it failed
                draft.is_stopped, draft.is_running = True, False

    def _levels_per_call(self, context: Context, milliseconds: float) -> int:
        """See MultiLevelDrafter."""
        drafter = self._drafter
        return drafter.levels_per_call(context, milliseconds) if isinstance(drafter, MultiLevelDrafter) else 1

    def _make(self, draft: _Draft, context: Context, limit: int, n_levels: int) -> None:
        """Make a step of a draft."""
        each, before = self._drafter.cost(context)
        self._watchdog.expect(before + n_levels * each)
        started = self._clock.now()
        of_call = each * n_levels if isinstance(draft, _Chain) else each
        self._milliseconds, self._due = each, started + 1e-3 * (before + of_call)
        try:
            tree = self._drafter.propose(context, limit)
        except Interrupted:  # it may have been meant for the draft before
            tree = None
            if draft.is_stopped:
                raise
        finally:
            if self.timeline is not None:
                self.timeline.add("draft", started, self._clock.now(), 1)
        if tree is not None:
            draft.take(tree)
        self._due = self._clock.now() + 1e-3 * of_call

    # ---- Out of it ---------------------------------------------------------------------------------------------------

    def _drop(self, text: Sequence[int] = ()) -> None:
        """Stop the draft, which is not wanted any more; at once unless what is read for it is of this text.

        A long prompt may take longer than a step of the target: it is not begun anew with each.
        """
        draft, self._draft = self._draft, None
        if draft is not None and draft.is_running:
            draft.is_stopped = True
            if not draft.is_in(text):
                self._drafter.interrupt()


class OverlappedFeatureDrafter(OverlappedDrafter):
    """The same for a drafter that goes on from the target's hidden rows."""

    def __init__(
        self,
        drafter: FeatureDrafter,
        device: str = "the draft device",
        clock: Clock | None = None,
    ) -> None:
        super().__init__(drafter, device, clock)
        self._follower = drafter
        self.taps = drafter.taps

    def observe_features(self, text: Sequence[int], first: int, features: Features) -> None:
        """See FeatureDrafter. The draft that runs ends with the pass that it is in: the next begins from these rows."""
        self._watchdog.check()
        draft, rows = self._draft, features.copy()
        if draft is not None:
            if draft.rebase(text, (), 0):
                draft.is_stopped = True
            else:
                self._drop(text)
        self._watchdog.submit(lambda: self._follower.observe_features(text, first, rows))


def overlapped(
    drafter: CostlyDrafter, device: str = "the draft device", clock: Clock | None = None
) -> OverlappedDrafter:
    """That drafter with a thread in which it drafts while the target checks. device: what it runs on, for messages."""
    if isinstance(drafter, FeatureDrafter):
        return OverlappedFeatureDrafter(drafter, device, clock)
    return OverlappedDrafter(drafter, device, clock)


def behind(tree: DraftTree, path: Sequence[int]) -> DraftTree | None:
    """The part of a tree behind a path of tokens from its root; None where it has no such path, or nothing behind."""
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


def _joined(tree: DraftTree, level: DraftTree, above: int) -> DraftTree:
    """A tree with a level more, whose nodes all follow that one."""
    parents = [*tree.parents, *[above] * len(level)]
    return DraftTree([*tree.tokens, *level.tokens], parents, [*tree.p, *level.p], [*tree.buckets, *level.buckets])


def _levels_of(tree: DraftTree) -> list[DraftTree]:
    """Levels that each follow the first node of the one before."""
    levels: list[DraftTree] = []
    above = -1
    while nodes := [node for node, parent in enumerate(tree.parents) if parent == above]:
        tokens, buckets = ([each[node] for node in nodes] for each in (tree.tokens, tree.buckets))
        levels.append(DraftTree(tokens, [-1] * len(nodes), [tree.p[node] for node in nodes], buckets))
        above = nodes[0]
    return levels


def _has_more(draft: _Draft, context: Context, n_nodes: int) -> bool:
    return not draft.is_running or len(draft.tree(context.tokens)) > n_nodes


def _is_short(tree: DraftTree, acceptance: AcceptanceModel) -> bool:
    """Whether it pays to make the first chain of a draft longer."""
    path_probability: list[float] = []
    above = -1
    for node, (parent, p, kind) in enumerate(zip(tree.parents, tree.p, tree.buckets, strict=True)):
        if parent == above:
            path_probability.append(
                (path_probability[-1] if path_probability else 1.0)
                * acceptance.probability(kind, len(path_probability), p)
            )
            above = node
    return acceptance.should_extend(path_probability)


def _first_part(tree: DraftTree, limit: int) -> DraftTree:
    return DraftTree(tree.tokens[:limit], tree.parents[:limit], tree.p[:limit], tree.buckets[:limit])
