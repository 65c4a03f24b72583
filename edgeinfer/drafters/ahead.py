"""Drafts on while the target checks, with a drafter whose device is not the target's (PEARL's post-verify, Liu et al.,
arXiv:2408.11850).

While a tree is checked, the drafter goes on behind its likeliest path, as if that were text already. Where it was, and
the token behind it was among those drafted, the next draft is there without waiting; elsewhere it is thrown away. Not
for a drafter that shares the target's cores: both would wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event

from edgeinfer.drafters.base import Context, CostlyDrafter, FeatureDrafter, Outlook
from edgeinfer.errors import Interrupted
from edgeinfer.speculation.tree import DraftTree
from edgeinfer.types import Features, Logits


@dataclass(slots=True)
class _StoppableOutlook:
    """An outlook on which nothing pays once it is stopped: a drafter ends behind the pass that it is in."""

    outlook: Outlook
    floor: float
    stopped: Event = field(default_factory=Event)

    def chance(self, kind: int, depth: int, p: float) -> float:
        """See Outlook."""
        return self.outlook.chance(kind, depth, p)

    def goes_on(self, reach: Sequence[float]) -> bool:
        """See Outlook."""
        return not self.stopped.is_set() and self.outlook.goes_on(reach)


@dataclass(slots=True)
class _Running:
    """A draft that is being made in the other thread, behind a text that is a guess."""

    text: list[int]
    outlook: _StoppableOutlook
    tree: Future[DraftTree]


class AheadDrafter:
    """A drafter with a thread in which it drafts on; see the module. The other drafter is closed with this one."""

    def __init__(self, drafter: CostlyDrafter) -> None:
        self.name = drafter.name
        self._drafter = drafter
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"edgeinfer-{drafter.name}")
        self._running: _Running | None = None
        self._text: list[int] = []
        self._tree: DraftTree | None = None  # behind _text

    def go_on(self, context: Context, path: Sequence[int], limit: int) -> None:
        """See DraftsAhead."""
        self._settle(())
        ahead = Context([*context.tokens, *path], context.draw, context.is_greedy, n_assumed=len(path))
        ahead.outlook = outlook = _StoppableOutlook(context.outlook, context.outlook.floor)
        tree = self._thread.submit(self._drafter.propose, ahead, limit)
        self._running = _Running(list(ahead.tokens), outlook, tree)

    def start(self, context: Context) -> None:
        """See Drafter."""
        self._settle(())
        self._drafter.start(context)

    def propose(self, context: Context, limit: int) -> DraftTree:
        """What was drafted ahead, if the text became what was guessed, or else what the drafter drafts now."""
        ready = self._ready(context.tokens)
        return self._drafter.propose(context, limit) if ready is None else _first_part(ready, limit)

    def observe(self, context: Context, n_new: int, rows: Sequence[Logits]) -> None:
        """See Drafter."""
        self._settle(context.tokens)
        self._drafter.observe(context, n_new, rows)

    def cost(self, context: Context) -> tuple[float, float]:
        """See CostlyDrafter. What is there already costs nothing."""
        return self._drafter.cost(context) if self._ready(context.tokens) is None else (0.0, 0.0)

    def read(self, context: Context) -> None:
        """See CostlyDrafter."""
        self._settle(())
        self._drafter.read(context)

    def interrupt(self) -> None:
        """See CostlyDrafter."""
        if self._running is not None:
            self._running.outlook.stopped.set()
        self._drafter.interrupt()

    def close(self) -> None:
        """Wait for the thread, and close the drafter."""
        self.interrupt()
        self._thread.shutdown()
        self._running = self._tree = None
        self._drafter.close()

    def _settle(self, text: Sequence[int]) -> None:
        """Wait for the draft that is made ahead; stop and drop it where its text is no beginning of this one.

        Raises what the drafter raised.
        """
        running, self._running = self._running, None
        if running is None:
            return
        self._text, self._tree = running.text, None
        is_text = running.text == list(text[: len(running.text)])
        if not is_text:
            running.outlook.stopped.set()
            self._drafter.interrupt()
        try:
            tree = running.tree.result()
        except Interrupted:
            return
        self._tree = tree if is_text else None

    def _ready(self, text: Sequence[int]) -> DraftTree | None:
        """The part of what was drafted ahead that follows this text; None if there is none."""
        self._settle(text)
        if self._tree is None or self._text != list(text[: len(self._text)]):
            return None
        return behind(self._tree, text[len(self._text) :])


class AheadFeatureDrafter(AheadDrafter):
    """The same for a drafter that goes on from the target's hidden rows."""

    def __init__(self, drafter: FeatureDrafter) -> None:
        super().__init__(drafter)
        self._follower = drafter
        self.taps = drafter.taps

    def follow(self, text: Sequence[int], first: int, features: Features) -> None:
        """See FeatureDrafter."""
        self._settle(text)
        self._follower.follow(text, first, features)


def drafting_ahead(drafter: CostlyDrafter) -> AheadDrafter:
    """That drafter with a thread in which it drafts while the target checks."""
    return AheadFeatureDrafter(drafter) if isinstance(drafter, FeatureDrafter) else AheadDrafter(drafter)


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
        [tree.kinds[node] for node in kept],
    )


def _first_part(tree: DraftTree, limit: int) -> DraftTree:
    return DraftTree(tree.tokens[:limit], tree.parents[:limit], tree.p[:limit], tree.kinds[:limit])
