"""What a drafter offers, and what it may know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from edgeinfer.speculation.timeline import Timeline
from edgeinfer.speculation.tree import DraftTree
from edgeinfer.speculation.verify import Draw
from edgeinfer.types import Features, Logits


class AcceptanceModel(Protocol):
    """What the policy has learnt about one drafter, for those that want to stop where it does not pay."""

    min_probability: float  # a node reached with less chance than this cannot pay
    max_wait_ms: float  # milliseconds that the next step may wait for a drafter that works while the target does

    def probability(self, bucket: int, depth: int, p: float) -> float:
        """How often nodes of that kind at that depth (0: first) were right; p is the estimate to begin with."""
        ...

    def should_extend(self, path_probability: Sequence[float]) -> bool:
        """Whether one more node pays for its drafting and its check. reach: chance of each node of the chain so far."""
        ...


@dataclass(slots=True)
class Context:
    """A request, as a drafter sees it.

    tokens: prompt and output so far; a list of the drafters' own.  draw: the target's own way to draw, for drafters
    with logits: with the same noise both draw the same token more often.  is_greedy: it takes the likeliest token.
    outlook: of the drafter that is asked.  n_unverified: tokens at the end that are a guess, for a drafter that goes on
    ahead of the text.  is_plain: that is the likeliest by the logits alone, without penalties.
    """

    tokens: list[int]
    draw: Draw
    is_greedy: bool
    acceptance: AcceptanceModel = field(init=False)
    n_unverified: int = 0
    is_plain: bool = False


class Drafter(Protocol):
    """Proposes what may come next. Whatever it does, the text stays the same; if it raises, it sits out the request."""

    name: str

    def start(self, context: Context) -> None:
        """A request begins: context.tokens is its prompt."""
        ...

    def propose(self, context: Context, limit: int) -> DraftTree:
        """A tree of at most limit nodes that follow context.tokens."""
        ...

    def observe(self, context: Context, n_new: int, rows: Sequence[Logits]) -> None:
        """The last n_new of context.tokens are new; each was drawn from its row of rows, (n_vocab,)."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


@runtime_checkable
class CostlyDrafter(Drafter, Protocol):
    """A drafter whose drafts take time that must be earned back."""

    def cost(self, context: Context) -> tuple[float, float]:
        """Milliseconds for each drafted token, and before the first for what of the text it has not read yet."""
        ...

    def prefill(self, context: Context) -> None:
        """Read context.tokens, so that the next draft need not."""
        ...

    def interrupt(self) -> None:
        """Stop what runs, with Interrupted; callable from any thread."""
        ...


@runtime_checkable
class MultiLevelDrafter(CostlyDrafter, Protocol):
    """A drafter of chains whose device may make several levels in one call."""

    def levels_per_call(self, context: Context, milliseconds: float) -> int:
        """Levels that are best made together, by what they cost and how often they are right, in that time at most."""
        ...


@runtime_checkable
class FeatureDrafter(CostlyDrafter, Protocol):
    """A drafter that goes on from the target's hidden rows, which are asked for where there is one.

    taps: which rows, as `hidden` of Session.forward has it.
    """

    taps: bool | tuple[int, ...]

    def observe_features(self, text: Sequence[int], first: int, features: Features) -> None:
        """The rows (n, n_taps * n_embd) of the tokens from text[first] on, those of several layers side by side.

        Of each piece of a prompt, before `start`, and of what a step took, before `observe`. The rows are the
        drafter's to copy. Where a text was in the target's cache, those of its beginning do not come again.
        """
        ...


@runtime_checkable
class BackgroundDrafter(CostlyDrafter, Protocol):
    """A drafter on a device of its own, which works while the target does. timeline: where it notes its drafts."""

    timeline: Timeline | None

    def start_drafting(self, context: Context, path: Sequence[int], limit: int) -> None:
        """Draft at most limit nodes behind context.tokens, a drafted path that is being checked, and the token that
        will follow it; returns at once.
        """
        ...
