"""What may follow where a model may call tools: a grammar, made of the format, the tools and the choice.

Marks that the vocabulary has as tokens are those tokens, so that the same letters may be spelt in a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgeinfer.common.errors import InvalidArgument
from edgeinfer.constraints.library import JSON_OPTIONS
from edgeinfer.models.call_formats import DIGITS, NAME, CallFormat
from edgeinfer.tools.options import Tool, ToolUse
from edgeinfer.tools.schemas import resolved

MAX_CALLS = 32  # of an answer: small models repeat themselves
_MOST_NESTED = 6  # of objects and lists in spellings other than JSON; deeper ones are any value
_SPACE, _MOST_SPACE = r"[ \n\r\t]", 16  # between the tokens of a bare call


@dataclass(frozen=True)
class Marks:
    """The special tokens of a vocabulary, by their texts.  end_ids: those that end a text."""

    ids: Mapping[str, int]
    end_ids: frozenset[int] = frozenset()


def tool_grammar(
    format: CallFormat,
    use: ToolUse,
    marks: Marks,
    *,
    opened: bool = False,
    schema: str | None = None,
    lenient: frozenset[str] = frozenset(),
) -> str:
    """The grammar of an answer, in Lark as llguidance reads it.

    opened: whether the prompt has begun the reasoning, where the model has channels.  schema: of an answer that is no
    call, None for any text.  lenient: names of tools of whose parameters not all keywords are known.
    """
    writer = _Writer(marks)
    calls = _Calls(format, use, writer, lenient)
    if format.has_channels:
        start = _channels(calls, opened, schema)
    else:
        start = _plain(calls, schema)
    return writer.whole(start)


class _Writer:
    """Rules of a grammar."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._rules: dict[str, str] = {}  # names by definition
        self._split = re.compile(
            "|".join(
                [f"({'|'.join(map(re.escape, sorted(marks.ids, key=len, reverse=True)))})" if marks.ids else "(?!)"]
            )
        )

    def whole(self, start: str) -> str:
        """The grammar that begins so."""
        rules = [f"{name}{definition}" for definition, name in self._rules.items()]
        return "\n".join([f"start: {start}", *rules])

    def rule(self, definition: str, attributes: str = "") -> str:
        """The name of a rule of that definition."""
        key = f"{attributes}: {definition}"
        if key not in self._rules:
            self._rules[key] = f"r{len(self._rules)}"
        return self._rules[key]

    def terminal(self, definition: str) -> str:
        """The name of a terminal of that definition."""
        key = f": {definition}"
        if key not in self._rules:
            self._rules[key] = f"T{len(self._rules)}"
        return self._rules[key]

    def is_token(self, text: str) -> bool:
        """Whether a text is one of the marks that are tokens."""
        return text in self._marks.ids

    def text(self, text: str) -> str:
        """A text with marks, as it is written."""
        parts: list[str] = []
        for part in self._split.split(text):
            if part and part in self._marks.ids:
                parts.append(f"<[{self._marks.ids[part]}]>")
            elif part:
                numbered = [_quoted(each) for each in part.split(DIGITS)]
                parts.append(f" {self.terminal('/[0-9]{1,4}/')} ".join(numbered))
        return " ".join(part for part in parts if part != '""') or '""'

    def ended(self, text: str) -> str:
        """A text that is the last of an answer: a mark that ends texts is left to the end."""
        last = next((mark for mark, id in self._marks.ids.items() if id in self._marks.end_ids and text == mark), None)
        return '""' if last is not None else self.text(text)

    def until(self, end: str, length: str = "*") -> str:
        """Any text, and the first end of it.  length: of the text, as a regular expression has it."""
        first = next(filter(None, self._split.split(end)))
        if first in self._marks.ids:
            return f"{self.terminal(f'/(?s:.{length})/')} {self.text(end)}"
        found = self.rule(f"/(?s:.{length})/", f"[suffix={_quoted(first)}]")
        rest = end[len(first) :]
        return f"{found} {self.text(rest)}" if rest else found

    def any_text(self) -> str:
        """Any text of at least one character."""
        return self.terminal("/(?s:.+)/")

    def json(self, schema: Mapping[str, Any], is_lenient: bool) -> str:
        """JSON by a schema."""
        options = {**JSON_OPTIONS, "coerce_one_of": True, "lenient": is_lenient}
        own = {key: value for key, value in schema.items() if key != "x-guidance"}
        return self.rule(f"%json {json.dumps({'x-guidance': options, **own}, ensure_ascii=False)}")


class _Calls:
    """The rules of calls."""

    def __init__(self, format: CallFormat, use: ToolUse, writer: _Writer, lenient: frozenset[str]) -> None:
        self.format, self.use, self.writer, self._lenient = format, use, writer, lenient

    @property
    def most(self) -> int:
        """Most calls of an answer."""
        return 1 if self.format.is_single or not self.use.is_parallel or self.use.named else MAX_CALLS

    def all(self, begun: str = "") -> str:
        """One call or several.  begun: what of it has been written."""
        format, writer = self.format, self.writer
        named = self.named()
        head = writer.text(format.head) if not format.header else ""  # which has the name in it
        first, begin = head, format.begin
        if begun and begin:
            begin = begin.removeprefix(begun)
        elif begun:
            first = writer.text(format.head.removeprefix(begun))
        parts = [writer.text(begin) if begin else "", first, named]
        separator = writer.text(format.separator) if format.separator else ""
        parts.append(self._more(f"{separator} {head} {named}"))
        return " ".join(filter(None, [*parts, writer.text(format.end) if format.end else ""]))

    def bare(self) -> str:
        """Calls that are all of an answer: JSON objects in a row or a list, as they are or as a block of code."""
        some = f"{_SPACE}{{0,{_MOST_SPACE}}}"
        writer, space = self.writer, self.writer.terminal(f"/{some}/")
        cases = [
            f"{_quoted(json.dumps(tool.name))} {space} {_quoted(',')} {space} {_quoted(json.dumps(self.format.bare))} "
            f"{space} {_quoted(':')} {space} {self.arguments(tool)} {space} {_quoted('}')}"
            for tool in self.use.callable_tools
        ]
        rest = writer.rule(f"{space} {_quoted(':')} {space} ({' | '.join(cases)})")

        # Up to the name one terminal: any text, which goes on beside it, is refused from there on.
        begun, in_list, in_block, in_both = (
            writer.terminal(rf"/{some}{before}\{{{some}\"name\"/")
            for before in ("", rf"\[{some}", f"```json{some}", rf"```json{some}\[{some}")
        )
        row = writer.rule(f"{rest} {self._more(f'{begun} {rest}')}")
        following = self._more(f"{space} {_quoted(',')} {begun} {rest}")
        row_of_list = writer.rule(f"{rest} {following} {space} {_quoted(']')}")
        fence = f"{space} {_quoted('```')}"
        return f"{begun} {row} | {in_list} {row_of_list} | {in_block} {row} {fence} | {in_both} {row_of_list} {fence}"

    def _more(self, following: str) -> str:
        """What may come after the first call. following: one more of them."""
        return f"({following}){{0,{self.most - 1}}}" if self.most > 1 else ""

    def named(self) -> str:
        """A call from its name on."""
        header = f"{self.format.header}{self.format.head}" if self.format.header else ""
        middle = self.format.middle
        cases = [
            f"{self.writer.text(header.replace(NAME, tool.name) + tool.name + middle)} {self.arguments(tool)} "
            f"{self.writer.ended(self.format.tail) if self.format.tail else ''}".rstrip()
            for tool in self.use.callable_tools
        ]
        return self.writer.rule(" | ".join(cases))

    def arguments(self, tool: Tool) -> str:
        """The arguments of a tool."""
        schema = _closed(tool.parameters)
        is_lenient = tool.name in self._lenient
        if self.format.arguments == "json":
            return self.writer.json(schema, is_lenient)
        if self.format.arguments == "parameters":
            return _Tagged(self.writer, self.format, schema, is_lenient).all()
        kind = _PythonValues if self.format.arguments == "python" else _QuotedValues
        values = kind(self.writer, schema, is_lenient, self.format.quote)
        return values.pairs(schema, 0, values.key_of_argument)


def _plain(calls: _Calls, schema: str | None) -> str:
    """An answer between whose parts tags stand."""
    use, format, writer = calls.use, calls.format, calls.writer
    if use.choice == "required":
        return calls.all()
    if schema is not None and not format.opening and use.may_call:
        return writer.json(_answer_or_call(json.loads(schema), calls), False)
    if schema is not None:
        answer = writer.json(json.loads(schema), False)
        return f"{answer} | {calls.all()}" if use.may_call else answer
    unlike = f' & ~/{_SPACE}*(```json{_SPACE}*)?\\{{{_SPACE}*"name"(?s:.*)/' if format.bare and use.may_call else ""
    is_token = writer.is_token(format.opening)
    if format.opening and not is_token:
        mark = re.escape(format.opening).replace("/", r"\/")
        unlike += f" & ~/(?s:.*{mark}.*)/"
    text = writer.terminal(f"/(?s:.*)/{unlike}")
    if not use.may_call:
        return text
    whole = [text]
    if is_token:
        whole = [f"{text} ({calls.all()})?"]
    elif format.opening:
        whole.append(f"{writer.until(format.opening)} {calls.all(format.opening)}")
    return " | ".join([*whole, calls.bare()] if format.bare else whole)


def _answer_or_call(schema: Mapping[str, Any], calls: _Calls) -> dict[str, Any]:
    """The schema of JSON that is an answer by a schema, or a bare call. Raises InvalidArgument if names clash."""
    cases: list[dict[str, Any]] = [dict(schema)]
    definitions: dict[str, dict[str, Any]] = {}
    for tool in calls.use.callable_tools:
        properties = {"name": {"const": tool.name}, calls.format.bare: dict(_closed(tool.parameters))}
        case = {"type": "object", "properties": properties, "required": list(properties)}
        cases.append({**case, "additionalProperties": False})
    for owner in (cases[0], *(case["properties"][calls.format.bare] for case in cases[1:])):
        for key in ("$defs", "definitions"):
            for name, part in owner.pop(key, {}).items():
                if definitions.setdefault(key, {}).setdefault(name, part) != part:
                    raise InvalidArgument(f"the schema and the tools both define {name}: give one of them another name")
    return {"anyOf": cases, **definitions}


def _channels(calls: _Calls, opened: bool, schema: str | None) -> str:
    """An answer in messages with headers: reasoning, and what is said before a call, then the call or the answer."""
    before, last, end, following = (_of_recipients if calls.format.header else _of_channels)(calls, schema)
    whole = f"({' | '.join(before)})* ({' | '.join(last)})"
    return f"{calls.writer.until(end)} {following} {whole}" if opened else whole


def _of_channels(calls: _Calls, schema: str | None) -> tuple[list[str], list[str], str, str]:
    """As gpt-oss writes.

    Gives what may come before the last message, what that may be, the end of a message, and what begins the next.
    """
    writer, format = calls.writer, calls.format
    following = writer.text("<|start|>assistant")
    before = [
        f"{writer.text(f'<|channel|>{channel}<|message|>')} {writer.until('<|end|>')} {following}"
        for channel in ("analysis", "commentary")
    ]
    last = []
    if calls.use.choice != "required":
        last.append(f"{writer.text('<|channel|>final<|message|>')} {_answer(writer, schema)}")
    if calls.use.may_call:
        end = writer.ended(format.tail)
        for tool in calls.use.callable_tools:
            arguments = calls.arguments(tool)
            heads = (
                f"{format.head}{tool.name}{format.middle}",
                f" to=functions.{tool.name}<|channel|>commentary{format.middle}",
                f" to=functions.{tool.name}<|channel|>commentary json<|message|>",
            )
            last += [f"{writer.text(head)} {arguments} {end}" for head in heads]
    return before, last, "<|end|>", following


def _of_recipients(calls: _Calls, schema: str | None) -> tuple[list[str], list[str], str, str]:
    """As Muse Glimmer writes, whose headers say whom a message is for; else as _of_channels."""
    writer, format = calls.writer, calls.format
    following = writer.text("<|start|>assistant")
    kinds = ("self", "user") if calls.use.may_call and schema is None else ("self",)
    before = [
        f"{writer.text(format.header.replace(NAME, kind))} {writer.until('<|eom|>')} {following}" for kind in kinds
    ]
    last = []
    if calls.use.choice != "required":
        last.append(f"{writer.text(format.header.replace(NAME, 'user'))} {_answer(writer, schema)}")
    if calls.use.may_call:
        last.append(calls.all())
    return before, last, "<|eom|>", following


def _answer(writer: _Writer, schema: str | None) -> str:
    """An answer that is no call, and may be empty where it has no schema."""
    return f"{writer.any_text()}?" if schema is None else writer.json(json.loads(schema), False)


class _Tagged:
    """Arguments each of which stands between tags: texts as they are, all others as JSON."""

    def __init__(self, writer: _Writer, format: CallFormat, schema: Mapping[str, Any], is_lenient: bool) -> None:
        self._writer, self._format, self._schema, self._is_lenient = writer, format, schema, is_lenient

    def all(self) -> str:
        """All arguments, in the order of the schema."""
        required = self._schema.get("required", ())
        parts = [
            f"{self._one(name, part)}{'' if name in required else '?'}" for name, part in _properties(self._schema)
        ]
        return " ".join(parts) or '""'

    def _one(self, name: str, part: Any) -> str:
        opening, between, closing = self._format.parameter
        begin = self._writer.text(f"{opening}{name}{between}")
        return self._writer.rule(f"{begin} {self._value(part, closing)}")

    def _value(self, given: Any, closing: str) -> str:
        schema = resolved(given, self._schema)
        values = _values(schema)
        if values is not None:
            texts = [self._writer.text(each if isinstance(each, str) else json.dumps(each)) for each in values]
            return f"({' | '.join(texts)}) {self._writer.text(closing)}"
        kinds = schema.get("type")
        if kinds is None or kinds == "string" or (isinstance(kinds, list) and "string" in kinds):
            if not any(key in schema for key in ("anyOf", "oneOf", "allOf")):
                return self._writer.until(closing, _length_of(schema))
        value = self._writer.json(_alone(schema, self._schema), self._is_lenient)
        return f"{value} {self._writer.text(closing)}"


class _Values:
    """Values as a language other than JSON writes them."""

    words: tuple[str, str, str]  # true, false and null
    pair_separator: str

    def __init__(self, writer: _Writer, root: Mapping[str, Any], is_lenient: bool, quote: str) -> None:
        self._writer, self._root, self._is_lenient, self._quote = writer, root, is_lenient, quote

    def text_value(self, length: str) -> str:
        """Any text of that length, as a regular expression has it."""
        raise NotImplementedError

    def quoted(self, text: str) -> str:
        """A text that is known."""
        raise NotImplementedError

    def key_of_argument(self, name: str) -> str:
        """The name of an argument of the call, with what stands before its value."""
        raise NotImplementedError

    def key_of_object(self, name: str) -> str:
        """The name of a part of an object, with what stands before its value."""
        raise NotImplementedError

    def pairs(self, schema: Mapping[str, Any], depth: int, key: Callable[[str], str]) -> str:
        """Names with values, in the order of the schema, between separators."""
        required = schema.get("required", ())
        parts = [
            (f"{self._writer.text(key(name))} {self.value(part, depth + 1)}", name in required)
            for name, part in _properties(schema)
        ]
        separator = _quoted(self.pair_separator)
        # From the last to the first: what follows where nothing was written before, and where something was.
        first, after = '""', '""'
        for part, is_required in reversed(parts):
            following = self._writer.rule(f"{separator} {part} {after}" + ("" if is_required else f" | {after}"))
            first = self._writer.rule(f"{part} {after}" + ("" if is_required else f" | {first}"))
            after = following
        return first

    def value(self, given: Any, depth: int) -> str:
        """A value by its schema; one that says nothing, or more than can be said here, is any value."""
        schema = resolved(given, self._root)
        values = _values(schema)
        if values is not None:
            return self._writer.rule(" | ".join(map(self._constant, values)))
        kinds = schema.get("type")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        parts = next((schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)), None)
        if depth > _MOST_NESTED or (not kinds and not parts):
            kinds, parts, schema = ["string", "number", "boolean", "null"], None, {}
        if parts:
            return self._writer.rule(" | ".join(self.value(part, depth + 1) for part in parts))
        return self._writer.rule(" | ".join(self._of_kind(kind, schema, depth) for kind in kinds or ()))

    def _of_kind(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        true, false, null = map(_quoted, self.words)
        if kind == "string":
            return self.text_value(_length_of(schema))
        if kind == "boolean":
            return f"{true} | {false}"
        if kind == "null":
            return null
        if kind == "array":
            items = self.value(schema.get("items", {}), depth + 1)
            least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
            if most == 0:
                return '"[]"'
            bounds = f"{max(0, least - 1)},{'' if most is None else int(most) - 1}"
            return f'"[" ({items} ({_quoted(self.pair_separator)} {items}){{{bounds}}}){"" if least else "?"} "]"'
        if kind == "object":
            return f'"{{" {self.pairs(_closed(schema), depth, self.key_of_object)} "}}"'
        limits = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
        return self._writer.json(
            {"type": kind, **{key: schema[key] for key in limits if key in schema}}, self._is_lenient
        )

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return self.quoted(value)
        true, false, null = map(_quoted, self.words)
        if value is None or isinstance(value, bool):
            return null if value is None else true if value else false
        return _quoted(json.dumps(value))


class _PythonValues(_Values):
    words = ("True", "False", "None")
    pair_separator = ", "

    def text_value(self, length: str) -> str:
        return self._writer.terminal(rf'/"([^"\\\n\r]|\\["\\nt]){length}"/')

    def quoted(self, text: str) -> str:
        return _quoted(json.dumps(text, ensure_ascii=False))

    def key_of_argument(self, name: str) -> str:
        return f"{name}="

    def key_of_object(self, name: str) -> str:
        return f"{json.dumps(name, ensure_ascii=False)}: "


class _QuotedValues(_Values):
    words = ("true", "false", "null")
    pair_separator = ","

    def text_value(self, length: str) -> str:
        return f"{self._writer.text(self._quote)} {self._writer.until(self._quote, length)}"

    def quoted(self, text: str) -> str:
        return self._writer.text(f"{self._quote}{text}{self._quote}")

    def key_of_argument(self, name: str) -> str:
        return f"{name}:"

    def key_of_object(self, name: str) -> str:
        return f"{name}:"


def _quoted(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


def _length_of(schema: Mapping[str, Any]) -> str:
    """The length of a text by its schema, as a regular expression has it."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    return f"{{{least},{most}}}" if least or most != "" else "*"


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of an object without properties that it does not name, unless it says that there may be some."""
    return schema if "additionalProperties" in schema else {**schema, "additionalProperties": False}


def _properties(schema: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found = schema.get("properties", {})
    return list(found.items()) if isinstance(found, Mapping) else []


def _values(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    """The values of which a schema allows one, None where it lists none that can be written as they are."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not values or any(isinstance(value, (dict, list)) for value in values):
        return None
    return values


def _alone(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part of a schema with the definitions that it may refer to."""
    return {**schema, **{key: root[key] for key in ("$defs", "definitions") if key in root}}
