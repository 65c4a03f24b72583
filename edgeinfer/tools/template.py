"""What the chat template of a model knows of tools, and how messages are put for one that knows less."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, TypeAlias

from edgeinfer.common.errors import TemplateError
from edgeinfer.models.call_formats import GENERIC, CallFormat
from edgeinfer.models.chat_template import ChatTemplate
from edgeinfer.models.provenance import joined, trusted
from edgeinfer.models.tool_calls import calls_for_template, mistral_id
from edgeinfer.tools.options import ToolUse
from edgeinfer.tools.reading import spelled

CallForm: TypeAlias = Literal["object", "json", "text"]
"""How a template gets calls of tools: with arguments as an object, as JSON, or as the text that was emitted."""

_NAME, _VALUE, _RESULT = "look_at_sky", "overcast", "seventeen"  # of a call that a template is asked about
_QUESTION = {"role": "user", "content": "How is it?"}
_MISTRAL_ID = re.compile("[0-9A-Za-z]{9}")


class TemplateTools:
    """A chat template, asked for what it does with tools.

    is_native: whether it tells the model of tools, in a format that is known here; else the system message does.
    format: in which the model writes calls; the generic one where it has none that is known.
    """

    def __init__(self, template: ChatTemplate, format: CallFormat | None) -> None:
        self._template = template
        self.is_native = format is not None and self._takes_tools()
        # The system message can tell of a format whose arguments are JSON as well as the template could.
        is_known = format is not None and (self.is_native or (format.arguments == "json" and not format.has_channels))
        self.format = format if format is not None and is_known else GENERIC

    def declarations(self, use: ToolUse) -> list[dict[str, Any]] | None:
        """The tools for the template, None where it gets none."""
        return [tool.declaration for tool in use.tools] if use.tools and self.is_native else None

    @cached_property
    def call_forms(self) -> tuple[CallForm, ...]:
        """The forms in which the template shows calls, the best one first; "text" is the last."""
        if "tool_calls" not in self._template.source:
            return ("text",)
        forms: tuple[CallForm, ...] = ("object", "json")
        return (*(form for form in forms if self._shows(form)), "text")

    @cached_property
    def takes_results(self) -> bool:
        """Whether the template shows the result of a call as such."""
        form = self.call_forms[0]
        return self.format is not GENERIC and self._is_shown(_RESULT, [_QUESTION, self._call(form), self._result()])

    def prepared(self, messages: Sequence[Mapping[str, Any]], use: ToolUse) -> list[dict[str, Any]]:
        """Messages in the form that the template takes: the tools and results as texts where it knows none.

        messages: with calls as the template takes them.
        """
        found = [dict(message) for message in messages]
        if any(message["role"] == "tool" for message in found) and not self.takes_results:
            found = _with_results_as_texts(found)
        if use.tools and not self.is_native:
            found = _with_instructions(found, _instructions(use, self.format))
        if self.format.opening == "[TOOL_CALLS]":
            found = [_with_short_ids(message) for message in found]
        return found

    def _takes_tools(self) -> bool:
        tool = {"name": _NAME, "description": "d", "parameters": {"type": "object", "properties": {}}}
        return self._is_shown(_NAME, [_QUESTION], [{"type": "function", "function": tool}])

    def _shows(self, form: CallForm) -> bool:
        """Whether a call is in the prompt, and its arguments not as Python writes an object, or JSON a text."""
        for following in ([self._result()], [_QUESTION], []):
            messages = [_QUESTION, self._call(form), *following]
            if self._is_shown(_VALUE, messages):
                prompt = self._template.render(messages)
                return '\\"place' not in prompt and "{'place'" not in prompt
        return False

    def _is_shown(
        self, text: str, messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> bool:
        try:
            return text in self._template.render(messages, tools=tools)
        except TemplateError:
            return False

    def _call(self, form: CallForm) -> dict[str, Any]:
        calls = [{"name": _NAME, "arguments": {"place": _VALUE}, "id": "abcdefgh1"}]
        if form == "text":
            return {"role": "assistant", "content": spelled(self.format, calls)}
        return {"role": "assistant", "content": "", "tool_calls": calls_for_template(calls, form == "json")}

    def _result(self) -> dict[str, Any]:
        return {"role": "tool", "content": _RESULT, "name": _NAME, "tool_call_id": "abcdefgh1"}


def _with_results_as_texts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results as messages of the user, those in a row as one."""
    found: list[dict[str, Any]] = []
    is_result = False
    for message in messages:
        was_result, is_result = is_result, message["role"] == "tool"
        if not is_result:
            found.append(message)
            continue
        said = {"name": message["name"]} if message.get("name") else {}
        body = json.dumps({**said, "content": message["content"]}, ensure_ascii=False)
        text = f"<tool_response>\n{body}\n</tool_response>"
        if was_result:
            found[-1]["content"] += f"\n{text}"
        else:
            found.append({"role": "user", "content": text})
    return found


def _instructions(use: ToolUse, format: CallFormat) -> str:
    """What tells a model of tools that its template does not tell of."""
    tools = "\n".join(tool.text for tool in use.tools)
    several = "one or more functions" if use.is_parallel else "a function"
    example = joined(
        [trusted(format.head), "<name>", trusted(format.middle), "<arguments as a JSON object>", trusted(format.tail)]
    )
    before = (
        f"You may call {several} to help with the question. These are the functions, each with its parameters as "
        f"JSON Schema:\n<tools>\n{tools}\n</tools>\n\nTo call a function, answer with its name and arguments as JSON:\n"
    )
    return joined([before, example])


def _with_instructions(messages: list[dict[str, Any]], instructions: str) -> list[dict[str, Any]]:
    if messages and messages[0]["role"] == "system":
        content = joined([messages[0]["content"], "\n\n", instructions])
        return [{**messages[0], "content": content}, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """The message with ids as Mistral's templates take them."""
    if "tool_calls" in message:
        return {**message, "tool_calls": [{**call, "id": _short(call["id"])} for call in message["tool_calls"]]}
    return {**message, "tool_call_id": _short(message["tool_call_id"])} if "tool_call_id" in message else message


def _short(id: str) -> str:
    return id if _MISTRAL_ID.fullmatch(id) else mistral_id(id)
