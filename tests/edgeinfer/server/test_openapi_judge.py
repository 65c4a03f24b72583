"""tests/benchmarks/openapi_schemas.py, by which replies are judged: it finds what is wrong, and nothing else."""

import importlib.util
import json
from pathlib import Path

import pytest
from parts import missing

SCHEMAS = Path(__file__).parents[2] / "benchmarks" / "openapi_schemas.py"
TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
EVENTS = {
    kind.title(): {
        "type": "object",
        "properties": {"type": {"type": "string", "enum": [kind]}, kind: WHOLE},
        "required": ["type", kind],
    }
    for kind in ("begin", "end")
}
REPLY = {
    "type": "object",
    "properties": {
        "id": TEXT,
        "user": {**TEXT, "nullable": True},
        "parts": {"type": "array", "items": {"anyOf": [{"$ref": "#/components/schemas/Part"}, {"type": "null"}]}},
    },
    "required": ["id"],
}
PART = {"type": "object", "properties": {"name": TEXT, "size": WHOLE}, "required": ["name"]}


def of(name):
    return {"schema": {"$ref": f"#/components/schemas/{name}"}}


@pytest.fixture(scope="module")
def schemas():
    if importlib.util.find_spec("jsonschema") is None:
        missing("grammar", "jsonschema is not installed")
    spec = importlib.util.spec_from_file_location("openapi_schemas", SCHEMAS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def document(schemas, tmp_path):
    """A document with one route."""
    answer = {"content": {"application/json": of("Reply"), "text/event-stream": of("Event")}}
    asked = {"content": {"application/json": {"schema": {"oneOf": [WHOLE, {"type": "number"}]}}}}
    components = {
        "schemas": {"Reply": REPLY, "Part": PART, **EVENTS}
        | {"Event": {"anyOf": [of(name)["schema"] for name in EVENTS]}},
        "responses": {"TooManyRequests": {"content": {"application/json": {"schema": TEXT}}}},
    }
    content = {"openapi": "3.1.0", "info": {"title": "a", "version": "1"}, "components": components}
    content["paths"] = {"/a": {"post": {"responses": {"200": answer}, "requestBody": asked}}}
    path = tmp_path / "openapi.json"
    path.write_text(json.dumps(content))
    return schemas.Document(path)


@pytest.mark.parametrize(
    "reply, wrong",
    [
        ({"id": "a", "user": None, "parts": [{"name": "b", "size": 1}, None]}, []),
        ({"user": None}, [("", "'id' is a required property")]),
        ({"id": None, "user": 1}, [("id", "None is not of type 'string'"), ("user", "1 is not of type 'string'")]),
        ({"id": "a", "parts": [{}, {"name": 1, "size": None}]}, None),
    ],
)
def test_what_is_wrong_with_a_reply_is_said_with_its_place(document, reply, wrong):
    found = list(document.wrong(document.reply("/a", "POST", False), reply))
    if wrong is None:  # of alternatives, the one that is meant
        wrong = [("parts/*/name", "1 is not of type 'string'"), ("parts/*/size", "None is not of type 'integer'")]
        assert sorted(found)[1:] == wrong and found[0][0] == "parts/*"
    else:
        assert sorted(found) == sorted(wrong)


@pytest.mark.parametrize(
    "event, n_wrong",
    [({"type": "end", "end": 1}, 0), ({"type": "end", "begin": 1}, 1), ({"type": "middle", "end": 1}, 1), ({}, 1)],
)
def test_an_event_is_read_as_its_type_says(document, event, n_wrong):
    schema = document.event(document.reply("/a", "POST", True), event)
    assert len(list(document.wrong(schema, event))) == n_wrong
    assert document.event(document.reply("/a", "POST", False), event) == of("Reply")["schema"]


def test_only_a_request_may_fit_two_alternatives(document):
    schema = document.request("/a")
    assert len(list(document.wrong(schema, 1))) == 1 and not list(document.wrong(schema, 1, is_request=True))
    assert list(document.wrong(schema, "a", is_request=True)) and list(document.wrong(document.error(), 1))


def test_what_is_no_document_is_refused(schemas, tmp_path):
    (tmp_path / "a.json").write_text('{"swagger": "2.0"}')
    with pytest.raises(ValueError, match=r"no OpenAPI document of version 3"):
        schemas.Document(tmp_path / "a.json")
