"""What a caller wants of a text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from edgeinfer.common.types import Logits
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.drafters.base import Following
from edgeinfer.speculation.verify import Draw


@dataclass(frozen=True)
class Request:
    """A prompt, and how tokens that follow it are chosen."""

    prompt: Sequence[int]  # token ids, at least one
    limit: int  # most tokens to generate; 0 only reads the prompt, whose logits are kept
    draw: Draw  # the sampler
    params: SamplingParams
    stop_ids: Collection[int] = ()  # tokens that end the text
    # called with each token and the logits (n_vocab,) that it was drawn from, None for nobody
    note: Callable[[Logits, int], None] | None = None
    forget: Callable[[int], None] | None = None  # called with a number of tokens: what was noted after them is void
    # constraint, free_draw: see DraftedText
    constraint: Following | None = None
    free_draw: Draw | None = None
    wants_progress: bool = False  # its reader is told how much of the prompt is read
    priority: int = 0  # a text with a higher one comes first
    begun: Sequence[int] = ()  # tokens of the text that were drawn elsewhere, with which it goes on
    deadline: float | None = None  # of time.monotonic, when the text ends as it is; None for never

    @property
    def is_plain(self) -> bool:
        """Whether the largest logit is taken as it is."""
        return self.params.is_greedy and not self.params.changes_logits
