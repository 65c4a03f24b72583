"""Results of a request: pieces while it runs, a completion at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from edgeinfer.logprobs import TokenLogprob
from edgeinfer.models.reasoning import ToolCall
from edgeinfer.offload.reads import ExpertReads
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.stats import Speculation

FinishReason: TypeAlias = Literal["stop", "length", "repetition", "interrupted", "timeout"]
"""Why the text ended: the model or a stop string ended it, max_tokens or n_ctx was reached, it only repeated itself, or
its calls of tools did (SamplingParams.loop_guard), somebody stopped it, its time was over."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The next part of a text. All pieces together are the text and the tokens of the completion."""

    text: str  # may be empty, if the bytes so far are an incomplete character or might become a stop string
    tokens: tuple[int, ...]  # ids sampled for it, without a stop token
    finish_reason: FinishReason | None = None  # set on the last piece only
    reasoning: str = ""  # the next part of the completion's reasoning; in a chat, text is that of the answer only
    logprobs: tuple[TokenLogprob, ...] = ()  # of these tokens, where asked for
    tool_calls: tuple[ToolCall, ...] = ()  # in a chat, those that have ended with this piece


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request."""

    prompt_tokens: int  # all of the prompt
    cached_tokens: int  # those of the prompt that were in the KV cache
    completion_tokens: int  # those generated, without a stop token


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of a request, without what the caller does between two pieces."""

    prompt_seconds: float  # from the start to the first token
    decode_seconds: float  # for all tokens after it, a stop token included
    prompt_tokens_per_second: float  # of the tokens that were not cached; 0 if there were none
    decode_tokens_per_second: float  # of the tokens after the first; 0 if there were none
    # figures of speculative decoding, None without it and where it was stopped before the first token
    speculation: Speculation | None = None
    # prompt_experts, decode_experts: what the expert cache did in these times, None where all experts are in memory
    prompt_experts: ExpertReads | None = None
    decode_experts: ExpertReads | None = None

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens after the first from one forward pass: 1 without speculation, 0 if there were no such tokens."""
        if self.speculation is not None:
            return self.speculation.tokens_per_step
        return 1.0 if self.decode_tokens_per_second else 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished text."""

    text: str  # without the stop string
    tokens: tuple[int, ...]  # all ids generated but a stop token; those of a stop string are included
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    # as used, with the seed that was drawn if none was given; the same prompt with them gives the same text
    params: SamplingParams
    # reasoning, tool_calls: in a chat, what the model thought before it answered, or None, and the tools that it
    # called; text is the answer without them. For a raw prompt everything is text.
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each token where `logprobs` was given, else none
    # parsed, parse_error: of a constraint (edgeinfer.constraints.options), the value of the answer, which is a pydantic
    # object, what JSON says, or the text; or None, and why there is no value
    parsed: Any = None
    parse_error: str | None = None
    # in a chat with tools: why a call is part of the text, None where none is
    call_error: str | None = None
    end_logprob: TokenLogprob | None = None  # of the stop token that ended it, where `logprobs` was given
