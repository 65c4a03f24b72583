"""/v1/responses, without anything that is stored."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edgeinfer.common.overriding import override
from edgeinfer.completion import Completion, Piece
from edgeinfer.models.reasoning import ToolCall
from edgeinfer.server.answering import Form, answer
from edgeinfer.server.asked import Asked
from edgeinfer.server.dialects.openai import common
from edgeinfer.server.dialects.openai.response_reading import read
from edgeinfer.server.exchange import Exchange, encoded
from edgeinfer.server.pace import Pace, timings_of
from edgeinfer.server.served import Served
from edgeinfer.server.server import Server
from edgeinfer.stream import Stream


async def respond(server: Server, exchange: Exchange) -> None:
    """Answer a conversation."""
    body = await exchange.json()
    asked = read(body, server.limits)
    common.check_model(server, asked)
    await answer(server, exchange, asked, lambda served, asked: ResponseForm(served, asked, body), common.error_of)


class ResponseForm(Form):
    """A response, or its events."""

    kind = common.EVENTS
    ping = common.PING

    def __init__(self, served: Served, asked: Asked, body: Mapping[str, Any]) -> None:
        self._asked, self._body = asked, body
        self._head = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": served.id,
        }
        self._items: list[dict[str, Any]] = []  # so far; the last one may be open
        self._is_open = False
        self._completion: Completion | None = None
        self._params: Any = None
        self._number = 0

    @override
    def begin(self, streams: Sequence[Stream]) -> Iterator[bytes]:
        self._params = streams[0].params
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    @override
    def piece(self, number: int, piece: Piece) -> Iterator[bytes]:
        calls, text = common.split_calls(piece.tool_calls, self._asked)
        if piece.reasoning:
            yield from self._add("reasoning", piece.reasoning)
        if piece.text or text:
            yield from self._add("message", piece.text + text, self._asked.times(number))
        for call in calls:
            yield from self._call(call)

    @override
    def progress(self, number: int, pace: Pace) -> Iterator[bytes]:
        told = {"prompt_progress": pace.progress(), **self._asked.times(number)}
        yield self._event("response.in_progress", response=self._response("in_progress"), **told)

    @override
    def ended(self, number: int, completion: Completion) -> Iterator[bytes]:
        self._completion = completion
        yield from self._close()

    @override
    def end(self) -> Iterator[bytes]:
        status = self._status()
        done = self._completion
        is_told = done is not None and self._asked.tells_times
        times = {"timings": timings_of(done.usage, done.timings)} if done is not None and is_told else {}
        yield self._event(f"response.{status}", response=self._response(status), **times)

    @override
    def failed(self, error: Any) -> bytes:
        return self._event("error", **{name: value for name, value in error["error"].items() if name != "type"})

    @override
    def whole(self) -> Any:
        return self._response(self._status())

    def _status(self) -> str:
        reason = None if self._completion is None else self._completion.finish_reason
        return "completed" if reason in ("stop", "interrupted") else "incomplete"

    def _response(self, status: str) -> dict[str, Any]:
        body, params = self._body, self._params
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        text = body.get("text") if isinstance(body.get("text"), dict) else {}
        return {
            **self._head,
            "status": status,
            "completed_at": None if status == "in_progress" else int(time.time()),
            "background": False,
            "error": None,
            "incomplete_details": details,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "max_tool_calls": None,
            "output": self._items,
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **(text or {})},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": [{"strict": None, "description": None, **tool} for tool in body.get("tools") or []],
            "top_p": params.top_p,
            "top_logprobs": 0,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "truncation": "disabled",
            "usage": self._usage(),
            "safety_identifier": None,
            "prompt_cache_key": None,
            "metadata": body.get("metadata") or {},
            **({} if body.get("user") is None else {"user": body["user"]}),  # which may be absent, but not null
        }

    def _usage(self) -> dict[str, Any] | None:
        if self._completion is None:
            return None
        usage = self._completion.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    # ---- Items -------------------------------------------------------------------------------------------------------

    def _add(self, kind: str, text: str, told: Mapping[str, Any] = {}) -> Iterator[bytes]:
        """Text of a message, or reasoning.  told: what is said beside it."""
        is_message = kind == "message"
        if not self._is_open or self._items[-1]["type"] != kind:
            yield from self._close()
            start: dict[str, Any] = {"role": "assistant"} if is_message else {"summary": []}
            id = f"{'msg' if is_message else 'rs'}_{secrets.token_hex(12)}"
            self._items.append({"id": id, "type": kind, "status": "in_progress", **start, "content": []})
            self._is_open = True
            item = {**self._items[-1], "content": []}
            yield self._event("response.output_item.added", output_index=self._last, item=item)
            self._items[-1]["content"].append(_part(kind))
            yield self._event("response.content_part.added", **self._place(), part=_part(kind))
        self._items[-1]["content"][0]["text"] += text
        more: dict[str, Any] = {"logprobs": []} if is_message else {}
        yield self._event(f"response.{_NAMES[kind]}.delta", **self._place(), delta=text, **more, **told)

    def _close(self) -> Iterator[bytes]:
        if not self._is_open:
            return
        self._is_open = False
        item = self._items[-1]
        item["status"] = "completed"
        part = item["content"][0]
        more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
        yield self._event(f"response.{_NAMES[item['type']]}.done", **self._place(), text=part["text"], **more)
        yield self._event("response.content_part.done", **self._place(), part=part)
        yield self._event("response.output_item.done", output_index=self._last, item=item)

    def _call(self, call: ToolCall) -> Iterator[bytes]:
        yield from self._close()
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        item = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "status": "in_progress"}
        item |= {"call_id": call.id, "name": str(call.name), "arguments": ""}
        self._items.append(item)
        place = {"item_id": item["id"], "output_index": self._last}
        yield self._event("response.output_item.added", output_index=self._last, item=dict(item))
        yield self._event("response.function_call_arguments.delta", **place, delta=arguments)
        yield self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=arguments)
        item |= {"arguments": arguments, "status": "completed"}
        yield self._event("response.output_item.done", output_index=self._last, item=item)

    @property
    def _last(self) -> int:
        return len(self._items) - 1

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": self._last, "content_index": 0}

    def _event(self, kind: str, **content: Any) -> bytes:
        data = encoded({"type": kind, "sequence_number": self._number, **content})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


_NAMES = {"message": "output_text", "reasoning": "reasoning_text"}


def _part(kind: str) -> dict[str, Any]:
    if kind == "message":
        return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": ""}
