"""Lines of a batch: JSON objects as in OpenAI's batch files, or with a prompt or messages and options beside them."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, TypeAlias, cast

from edgeinfer.common.arguments import shown
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.constraints.options import ConstraintOptions, Schema
from edgeinfer.message import Message
from edgeinfer.sampling import SamplingOptions, SamplingParams
from edgeinfer.stream import RequestOptions

MOST_BYTES = 1 << 26  # of a line

Form: TypeAlias = Literal["own", "chat", "completion"]

_URLS: Mapping[object, Form] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
LIMITS = ("max_completion_tokens", "max_tokens")  # the first one that is given
# That change no text.
IGNORED = {
    *("model", "user", "metadata", "stream", "stream_options", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls"),
}
_ONLY: Mapping[str, tuple[object, ...]] = {  # options of which only these values are known
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
}


@dataclass(frozen=True, slots=True)
class Line:
    """A line that is not empty.  number: the first is 1.  data: None of one that is too long."""

    number: int
    data: bytes | None


@dataclass(frozen=True, slots=True)
class Name:
    """What an answer is recognised by.  key: of the line, for a later run.  id: as the line says, or its number."""

    key: str
    id: str | int | None
    form: Form


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: a prompt, text or token ids, or messages.  options: those that the line gives."""

    prompt: str | list[int] | None
    messages: list[Message] | None
    options: RequestOptions


def read_lines(file: BinaryIO) -> Iterator[Line]:
    """The lines of a file, read as they are needed."""
    number, starts, too_long = 0, True, False
    while data := file.readline(MOST_BYTES):
        if starts:
            number, too_long = number + 1, not data.endswith(b"\n") and len(data) == MOST_BYTES
        starts = data.endswith(b"\n")
        if too_long:
            if starts:
                yield Line(number, None)
            continue
        stripped = (data.removeprefix(codecs.BOM_UTF8) if number == 1 else data).strip()
        if stripped:
            yield Line(number, stripped)
    if too_long and not starts:
        yield Line(number, None)


def parse_line(line: Line) -> dict[str, Any]:
    """The object of a line. Raises InvalidArgument."""
    if line.data is None:
        raise InvalidArgument(f"the line has more than {MOST_BYTES} bytes")
    try:
        content = json.loads(line.data.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"the line is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise InvalidArgument(f"the line must be a JSON object: found {shown(content)}")
    return content


def name_of(content: Mapping[str, Any], number: int, key: str) -> Name:
    """The name of a line, whether or not the rest of it is right."""
    if {"custom_id", "url", "body"} & content.keys():
        custom_id = content.get("custom_id")
        return Name(key, custom_id if isinstance(custom_id, str) else None, _form_of(content.get("url")) or "chat")
    id = content.get("id", number)
    return Name(key, id if isinstance(id, str | int) and not isinstance(id, bool) else number, "own")


def read_request(content: Mapping[str, Any], form: Form) -> Asked:
    """The request of a line. Raises InvalidArgument."""
    if form != "own":
        return _openai_request(content)
    id = content.get("id")
    if id is not None and (isinstance(id, bool) or not isinstance(id, str | int)):
        raise InvalidArgument(f"id must be a text or an integer: found {shown(id)}")
    if ("prompt" in content) == ("messages" in content):
        raise InvalidArgument("a line must have a prompt or messages, and not both")
    rest = {name: value for name, value in content.items() if name != "id"}
    return _asked(rest, "chat" if "messages" in content else "completion")


def _openai_request(content: Mapping[str, Any]) -> Asked:
    if unknown := sorted(content.keys() - {"custom_id", "method", "url", "body"}):
        raise InvalidArgument(f"a line of a batch file has custom_id, method, url and body: found {shown(unknown)}")
    if not isinstance(content.get("custom_id"), str):
        raise InvalidArgument(f"custom_id must be a text: found {shown(content.get('custom_id'))}")
    if content.get("method", "POST") != "POST":
        raise InvalidArgument(f"method must be POST: found {shown(content['method'])}")
    form = _form_of(content.get("url"))
    if form is None:
        raise InvalidArgument(f"url must be {' or '.join(map(str, _URLS))}: found {shown(content.get('url'))}")
    body = content.get("body")
    if not isinstance(body, dict):
        raise InvalidArgument(f"body must be a JSON object: found {shown(body)}")
    return _asked(body, form)


def _asked(body: Mapping[str, Any], form: Form) -> Asked:
    what = "messages" if form == "chat" else "prompt"
    if what not in body:
        raise InvalidArgument(f"the request has no {what}")
    of_template = {"chat_template_kwargs"} & body.keys() if form == "chat" else set()
    options = _options({name: value for name, value in body.items() if name not in (what, *of_template)})
    if form == "chat":
        told = {name: body[name] for name in of_template}  # checked by the conversation
        return Asked(None, _messages(body["messages"]), cast(RequestOptions, {**options, **told}))
    prompt = body["prompt"]
    are_tokens = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not isinstance(prompt, str) and not are_tokens:
        raise InvalidArgument(f"the prompt must be one text, or the ids of its tokens: found {shown(prompt)}")
    return Asked(prompt, None, options)


def _options(given: Mapping[str, Any]) -> RequestOptions:
    """Options by the names that SamplingOptions and OpenAI have for them; null is as if not given."""
    options: dict[str, Any] = {}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if name in _ONLY:
            # == alone takes false for 0 and true for 1
            if not any(value == known and type(value) is type(known) for known in _ONLY[name]):
                raise InvalidArgument(f"{name} {shown(value)} is not supported")
        elif name in (*SamplingOptions.__annotations__, *ConstraintOptions.__annotations__, "stop"):
            options[name] = value
        elif name == "response_format":
            options |= constraint_of(value)
        elif name not in (*IGNORED, *LIMITS):
            raise InvalidArgument(no_such(name))
    limit = next((given[name] for name in LIMITS if name in given), None)
    return cast(RequestOptions, options if limit is None else options | {"max_tokens": limit})


def constraint_of(format: object) -> ConstraintOptions:
    """What OpenAI's response_format says. Raises InvalidArgument."""
    kind = format.get("type") if isinstance(format, dict) else None
    if kind == "text":
        return {}
    if kind == "json_object" and isinstance(format, dict) and "schema" not in format:
        return {"json": True}
    # llama.cpp's servers have the schema of a json_object beside its type
    described = format if kind == "json_object" else format.get("json_schema") if isinstance(format, dict) else None
    if (
        kind in ("json_object", "json_schema")
        and isinstance(described, dict)
        and isinstance(described.get("schema"), dict)
    ):
        return {"schema": cast(Schema, described["schema"])}
    raise InvalidArgument(
        f"response_format must be text, json_object, or json_schema with a schema: found {shown(format)}"
    )


def no_such(name: str) -> str:
    """That there is no option of this name, with the name that it has here."""
    try:
        SamplingParams().changed({name: None})
    except TypeError as error:
        return str(error).replace("sampling parameter", "option")
    raise AssertionError(name)  # it is one of SamplingOptions


def _messages(given: object) -> list[Message]:
    if not isinstance(given, list) or not given:
        raise InvalidArgument(f"messages must be a list of at least one message: found {shown(given)}")
    messages = [_message(each, f"message {number}") for number, each in enumerate(given, start=1)]
    if messages[-1]["role"] != "user":
        raise InvalidArgument(f"the last message must be the user's: found {messages[-1]['role']}")
    return messages


def _message(given: object, place: str) -> Message:
    if not isinstance(given, dict) or not {"role", "content"} <= given.keys() <= {"role", "content", "name"}:
        raise InvalidArgument(f'{place} must be {{"role": ..., "content": ...}}: found {shown(given)}')
    role = given["role"]
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidArgument(f"{place}: the role must be {', '.join(ROLES)}: found {shown(role)}")
    return {"role": ROLES[role], "content": text_of(given["content"], place)}


def text_of(content: object, place: str) -> str:
    """The text of a message: itself, or parts that are texts. Raises InvalidArgument."""
    parts: list[Any] = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [
        part["text"]
        for part in parts
        if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    ]
    if len(texts) < len(parts):
        raise InvalidArgument(f"{place}: the content must be a text: found {shown(content)}")
    return "\n".join(texts)


def _form_of(url: object) -> Form | None:
    return _URLS.get(url) if isinstance(url, str) else None
