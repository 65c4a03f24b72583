"""Parts of OpenAI's replies that several of them have."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from edgeinfer.completion import Completion, FinishReason
from edgeinfer.engine import Engine
from edgeinfer.logprobs import TokenLogprob
from edgeinfer.models.reasoning import ToolCall
from edgeinfer.server.asked import Asked
from edgeinfer.server.exchange import Exchange, encoded
from edgeinfer.server.problem import Problem
from edgeinfer.server.served import Served
from edgeinfer.server.server import Server

EVENTS = "text/event-stream; charset=utf-8"
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
_NEVER = -9999.0  # OpenAI's log probability of a token that is excluded
_FINISH: Mapping[FinishReason, str] = {
    "stop": "stop",
    "length": "length",
    "repetition": "length",
    "timeout": "length",
    "interrupted": "stop",
}


def event(content: Any) -> bytes:
    """An event of a stream."""
    return b"data: " + encoded(content) + b"\n\n"


def error_of(exchange: Exchange, problem: Problem) -> dict[str, Any]:
    """An error as OpenAI writes it."""
    return {
        "error": {
            "message": problem.message,
            "type": problem.kind,
            "param": problem.param,
            "code": problem.code,
            **problem.more,
        }
    }


def llama_error_of(exchange: Exchange, problem: Problem) -> dict[str, Any]:
    """The same at the paths that llama.cpp's clients use, which look for another type where a prompt is too long."""
    found = error_of(exchange, problem)
    if problem.code == "context_length_exceeded":
        found["error"]["type"] = "exceed_context_size_error"
    return found


def check_model(server: Server, asked: Asked) -> None:
    """Raises Problem where a request names no model, unless the server answers to any name."""
    if asked.model is None and not server.models.any_name:
        raise Problem(400, "the request has no model: name one of /v1/models", param="model")


def head(kind: str, prefix: str, served: Served, asked: Asked) -> dict[str, Any]:
    """What a reply and each part of a stream begin with."""
    return {
        "id": (asked.going_on and asked.going_on.id) or f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": served.id,
        "system_fingerprint": served.fingerprint,
    }


def finish_of(completion: Completion, has_calls: bool = False) -> str:
    """Why a text ended. A call that was cut is no call."""
    return "tool_calls" if completion.finish_reason == "stop" and has_calls else _FINISH[completion.finish_reason]


def split_calls(calls: Sequence[ToolCall], asked: Asked) -> tuple[list[ToolCall], str]:
    """(calls for the client, the text of the others): those of no tool, or where no tools were given."""
    found = [call for call in calls if asked.tools and call.name is not None and call.arguments is not None]
    return found, "".join(call.text for call in calls if call not in found)


def shown_prompt(asked: Asked, engine: Engine, completion: Completion, number: int) -> dict[str, Any]:
    """The prompt of a text and what it was drawn with, where that was asked for."""
    if not asked.shows_prompt:
        return {}
    tokens = asked.prompt_tokens[number // asked.n]
    params = {**completion.params.to_json(), "stop": asked.options.get("stop") or []}
    shown = {"prompt": asked.prompt_text(engine, number), "prompt_tokens": list(tokens), "params": params}
    return {"__verbose": shown}


def usage_of(completions: Sequence[Completion], n: int) -> dict[str, Any]:
    """Numbers of tokens.  n: samples of each prompt, which is read once."""
    firsts = completions[::n]
    n_prompt = sum(each.usage.prompt_tokens for each in firsts)
    n_made = sum(each.usage.completion_tokens for each in completions)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_made,
        "total_tokens": n_prompt + n_made,
        "prompt_tokens_details": {"cached_tokens": sum(each.usage.cached_tokens for each in firsts)},
    }


def logprob(value: float) -> float:
    """A log probability that JSON has."""
    return value if math.isfinite(value) else _NEVER


def token_text(engine: Engine, token: int) -> str:
    """The text of a token, also where it is not shown."""
    return str(engine.tokenizer.name(token))


def chat_logprobs(engine: Engine, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Log probabilities of tokens as chats have them."""

    def entry(token: int, value: float) -> dict[str, Any]:
        data = engine.tokenizer.token_bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": logprob(value), "bytes": list(data)}

    content = [
        {**entry(each.token, each.logprob), "top_logprobs": [entry(*top) for top in each.top]} for each in tokens
    ]
    return {"content": content, "refusal": None}


def call_of(call: ToolCall) -> dict[str, Any]:
    """A call of a tool."""
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": call.id, "type": "function", "function": function}
