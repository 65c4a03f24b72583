"""Which part of a schema it is that llguidance refuses: it names the keyword or the value, and not the place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_KEYS = re.compile(r"Unimplemented keys: (\[.*?\])")
_VALUES = re.compile(r"(?:Invalid type|Unknown format): (\S+)|Pointer '([^']*)'|Resource '([^']*)'")


def with_place(message: str, source: str) -> str:
    """The message with the places in the schema, as JSON pointers, of what it names; the first few of them."""
    keys, values = _named_in(message)
    if not keys and not values:
        return message
    try:
        schema = json.loads(source)
        found = [pointer for pointer, name, value in _walk(schema, "#") if name in keys or _is_in(value, values)]
    except (ValueError, RecursionError):
        return message
    if not found:
        return message
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f"{message}, at {', '.join(found[:3])}{more}"


def _named_in(message: str) -> tuple[set[str], set[str]]:
    """(keywords, values) that a message is about."""
    if keys := _KEYS.search(message):
        try:
            return set(json.loads(keys[1])), set()
        except ValueError:
            return set(), set()
    if "oneOf constraints" in message:
        return {"oneOf"}, set()
    if "regex" in message:
        return {"pattern", "patternProperties"}, set()
    value = _VALUES.search(message)
    return set(), {next(filter(None, value.groups()), "")} if value else set()


def _is_in(value: Any, names: set[str]) -> bool:
    """Whether a value of a keyword is one of these, or a reference that ends so."""
    return isinstance(value, str) and any(value == name or value == f"#{name}" for name in names)


def _walk(schema: Any, pointer: str) -> Iterator[tuple[str, str, Any]]:
    """(pointer, keyword, value) of all that a schema holds, in its order."""
    items = schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ()
    for name, value in items:
        place = f"{pointer}/{str(name).replace('~', '~0').replace('/', '~1')}"
        yield place, str(name), value
        yield from _walk(value, place)
