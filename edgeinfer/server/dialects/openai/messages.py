"""Messages and tools as OpenAI has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from edgeinfer.batch.lines import ROLES, text_of
from edgeinfer.common.arguments import shown
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.message import Message
from edgeinfer.server.limits import Limits
from edgeinfer.server.problem import Problem, about

_OF_ROLE: Mapping[str, frozenset[str]] = {  # what a message may have beside its role
    "system": frozenset({"content", "name"}),
    "user": frozenset({"content", "name"}),
    "assistant": frozenset(
        {"content", "name", "tool_calls", "refusal", "audio", "annotations", "reasoning_content", "reasoning"}
    ),
    "tool": frozenset({"content", "tool_call_id", "name"}),
}


def read_messages(given: object, limits: Limits) -> list[Message]:
    """The messages of a chat. Raises InvalidArgument, Problem."""
    if not isinstance(given, list) or not given:
        raise InvalidArgument(f"messages must be a list of at least one message: found {shown(given)}")
    check_number_of("messages", given, limits.messages)
    return [_message(each, f"message {number}") for number, each in enumerate(given, start=1)]


def read_tools(body: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    """tools, tool_choice and parallel_tool_calls, as for Conversation.stream. Raises Problem."""
    tools = body.get("tools")
    if not tools:
        if (choice := body.get("tool_choice")) not in (None, "none", "auto"):
            raise Problem(400, f"tool_choice {shown(choice)} needs tools", param="tool_choice")
        return {}
    check_tools(tools, limits)
    selection = body.get("tool_selection", False)  # all are given to the model, unless the client says otherwise
    if type(selection) not in (bool, int):
        raise Problem(400, f"tool_selection must be a number: found {shown(selection)}", param="tool_selection")
    found = {"tools": tools, "tool_choice": body.get("tool_choice"), "tool_selection": selection}
    if body.get("parallel_tool_calls") is not None:
        found["parallel_tool_calls"] = body["parallel_tool_calls"]
    return found


def read_template_options(body: Mapping[str, Any]) -> dict[str, Any]:
    """chat_template_kwargs, as for Conversation.stream. Raises Problem."""
    name = "chat_template_kwargs"
    given = body.get(name)
    if given is not None and not isinstance(given, dict):
        raise Problem(400, f"{name} must be an object: found {shown(given)}", param=name)
    return {name: given} if given else {}


def check_tools(tools: object, limits: Limits) -> None:
    """Raises Problem where tools are none, too many or too large."""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Problem(400, f"tools must be a list of objects: found {shown(tools)}", param="tools")
    check_number_of("tools", tools, limits.tools)
    if (n_bytes := len(json.dumps(tools))) > limits.schemas:
        raise Problem(400, f"tools may have {limits.schemas} bytes: found {n_bytes}", param="tools")


def check_number_of(name: str, values: object, most: int) -> None:
    """Raises Problem where there are too many."""
    if isinstance(values, list) and len(values) > most:
        raise Problem(400, f"there may be {most} {name}: found {len(values)}", param=name)


def _message(given: object, place: str) -> Message:
    if not isinstance(given, dict):
        raise InvalidArgument(f'{place} must be {{"role": ..., "content": ...}}: found {shown(given)}')
    role = given.get("role")
    known = {**ROLES, "tool": "tool"}
    if not isinstance(role, str) or role not in known:
        raise InvalidArgument(f"{place}: the role must be {', '.join(known)}: found {shown(role)}")
    named = {name: value for name, value in given.items() if name != "role" and value is not None}
    if unknown := sorted(named.keys() - _OF_ROLE[known[role]]):
        raise InvalidArgument(f"{place}: a message of the {role} has no {', '.join(unknown)}")
    calls = named.get("tool_calls")
    if "content" not in named and not calls:
        raise InvalidArgument(f"{place} has no content")
    content = text_of(named["content"], place) if "content" in named else ""
    message: Message = {"role": known[role], "content": content}
    if calls:
        message["tool_calls"] = _calls(calls, place)
    if role == "assistant" and isinstance(said := named.get("reasoning_content", named.get("reasoning")), str) and said:
        message["reasoning"] = said
    if role == "tool":
        _read_result(message, named, place)
    return message


def _read_result(message: Message, named: Mapping[str, Any], place: str) -> None:
    """What the result of a call has beside its content."""
    for name in ("tool_call_id", "name"):
        if name in named:
            if not isinstance(named[name], str):
                raise InvalidArgument(f"{place}: {name} must be a text: found {shown(named[name])}")
            message[name] = named[name]


def _calls(calls: object, place: str) -> list[dict[str, Any]]:
    """Earlier calls of tools. What a model once wrote that is no JSON stays as it is."""
    found = []
    several: list[Any] = calls if isinstance(calls, list) else [calls]
    for call in several:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidArgument(f"{place}: a call must have a function with a name: found {shown(call)}")
        read = {"name": function["name"], **arguments_of(function.get("arguments"))}
        if isinstance(call.get("id"), str):
            read["id"] = call["id"]
        found.append(read)
    return found


def arguments_of(given: object) -> dict[str, Any]:
    """The arguments of an earlier call, and their text where they are none."""
    if given in (None, ""):
        return {"arguments": {}}
    if isinstance(given, dict):
        return {"arguments": given}
    text = given if isinstance(given, str) else json.dumps(given)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return {"arguments": value} if isinstance(value, dict) else {"arguments": None, "text": text}


def read_chat_parts(body: Mapping[str, Any], limits: Limits) -> tuple[list[Message], dict[str, Any]]:
    """(messages, tools) of a chat. Raises Problem."""
    if "messages" not in body:
        raise Problem(400, "the request has no messages", param="messages")
    with about("messages"):
        messages = read_messages(body["messages"], limits)
    return messages, read_tools(body, limits)
