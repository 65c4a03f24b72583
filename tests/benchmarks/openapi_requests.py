"""Requests of OpenAI's dialect, one for each thing that a route takes, and those that it refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]
CHAT, TEXT, RESPONSES = "/chat/completions", "/completions", "/responses"

_HELLO = [{"role": "user", "content": "Say hello in one short sentence."}]
_OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_WEATHER = {
    "name": "weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
_CLOCK = {"name": "clock", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
_TOOLS = [{"type": "function", "function": each} for each in (_WEATHER, _CLOCK)]
_FLAT_TOOLS: list[Body] = [{"type": "function", "strict": None, **each} for each in (_WEATHER, _CLOCK)]
_ASKED = [{"role": "user", "content": "What is the weather in Rome, and what in Oslo? Use tools."}]
_CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
_CALLED = [
    *_ASKED,
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]
# A model that has seen answers begin with a thought and end it does the same.
_THOUGHTS = [
    message
    for question, thought, answer in (("2+2?", "Two and two.", "4"), ("3+3?", "Three and three.", "6"))
    for message in (
        {"role": "user", "content": question},
        {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n{answer}"},
    )
] + [{"role": "user", "content": "4+4?"}]


@dataclass(frozen=True)
class Case:
    """A request.  status: that it must have.  path: of the document, without /v1.  url: where it differs from that."""

    name: str
    path: str
    body: Any = None
    status: int = 200
    method: str = "POST"
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_stream(self) -> bool:
        return isinstance(self.body, dict) and self.body.get("stream") is True


def cases(model: str) -> Iterator[Case]:
    """All requests, those that are answered whole and as a stream."""
    for path, bodies in ((CHAT, _chats()), (TEXT, _texts()), (RESPONSES, _responses())):
        for name, body in bodies.items():
            body = {"model": model, **body}
            if path == RESPONSES or "stream_options" not in body:
                yield Case(name, path, body)
            yield Case(f"{name}, stream", path, {**body, "stream": True})
    yield from _models(model)
    yield from _refused(model)


def thoughts(model: str) -> Iterator[Case]:
    """Requests for a model whose template opens a thought, some cut within it."""
    for n_tokens in (16, 64):  # OpenAI takes no fewer
        chat = {"model": model, "messages": _THOUGHTS, "max_tokens": n_tokens, "temperature": 0}
        response = {"model": model, "input": _THOUGHTS, "max_output_tokens": n_tokens, "temperature": 0}
        for path, body in ((CHAT, chat), (RESPONSES, response)):
            for stream in (False, True):
                yield Case(f"thought of {n_tokens} tokens, stream {stream}", path, {**body, "stream": stream})


def _chats() -> dict[str, Body]:
    plain: Body = {"messages": _HELLO, "max_tokens": 12}
    schema = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": _OBJECT}}
    parts = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "And now?", "name": "ann"},
    ]
    tools: Body = {"messages": _ASKED, "tools": _TOOLS, "max_tokens": 200, "temperature": 0}
    named = {"type": "function", "function": {"name": "weather"}}
    return {
        "plain": plain,
        "to its end": {"messages": [{"role": "user", "content": "Say yes."}], "max_tokens": 200, "temperature": 0},
        "max_completion_tokens": {"messages": _HELLO, "max_completion_tokens": 3},
        "parts and roles": {**plain, "messages": parts},
        "n": {**plain, "n": 3, "seed": 5, "temperature": 1},
        "stop": {**plain, "stop": ["e", "\n"]},
        "one stop": {**plain, "stop": "e"},
        "sampling": {**plain, "temperature": 0.7, "top_p": 0.9, "presence_penalty": 0.1, "frequency_penalty": 0.2},
        "logit_bias": {**plain, "logit_bias": {"28": -100, "260": 5}},
        "logprobs": {**plain, "logprobs": True},
        "top_logprobs": {**plain, "logprobs": True, "top_logprobs": 5, "n": 2},
        "usage": {**plain, "stream_options": {"include_usage": True}},
        "ignored": {**plain, "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        "json_object": {**plain, "response_format": {"type": "json_object"}, "max_tokens": 40},
        "json_schema": {**plain, "response_format": schema, "max_tokens": 60},
        "text": {**plain, "response_format": {"type": "text"}},
        "tools": tools,
        "tools, none": {**tools, "tool_choice": "none", "max_tokens": 12},
        "tools, required": {**tools, "tool_choice": "required"},
        "tools, required, usage": {**tools, "tool_choice": "required", "stream_options": {"include_usage": True}},
        "tools, named": {**tools, "tool_choice": named},
        "tools, one call": {**tools, "tool_choice": "required", "parallel_tool_calls": False},
        "tools, n": {**tools, "tool_choice": "required", "n": 2, "seed": 1, "temperature": 1},
        "tools, cut": {**tools, "tool_choice": "required", "max_tokens": 5},
        "tools, logprobs": {**tools, "tool_choice": "required", "logprobs": True, "top_logprobs": 2},
        "tools, history": {**tools, "messages": _CALLED, "max_tokens": 20},
    }


def _texts() -> dict[str, Body]:
    plain: Body = {"prompt": "Once upon a time", "max_tokens": 12}
    return {
        "plain": plain,
        "to a stop": {**plain, "stop": [",", "."], "max_tokens": 60},
        "prompts": {**plain, "prompt": ["One, two,", "A, b,"]},
        "tokens": {**plain, "prompt": [504, 282, 260]},
        "lists of tokens": {**plain, "prompt": [[504, 282], [260, 28]]},
        "n": {**plain, "n": 2, "best_of": 1, "seed": 3, "temperature": 1},
        "echo": {**plain, "echo": True},
        "echo of two": {**plain, "prompt": ["One, two,", "A, b,"], "echo": True, "n": 2},
        "logprobs": {**plain, "logprobs": 0},
        "top logprobs": {**plain, "logprobs": 5},
        "echo with logprobs": {**plain, "echo": True, "logprobs": 1},
        "scores": {**plain, "echo": True, "logprobs": 1, "max_tokens": 0},
        "sampling": {**plain, "temperature": 0.5, "top_p": 0.8, "presence_penalty": 0.1, "frequency_penalty": 0.2},
        "logit_bias": {**plain, "logit_bias": {"28": -100}},
        "usage": {**plain, "stream_options": {"include_usage": True}},
        "ignored": {**plain, "user": "u"},
    }


def _responses() -> dict[str, Body]:
    plain: Body = {"input": "Say hello in one short sentence.", "max_output_tokens": 20}
    schema = {"type": "json_schema", "name": "person", "strict": True, "schema": _OBJECT}
    items = [
        {"type": "message", "role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "And now?"},
    ]
    tools: Body = {"input": _ASKED, "tools": _FLAT_TOOLS, "max_output_tokens": 200, "temperature": 0}
    called = [
        *_ASKED,
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
    ]
    return {
        "plain": plain,
        "to its end": {"input": "Say yes.", "max_output_tokens": 200, "temperature": 0},
        "items": {**plain, "input": items, "instructions": "Answer in English."},
        "sampling": {**plain, "temperature": 0.7, "top_p": 0.9},
        "ignored": {**plain, "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        "more ignored": {**plain, "safety_identifier": "s", "prompt_cache_key": "k", "include": []},
        "said": {**plain, "truncation": "disabled", "background": False, "reasoning": {"summary": "auto"}},
        "json_object": {**plain, "text": {"format": {"type": "json_object"}}},
        "json_schema": {**plain, "text": {"format": schema}, "max_output_tokens": 60},
        "text": {**plain, "text": {"format": {"type": "text"}}},
        "tools": tools,
        "tools, none": {**tools, "tool_choice": "none", "max_output_tokens": 20},
        "tools, required": {**tools, "tool_choice": "required"},
        "tools, named": {**tools, "tool_choice": {"type": "function", "name": "weather"}},
        "tools, one call": {**tools, "tool_choice": "required", "parallel_tool_calls": False},
        "tools, cut": {**tools, "tool_choice": "required", "max_output_tokens": 16},
        "tools, history": {**tools, "input": called, "max_output_tokens": 20},
    }


def _models(model: str) -> Iterator[Case]:
    yield Case("list", "/models", method="GET")
    yield Case("one", "/models/{model}", method="GET", url=f"/models/{model}")
    yield Case("none such", "/models/{model}", method="GET", url="/models/none", status=404)
    yield Case("embeddings", "/embeddings", {"model": model, "input": "a"}, status=501)
    yield Case("no such path", "/models", method="GET", url="/nothing", status=404)
    yield Case("wrong method", "/models", {}, url="/models", status=405)


def _refused(model: str) -> Iterator[Case]:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]
    bad_tool = [{"type": "function", "function": {"name": 7}}]
    of_chat: dict[str, Body] = {
        **{"no messages": {"messages": []}, "an image": {"messages": image}, "hot": {"temperature": "hot"}},
        **{"no n": {"n": 0}, "unknown": {"unknown_parameter": 1}, "bad tool": {"tools": bad_tool}},
        **{"choice of nothing": {"tool_choice": "required"}, "too long": {"messages": [*_HELLO] * 2000}},
        **{"bad schema": {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}}},
        **{"options of no stream": {"stream_options": {"include_usage": True}}, "top": {"top_logprobs": 3}},
    }
    of_text: dict[str, Body] = {
        **{"no prompt": {"prompt": None}, "tops": {"logprobs": 50}, "bias": {"logit_bias": {"a": 1}}},
        **{"best_of": {"best_of": 3}, "foreign tokens": {"prompt": [10**9]}, "suffix": {"suffix": 7}},
    }
    of_responses: dict[str, Body] = {
        **{
            "stored": {"previous_response_id": "resp_1"},
            "nothing": {"input": []},
            "search": {"tools": [{"type": "x"}]},
        },
        **{"cut": {"truncation": "auto"}, "effort": {"reasoning": {"effort": "low"}}, "unknown": {"x": 1}},
    }
    for path, plain, bodies in (
        (CHAT, {"messages": _HELLO}, of_chat),
        (TEXT, {"prompt": "Once"}, of_text),
        (RESPONSES, {"input": "Hello"}, of_responses),
    ):
        for name, body in bodies.items():
            yield Case(name, path, {"model": model, **plain, **body}, status=400)
        streamed = {"model": "none-such", "stream": True, **plain}
        yield Case("no model", path, dict(plain), status=400)
        yield Case("another model, stream", path, streamed, status=404)
        yield Case("no JSON", path, b"{", status=400)
        yield Case("no object", path, [], status=400)
        yield Case("no key", path, {"model": model, **plain}, status=401, headers={"authorization": "Bearer wrong"})
