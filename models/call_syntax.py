"""Calls of tools that are no JSON: XML as Qwen3-Coder and Qwen3.5 or as Muse Glimmer and MiniMax write it, Python's
syntax as LFM2 writes it, and Gemma's.

<function=f><parameter=a>1</parameter></function>            [f(a=1, b="x"), g()]            call:f{a:1,b:<|"|>x<|"|>}
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any, NamedTuple

_MOST_NESTED = 64  # lists and dicts in one another


class SpelledCall(NamedTuple):
    """A call as it is written, with what it says."""

    text: str
    name: str
    arguments: dict[str, Any]


# ---- XML -------------------------------------------------------------------------------------------------------------

_FUNCTION = re.compile(r"\s*<function=([^<>\s]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>\s]+)>(.*?)</parameter>\s*", re.DOTALL)
# <atem:invoke name="f"><atem:parameter name="a">1</atem:parameter></atem:invoke>, the prefix being a model's
_INVOKED = re.compile(r"""\s*<(?:\w+:)?invoke name="([^<>"\s]+)">(.*?)</(?:\w+:)?invoke>\s*""", re.DOTALL)
_NAMED = re.compile(r"""\s*<(?:\w+:)?parameter name="([^<>"\s]+)">(.*?)</(?:\w+:)?parameter>\s*""", re.DOTALL)
_WRAPPER = re.compile(r"\s*<(?:\w+:)?function_calls>(.*)</(?:\w+:)?function_calls>\s*", re.DOTALL)


def xml_calls(text: str) -> list[SpelledCall] | None:
    """The calls of a text that is nothing but functions with parameters; None for another one.

    Values have no quotes: what is a number, true, false, null, a list or an object in JSON is that, all else a text,
    without the line ends next to its tags. A text that looks like a number cannot be told from one.
    """
    wrapped = _WRAPPER.fullmatch(text)
    text = text if wrapped is None else wrapped[1]
    return _xml_calls(text, _FUNCTION, _PARAMETER) or _xml_calls(text, _INVOKED, _NAMED)


def _xml_calls(text: str, of_call: re.Pattern[str], of_parameter: re.Pattern[str]) -> list[SpelledCall] | None:
    calls, end = [], 0
    while end < len(text):
        function = of_call.match(text, end)
        arguments = None if function is None else _parameters(function[2], of_parameter)
        if function is None or arguments is None:
            return None
        calls.append(SpelledCall(function[0].strip(), function[1], arguments))
        end = function.end()
    return calls or None


def _parameters(body: str, of_parameter: re.Pattern[str]) -> dict[str, Any] | None:
    found: dict[str, Any] = {}
    end = len(body) - len(body.lstrip())
    while end < len(body):
        parameter = of_parameter.match(body, end)
        if parameter is None or parameter[1] in found:
            return None
        found[parameter[1]] = _xml_value(parameter[2].removeprefix("\n").removesuffix("\n"))
        end = parameter.end()
    return found


def _xml_value(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) or value != value else value  # NaN is no JSON


# ---- Python's syntax -------------------------------------------------------------------------------------------------

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[^\W\d]\w*(?:[.-][^\W\d]\w*)*")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.])")
_STRING = re.compile(r"'(?:[^'\\\n]|\\.)*'" + r'|"(?:[^"\\\n]|\\.)*"', re.DOTALL)
_CONSTANTS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_MOST_DIGITS = 300


class _Mismatch(ValueError):
    """The text is no list of calls."""


def python_calls(text: str) -> list[SpelledCall] | None:
    """The calls of a text that is a list of calls with named arguments, whose values are literals; None for another."""
    try:
        return _PythonReader(text).calls() or None
    except _Mismatch:
        return None


class _PythonReader:
    """Reads a list of calls from the left. Python's own parser is not used: a hostile text could end the process."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def calls(self) -> list[SpelledCall]:
        """All of them. Raises _Mismatch."""
        self._expect("[")
        found: list[SpelledCall] = []
        while self._another(bool(found), "]"):
            found.append(self._call())
        self._skip(_SPACE)
        if self._at < len(self._text):
            raise _Mismatch
        return found

    def _call(self) -> SpelledCall:
        self._skip(_SPACE)
        start, name = self._at, self._take(_NAME)
        arguments: dict[str, Any] = {}
        self._expect("(")
        while self._another(bool(arguments), ")"):
            key = self._take(_NAME)
            if key in arguments:
                raise _Mismatch
            self._expect("=")
            arguments[key] = self._value()
        return SpelledCall(self._text[start : self._at], name, arguments)

    def _value(self) -> Any:
        self._skip(_SPACE)
        first = self._text[self._at : self._at + 1]
        if first in ("[", "{"):
            self._depth += 1
            if self._depth > _MOST_NESTED:
                raise _Mismatch
            value = self._list() if first == "[" else self._dict()
            self._depth -= 1
            return value
        if first in ("'", '"'):
            return self._string()
        if first and first in "+-.0123456789":
            return self._number()
        word = self._take(_NAME)
        if word not in _CONSTANTS:
            raise _Mismatch
        return _CONSTANTS[word]

    def _list(self) -> list[Any]:
        self._expect("[")
        found: list[Any] = []
        while self._another(bool(found), "]"):
            found.append(self._value())
        return found

    def _dict(self) -> dict[str, Any]:
        self._expect("{")
        found: dict[str, Any] = {}
        while self._another(bool(found), "}"):
            key = self._string()
            self._expect(":")
            found[key] = self._value()
        return found

    def _string(self) -> str:
        try:
            return str(ast.literal_eval(self._take(_STRING)))
        except (ValueError, SyntaxError):
            raise _Mismatch from None

    def _number(self) -> int | float:
        digits = self._take(_NUMBER)
        if len(digits) > _MOST_DIGITS:
            raise _Mismatch
        return int(digits) if digits.lstrip("+-").isdigit() else float(digits)

    def _another(self, is_first_read: bool, closing: str) -> bool:
        """Whether another element comes before the closing bracket; takes the comma, or the bracket."""
        if self._accept(closing):
            return False
        if is_first_read:
            self._expect(",")
            return not self._accept(closing)
        return True

    # ---- characters --------------------------------------------------------------------------------------------------

    def _skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self._text, self._at)
        self._at = self._at if found is None else found.end()

    def _accept(self, char: str) -> bool:
        self._skip(_SPACE)
        is_there = self._text.startswith(char, self._at)
        self._at += is_there
        return is_there

    def _expect(self, char: str) -> None:
        if not self._accept(char):
            raise _Mismatch

    def _take(self, pattern: re.Pattern[str]) -> str:
        self._skip(_SPACE)
        found = pattern.match(self._text, self._at)
        if found is None:
            raise _Mismatch
        self._at = found.end()
        return found[0]


# ---- Values in quotes of their own -----------------------------------------------------------------------------------


def quoted_call(text: str, quote: str) -> SpelledCall | None:
    """A call such as call:name{a:1,b:QtextQ}, as Gemma writes it; None for another text.  quote: the Q of texts."""
    try:
        return _QuotedReader(text, quote).call()
    except _Mismatch:
        return None


_KEY = re.compile(r"[^\s:,{}\[\]]+")
_JSON_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w.])")


class _QuotedReader:
    """Reads a call whose texts stand between quotes of their own, from the left."""

    def __init__(self, text: str, quote: str) -> None:
        self._text = text.strip()
        self._quote = quote
        self._at = 0
        self._depth = 0

    def call(self) -> SpelledCall:
        """The call. Raises _Mismatch."""
        self._expect("call:")
        name = self._match(_KEY)
        arguments = self._object()
        if self._at < len(self._text):
            raise _Mismatch
        return SpelledCall(self._text, name, arguments)

    def _object(self) -> dict[str, Any]:
        self._expect("{")
        found: dict[str, Any] = {}
        while not self._accept("}"):
            if found:
                self._expect(",")
            key = self._between_quotes() if self._accept(self._quote) else self._match(_KEY)
            self._expect(":")
            if key in found:
                raise _Mismatch
            found[key] = self._value()
        return found

    def _value(self) -> Any:
        self._space()
        if self._accept(self._quote):
            return self._between_quotes()
        first = self._text[self._at : self._at + 1]
        if first in ("{", "["):
            self._depth += 1
            if self._depth > _MOST_NESTED:
                raise _Mismatch
            value = self._object() if first == "{" else self._list()
            self._depth -= 1
            return value
        for word, meant in (("true", True), ("false", False), ("null", None)):
            if self._accept(word):
                return meant
        digits = self._match(_JSON_NUMBER)
        if len(digits) > _MOST_DIGITS:
            raise _Mismatch
        return json.loads(digits)

    def _list(self) -> list[Any]:
        self._expect("[")
        found: list[Any] = []
        while not self._accept("]"):
            if found:
                self._expect(",")
            found.append(self._value())
        return found

    def _between_quotes(self) -> str:
        end = self._text.find(self._quote, self._at)
        if end < 0:
            raise _Mismatch
        found = self._text[self._at : end]
        self._at = end + len(self._quote)
        return found

    def _space(self) -> None:
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1

    def _accept(self, mark: str) -> bool:
        self._space()
        is_there = bool(mark) and self._text.startswith(mark, self._at)
        self._at += len(mark) if is_there else 0
        return is_there

    def _expect(self, mark: str) -> None:
        if not self._accept(mark):
            raise _Mismatch

    def _match(self, pattern: re.Pattern[str]) -> str:
        self._space()
        found = pattern.match(self._text, self._at)
        if found is None:
            raise _Mismatch
        self._at = found.end()
        return found[0]
