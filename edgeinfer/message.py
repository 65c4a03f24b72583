"""Messages of a conversation, and how they are read from a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NotRequired, TypedDict, cast

from edgeinfer.common.errors import InvalidArgument
from edgeinfer.models.reasoning import OutputParser

_ROLES = ("system", "user", "assistant")


class Message(TypedDict):
    """A message of a conversation.

    role: "system", "user" or "assistant".  content: the text; of an answer without the parts in the other keys. Further
    keys of an answer generated here: reasoning.  tool_calls: each with text, name and arguments, as in ToolCall.
    tokens: the ids as emitted.  opened: the end of the prompt that belongs to the reasoning.
    """

    role: str
    content: str
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]
    tokens: NotRequired[list[int]]
    opened: NotRequired[str]


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


def answer_message(output: OutputParser, length: int, tokens: Sequence[int]) -> Message:
    """An answer as a message; length: of its text."""
    message: Message = {"role": "assistant", "content": output.answer[:length]}
    if output.reasoning:
        message["reasoning"] = output.reasoning
    if output.tool_calls:
        message["tool_calls"] = [asdict(call) for call in output.tool_calls]
    if tokens:
        message["tokens"] = list(tokens)
    if output.opened:
        message["opened"] = output.opened
    return message


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
    if message["role"] != "assistant" and len(message) > 2:
        raise InvalidArgument(f"{place}: only an answer may have {', '.join(sorted({*message} - {'role', 'content'}))}")
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
        and set(call) == {"text", "name", "arguments"}
        and isinstance(call["text"], str)
        and isinstance(call["name"], str | None)
        and isinstance(call["arguments"], dict | None)
        for call in value
    )


# What a message of a file may hold beside its role: a check, and what it wants.
_CHECKS: dict[str, tuple[Callable[[object], bool], str]] = {
    "content": (_is_text, "a text"),
    "reasoning": (_is_text, "a text"),
    "tool_calls": (_are_calls, "a list of calls, each with text, name and arguments"),
    "tokens": (_are_tokens, "a list of token ids"),
    "opened": (_is_text, "a text"),
}
