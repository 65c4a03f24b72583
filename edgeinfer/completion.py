"""What a request gives back: pieces while it runs, a completion at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from edgeinfer.models.reasoning import ToolCall
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.stats import Speculation

FinishReason: TypeAlias = Literal["stop", "length", "repetition", "interrupted"]
"""Why the text ended: the model or a stop string ended it, max_tokens or n_ctx was reached, it only repeated itself
(SamplingParams.loop_guard), somebody stopped it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The next part of a text. All pieces together are the text and the tokens of the completion.

    text: may be empty, where the bytes so far are no whole character or might become a stop string.
    tokens: ids drawn for it; a stop token is not among them.  finish_reason: set on the last piece only.
    reasoning: what it adds to that of the completion; in a chat, text is of the answer alone.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request.

    prompt_tokens: all of the prompt.  cached_tokens: those of the prompt that were in the KV cache already.
    completion_tokens: those drawn, without a stop token.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of a request; what the caller does between two pieces does not count.

    prompt_seconds: from the start to the first token drawn.  decode_seconds: for all tokens after it, a stop token
    included.  prompt_tokens_per_second: of the tokens that were not cached.  decode_tokens_per_second: of the tokens
    after the first. Rates are 0 where nothing was done.  speculation: what drafts did for it, None without any.
    """

    prompt_seconds: float
    decode_seconds: float
    prompt_tokens_per_second: float
    decode_tokens_per_second: float
    speculation: Speculation | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished text.

    text: without the stop string.  tokens: every id drawn but a stop token; a stop string's tokens are among them.
    params: as used, with the seed that was drawn if none was given: the same prompt with them gives the same text.
    reasoning, tool_calls: in a chat, what the model thought before it answered, None if it did not, and the tools that
    it asked for; text is then the answer without them. The completion of a raw prompt is all text.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    params: SamplingParams
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
