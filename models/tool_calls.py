"""Calls of tools, as models write them and as templates need them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from edgeinfer.models.call_syntax import python_calls, xml_calls


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the model."""

    text: str  # as emitted, between the marks
    # name, arguments: parsed from it, None where that is not possible
    name: str | None = None
    arguments: dict[str, Any] | None = None
    # nine letters and digits, by which a result names its call; "" before the answer has it
    id: str = field(default="", compare=False)


_ID_DIGITS, _ID_LENGTH = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz", 9  # as Mistral's templates


def call_id(n_prompt: int, number: int, text: str) -> str:
    """The id of a call: a function of the place and the text, so that the same answer has the same ids.

    n_prompt: tokens before the answer, so that later answers of a conversation have others.  number: of the call in it.
    """
    return mistral_id(f"{n_prompt} {number} {text}")


def mistral_id(text: str) -> str:
    """An id as Mistral's templates need it, nine letters and digits; the same of the same text."""
    value = int.from_bytes(hashlib.blake2b(text.encode(errors="replace")).digest(), "big")
    digits = []
    for _ in range(_ID_LENGTH):
        value, digit = divmod(value, len(_ID_DIGITS))
        digits.append(_ID_DIGITS[digit])
    return "".join(digits)


class CallReader(Protocol):
    """Reads the calls of one format: edgeinfer.tools.reading."""

    @property
    def opening(self) -> str:
        """What begins calls, by its name; "" where there are no calls but bare ones."""
        ...

    @property
    def closing(self) -> str:
        """What ends calls, by its name; "": the next opening, or the end."""
        ...

    @property
    def takes_bare(self) -> bool:
        """Whether an answer that is a JSON object with a name first, alone or as a block of code, is a call."""
        ...

    def read_bare(self, text: str) -> list[ToolCall]:
        """The calls that JSON objects are, one after the other or in a list; none if one is another object."""
        ...

    def read(self, text: str) -> list[ToolCall]:
        """The calls of the text between the two; none if it is no such text."""
        ...


_CALL_ENDS = re.compile("<[|｜]tool[_▁]call[_▁]end[|｜]>")


def read_calls(text: str) -> list[ToolCall]:
    """The calls in what a model wrote between the tags: JSON, names with JSON after them, XML (Qwen3.5) or a list in
    Python's syntax (LFM2); none if it is none of these.
    """
    spelled = xml_calls(text) or python_calls(text)
    if spelled is not None:
        return [ToolCall(call.text, call.name, call.arguments) for call in spelled]
    value = _read_json(text)
    if isinstance(value, list):
        calls = [_call(each, json.dumps(each, ensure_ascii=False)) for each in value]
    elif value is not None:
        calls = [_call(value, text)]
    else:
        calls = [_named_call(part) for part in _CALL_ENDS.split(text) if part.strip()]
    return [call for call in calls if call is not None] if None not in calls else []


def call_to(name: str, text: str) -> ToolCall:
    """A call whose name is known; its arguments are the JSON of the text, if it is any."""
    return ToolCall(text, name.removeprefix("functions."), _object(_read_json(text)))


def _call(value: Any, text: str) -> ToolCall | None:
    """A call from its JSON. Models name the parts differently."""
    if not isinstance(value, dict):
        return None
    value = value["function"] if isinstance(value.get("function"), dict) else value
    name = next((value[key] for key in ("name", "tool_name") if isinstance(value.get(key), str)), None)
    given: Any = next((value[key] for key in ("arguments", "parameters") if key in value), {})
    arguments = _object(_read_json(given) if isinstance(given, str) else given)
    return None if name is None or arguments is None else ToolCall(text, name, arguments)


def _named_call(text: str) -> ToolCall | None:
    """A call from its name with JSON after it; between them may be tags."""
    head, brace, body = text.partition("{")
    inside, end, _ = body.rpartition("}")
    arguments = _object(_read_json(brace + inside + end))
    names = [name for name in re.findall(r"[\w.-]+", re.sub("<[^<>]*>", " ", head)) if name != "function"]
    if arguments is None or not names:
        return None
    return ToolCall(text, names[0].removeprefix("functions."), arguments)


def _read_json(text: str) -> Any:
    """The value, None if it is no JSON."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _object(value: Any) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None


def calls_for_template(calls: Sequence[Mapping[str, Any]], as_text: bool) -> list[dict[str, Any]]:
    """Calls in OpenAI's form. as_text: arguments as JSON, which some templates need in place of the object."""
    return [
        {
            "id": call.get("id") or f"call{number:05}",  # Mistral's templates need nine characters
            "type": "function",
            "function": {
                "name": call["name"],
                "arguments": json.dumps(call["arguments"], ensure_ascii=False) if as_text else call["arguments"],
            },
        }
        for number, call in enumerate(calls)
    ]
