"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from edgeinfer.common.overriding import override
from edgeinfer.completion import Completion, Piece
from edgeinfer.server.answering import answer
from edgeinfer.server.asked import Asked
from edgeinfer.server.dialects.openai import common
from edgeinfer.server.dialects.openai.choices import ChoicesForm
from edgeinfer.server.dialects.openai.reading import read_chat
from edgeinfer.server.exchange import Exchange
from edgeinfer.server.pace import Pace
from edgeinfer.server.served import Served
from edgeinfer.server.server import Server
from edgeinfer.stream import Stream


async def chat(server: Server, exchange: Exchange) -> None:
    """Answer a chat."""
    asked, wants_usage = read_chat(await exchange.json(), server.limits)
    asked.shows_prompt = server.shown.prompts if asked.shows_prompt is None else asked.shows_prompt
    common.check_model(server, asked)
    await answer(server, exchange, asked, lambda served, asked: ChatForm(served, asked, wants_usage), common.error_of)


async def count_tokens(server: Server, exchange: Exchange) -> None:
    """The number of tokens that the prompt of a chat has."""
    asked, _ = read_chat(await exchange.json(), server.limits)
    common.check_model(server, asked)
    exchange.watch()
    async with server.models.use(asked.model) as served, server.running(exchange, 0) as run:
        n_tokens = await run.call(lambda: len(asked.prompt_of_chat(served.engine)))
    await exchange.reply_json({"object": "response.input_tokens", "input_tokens": n_tokens})


class ChatForm(ChoicesForm):
    """Objects chat.completion and chat.completion.chunk."""

    def __init__(self, served: Served, asked: Asked, wants_usage: bool) -> None:
        super().__init__(served, asked, wants_usage, "chat.completion.chunk", "chatcmpl")
        self._n_calls: dict[int, int] = {}

    @override
    def begin(self, streams: Sequence[Stream]) -> Iterator[bytes]:
        for number in range(len(streams)):
            yield self._chunk(number, {"role": "assistant", "content": None})

    @override
    def piece(self, number: int, piece: Piece) -> Iterator[bytes]:
        if not self._asked.is_stream:
            return
        if piece.logprobs:
            self._logprobs.setdefault(number, []).extend(piece.logprobs)
        if piece.reasoning:
            yield self._chunk(number, {"reasoning_content": piece.reasoning})
        calls, text = common.split_calls(piece.tool_calls, self._asked)
        if piece.text or text:
            yield self._chunk(number, {"content": piece.text + text})
        for call in calls:
            index = self._n_calls.get(number, 0)
            self._n_calls[number] = index + 1
            named = common.call_of(call)
            arguments, named["function"]["arguments"] = named["function"]["arguments"], ""
            yield self._chunk(number, {"tool_calls": [{"index": index, **named}]})
            yield self._chunk(number, {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]})

    @override
    def ended(self, number: int, completion: Completion) -> Iterator[bytes]:
        self._completions[number] = completion
        shown = common.shown_prompt(self._asked, self._engine, completion, number)
        yield self._chunk(number, {}, common.finish_of(completion, number in self._n_calls), **shown)

    @override
    def progress(self, number: int, pace: Pace) -> Iterator[bytes]:
        yield self._chunk(number, {}, prompt_progress=pace.progress())

    @override
    def whole(self) -> Any:
        choices = [self._choice(number) for number in sorted(self._completions)]
        head = {**self._head, "object": "chat.completion"}
        return {**head, "choices": choices, "usage": self._usage(), **self._more()}

    def _choice(self, number: int) -> dict[str, Any]:
        completion = self._completions[number]
        calls, text = common.split_calls(completion.tool_calls, self._asked)
        said = completion.text + text
        message: dict[str, Any] = {"role": "assistant", "content": said, "refusal": None, "annotations": []}
        if completion.reasoning:
            message["reasoning_content"] = completion.reasoning
        if calls:
            message |= {"content": said or None, "tool_calls": [common.call_of(call) for call in calls]}
        logprobs = common.chat_logprobs(self._engine, completion.logprobs) if self._has_logprobs else None
        return {
            "index": number,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": common.finish_of(completion, bool(calls)),
        }

    def _chunk(self, number: int, delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        waiting = self._logprobs.pop(number, None)
        logprobs = common.chat_logprobs(self._engine, waiting) if waiting else None
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self._event(choice, **more)
