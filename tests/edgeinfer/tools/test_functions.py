"""Python functions and dicts as declarations of tools."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

import pytest

from edgeinfer.common.errors import InvalidArgument
from edgeinfer.tools.functions import declaration_of, schema_of
from edgeinfer.tools.options import NO_TOOLS, tool_of, tool_use_of


class Unit(enum.Enum):
    METRE = "m"
    FOOT = "ft"


@dataclass
class Place:
    name: str
    zoom: int = 3


class Span(TypedDict, total=False):
    start: float


def look(at: str, times: int = 1, *, how: Literal["near", "far"] = "near", place: "Place | None" = None) -> str:
    """Look at something.

    It takes a while.

    Args:
        at: What to look at,
            in words.
        times (int): How often.

    Returns:
        what is seen
    """
    return at


def test_a_function_is_declared_by_its_signature_and_docstring():
    declared = declaration_of(look)
    assert declared["name"] == "look" and declared["description"] == "Look at something.\n\nIt takes a while."
    parameters = declared["parameters"]
    assert parameters["required"] == ["at"] and parameters["additionalProperties"] is False
    properties = parameters["properties"]
    assert properties["at"] == {"type": "string", "description": "What to look at, in words."}
    assert properties["times"] == {"type": "integer", "description": "How often."}
    assert properties["how"] == {"enum": ["near", "far"]}
    assert properties["place"]["anyOf"][1] == {"type": "null"}
    assert properties["place"]["anyOf"][0]["required"] == ["name"]


def test_sphinx_fields_are_read():
    def f(a: int, b: str = "x") -> None:
        """Do it.

        :param a: the first
            of two
        :type a: int
        :param str b: the second
        :returns: nothing
        """

    declared = declaration_of(f)
    assert declared["description"] == "Do it."
    properties = declared["parameters"]["properties"]
    assert properties["a"]["description"] == "the first of two" and properties["b"]["description"] == "the second"


@pytest.mark.parametrize(
    "hint, schema",
    [
        (str, {"type": "string"}),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (Any, {}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (list, {"type": "array"}),
        (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}),
        (dict[str, bool], {"type": "object", "additionalProperties": {"type": "boolean"}}),
        (Mapping, {"type": "object"}),
        (int | None, {"type": ["integer", "null"]}),
        (Unit, {"enum": ["m", "ft"]}),
        (Annotated[int, "how many"], {"type": "integer", "description": "how many"}),
        (
            Span,
            {"type": "object", "properties": {"start": {"type": "number"}}, "required": [],
             "additionalProperties": False},
        ),
        (
            tuple[int, str],
            {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "minItems": 2,
             "maxItems": 2},
        ),
    ],
)  # fmt: skip
def test_type_hints_are_schemas(hint, schema):
    assert schema_of(hint, "f(a)") == schema


@pytest.mark.parametrize("hint", [dict[int, str], complex, object, bytes])
def test_types_that_no_json_makes_are_refused(hint):
    with pytest.raises(InvalidArgument, match=r"f\(a\)"):
        schema_of(hint, "f(a)")


def test_parameters_without_a_name_are_refused():
    def f(a: int, /) -> None: ...

    with pytest.raises(InvalidArgument, match="a has no name"):
        declaration_of(f)


def test_openai_declarations_are_taken_with_and_without_their_wrapping():
    function = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {}}}}
    assert tool_of({"type": "function", "function": function}) == tool_of(function)
    assert tool_of({"name": "g"}).declaration["function"]["parameters"] == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    "options, said",
    [
        ({"tools": "x"}, "tools must be a list"),
        ({"tools": {"name": "f"}}, "tools must be a list"),
        ({"tools": [5]}, "must be a function or a mapping"),
        ({"tools": [Place]}, "must be a function or a mapping"),
        ({"tools": [{"type": "web_search"}]}, "a tool must be"),
        ({"tools": [{"name": "<tool>"}]}, "the name of a tool"),
        ({"tools": [{"name": "f", "parameters": {"type": "array"}}]}, "parameters of f"),
        ({"tools": [{"name": "f", "parameters": {"type": "object", "x": {1}}}]}, "cannot be written as JSON"),
        ({"tools": [{"name": "f"}, {"name": "f"}]}, "two tools are called f"),
        ({"tools": [look], "tool_choice": "g"}, r"name of a tool \(look\): found g"),
        ({"tools": [look], "tool_choice": {"type": "function"}}, "the name in tool_choice"),
        ({"tools": [look], "tool_choice": 5}, "tool_choice must be a text"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": [look], "parallel_tool_calls": 1}, "parallel_tool_calls must be"),
    ],
)
def test_wrong_options_are_refused(options, said):
    with pytest.raises(InvalidArgument, match=said):
        tool_use_of(options)


def test_a_choice_says_what_may_be_called():
    other = {"name": "other"}
    assert tool_use_of({}) == NO_TOOLS and tool_use_of({"tools": []}) == NO_TOOLS
    assert [t.name for t in tool_use_of({"tools": [look, other]}).callable_tools] == ["look", "other"]
    assert tool_use_of({"tools": [look], "tool_choice": "none"}).callable_tools == ()
    for choice in ("other", {"type": "function", "function": {"name": "other"}}):
        use = tool_use_of({"tools": [look, other], "tool_choice": choice})
        assert use.choice == "required" and [t.name for t in use.callable_tools] == ["other"]
