"""Lines that a batch writes: OpenAI's results for OpenAI's requests, plain objects for others."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

from edgeinfer.batch.lines import Name
from edgeinfer.completion import Completion
from edgeinfer.models.reasoning import ToolCall

KEY_PREFIX = "batch_req_"  # of OpenAI's ids, before the key of a line
_REASONS = {"stop": "stop", "repetition": "stop"}  # of OpenAI; all others are "length"


def answered(name: Name, completion: Completion, model: str) -> dict[str, Any]:
    """The record of an answer.  model: the name of the model."""
    if name.form == "own":
        return {
            "id": name.id,
            "request": name.key,
            "text": completion.text,
            **({} if completion.reasoning is None else {"reasoning": completion.reasoning}),
            **(
                {"tool_calls": [dataclasses.asdict(each) for each in completion.tool_calls]}
                if completion.tool_calls
                else {}
            ),
            **({} if completion.parse_error is None else {"parse_error": completion.parse_error}),
            "finish_reason": completion.finish_reason,
            "usage": dataclasses.asdict(completion.usage),
            "seed": completion.params.seed,
        }
    body = _chat(name, completion) if name.form == "chat" else _text(name, completion)
    usage = completion.usage
    body |= {
        "created": int(time.time()),
        "model": model,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        },
        "seed": completion.params.seed,
    }
    response = {"status_code": 200, "request_id": f"req_{name.key}", "body": body}
    return {"id": KEY_PREFIX + name.key, "custom_id": name.id, "response": response, "error": None}


def failed(name: Name, error: BaseException) -> dict[str, Any]:
    """The record of a line that has no answer."""
    what = {"code": type(error).__name__, "message": str(error)}
    if name.form == "own":
        return {"id": name.id, "request": name.key, "error": what}
    return {"id": KEY_PREFIX + name.key, "custom_id": name.id, "response": None, "error": what}


def as_line(record: dict[str, Any]) -> bytes:
    """A record as a line of JSON, in ASCII."""
    return json.dumps(record).encode() + b"\n"


def _chat(name: Name, completion: Completion) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
    if completion.reasoning is not None:
        message["reasoning_content"] = completion.reasoning
    reason = _REASONS.get(completion.finish_reason, "length")
    if completion.tool_calls:
        message["tool_calls"] = [_call(name, *each) for each in enumerate(completion.tool_calls)]
        reason = "tool_calls" if reason == "stop" else reason
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
    return {"id": f"chatcmpl-{name.key}", "object": "chat.completion", "choices": [choice]}


def _call(name: Name, number: int, call: ToolCall) -> dict[str, Any]:
    arguments = call.text if call.name is None else json.dumps(call.arguments, ensure_ascii=False)
    function = {"name": call.name or "", "arguments": arguments}
    return {"id": f"call_{name.key}_{number}", "type": "function", "function": function}


def _text(name: Name, completion: Completion) -> dict[str, Any]:
    reason = _REASONS.get(completion.finish_reason, "length")
    choice = {"index": 0, "text": completion.text, "logprobs": None, "finish_reason": reason}
    return {"id": f"cmpl-{name.key}", "object": "text_completion", "choices": [choice]}
