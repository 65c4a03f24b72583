"""Overlapped drafting: the drafter works in a thread of its own while the target verifies (PEARL, Liu et al.,
arXiv:2408.11850).

While a draft is verified, the drafter continues it along its most probable path, as if that path were accepted already
(post-verify). If it was accepted, the continuation is the next draft; otherwise it is dropped. The target waits for a
draft at most `AcceptanceModel.max_wait_ms`. Without a draft it makes its next step alone, and the drafter gets ahead
meanwhile (pre-verify). Only for drafters that do not run on the target's cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from edgeinfer.common.errors import Interrupted
from edgeinfer.common.overriding import override
from edgeinfer.common.types import Features, Logits
from edgeinfer.speculation.drafters.base import (
    AcceptanceModel,
    BackgroundDrafter,
    Context,
    FeatureDrafter,
    ModelBasedDrafter,
    MultiLevelDrafter,
)
from edgeinfer.speculation.drafters.cross_vocabulary import CrossVocabularyDrafter
from edgeinfer.speculation.drafters.overlapped_draft import OverlappedChain, OverlappedDraft, OverlappedTree
from edgeinfer.speculation.drafters.watchdog import Clock, Watchdog
from edgeinfer.speculation.timeline import Timeline
from edgeinfer.speculation.tree import DraftTree, no_draft

_MARGIN = 0.8  # of max_wait_ms: a draft that is expected later than this may come too late


class OverlappedDrafter(BackgroundDrafter):
    """A drafter with a thread in which it drafts while the target verifies; see the module. It owns that drafter.

    device: the drafter's, for messages.  timeline: where its drafts are recorded, None for nowhere. `observe` is not
    passed on: the drafter sees accepted tokens in the next context.
    """

    def __init__(
        self,
        drafter: ModelBasedDrafter,
        device: str = "the draft device",
        clock: Clock | None = None,
    ) -> None:
        self.name = drafter.name
        self.timeline: Timeline | None = None
        self._drafter = drafter
        # A cross-vocabulary draft has no levels to continue from: one token of it may be several of the draft model's,
        # or a part of one.
        is_tree = isinstance(drafter, (FeatureDrafter, CrossVocabularyDrafter))
        self._draft_type = OverlappedTree if is_tree else OverlappedChain
        self._watchdog = Watchdog(drafter.name, device, clock)
        self._clock = self._watchdog.clock
        self._draft: OverlappedDraft | None = None
        self._token_ms = 0.0  # cost of a draft token
        self._due = 0.0  # when the thread should have more of the draft

    @override
    def start(self, context: Context) -> None:
        self._drop()
        self._watchdog.check()
        self._watchdog.submit(lambda: self._drafter.start(context))

    @override
    def start_drafting(self, context: Context, path: Sequence[int], limit: int) -> None:
        self._watchdog.check()
        if self._draft is None or not self._draft.rebase(context.tokens, path, limit):
            self._drop([*context.tokens, *path])
            self._draft = self._draft_type(context, path, limit)
            self._submit(self._draft)
        elif self._draft.resume():
            self._submit(self._draft)

    @override
    def propose(self, context: Context, limit: int) -> DraftTree:
        """The draft after the text so far. Waits for more nodes if they are due soon enough."""
        self.start_drafting(context, (), limit)
        max_wait, now = 1e-3 * context.acceptance.max_wait_ms, self._clock.now()
        draft, deadline, last_due = self._draft, now + max_wait, now + _MARGIN * max_wait
        tree = no_draft() if draft is None else draft.tree(context.tokens)
        while (
            draft is not None
            and draft.is_running
            and self._due <= last_due
            and _should_extend(tree, context.acceptance)
        ):
            n_nodes, left = len(tree), deadline - self._clock.now()
            if left <= 0.0 or not self._clock.wait_for(partial(_has_more, draft, context, n_nodes), left):
                break
            tree = draft.tree(context.tokens)
        self._watchdog.check()
        return _first_nodes(tree, limit)

    @override
    def observe(self, context: Context, n_new: int, rows: Sequence[Logits]) -> None:
        pass

    @override
    def cost(self, context: Context) -> tuple[float, float]:
        """See ModelBasedDrafter. The prefill happens while the target works."""
        return self._token_ms, 0.0

    @override
    def prefill(self, context: Context) -> None:
        """See ModelBasedDrafter. It happens when drafting begins."""

    @override
    def interrupt(self) -> None:
        draft = self._draft
        if draft is not None:
            draft.is_stopped = True
        self._drafter.interrupt()

    @override
    def close(self) -> None:
        """End the thread, and close the drafter. Raises BackendLost where its device hangs: no memory is freed."""
        self._drop()
        try:
            self._watchdog.run(self._drafter.close)
        finally:
            self._watchdog.close()

    # ---- In the thread -----------------------------------------------------------------------------------------------

    def _submit(self, draft: OverlappedDraft) -> None:
        self._due = self._clock.now() + 1e-3 * self._token_ms
        self._watchdog.submit(lambda: self._grow(draft), self._token_ms)

    def _grow(self, draft: OverlappedDraft) -> None:
        """Make the steps of a draft, one after the other."""
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

    def _make(self, draft: OverlappedDraft, context: Context, limit: int, n_levels: int) -> None:
        """Make one step of a draft."""
        token_ms, prefill_ms = self._drafter.cost(context)
        self._watchdog.expect(prefill_ms + n_levels * token_ms)
        started = self._clock.now()
        step_ms = token_ms * n_levels if isinstance(draft, OverlappedChain) else token_ms
        self._token_ms, self._due = token_ms, started + 1e-3 * (prefill_ms + step_ms)
        try:
            tree = self._drafter.propose(context, limit)
        except Interrupted:  # it may have been meant for the previous draft
            tree = None
            if draft.is_stopped:
                raise
        finally:
            if self.timeline is not None:
                self.timeline.add("draft", started, self._clock.now(), 1)
        if tree is not None:
            draft.add(tree)
        self._due = self._clock.now() + 1e-3 * step_ms

    # ---- In the target's thread --------------------------------------------------------------------------------------

    def _drop(self, text: Sequence[int] = ()) -> None:
        """Stop the draft; interrupt its pass too, unless the tokens of that pass are a prefix of this text.

        So a prefill that takes longer than a step of the target is not started again in each step.
        """
        draft, self._draft = self._draft, None
        if draft is not None and draft.is_running:
            draft.is_stopped = True
            if not draft.is_in(text):
                self._drafter.interrupt()


class OverlappedFeatureDrafter(OverlappedDrafter):
    """The same for a FeatureDrafter."""

    def __init__(
        self,
        drafter: FeatureDrafter,
        device: str = "the draft device",
        clock: Clock | None = None,
    ) -> None:
        super().__init__(drafter, device, clock)
        self._feature_drafter = drafter
        self.taps = drafter.taps

    def observe_features(self, text: Sequence[int], first: int, features: Features) -> None:
        """See FeatureDrafter. A running draft ends with its current pass; the next one begins from these features."""
        self._watchdog.check()
        draft, rows = self._draft, features.copy()
        if draft is not None:
            if draft.rebase(text, (), 0):
                draft.is_stopped = True
            else:
                self._drop(text)
        self._watchdog.submit(lambda: self._feature_drafter.observe_features(text, first, rows))


def overlapped(
    drafter: ModelBasedDrafter, device: str = "the draft device", clock: Clock | None = None
) -> OverlappedDrafter:
    """That drafter with a thread in which it drafts while the target verifies. device: its own, for messages."""
    if isinstance(drafter, FeatureDrafter):
        return OverlappedFeatureDrafter(drafter, device, clock)
    return OverlappedDrafter(drafter, device, clock)


def _has_more(draft: OverlappedDraft, context: Context, n_nodes: int) -> bool:
    return not draft.is_running or len(draft.tree(context.tokens)) > n_nodes


def _should_extend(tree: DraftTree, acceptance: AcceptanceModel) -> bool:
    """Whether the first chain of a draft is worth one more token."""
    path_probabilities: list[float] = []
    last = -1
    for node, (parent, p, bucket) in enumerate(zip(tree.parents, tree.p, tree.buckets, strict=True)):
        if parent == last:
            probability = acceptance.probability(bucket, len(path_probabilities), p)
            path_probabilities.append((path_probabilities[-1] if path_probabilities else 1.0) * probability)
            last = node
    return acceptance.should_extend(path_probabilities)


def _first_nodes(tree: DraftTree, limit: int) -> DraftTree:
    return DraftTree(tree.tokens[:limit], tree.parents[:limit], tree.p[:limit], tree.buckets[:limit])
