"""/api/chat and /api/generate."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from edgeinfer.common.overriding import override
from edgeinfer.completion import Completion, Piece
from edgeinfer.message import Message
from edgeinfer.server.about import abilities
from edgeinfer.server.answering import Form, answer
from edgeinfer.server.asked import Asked
from edgeinfer.server.dialects.ollama import common
from edgeinfer.server.dialects.ollama.reading import read_common, read_messages, read_tools
from edgeinfer.server.dialects.openai.common import chat_logprobs, split_calls
from edgeinfer.server.exchange import Exchange
from edgeinfer.server.problem import Problem, unsupported
from edgeinfer.server.served import Served
from edgeinfer.server.server import Server
from edgeinfer.stream import Stream
from edgeinfer.template_values import reasoning_values

_CHAT = frozenset({"messages", "tools"})
_GENERATE = frozenset(
    {"prompt", "suffix", "images", "system", "template", "raw", "context", "width", "height", "steps"}
)


async def chat(server: Server, exchange: Exchange) -> None:
    """Answer a chat; without messages the model is loaded, or with keep_alive 0 dropped."""
    body = await exchange.json()
    asked = read_common(body, server.limits, _CHAT)
    asked.messages = read_messages(body.get("messages"), server.limits)
    asked.tools = read_tools(body.get("tools"), server.limits)
    if not asked.messages:
        await _load(server, exchange, asked, body, {"message": {"role": "assistant", "content": ""}})
        return
    await _answer(server, exchange, asked, body, is_chat=True)


async def generate(server: Server, exchange: Exchange) -> None:
    """Complete a prompt: as the first message of a chat, or as it is if it is raw."""
    body = await exchange.json()
    asked = read_common(body, server.limits, _GENERATE)
    prompt, system = body.get("prompt") or "", body.get("system") or ""
    if not isinstance(prompt, str) or not isinstance(system, str):
        raise Problem(400, "prompt and system must be texts")
    suffix = body.get("suffix") or ""
    if not isinstance(suffix, str):
        raise Problem(400, "suffix must be a text", param="suffix")
    for name in ("images", "template", "context", "width", "height", "steps"):
        if body.get(name):
            raise unsupported(name)
    if not prompt:
        await _load(server, exchange, asked, body, {"response": ""})
        return
    if body.get("raw") or suffix:
        asked.prompts, asked.suffix = [prompt], suffix
    else:
        first: list[Message] = [{"role": "system", "content": system}] if system else []
        asked.messages = [*first, {"role": "user", "content": prompt}]
    await _answer(server, exchange, asked, body, is_chat=False)


async def _load(server: Server, exchange: Exchange, asked: Asked, body: dict[str, Any], empty: dict[str, Any]) -> None:
    seconds = common.keep_seconds(body.get("keep_alive"))
    reason = "unload" if seconds == 0 else "load"
    if seconds == 0:
        id = server.models.find(asked.model)
        await server.models.drop(id)
    else:
        async with server.models.use(asked.model) as served:
            id = served.id
            server.models.keep(served, seconds)
    reply = {"model": common.tagged(id), "created_at": common.moment(), **empty, "done": True, "done_reason": reason}
    await exchange.reply_json(reply)


async def _answer(server: Server, exchange: Exchange, asked: Asked, body: dict[str, Any], is_chat: bool) -> None:
    think, seconds = body.get("think"), common.keep_seconds(body.get("keep_alive"))
    if think not in (None, True, False, "low", "medium", "high"):
        raise Problem(400, f"think must be true or false: found {str(think)[:40]!r}", param="think")
    if think is not None and asked.messages is not None:
        asked.template = {"chat_template_kwargs": reasoning_values(think is not False)}

    def form_of(served: Served, asked: Asked) -> Answer:
        if think and not abilities(served.engine).reasons:
            raise Problem(400, f"{served.id} does not support thinking", param="think")
        server.models.keep(served, seconds)
        return Answer(served, asked, is_chat, think is not False)

    await answer(server, exchange, asked, form_of, common.error_of)


class Answer(Form):
    """Lines of JSON, or one object."""

    kind = common.LINES
    ping = b""

    def __init__(self, served: Served, asked: Asked, is_chat: bool, shows_reasoning: bool) -> None:
        """shows_reasoning: whether the client gets the reasoning."""
        self._engine, self._asked, self._is_chat, self._shows = served.engine, asked, is_chat, shows_reasoning
        self._model, self._started = common.tagged(served.id), time.monotonic()
        self._has_logprobs = asked.options.get("logprobs") is not None
        self._last: dict[str, Any] = {}

    @override
    def begin(self, streams: Sequence[Stream]) -> Iterator[bytes]:
        return iter(())

    @override
    def piece(self, number: int, piece: Piece) -> Iterator[bytes]:
        calls, text = split_calls(piece.tool_calls, self._asked)
        reasoning = piece.reasoning if self._shows else ""
        if not self._asked.is_stream or not (piece.text or text or reasoning or calls or piece.logprobs):
            return
        content = self._content(piece.text + text, reasoning, calls)
        if self._has_logprobs:
            content["logprobs"] = chat_logprobs(self._engine, piece.logprobs)["content"]
        yield common.line({**self._head(), **content, "done": False})

    @override
    def ended(self, number: int, completion: Completion) -> Iterator[bytes]:
        calls, text = split_calls(completion.tool_calls, self._asked)
        reasoning = (completion.reasoning or "") if self._shows else ""
        content = self._content("", "", []) if self._asked.is_stream else None
        if content is None:
            content = self._content(completion.text + text, reasoning, calls)
            if self._has_logprobs:
                content["logprobs"] = chat_logprobs(self._engine, completion.logprobs)["content"]
        end = {"done": True, "done_reason": common.done_reason(completion.finish_reason)}
        self._last = {**self._head(), **content, **end, **common.figures(completion, self._started)}
        yield common.line(self._last)

    @override
    def end(self) -> Iterator[bytes]:
        return iter(())

    @override
    def failed(self, error: Any) -> bytes:
        return common.line(error)

    @override
    def whole(self) -> Any:
        return self._last

    def _head(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": common.moment()}

    def _content(self, text: str, reasoning: str, calls: Sequence[Any]) -> dict[str, Any]:
        thinking = {"thinking": reasoning} if reasoning else {}
        if not self._is_chat:
            return {"response": text, **thinking}
        message: dict[str, Any] = {"role": "assistant", "content": text, **thinking}
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "function": {"index": index, "name": call.name, "arguments": call.arguments}}
                for index, call in enumerate(calls)
            ]
        return {"message": message}
