"""The interfaces of drafters, and what a drafter may know of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from edgeinfer.common.types import Features, Logits, MemoryUse
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.timeline import Timeline
from edgeinfer.speculation.tree import DraftTree
from edgeinfer.speculation.verify import Draw


class AcceptanceModel(Protocol):
    """What is known of how often a drafter's tokens are accepted, for drafters that decide when to stop.

    min_probability: nodes with a lower path probability are not worth verifying.  max_wait_ms: milliseconds that the
    next step may wait for an overlapped drafter.
    """

    min_probability: float
    max_wait_ms: float

    def probability(self, bucket: int, depth: int, p: float) -> float:
        """Acceptance probability of a node of that bucket and depth (0: first) if its parent is accepted.

        p: the drafter's estimate, the prior.
        """
        ...

    def should_extend(self, path_probabilities: Sequence[float]) -> bool:
        """Whether a chain with these path probabilities is worth one more token."""
        ...


@dataclass(slots=True)
class Context:
    """A request, as a drafter sees it.

    tokens: prompt and output so far; a copy for the drafters.  draw: the target's sampler, for drafters with logits:
    with the same noise both sample the same token more often.  is_greedy: the target takes the most probable token.
    acceptance: of the drafter that is asked.  n_unverified: tokens at the end that are drafted and not verified yet.
    is_plain: the target takes the largest logit, without penalties.  params: how it chooses, where that is known.
    """

    tokens: list[int]
    draw: Draw
    is_greedy: bool
    acceptance: AcceptanceModel = field(init=False)
    n_unverified: int = 0
    is_plain: bool = False
    params: SamplingParams | None = None


def held_by(use: MemoryUse) -> dict[str, int]:
    """Bytes of a draft model or a head by part."""
    return {"weights": use.weights + use.experts, "caches": use.kv_cache, "rows": use.activations}


class Drafter(Protocol):
    """Proposes draft tokens. Whatever it does, the text stays the same; one that raises is not asked again in the
    request.
    """

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
    """A drafter that tells what main memory it holds."""

    def held(self) -> dict[str, int]:
        """Bytes now, by part: "weights", "caches", "rows", "features", "tables"."""
        ...


@runtime_checkable
class CostlyDrafter(Drafter, Protocol):
    """A drafter with a model, whose drafts take time."""

    def cost(self, context: Context) -> tuple[float, float]:
        """Milliseconds of each draft token, and of the prefill that the next draft needs first."""
        ...

    def prefill(self, context: Context) -> None:
        """Run context.tokens through the draft model, so that the next draft need not."""
        ...

    def interrupt(self) -> None:
        """Stop the running call, which raises Interrupted; callable from any thread."""
        ...


@runtime_checkable
class MultiLevelDrafter(CostlyDrafter, Protocol):
    """A drafter of chains whose device may make several levels in one call."""

    def levels_per_call(self, context: Context, milliseconds: float) -> int:
        """Number of levels with the least cost per accepted token, of those that one call makes in that time."""
        ...


@runtime_checkable
class FeatureDrafter(CostlyDrafter, Protocol):
    """A drafter that needs the target's hidden states.

    taps: which layers, as the argument `hidden` of Session.forward.
    """

    taps: bool | tuple[int, ...]

    def observe_features(self, text: Sequence[int], first: int, features: Features) -> None:
        """Hidden states (n, n_taps * n_embd) of the tokens from text[first] on, several layers side by side.

        Called for each chunk of a prompt before `start`, and for the accepted tokens of a step before `observe`. The
        drafter may copy them. There are none for a prefix that the target took from its KV cache.
        """
        ...


@runtime_checkable
class BackgroundDrafter(CostlyDrafter, Protocol):
    """A drafter on a device of its own, which works while the target does. timeline: where it records its drafts."""

    timeline: Timeline | None

    def start_drafting(self, context: Context, path: Sequence[int], limit: int) -> None:
        """Draft at most limit nodes after context.tokens, a draft path that is being verified, and the token that will
        follow it. Returns at once.
        """
        ...
