"""The declaration of a Python function as a tool: its signature, type hints and docstring as JSON Schema."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from edgeinfer.common.arguments import shown
from edgeinfer.common.errors import InvalidArgument

_PLAIN: dict[object, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_LISTS = (list, tuple, set, frozenset)
# Of a docstring: where parameters begin, and one of them.
_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Params)\s*:?\s*$", re.IGNORECASE)
_OTHER_SECTION = re.compile(r"^\s*(Returns?|Raises|Yields?|Examples?|Notes?)\s*:?\s*$", re.IGNORECASE)
_NAMED = re.compile(r"^(\s*)\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_FIELD = re.compile(r"^\s*:param\s+(?:[\w\[\], .|]+\s+)?(\w+)\s*:\s*(.*)$")
_FIELD_OF_OTHERS = re.compile(r"^\s*:(type|returns?|rtype|raises)\b")


def declaration_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The name, description and parameters of a function, as OpenAI declares them.

    The description is the docstring before its parameters; Google's and Sphinx's ways to describe those are read.
    Raises InvalidArgument for a parameter that no JSON can give.
    """
    name = getattr(function, "__name__", type(function).__name__)
    text, described = _read_docstring(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required = []
    for parameter in _parameters(function, name):
        schema = schema_of(parameter.annotation, f"{name}({parameter.name})")
        if parameter.name in described:
            schema = {**schema, "description": described[parameter.name]}
        properties[parameter.name] = schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"name": name, "description": text, "parameters": parameters}


def _parameters(function: Callable[..., Any], name: str) -> list[inspect.Parameter]:
    """The parameters with their types in the place of strings. Raises InvalidArgument."""
    try:
        signature = inspect.signature(function)
        hints = typing.get_type_hints(function)
    except (TypeError, ValueError, NameError) as error:
        raise InvalidArgument(f"{name} cannot be a tool, its types are not known: {error}") from None
    found = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise InvalidArgument(f"{name} cannot be a tool: {parameter.name} has no name for who calls")
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        found.append(parameter.replace(annotation=hints.get(parameter.name, Any)))
    return found


def schema_of(hint: Any, place: str) -> dict[str, Any]:
    """The JSON Schema of a type hint. Raises InvalidArgument for a type that no JSON makes; place: for its message."""
    if hint is Any or hint is inspect.Parameter.empty:
        return {}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is typing.Annotated:
        described = [each for each in arguments[1:] if isinstance(each, str)]
        schema = schema_of(arguments[0], place)
        return {**schema, "description": described[0]} if described else schema
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return _union([schema_of(each, place) for each in arguments])
    if hint in _LISTS or origin in _LISTS:
        return _list(origin or hint, arguments, place)
    if hint is dict or origin is dict or hint is Mapping or origin is Mapping:
        if arguments and arguments[0] is not str:
            raise InvalidArgument(f"{place} has the type {hint}: the keys of JSON are texts")
        values = schema_of(arguments[1], place) if arguments else {}
        return {"type": "object", "additionalProperties": values} if values else {"type": "object"}
    return _schema_of_class(hint, place)


def _union(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    if all(set(schema) == {"type"} for schema in schemas):
        return {"type": [schema["type"] for schema in schemas]}
    return {"anyOf": schemas}


def _list(kind: Any, arguments: tuple[Any, ...], place: str) -> dict[str, Any]:
    if kind is tuple and arguments and arguments[-1] is not Ellipsis:
        items = [schema_of(each, place) for each in arguments]
        return {
            "type": "array", "prefixItems": items, "items": False, "minItems": len(items), "maxItems": len(items)
        }  # fmt: skip
    return {"type": "array", "items": schema_of(arguments[0], place)} if arguments else {"type": "array"}


def _schema_of_class(hint: Any, place: str) -> dict[str, Any]:
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [member.value for member in hint]}
    if hasattr(hint, "model_json_schema"):
        return dict(hint.model_json_schema())
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        hints = typing.get_type_hints(hint)
        fields = [each for each in dataclasses.fields(hint) if each.init]
        is_needed = [each.default is each.default_factory is dataclasses.MISSING for each in fields]
        required = [each.name for each, needed in zip(fields, is_needed, strict=True) if needed]
        return _object({each.name: hints[each.name] for each in fields}, required, place)
    if typing.is_typeddict(hint):
        return _object(typing.get_type_hints(hint), sorted(hint.__required_keys__), place)
    raise InvalidArgument(f"{place} has the type {shown(hint)}, which no JSON makes: give the tool as a dict instead")


def _object(hints: Mapping[str, Any], required: list[str], place: str) -> dict[str, Any]:
    properties = {name: schema_of(hint, f"{place}.{name}") for name, hint in hints.items()}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """(what it says before the parameters, the description of each parameter)."""
    said: list[str] = []
    described: dict[str, str] = {}
    name, indent, is_within, is_over = "", -1, False, False
    for line in text.splitlines():
        field = _FIELD.match(line)
        if field is not None:
            name, indent, is_over = field[1], len(line) - len(line.lstrip()), True
            described[name] = field[2].strip()
        elif _SECTION.match(line):
            name, indent, is_within, is_over = "", -1, True, True
        elif _OTHER_SECTION.match(line) or _FIELD_OF_OTHERS.match(line):
            name, is_within, is_over = "", False, True
        elif is_within and (named := _NAMED.match(line)) and (indent < 0 or len(named[1]) <= indent):
            name, indent = named[2], len(named[1])
            described[name] = named[3].strip()
        elif name and line.strip():
            described[name] = f"{described[name]} {line.strip()}".strip()
        elif not is_over:
            said.append(line)
    return "\n".join(said).strip(), described
