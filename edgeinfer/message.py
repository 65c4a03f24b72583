"""Messages of a conversation, and how they are read from a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NotRequired, TypedDict, cast

from edgeinfer.common.arguments import shown
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.models.reasoning import OutputParser, ToolCall

_ROLES = ("system", "user", "assistant", "tool")
_OF_ROLE = {"tool": {"tool_call_id", "name"}}  # what a message of a role may have beside its content


class Message(TypedDict):
    """A message of a conversation."""

    role: str  # "system", "user", "assistant" or "tool": the result of a call
    content: str  # the text; of an answer without the parts in the other keys
    # Of an answer:
    reasoning: NotRequired[str]
    # each with name and arguments, and where it has them text and id, as in ToolCall
    tool_calls: NotRequired[list[dict[str, Any]]]
    # Of an answer that was generated here:
    tokens: NotRequired[list[int]]  # the ids as emitted
    opened: NotRequired[str]  # the end of the prompt that belongs to the reasoning
    # Of the result of a call:
    tool_call_id: NotRequired[str]  # of the call
    name: NotRequired[str]  # of the tool


CHANNEL_MARK, _BROKEN_MARK = "<|channel|>", "<|channel\u200b|>"


def texts_of(answer: Message) -> tuple[str, str]:
    """(what was said, the reasoning or "")."""
    return answer["content"], answer.get("reasoning", "")


def with_broken_marks(message: Message) -> Message:
    """The message, an answer with a space of no width in each mark that it spells."""
    if message["role"] != "assistant":
        return message
    broken = cast(Message, {**message, "content": message["content"].replace(CHANNEL_MARK, _BROKEN_MARK)})
    if "reasoning" in message:
        broken["reasoning"] = message["reasoning"].replace(CHANNEL_MARK, _BROKEN_MARK)
    return broken


def answer_message(
    output: OutputParser, length: int, tokens: Sequence[int], calls: Sequence[ToolCall] | None = None
) -> Message:
    """An answer as a message; length: of its text.  calls: those of the output with their ids, None for no ids."""
    message: Message = {"role": "assistant", "content": output.answer[:length]}
    if output.reasoning:
        message["reasoning"] = output.reasoning
    if output.tool_calls:
        message["tool_calls"] = [_as_dict(call) for call in (output.tool_calls if calls is None else calls)]
    if tokens:
        message["tokens"] = list(tokens)
    if output.opened:
        message["opened"] = output.opened
    return message


def _as_dict(call: ToolCall) -> dict[str, Any]:
    found = asdict(call)
    return found if call.id else {key: value for key, value in found.items() if key != "id"}


def without_ids(message: Message) -> Message:
    """The message, its calls without their ids, which the tokens do not tell."""
    if "tool_calls" not in message:
        return message
    calls = [{key: value for key, value in call.items() if key != "id"} for call in message["tool_calls"]]
    return cast(Message, {**message, "tool_calls": calls})


def result_message(name: str, content: str, call_id: str = "") -> Message:
    """The result of a call as a message.  name: of the tool.  call_id: of the call, "" where it has none."""
    message: Message = {"role": "tool", "content": content, "name": name}
    if call_id:
        message["tool_call_id"] = call_id
    return message


def result_messages(
    calls: Sequence[Mapping[str, Any]], results: Sequence[object] | Mapping[str, object]
) -> list[Message]:
    """Messages with the results of calls, in the order of the calls or by their ids. Raises InvalidArgument."""
    if isinstance(results, Mapping):
        missing = [call.get("id", "") for call in calls if call.get("id", "") not in results]
        given = [] if missing else [results[call["id"]] for call in calls]
    elif isinstance(results, (str, bytes)) or not isinstance(results, Sequence):
        raise InvalidArgument(f"results must be a list, or a mapping by the ids of the calls: found {shown(results)}")
    else:
        given = list(results)
    if len(given) != len(calls) or (isinstance(results, Mapping) and len(results) != len(calls)):
        raise InvalidArgument(
            f"each of the {len(calls)} calls needs one result: found {len(results)}, {shown(results)}"
        )
    named = [(call, call.get("name") or "") for call in calls]
    return [
        result_message(name, result_text(result), call.get("id", ""))
        for (call, name), result in zip(named, given, strict=True)
    ]


def result_text(result: object) -> str:
    """The result of a tool as a model gets it: a text as it is, anything else as JSON, or as Python shows it."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return str(result)


def read_message(line: bytes, place: str) -> Message:
    """A message from a line of JSON. Raises InvalidArgument, which names the place."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{place} is no JSON: {error}") from None
    if not isinstance(message, dict) or not {"role", "content"} <= set(message) <= {"role", *_CHECKS}:
        raise InvalidArgument(f'{place} must be {{"role": ..., "content": ...}}: found {message!r:.80}')
    if message["role"] not in _ROLES:
        raise InvalidArgument(f"{place}: the role must be {', '.join(_ROLES)}: found {message['role']!r:.80}")
    others = {*message} - {"role", "content"}
    if message["role"] != "assistant" and (wrong := others - _OF_ROLE.get(message["role"], set())):
        raise InvalidArgument(f"{place}: only an answer may have {', '.join(sorted(wrong))}")
    if message["role"] == "assistant" and (wrong := others & _OF_ROLE["tool"]):
        raise InvalidArgument(f"{place}: only the result of a tool may have {', '.join(sorted(wrong))}")
    for key, value in message.items():
        if key != "role" and not _CHECKS[key][0](value):
            raise InvalidArgument(f"{place} must be a message whose {key} is {_CHECKS[key][1]}: found {value!r:.80}")
    return cast(Message, message)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_tokens(value: object) -> bool:
    return isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)


def _are_calls(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(call, dict)
        and {"name", "arguments"} <= set(call) <= {"text", "name", "arguments", "id"}
        and isinstance(call.get("text", ""), str)
        and isinstance(call.get("id", ""), str)
        and isinstance(call["name"], str | None)
        and isinstance(call["arguments"], dict | None)
        and ("text" in call or call["name"] is not None)
        for call in value
    )


# What a message of a file may hold beside its role: a check, and what is expected.
_CHECKS: dict[str, tuple[Callable[[object], bool], str]] = {
    "content": (_is_text, "a text"),
    "reasoning": (_is_text, "a text"),
    "tool_calls": (_are_calls, "a list of calls, each with name and arguments"),
    "tokens": (_are_tokens, "a list of token ids"),
    "opened": (_is_text, "a text"),
    "tool_call_id": (_is_text, "a text"),
    "name": (_is_text, "a text"),
}
