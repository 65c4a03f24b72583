"""Reading calls of tools by the description of their format; edgeinfer.tools.grammar allows what is read here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from edgeinfer.common.overriding import override
from edgeinfer.models.call_formats import DIGITS, NAME, CallFormat
from edgeinfer.models.call_syntax import python_calls, quoted_call
from edgeinfer.models.provenance import joined, trusted
from edgeinfer.models.tool_calls import CallReader, ToolCall, read_calls
from edgeinfer.tools.options import Tool
from edgeinfer.tools.schemas import types_of


class FormatReader(CallReader):
    """Reads the calls of a format."""

    def __init__(self, format: CallFormat, tools: Sequence[Tool] = (), takes_bare: bool = True) -> None:
        """tools: whose parameters tell a text that looks like a number from one, where the format does not.

        takes_bare: where the format does.
        """
        self.format = format
        self._takes_bare = takes_bare or not format.opening
        self._parameters = {tool.name: tool.parameters for tool in tools}

    @property
    @override
    def opening(self) -> str:
        return self.format.opening

    @property
    @override
    def closing(self) -> str:
        return self.format.closing

    @property
    @override
    def takes_bare(self) -> bool:
        return self._takes_bare and bool(self.format.bare)

    @override
    def read_bare(self, text: str) -> list[ToolCall]:
        values = _objects_of(text)
        calls = [ToolCall(written, value["name"], value[self.format.bare]) for written, value in values
                 if self._is_call(value)]  # fmt: skip
        return calls if len(calls) == len(values) else []

    def _is_call(self, value: Any) -> bool:
        if not isinstance(value, dict) or set(value) != {"name", self.format.bare}:
            return False
        name, arguments = value["name"], value[self.format.bare]
        is_known = not self._parameters or name in self._parameters
        return isinstance(name, str) and is_known and isinstance(arguments, dict)

    @override
    def read(self, text: str) -> list[ToolCall]:
        if self.format.arguments == "quoted":
            call = quoted_call(self._without_head(text), self.format.quote)
            return [] if call is None else [ToolCall(text, call.name, call.arguments)]
        if self.format.arguments == "python":
            return [ToolCall(call.text, call.name, call.arguments) for call in python_calls(text) or ()]
        if self.format.arguments == "parameters":
            return self._tagged(text) or read_calls(text)
        return read_calls(text)

    def _without_head(self, text: str) -> str:
        """The text from its "call:" on; the opening is part of the head in the description."""
        return text if text.lstrip().startswith("call:") else f"call:{text}"

    def _tagged(self, text: str) -> list[ToolCall]:
        """Calls whose name and arguments stand between tags; none if the text is anything else."""
        format = self.format
        head, tail = format.head.removeprefix(self.opening), format.tail.removesuffix(self.closing)
        text = text.removeprefix(format.begin.removeprefix(self.opening)) if format.begin else text
        found: list[ToolCall] = []
        at = 0
        while at < len(text) or not found:
            call = _TaggedCall(text, at)
            if not (call.skip(head) and call.take_name() and call.skip(format.middle)):
                return []
            while call.take_argument(format.parameter):
                pass
            if not call.skip(tail):
                return []
            found.append(ToolCall(text[at : call.at].strip(), call.name, self._typed(call.name, call.arguments)))
            at = call.at
        return found

    def _typed(self, name: str, given: Mapping[str, str]) -> dict[str, Any]:
        """Arguments with their types, as the parameters of the tool say, else as JSON where they are JSON."""
        parameters = self._parameters.get(name, {})
        return {key: _value_of(text, types_of(parameters, key)) for key, text in given.items()}


class _TaggedCall:
    """Reads a call from a place in a text, tags as they are in the description."""

    def __init__(self, text: str, at: int) -> None:
        self._text = text
        self.at = at
        self.name = ""
        self.arguments: dict[str, str] = {}

    def skip(self, tag: str) -> bool:
        """Go behind a tag, if it is there."""
        is_there = self._text.startswith(tag, self.at)
        self.at += len(tag) if is_there else 0
        return is_there

    def take_name(self) -> bool:
        """Take the name of the tool, if there is one."""
        name = _NAME.match(self._text, self.at)
        self.name = "" if name is None else name[0]
        self.at += len(self.name)
        return name is not None

    def take_argument(self, tags: tuple[str, str, str]) -> bool:
        """Take an argument, if a whole one is there."""
        opening, between, closing = tags
        if not self._text.startswith(opening, self.at):
            return False
        start = self.at + len(opening)
        middle = self._text.find(between, start)
        end = self._text.find(closing, middle + len(between)) if middle >= 0 else -1
        name = self._text[start:middle]
        if end < 0 or name in self.arguments:
            return False
        self.arguments[name] = self._text[middle + len(between) : end]
        self.at = end + len(closing)
        return True


_NAME = re.compile(r"[\w.-]+")


def _value_of(text: str, types: frozenset[str]) -> Any:
    """types: that the schema allows, none where it says nothing."""
    if types == {"string"}:
        return text
    if types and text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    # A text in quotes keeps them, unless only a text is allowed; NaN is no JSON.
    return text if isinstance(value, str) or value != value else value


_DECODER = json.JSONDecoder()
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def _objects_of(text: str) -> list[tuple[str, Any]]:
    """The JSON values of a text, one after the other or in one list, each as it is written; none if it is no JSON."""
    found: list[tuple[str, Any]] = []
    at = 0
    try:
        while at < len(text):
            value, end = _DECODER.raw_decode(text, at)
            found.append((text[at:end], value))
            at = end + len(text[end:]) - len(text[end:].lstrip())
    except (ValueError, RecursionError):
        return []
    if len(found) == 1 and isinstance(found[0][1], list):
        return [(json.dumps(value, ensure_ascii=False), value) for value in found[0][1]]
    return found


def spelled(format: CallFormat, calls: Sequence[Mapping[str, Any]]) -> str:
    """Calls as a model writes them, marks trusted.  calls: each with name and arguments."""
    parts: list[str] = [trusted(format.begin)]
    for number, call in enumerate(calls):
        parts += [trusted(format.separator) if number else "", *_header(format, call["name"])]
        parts += [trusted(format.head.replace(DIGITS, str(number)))]
        parts += [call["name"], trusted(format.middle.replace(DIGITS, str(number)))]
        parts += [*_spelled_arguments(format, call["arguments"] or {}), trusted(format.tail)]
    return joined([*parts, trusted(format.end)])


def _header(format: CallFormat, name: str) -> list[str]:
    """Whom a message is for."""
    before, has_name, after = format.header.partition(NAME)
    return [trusted(before), name if has_name else "", trusted(after)]


def _spelled_arguments(format: CallFormat, arguments: Mapping[str, Any]) -> list[str]:
    if format.arguments == "parameters":
        before, between, after = map(trusted, format.parameter)
        pairs = [(before, key, between, _as_text(value), after) for key, value in arguments.items()]
        return [part for pair in pairs for part in pair]
    if format.arguments == "python":
        return [", ".join(f"{key}={value!r}" for key, value in arguments.items())]
    if format.arguments == "quoted":
        whole = _quoted(arguments, trusted(format.quote))
        return whole[1:-1]
    return [json.dumps(arguments, ensure_ascii=False)]


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _quoted(value: Any, quote: str) -> list[str]:
    if isinstance(value, str):
        return [quote, value, quote]
    if isinstance(value, Mapping):
        pairs = [[",", key, ":", *_quoted(part, quote)] for key, part in value.items()]
        return ["{", *[part for pair in pairs for part in pair][1:], "}"]
    if isinstance(value, Sequence):
        items = [[",", *_quoted(part, quote)] for part in value]
        return ["[", *[part for item in items for part in item][1:], "]"]
    return [json.dumps(value)]
