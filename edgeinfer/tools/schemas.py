"""What a JSON Schema says of the parameters of a tool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", dict: "object"}


def resolved(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Mapping[str, Any]:
    """The schema that a local reference names; an empty one where there is none."""
    if not isinstance(schema, Mapping):
        return {}
    reference = schema.get("$ref")
    if not isinstance(reference, str) or depth > 8:
        return schema
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return resolved(found, root, depth + 1)


def types_of(parameters: Mapping[str, Any], name: str) -> frozenset[str]:
    """The JSON types that a parameter may have; none where the schema does not say."""
    properties = parameters.get("properties", {})
    schema = properties.get(name, {}) if isinstance(properties, Mapping) else {}
    return _types(schema, parameters, 0)


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    schema = resolved(schema, root)
    if depth > 8:
        return frozenset()
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset({given})
    if isinstance(given, (list, tuple)):
        return frozenset(each for each in given if isinstance(each, str))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, (list, tuple)):
        return frozenset(_TYPES.get(type(value), "array") for value in values)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), (list, tuple)):
            parts = [_types(part, root, depth + 1) for part in schema[key]]
            return frozenset().union(*parts) if all(parts) else frozenset()
    return frozenset()
