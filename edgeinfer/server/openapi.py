"""/openapi.json: what the server takes, in OpenAPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from edgeinfer.server.exchange import Exchange
from edgeinfer.server.server import Server

_TEXT, _FLAG, _WHOLE = {"type": "string"}, {"type": "boolean"}, {"type": "integer"}
_NUMBER, _OBJECT, _ANY = {"type": "number"}, {"type": "object"}, dict[str, Any]()
_LIST = {"type": "array", "items": _ANY}
_STOP = {"oneOf": [_TEXT, {"type": "array", "items": _TEXT}]}
_SAMPLING = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty"), _NUMBER),
    **{"repeat_penalty": _NUMBER, "top_k": _WHOLE, "seed": _WHOLE, "stop": _STOP, "logit_bias": _ANY},
}
_CONSTRAINTS = {"schema": _ANY, "regex": _TEXT, "grammar": _TEXT, "choices": {"type": "array", "items": _TEXT}}
_OPENAI = {
    **{"model": _TEXT, "stream": _FLAG, "stream_options": _OBJECT, "n": _WHOLE, "max_tokens": _WHOLE, "user": _TEXT},
    **{"timeout": _NUMBER, "response_format": _OBJECT, **_SAMPLING, **_CONSTRAINTS},
    **dict.fromkeys(("timings_per_token", "return_progress", "verbose"), _FLAG),
}
_MESSAGE = {
    "type": "object",
    "properties": {"role": _TEXT, "content": {"oneOf": [_TEXT, _LIST]}, "tool_calls": _LIST, "tool_call_id": _TEXT},
    "required": ["role"],
}
_MESSAGES = {"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": 2048}
_TOOLS = {"tools": {"type": "array", "items": _OBJECT, "maxItems": 128}, "tool_choice": _ANY}
_TEMPLATE = {"add_generation_prompt": _FLAG, "chat_template_kwargs": _OBJECT}
_PROMPT = {"oneOf": [_TEXT, {"type": "array", "items": {"oneOf": [_TEXT, _WHOLE]}}]}
_LLAMA = {"n_predict": _WHOLE, "stream": _FLAG, "n_probs": _WHOLE, "json_schema": _ANY, "grammar": _TEXT, **_SAMPLING}
_OLLAMA = {"model": _TEXT, "stream": _FLAG, "format": _ANY, "options": _OBJECT, "keep_alive": _ANY, "think": _ANY}
_CLAUDE = {"model": _TEXT, "messages": _MESSAGES, "system": {"oneOf": [_TEXT, _LIST]}, **_TOOLS}
# Parameters of a path, and those that it must have.
_BODIES: Mapping[str, tuple[Mapping[str, Any], Sequence[str]]] = {
    "/v1/chat/completions": (
        {**_OPENAI, **_TOOLS, **_TEMPLATE, "messages": _MESSAGES, "logprobs": _FLAG, "top_logprobs": _WHOLE},
        ("model", "messages"),
    ),
    "/v1/completions": (
        {**_OPENAI, "prompt": _PROMPT, "logprobs": _WHOLE, "echo": _FLAG, "suffix": _TEXT},
        ("model", "prompt"),
    ),
    "/v1/responses": (
        {"model": _TEXT, "input": {"oneOf": [_TEXT, _LIST]}, "instructions": _TEXT, "max_output_tokens": _WHOLE}
        | {"stream": _FLAG, "text": _OBJECT, **_TOOLS, "temperature": _NUMBER, "top_p": _NUMBER},
        ("model", "input"),
    ),
    "/v1/messages": (
        {**_CLAUDE, "max_tokens": _WHOLE, "stream": _FLAG, "temperature": _NUMBER, "stop_sequences": _LIST},
        ("model", "messages", "max_tokens"),
    ),
    "/v1/messages/count_tokens": (_CLAUDE, ("model", "messages")),
    "/api/chat": ({**_OLLAMA, "messages": {**_MESSAGES, "minItems": 0}, "tools": _TOOLS["tools"]}, ("model",)),
    "/api/generate": (
        {**_OLLAMA, "prompt": _TEXT, "system": _TEXT, "suffix": _TEXT, "raw": _FLAG},
        ("model",),
    ),
    "/api/show": ({"model": _TEXT}, ("model",)),
    "/completion": ({**_LLAMA, "prompt": _PROMPT}, ("prompt",)),
    "/infill": ({**_LLAMA, "input_prefix": _TEXT, "input_suffix": _TEXT, "input_extra": _LIST, "prompt": _TEXT}, ()),
    "/tokenize": (
        {
            **dict.fromkeys(("content", "prompt"), _TEXT),
            **dict.fromkeys(("add_special", "add_special_tokens", "parse_special", "with_pieces"), _FLAG),
        },
        (),
    ),
    "/detokenize": ({"tokens": {"type": "array", "items": {**_WHOLE, "minimum": 0}}}, ("tokens",)),
    "/apply-template": ({"messages": _MESSAGES, **_TOOLS, **_TEMPLATE}, ("messages",)),
}
_SAME = {
    "/completions": "/completion",
    "/responses": "/v1/responses",
    **dict.fromkeys(
        (
            "/chat/completions",
            *(f"{start}/chat/completions/input_tokens" for start in ("", "/v1")),
        ),
        "/v1/chat/completions",
    ),
}
_ERRORS = {
    "400": "A parameter is wrong or not supported, or the prompt does not fit",
    "401": "A key is needed",
    "403": "Not by this name or from this page",
    "404": "No such model",
    "413": "The body is too long",
    "429": "Too many texts wait; Retry-After says when to come again",
    "501": "This server cannot do that",
    "503": "It shuts down, or has no memory left",
}


async def openapi(server: Server, exchange: Exchange) -> None:
    """The document."""
    await exchange.reply_json(server.document)


def document(routes: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The document. routes: methods by path."""
    paths: dict[str, Any] = {}
    for path, methods in routes.items():
        plain = path.replace(":path", "")
        paths[plain] = {method.lower(): _operation(plain, method) for method in methods}
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.0.3",
        "info": {"title": "edgeinfer", "version": version("edgeinfer")},
        "paths": paths,
        "components": {"securitySchemes": keys},
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _operation(path: str, method: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": f"{method.lower()}{path.replace('/', '_').replace('{', '').replace('}', '')}",
        "responses": {"200": {"description": "The answer"}}
        | {status: {"description": about} for status, about in _ERRORS.items()},
    }
    if "{model}" in path:
        found["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": _TEXT}]
    if method == "POST":
        properties, required = _BODIES.get(_SAME.get(path, path), ({}, ()))
        schema = {
            "type": "object",
            "properties": dict(properties),
            **({"required": list(required)} if required else {}),
        }
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return found
