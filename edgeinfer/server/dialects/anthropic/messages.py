"""/v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edgeinfer.common.overriding import override
from edgeinfer.completion import Completion, Piece
from edgeinfer.models.reasoning import ToolCall
from edgeinfer.server.answering import Form, answer
from edgeinfer.server.asked import Asked
from edgeinfer.server.dialects.anthropic import common
from edgeinfer.server.dialects.anthropic.reading import read, shows_reasoning
from edgeinfer.server.dialects.openai.common import split_calls
from edgeinfer.server.exchange import Exchange
from edgeinfer.server.served import Served
from edgeinfer.server.server import Server
from edgeinfer.stream import Stream
from edgeinfer.template_values import reasoning_values


async def answer_messages(server: Server, exchange: Exchange) -> None:
    """Answer a chat."""
    body = await exchange.json()
    asked, shows = read(body, server.limits), shows_reasoning(body)
    if body.get("thinking") is not None:
        asked.template = {"chat_template_kwargs": reasoning_values(shows)}
    exchange.extra["request-id"] = exchange.id
    await answer(server, exchange, asked, lambda served, asked: MessageForm(served, asked, shows), common.error_of)


async def count_tokens(server: Server, exchange: Exchange) -> None:
    """The number of tokens of a prompt, also of one that does not fit."""
    asked = read(await exchange.json(), server.limits, counts=True)
    exchange.watch()
    async with server.models.use(asked.model) as served, server.running(exchange, 0) as run:
        n = await run.call(lambda: _n_tokens(served, asked))
    await exchange.reply_json({"input_tokens": n})


def _n_tokens(served: Served, asked: Asked) -> int:
    return len(asked.prompt_of_chat(served.engine))


_BESIDE: Mapping[str, dict[str, Any]] = {"thinking": {"signature": ""}, "text": {"citations": None}}  # of blocks


class MessageForm(Form):
    """Events of a message, or a message."""

    kind = common.EVENTS
    ping = common.PING

    def __init__(self, served: Served, asked: Asked, shows: bool) -> None:
        """shows: whether the client gets the reasoning."""
        self._engine, self._asked, self._shows = served.engine, asked, shows
        self._head = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": served.id,
            "container": None,
        }
        self._n_prompt = 0
        self._blocks: list[dict[str, Any]] = []  # so far; the last one may be open
        self._is_open = False
        self._end: dict[str, Any] = {}
        self._n_made = 0

    @override
    def begin(self, streams: Sequence[Stream]) -> Iterator[bytes]:
        self._n_prompt = streams[0].n_prompt
        message = {**self._head, "content": [], **common.end_of(None, None), "usage": self._usage()}
        yield common.event("message_start", message=message)

    @override
    def piece(self, number: int, piece: Piece) -> Iterator[bytes]:
        calls, text = split_calls(piece.tool_calls, self._asked)
        if piece.reasoning and self._shows:
            yield from self._add("thinking", piece.reasoning)
        if piece.text or text:
            yield from self._add("text", piece.text + text)
        for call in calls:
            yield from self._add_call(call)

    @override
    def ended(self, number: int, completion: Completion) -> Iterator[bytes]:
        stops = self._asked.options.get("stop") or ()
        met = common.met_stop(self._engine, completion, [stops] if isinstance(stops, str) else stops)
        has_calls = any(block["type"] == "tool_use" for block in self._blocks)
        self._n_made = completion.usage.completion_tokens
        self._end = common.end_of(common.stop_reason(completion, has_calls, met), met)
        yield from self._close()

    @override
    def end(self) -> Iterator[bytes]:
        yield common.event("message_delta", delta=self._end, usage=self._usage())
        yield common.event("message_stop")

    @override
    def failed(self, error: Any) -> bytes:
        return common.event("error", error=error["error"])

    @override
    def whole(self) -> Any:
        return {**self._head, "content": self._blocks, **self._end, "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        """Numbers of tokens. What the cache had of the prompt is counted as read, as that is no matter of a price."""
        none = dict.fromkeys(("cache_creation", "inference_geo", "output_tokens_details", "server_tool_use"))
        zero = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        made = {"input_tokens": self._n_prompt, "output_tokens": self._n_made}
        return {**made, **zero, **none, "service_tier": "standard"}

    def _add(self, kind: str, text: str) -> Iterator[bytes]:
        """Text or reasoning."""
        if not self._is_open or self._blocks[-1]["type"] != kind:
            yield from self._open({"type": kind, kind: "", **_BESIDE[kind]})
        self._blocks[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _add_call(self, call: ToolCall) -> Iterator[bytes]:
        yield from self._open(
            {"type": "tool_use", "id": call.id, "name": call.name, "input": {}, "caller": {"type": "direct"}}
        )
        yield self._delta({"type": "input_json_delta", "partial_json": json.dumps(call.arguments, ensure_ascii=False)})
        self._blocks[-1]["input"] = call.arguments
        yield from self._close()

    def _open(self, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        self._blocks.append(block)
        self._is_open = True
        yield common.event("content_block_start", index=len(self._blocks) - 1, content_block=dict(block))

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return common.event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self) -> Iterator[bytes]:
        if self._is_open:
            self._is_open = False
            yield common.event("content_block_stop", index=len(self._blocks) - 1)
