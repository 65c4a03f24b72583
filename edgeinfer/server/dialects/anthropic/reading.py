"""Bodies of Anthropic's requests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from edgeinfer.common.arguments import check_integer, shown
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.message import Message
from edgeinfer.server.asked import Asked
from edgeinfer.server.dialects.openai.messages import check_number_of, check_tools
from edgeinfer.server.limits import Limits
from edgeinfer.server.problem import Problem, about, unsupported
from edgeinfer.stream import RequestOptions

_SAME = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "stop_sequences": "stop", "seed": "seed"}
_HARMLESS = frozenset({"metadata", "service_tier", "inference_geo"})
_READ = frozenset(
    "model messages system max_tokens stream tools tool_choice thinking output_format output_config".split()
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def read(body: Mapping[str, Any], limits: Limits, counts: bool = False) -> Asked:
    """What is asked.  counts: only the tokens of the prompt. Raises Problem."""
    given = {name: value for name, value in body.items() if value is not None}
    asked = Asked(model=_name(given.get("model")), is_stream=_flag(given, "stream"))
    options = cast("dict[str, Any]", asked.options)
    for name, value in given.items():
        if name in _SAME:
            options[_SAME[name]] = value
        elif name in _HARMLESS:
            asked.ignored.append(name)
        elif name not in _READ:
            raise Problem(400, f"{name}: there is no such parameter here", code="unknown_parameter", param=name)
    if not counts:
        with about("max_tokens"):
            options["max_tokens"] = check_integer("max_tokens", given.get("max_tokens"), 1)
    options.update(_format(given))
    asked.messages = [*_system(given.get("system")), *_messages(given.get("messages"), limits)]
    asked.tools = _tools(given, limits)
    return asked


def shows_reasoning(body: Mapping[str, Any]) -> bool:
    """Whether the client gets the reasoning. Raises Problem."""
    thinking = body.get("thinking")
    if thinking is None:
        return False
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    if kind not in ("enabled", "disabled", "adaptive"):
        raise Problem(400, f"thinking must be enabled, adaptive or disabled: found {shown(thinking)}", param="thinking")
    return bool(kind != "disabled")


def _name(model: object) -> str:
    if not isinstance(model, str) or not model:
        raise Problem(400, f"model: must be a name, found {shown(model)}", param="model")
    return model


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value: object = given.get(name, False)
    if not isinstance(value, bool):
        raise Problem(400, f"{name}: must be true or false, found {shown(value)}", param=name)
    return value


def _format(given: Mapping[str, Any]) -> RequestOptions:
    """The schema that an answer has to keep to."""
    config = given.get("output_config", {})
    if not isinstance(config, dict) or config.keys() - {"format"}:
        raise unsupported("output_config", f"beside its format: found {shown(config)}")
    format = given.get("output_format", config.get("format"))
    if format is None:
        return {}
    if (
        not isinstance(format, dict)
        or format.get("type") != "json_schema"
        or not isinstance(format.get("schema"), dict)
    ):
        raise Problem(400, f"output_format: must be a json_schema, found {shown(format)}", param="output_format")
    return {"schema": format["schema"]}


def _system(given: object) -> list[Message]:
    if given is None:
        return []
    with about("system"):
        text = _text(given, "system")
    return [{"role": "system", "content": text}] if text else []


def _messages(given: object, limits: Limits) -> list[Message]:
    if not isinstance(given, list) or not given:
        raise Problem(400, f"messages: must be a list of at least one, found {shown(given)}", param="messages")
    check_number_of("messages", given, limits.messages)
    with about("messages"):
        return [each for number, message in enumerate(given) for each in _message(message, f"messages.{number}")]


def _message(given: object, place: str) -> list[Message]:
    """A message; the results in one of the user are messages of their own."""
    role = given.get("role") if isinstance(given, dict) else None
    if not isinstance(given, dict) or role not in ("user", "assistant", "system"):
        raise InvalidArgument(f"{place}.role: must be user or assistant, found {shown(role)}")
    content = given.get("content")
    if isinstance(content, str):
        return [{"role": str(role), "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise InvalidArgument(f"{place}.content: must be a text or blocks, found {shown(content)}")
    return _answer(content, place) if role == "assistant" else _question(content, str(role), place)


def _question(blocks: list[dict[str, Any]], role: str, place: str) -> list[Message]:
    found: list[Message] = []
    texts = []
    for block in blocks:
        if block.get("type") == "tool_result":
            result: Message = {"role": "tool", "content": _text(block.get("content") or "", place)}
            if isinstance(block.get("tool_use_id"), str):
                result["tool_call_id"] = block["tool_use_id"]
            found.append(result)
        else:
            texts.append(_text([block], place))
    return [*found, {"role": role, "content": "\n".join(texts)}] if texts or not found else found


def _answer(blocks: list[dict[str, Any]], place: str) -> list[Message]:
    kinds = ("tool_use", "thinking", "redacted_thinking")
    text = _text([block for block in blocks if block.get("type") not in kinds], place)
    message: Message = {"role": "assistant", "content": text}
    thoughts = [str(block.get("thinking", "")) for block in blocks if block.get("type") == "thinking"]
    if any(thoughts):
        message["reasoning"] = "\n".join(thoughts)
    calls = [_call(block, place) for block in blocks if block.get("type") == "tool_use"]
    if calls:
        message["tool_calls"] = calls
    return [message]


def _call(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    name, given = block.get("name"), block.get("input", {})
    if not isinstance(name, str) or not isinstance(given, dict):
        raise InvalidArgument(f"{place}: a tool_use must have a name and an input that is an object")
    return {"name": name, "arguments": given, **({"id": block["id"]} if isinstance(block.get("id"), str) else {})}


def _text(content: object, place: str) -> str:
    """The text of a content: itself, or of blocks."""
    if isinstance(content, str):
        return content
    blocks: list[Any] = content if isinstance(content, list) else [content]
    texts = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "json":
            texts.append(json.dumps(block.get("json"), ensure_ascii=False))
        else:
            raise InvalidArgument(f"{place}: blocks of texts and tools are supported, found {shown(kind or block)}")
    return "\n".join(texts)


def _tools(given: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    tools, choice = given.get("tools"), given.get("tool_choice", {"type": "auto"})
    if not isinstance(choice, dict) or choice.get("type") not in (*_CHOICES, "tool"):
        raise Problem(400, f"tool_choice: must be auto, any, tool or none, found {shown(choice)}", param="tool_choice")
    if not tools:
        if choice["type"] in ("any", "tool"):
            raise Problem(400, "tool_choice: needs tools", param="tool_choice")
        return {}
    check_tools(tools, limits)
    named = choice.get("name") if choice["type"] == "tool" else _CHOICES[choice["type"]]
    return {
        "tools": [_tool(tool) for tool in tools],
        "tool_choice": named,
        "tool_selection": False,
        "parallel_tool_calls": choice.get("disable_parallel_tool_use") is not True,
    }


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom" or not isinstance(tool.get("name"), str):
        raise unsupported("tools", f"only tools of the client are: found {shown(tool.get('type', tool))}")
    function = {
        "name": tool["name"],
        "description": tool.get("description", ""),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": function}
