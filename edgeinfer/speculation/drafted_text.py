"""The part of speculation that is one text's own: what its drafters know of it, and what came of their drafts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from edgeinfer.backends.base import Session
from edgeinfer.common.types import Logits
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.drafter_state import DrafterState
from edgeinfer.speculation.drafters.base import Context, Following
from edgeinfer.speculation.policy import Proposal, VerifyTree
from edgeinfer.speculation.stats import StatsCounter
from edgeinfer.speculation.verify import Draw


@dataclass(slots=True)
class DraftedText:
    """A text that is decoded with drafts."""

    session: Session
    tokens: list[int]  # prompt and what was drawn, the last of which is not committed; extended by what is drawn
    n_prompt: int
    limit: int  # most tokens to draw
    draw: Draw  # the target's sampler
    is_greedy: bool  # it takes the most probable token
    stop_ids: Collection[int]  # tokens that end the text
    # is_plain, params: see Context
    is_plain: bool = False
    params: SamplingParams | None = None
    # called with each token and the logits that it was drawn from, None for nobody
    note: Callable[[Logits, int], None] | None = None
    # constraint, free_draw: what may follow, and the sampler without that, for drafters; None where anything may follow
    constraint: Following | None = None
    free_draw: Draw | None = None
    stats: StatsCounter = field(default_factory=StatsCounter)
    # set by Speculator.begin:
    place: int = 0  # among the texts that run
    states: list[DrafterState] = field(default_factory=list)
    context: Context = field(init=False)

    @property
    def n_drawn(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - self.n_prompt

    @property
    def n_left(self) -> int:
        """Most tokens from here on."""
        return self.limit - self.n_drawn


@dataclass(slots=True)
class Step:
    """What a pass verifies of one text."""

    text: DraftedText
    proposals: list[Proposal]
    tree: VerifyTree
    # tokens, parents: of the rows, as Session.forward takes them; the last n_padding are ignored
    tokens: list[int]
    parents: list[int]
    n_padding: int
    hidden: bool | tuple[int, ...]  # the hidden states that its drafters need
    new: list[int] = field(default_factory=list)  # tokens that were drawn
    error: Exception | None = None  # why none could be drawn
