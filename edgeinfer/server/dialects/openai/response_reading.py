"""Bodies of /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from edgeinfer.batch.lines import ROLES
from edgeinfer.common.arguments import check_integer, shown
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.message import Message
from edgeinfer.server.asked import Asked
from edgeinfer.server.dialects.openai.messages import (
    arguments_of,
    check_number_of,
    read_template_options,
    read_tools,
)
from edgeinfer.server.limits import Limits
from edgeinfer.server.problem import Problem, about, unsupported

_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "frequency_penalty", "presence_penalty")
_HARMLESS = frozenset(
    "metadata user store include service_tier safety_identifier prompt_cache_key prompt_cache_retention".split()
)
_ONLY: Mapping[str, tuple[object, ...]] = {"truncation": ("disabled",), "background": (False,), "top_logprobs": (0,)}
_READ = frozenset(
    "model input instructions max_output_tokens tools tool_choice parallel_tool_calls text stream reasoning "
    "timings_per_token return_progress chat_template_kwargs".split()
)
_TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")


def read(body: Mapping[str, Any], limits: Limits) -> Asked:
    """What is asked. Raises Problem."""
    given = {name: value for name, value in body.items() if value is not None}
    model, stream = given.get("model"), given.get("stream", False)
    if (model is not None and not isinstance(model, str)) or not isinstance(stream, bool):
        raise Problem(400, "model must be a name, and stream true or false", param="model")
    asked = Asked(model=model, is_stream=stream)
    options = cast("dict[str, Any]", asked.options)
    for name, value in given.items():
        if name in _OPTIONS:
            options[name] = value
        elif name in _HARMLESS:
            asked.ignored.append(name)
        elif name == "previous_response_id":
            raise unsupported(name, "nothing is stored here, send the whole conversation as input")
        elif name in _ONLY:
            if value not in _ONLY[name]:
                raise unsupported(name)
        elif name not in _READ:
            raise Problem(400, f"there is no parameter {shown(name)}", code="unknown_parameter", param=name)
    if "max_output_tokens" in given:
        with about("max_output_tokens"):
            options["max_tokens"] = check_integer("max_output_tokens", given["max_output_tokens"], 1)
    asked.template = read_template_options(given)
    asked.tells_times, asked.tells_progress = (_flag(given, name) for name in ("timings_per_token", "return_progress"))
    _check_reasoning(given.get("reasoning", {}))
    options.update(_format(given.get("text", {})))
    asked.messages = _messages(given, limits)
    asked.tools = read_tools({**given, **_tools(given)}, limits)
    return asked


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value: object = given.get(name, False)
    if not isinstance(value, bool):
        raise Problem(400, f"{name} must be true or false: found {shown(value)}", param=name)
    return value


def _check_reasoning(given: object) -> None:
    """The model reasons as it does; a summary is not made."""
    if not isinstance(given, dict) or any(value is not None for name, value in given.items() if name != "summary"):
        raise unsupported("reasoning")


def _format(given: object) -> dict[str, Any]:
    format = given.get("format") if isinstance(given, dict) else None
    kind = format.get("type") if isinstance(format, dict) else None
    if kind == "json_object":
        return {"json": True}
    if kind == "json_schema" and isinstance(format, dict) and isinstance(format.get("schema"), dict):
        return {"schema": format["schema"]}
    if not isinstance(given, dict) or kind not in (None, "text"):
        raise Problem(400, f"text must have a format: found {shown(given)}", param="text")
    return {}


def _tools(given: Mapping[str, Any]) -> dict[str, Any]:
    """Tools and their choice as chats have them."""
    tools, choice = given.get("tools"), given.get("tool_choice")
    found: dict[str, Any] = {}
    if isinstance(tools, list):
        for tool in tools:
            if not isinstance(tool, dict) or tool.get("type") != "function":
                raise unsupported("tools", f"only functions are: found {shown(tool)}")
        found["tools"] = [{"type": "function", "function": tool} for tool in tools]
    if isinstance(choice, dict):
        found["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    return found


def _messages(given: Mapping[str, Any], limits: Limits) -> list[Message]:
    items, instructions = given.get("input"), given.get("instructions")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise Problem(400, f"input must be a text or a list of items: found {shown(items)}", param="input")
    check_number_of("items", items, limits.messages)
    found: list[Message] = []
    if instructions is not None:
        if not isinstance(instructions, str):
            raise Problem(400, f"instructions must be a text: found {shown(instructions)}", param="instructions")
        found.append({"role": "system", "content": instructions})
    with about("input"):
        for number, item in enumerate(items):
            _add(item, found, f"input {number}")
    return found


def _add(item: Any, found: list[Message], place: str) -> None:
    """Add an item to the messages; calls belong to the answer before them."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message" and item.get("role") in ROLES:
        found.append({"role": ROLES[item["role"]], "content": _text(item.get("content"), place)})
    elif kind == "reasoning":
        pass  # of an earlier answer, which templates leave out
    elif kind == "function_call" and isinstance(item.get("name"), str):
        call = {"name": item["name"], "id": str(item.get("call_id", "")), **arguments_of(item.get("arguments"))}
        if not found or found[-1]["role"] != "assistant":
            found.append({"role": "assistant", "content": ""})
        found[-1]["tool_calls"] = [*found[-1].get("tool_calls", []), call]
    elif kind == "function_call_output":
        text = _text(item.get("output"), place)
        found.append({"role": "tool", "content": text, "tool_call_id": str(item.get("call_id", ""))})
    else:
        raise InvalidArgument(f"{place} must be a message, a call of a function or its output: found {shown(item)}")


def _text(content: object, place: str) -> str:
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else [content]
    texts = [
        part.get("text", part.get("refusal")) for part in parts if isinstance(part, dict) and part.get("type") in _TEXTS
    ]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise InvalidArgument(f"{place}: the content must be texts: found {shown(content)}")
    return "\n".join(map(str, texts))
