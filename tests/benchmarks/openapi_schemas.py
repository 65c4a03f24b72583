"""Values against the schemas of an OpenAPI document, and against the types of openai-python."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError

Wrong: TypeAlias = tuple[str, str]  # (where, without the numbers of items; what)

_EVENTS, _JSON = "text/event-stream", "application/json"
# Of openai-python, by the route, for whole replies and for the events of a stream.
_TYPES: Mapping[str, tuple[str, str]] = {
    "/chat/completions": ("chat.ChatCompletion", "chat.ChatCompletionChunk"),
    "/completions": ("Completion", "Completion"),
    "/responses": ("responses.Response", "responses.ResponseStreamEvent"),
    "/models": ("Model", ""),
    "/models/{model}": ("Model", ""),
}


class Document:
    """An OpenAPI document of version 3.1, which may still have the word `nullable` of 3.0."""

    def __init__(self, path: Path) -> None:
        """path: of the document, as JSON. Raises ValueError where it is none."""
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not str(content.get("openapi", "")).startswith("3."):
            raise ValueError(f"{path} is no OpenAPI document of version 3, as JSON")
        self.version = f"{content['info']['title']} {content['info']['version']}, OpenAPI {content['openapi']}"
        self._paths: dict[str, Any] = content["paths"]
        self._components = _with_null(content["components"])

    def reply(self, path: str, method: str, is_stream: bool) -> dict[str, Any]:
        """The schema of good replies of a route, or of the events of a stream where the document has one of its own."""
        content = self._paths[path][method.lower()]["responses"]["200"]["content"]
        return dict(content[_EVENTS if is_stream and _EVENTS in content else _JSON]["schema"])

    def request(self, path: str) -> dict[str, Any]:
        """The schema of bodies of a route."""
        return dict(self._paths[path]["post"]["requestBody"]["content"][_JSON]["schema"])

    def error(self) -> dict[str, Any]:
        """The schema of refusals."""
        response = self._components["responses"]["TooManyRequests"]
        return dict(response["content"][_JSON]["schema"])

    def event(self, schema: Mapping[str, Any], value: Any) -> dict[str, Any]:
        """Of a schema of events that differ by `type`, that of one event, so that what is wrong is said of it alone."""
        choices = self._components["schemas"][schema["$ref"].rpartition("/")[2]].get("anyOf")
        if not choices:
            return dict(schema)
        kind = value.get("type") if isinstance(value, dict) else None
        for choice in choices:
            each = self._components["schemas"][choice["$ref"].rpartition("/")[2]]
            if kind in each["properties"]["type"]["enum"]:
                return dict(choice)
        return {"not": {}, "description": f"no event is {kind!r}"}

    def wrong(self, schema: Mapping[str, Any], value: Any, is_request: bool = False) -> Iterator[Wrong]:
        """What is wrong with a value: of alternatives that all fail, within the one that gets furthest.

        is_request: it may fit several alternatives where the document allows one: a message of /responses does.
        """
        import jsonschema

        for error in jsonschema.Draft202012Validator({**schema, "components": self._components}).iter_errors(value):
            yield from _leaves(error, is_request)


def _leaves(error: ValidationError, may_fit_several: bool) -> Iterator[Wrong]:
    """What is wrong within one error."""
    if may_fit_several and error.validator == "oneOf" and not error.context:
        return
    if error.context:
        by_choice: dict[object, list[ValidationError]] = {}
        for each in error.context:
            by_choice.setdefault(each.schema_path[0], []).append(each)
        for each in max(by_choice.values(), key=lambda errors: max(len(each.absolute_path) for each in errors)):
            yield from _leaves(each, may_fit_several)
        return
    place = "/".join("*" if isinstance(part, int) else str(part) for part in error.absolute_path)
    yield place, error.message[:200]


def _with_null(schema: Any) -> Any:
    """The same with `nullable` as JSON Schema says it."""
    if isinstance(schema, list):
        return [_with_null(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _with_null(each) for name, each in schema.items() if name != "nullable"}
    return {"anyOf": [found, {"type": "null"}]} if schema.get("nullable") is True else found


class Types:
    """The types of openai-python, read strictly: no text for a number, no number for a text."""

    def __init__(self) -> None:
        """Raises ImportError where openai-python is missing."""
        self._pydantic = importlib.import_module("pydantic")
        self.version = f"openai-python {importlib.import_module('openai').__version__}"

    def wrong(self, path: str, is_stream: bool, text: str) -> Iterator[Wrong]:
        """What is wrong with a good reply, or with the data of an event."""
        try:
            self._of(_TYPES[path][is_stream], json.loads(text).get("type")).validate_json(text, strict=True)
        except self._pydantic.ValidationError as error:
            for each in error.errors(include_url=False):
                place = "/".join("*" if isinstance(part, int) else str(part) for part in each["loc"])
                yield place, f"{each['input']!r:.100}: {each['msg']}"

    @cache  # noqa: B019  # one object for the life of the script
    def _of(self, name: str, kind: str | None) -> Any:
        module, _, name = f"types.{name}".rpartition(".")
        found = getattr(importlib.import_module(f"openai.{module}"), name)
        for each in getattr(getattr(found, "__origin__", None), "__args__", ()):
            field = getattr(each, "model_fields", {}).get("type")
            if field is not None and re.search(rf"'{re.escape(str(kind))}'", str(field.annotation)):
                found = each
        return self._pydantic.TypeAdapter(found)
