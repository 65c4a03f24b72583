"""The interfaces of drafters, and what a drafter may know of a request."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

from edgeinfer.backends.base import Rows, Session
from edgeinfer.common.types import Features, Logits, MemoryUse, Output
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.timeline import Timeline
from edgeinfer.speculation.tree import DraftTree
from edgeinfer.speculation.verify import Draw


class AcceptanceModel(Protocol):
    """Estimates how often a drafter's tokens are accepted, for drafters that decide when to stop."""

    min_probability: float  # nodes with a lower path probability are not worth verifying
    max_wait_ms: float  # milliseconds that the next step may wait for an overlapped drafter

    def probability(self, bucket: int, depth: int, p: float) -> float:
        """Acceptance probability of a node of that bucket and depth (0: first) if its parent is accepted.

        p: the drafter's estimate, the prior.
        """
        ...

    def should_extend(self, path_probabilities: Sequence[float]) -> bool:
        """Whether a chain with these path probabilities is worth one more token."""
        ...


class Following(Protocol):
    """What may follow the text of a request that has a constraint: edgeinfer.constraints.constraint.ConstraintState."""

    def likely(self, text: Sequence[int]) -> Iterator[tuple[int, int]]:
        """What will probably follow a text: each token with the number of those that may stand in its place."""
        ...

    def kept(self, text: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """The nodes of a draft tree after a text that may follow, each with its parent."""
        ...


@dataclass(slots=True)
class Context:
    """A request, as a drafter sees it."""

    tokens: list[int]  # prompt and output so far; a copy for the drafters
    draw: Draw  # the target's sampler: a drafter with logits that uses its noise draws the same token more often
    is_greedy: bool  # the target takes the most probable token
    acceptance: AcceptanceModel = field(init=False)  # of the drafter that is called
    n_unverified: int = 0  # tokens at the end that are drafted and not verified yet
    is_plain: bool = False  # the target takes the largest logit, without penalties
    params: SamplingParams | None = None  # how the target chooses, where that is known
    is_over: bool = False  # no more of the text comes
    constraint: Following | None = None  # None where anything may follow


def held_by(use: MemoryUse) -> dict[str, int]:
    """Bytes of a draft model or a head by part."""
    return {"weights": use.weights + use.experts, "caches": use.kv_cache, "rows": use.activations}


class Drafter(Protocol):
    """Proposes draft tokens, which never change the text. One that raises is not called again in the request."""

    name: str

    def start(self, context: Context) -> None:
        """A request begins: context.tokens is its prompt."""
        ...

    def propose(self, context: Context, limit: int) -> DraftTree:
        """A tree of at most limit nodes that follow context.tokens."""
        ...

    def observe(self, context: Context, n_new: int, rows: Sequence[Logits]) -> None:
        """The last n_new of context.tokens are new; each was sampled from its row of rows, (n_vocab,)."""
        ...

    def close(self) -> None:
        """Free the memory."""
        ...


@runtime_checkable
class HoldingDrafter(Protocol):
    """A drafter that reports the main memory that it holds."""

    def held(self) -> dict[str, int]:
        """Bytes now, by part: "weights", "caches", "rows", "features", "tables"."""
        ...


@runtime_checkable
class SharedDrafter(Drafter, Protocol):
    """A drafter that can work for several texts that run at once."""

    def beside(self) -> Drafter | None:
        """One for another text: itself where it keeps nothing of a text that another one would disturb, None where
        there is memory for one text only."""
        ...


@runtime_checkable
class ModelBasedDrafter(Drafter, Protocol):
    """A model-based drafter, whose drafts take time."""

    def cost(self, context: Context) -> tuple[float, float]:
        """(milliseconds per draft token, milliseconds of the prefill that the next draft needs first)."""
        ...

    def prefill(self, context: Context) -> None:
        """Run context.tokens through the draft model, so that the next draft need not."""
        ...

    def interrupt(self) -> None:
        """Stop the running call, which raises Interrupted; callable from any thread."""
        ...


Drafting: TypeAlias = Generator[Rows, Output, DraftTree]
"""A draft that is being made: yields the rows of each pass that it wants, is sent their output, and gives the tree."""


@runtime_checkable
class JointDrafter(ModelBasedDrafter, SharedDrafter, Protocol):
    """A drafter whose passes may be those of several texts; see edgeinfer.speculation.drafters.joint."""

    @property
    def can_join(self) -> bool:
        """Whether its model takes rows of several texts, and has memory for them."""
        ...

    def joint_cost(self, context: Context, n_texts: int) -> tuple[float, float]:
        """As cost, of one of so many texts that are drafted for in the same passes."""
        ...

    def drafting(self, context: Context, limit: int, is_alone: bool = True) -> Drafting:
        """As propose, pass by pass. is_alone: the time of its passes is that of its rows."""
        ...

    def rest(self) -> None:
        """The text has ended: others may have the memory that they share."""
        ...


@runtime_checkable
class MultiLevelDrafter(ModelBasedDrafter, Protocol):
    """A drafter of chains whose device may make several levels in one call."""

    def levels_per_call(self, context: Context, milliseconds: float) -> int:
        """Number of levels with the least cost per accepted token, of those that one call makes in that time."""
        ...


@runtime_checkable
class FeatureDrafter(ModelBasedDrafter, Protocol):
    """A drafter that needs the target's hidden states."""

    taps: bool | tuple[int, ...]  # which layers, as the argument `hidden` of Session.forward

    def observe_features(self, text: Sequence[int], first: int, features: Features) -> None:
        """Hidden states (n, n_taps * n_embd) of the tokens from text[first] on, layers concatenated.

        Called for each chunk of a prompt before `start`, and for the accepted tokens of a step before `observe`. The
        drafter may copy them. There are none for a prefix that the target took from its KV cache.
        """
        ...


@runtime_checkable
class TargetDrafter(Drafter, Protocol):
    """A drafter that may read what the target keeps of the text, beside what it is shown."""

    def follow(self, session: Session) -> None:
        """A text begins, in that session of the target; called before `start`."""
        ...


@runtime_checkable
class BackgroundDrafter(ModelBasedDrafter, Protocol):
    """A drafter on a device of its own, which works while the target does."""

    timeline: Timeline | None  # where it records its drafts, None for nowhere

    def start_drafting(self, context: Context, path: Sequence[int], limit: int) -> None:
        """Begin to draft, and return at once.

        At most limit nodes follow context.tokens, then a draft path that is being verified, then the token after it.
        """
        ...
