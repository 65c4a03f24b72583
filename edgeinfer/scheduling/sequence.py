"""A text that runs: its tokens, and while it has a place among those that run, its session and its drafts."""

from __future__ import annotations

import time
from typing import Literal, TypeAlias

from edgeinfer.backends.base import Rows, Session
from edgeinfer.common.types import Logits
from edgeinfer.context_cache.kept_text import KeptText
from edgeinfer.scheduling.request import Request
from edgeinfer.speculation.drafted_text import DraftedText
from edgeinfer.speculation.pipeline import Speculator
from edgeinfer.speculation.stats import StatsCounter

RUN_AHEAD = 32  # tokens that nobody has read, after which a text waits for its reader

End: TypeAlias = Literal["stop", "length", "interrupted", "timeout"]


class Sequence:
    """A text of a Scheduler, which alone changes it. What may be read from any thread: `tokens` up to `n_ready`.

    tokens: prompt and what was drawn.  n_ready: of the drawn tokens, those that are settled.  end: why no more come,
    None while some may.  error: what ended it instead.  n_cached: tokens of the prompt that were in the cache when it
    was first read.  n_read: drawn tokens that its reader has taken.
    """

    def __init__(self, request: Request, number: int) -> None:
        """number: in the order of asking."""
        self.request = request
        self.number = number
        self.tokens = [*request.prompt, *request.begun]
        self.n_prompt = len(request.prompt)
        self.n_ready, self.n_read = len(request.begun), 0
        self.end: End | None = "length" if 0 < request.limit <= self.n_ready else None
        self.error: BaseException | None = None
        self.is_interrupted = self.is_cancelled = False
        self.n_cached: int | None = None
        self.since = time.monotonic()
        self.reader = 0  # the thread that read last
        self.stats = StatsCounter()
        self.session: Session | None = None
        self.place: int | None = None  # among the texts that are drafted for
        self.speculator: Speculator | None = None  # that drafts for it
        self.drafted: DraftedText | None = None
        self.kept: KeptText | None = None  # its segments on disk
        self.has_stats = False  # whether drafters began with it
        self.logits: Logits | None = None  # of the prompt's last token, where limit is 0
        self.share_read = self.share_told = 0.0  # of the prompt

    # ---- for the reader ----------------------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """Whether no more tokens come than those that are ready."""
        return self.end is not None or self.error is not None

    @property
    def is_ready(self) -> bool:
        """Whether its reader has something to do."""
        return (
            self.n_read < self.n_ready
            or self.has_ended
            or self.is_interrupted
            or self.is_cancelled
            or self.logits is not None
            or self.has_progress
        )

    @property
    def has_progress(self) -> bool:
        """Whether more of the prompt was read than its reader was told."""
        return self.request.wants_progress and self.share_read > self.share_told

    def take(self) -> int:
        """The next token that is ready."""
        token = self.tokens[self.n_prompt + self.n_read]
        self.n_read += 1
        return token

    # ---- for the scheduler -------------------------------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        """Whether it waits for its reader."""
        return self.n_ready - self.n_read >= RUN_AHEAD or self.is_held

    @property
    def is_held(self) -> bool:
        """Whether its reader uses its session."""
        return self.request.limit == 0 and self.logits is not None

    @property
    def n_left(self) -> int:
        """Most tokens that it may still draw."""
        return self.request.limit - self.n_ready

    @property
    def n_to_read(self) -> int:
        """Tokens that are to be read before the next one is drawn: 1 while it decodes, 0 where all is done."""
        if self.session is None:
            return len(self.tokens)
        return len(self.tokens) - self.session.n_past

    @property
    def is_decoding(self) -> bool:
        """Whether each pass draws tokens of it: all but its last token is committed, and that was drawn."""
        return self.n_ready > 0 and self.n_to_read == 1

    def keep_settled(self) -> None:
        """Drop what was drawn in a pass that did not come to its end."""
        del self.tokens[self.n_prompt + self.n_ready :]
        if self.request.forget is not None:
            self.request.forget(self.n_ready)

    @property
    def needs_logits(self) -> bool:
        """Whether a token is to be drawn after what it has to read."""
        return self.n_ready == 0

    def reading_rows(self, n: int, taps: bool | tuple[int, ...]) -> Rows:
        """The next n tokens of what it has to read, with the hidden states that drafters need."""
        assert self.session is not None
        n_past = self.session.n_past
        is_last = n_past + n == len(self.tokens)
        return Rows(self.session, self.tokens[n_past : n_past + n], None, "last" if is_last else (), taps)

    @property
    def is_loading(self) -> bool:
        """Whether more of it is to be read from disk, before anything of it runs."""
        return self.kept is not None and self.kept.is_reading

    def tell_progress(self) -> None:
        """More of the prompt was read."""
        if self.n_ready == 0 and self.session is not None:
            n_cached = self.n_cached or 0
            self.share_read = (self.session.n_past - n_cached) / (self.n_prompt - n_cached)

    def settle(self, n_new: int) -> None:
        """The last n_new tokens are drawn for good."""
        n_ready = self.n_ready + n_new
        if n_new and self.tokens[-1] in self.request.stop_ids:
            self.end = "stop"
        elif n_ready >= self.request.limit:
            self.end = "length"
        self.n_ready = n_ready
