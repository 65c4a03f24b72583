"""What a caller may ask for: a schema, a regular expression, a grammar, choices, or JSON of any kind."""

from __future__ import annotations

import json as json_module
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypedDict, cast

from edgeinfer.common.arguments import check_flag, check_text, shown
from edgeinfer.common.errors import InvalidArgument, InvalidConstraint
from edgeinfer.constraints.library import Form, one_line

# A JSON Schema as an object, as JSON text, or a pydantic model.
Schema: TypeAlias = Mapping[str, Any] | str | bool | type
Name: TypeAlias = Literal["schema", "regex", "grammar", "choices", "json", "tools"]

_VALUES = frozenset({"enum", "const", "default", "examples"})  # keywords whose values are no schemas
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_NAMES: tuple[Name, ...] = ("schema", "regex", "grammar", "choices", "json")


class ConstraintOptions(TypedDict, total=False):
    """What an answer may be, as keyword arguments, of which one may be given; None is as if it were not given.

    schema: JSON that is valid by this JSON Schema (an object, or JSON text) or makes this pydantic model.  regex: a
    text that the regular expression matches as a whole.  grammar: a text of this grammar, Lark as llguidance reads it,
    or GBNF as llama.cpp does.  choices: one of these texts.  json: True for any JSON object.
    """

    schema: Schema | None
    regex: str | None
    grammar: str | Wanted | None
    choices: Sequence[str] | None
    json: bool | None


@dataclass(frozen=True)
class Wanted:
    """A constraint before it is read. Equal ones allow the same texts."""

    name: Name  # of the option
    form: Form
    source: str
    model: Any = field(default=None, compare=False)  # the pydantic model that the answer makes, None for none
    # Of tools, which are no option of a caller here:
    is_json_answer: bool = field(default=False, compare=False)  # an answer without calls is JSON
    includes_reasoning: bool = field(default=False, compare=False)  # the grammar is of all that the model writes

    @property
    def is_json(self) -> bool:
        """Whether the answer is JSON."""
        return self.form == "schema" or self.is_json_answer

    @property
    def has_value(self) -> bool:
        """Whether a complete answer has a value for the caller."""
        return self.name != "tools" or self.is_json_answer


def wanted_of(options: Mapping[str, Any]) -> Wanted | None:
    """The constraint that ConstraintOptions ask for, None for none. Raises InvalidArgument."""
    if isinstance(options.get("grammar"), Wanted):
        return cast(Wanted, options["grammar"])  # edgeinfer.chat makes it of tools, and has checked the others
    given: list[Name] = [name for name in _NAMES if options.get(name) is not None]
    if options.get("json") is False:
        given.remove("json")
    if len(given) > 1:
        raise InvalidArgument(f"only one of {', '.join(_NAMES)} may be given: found {', '.join(given)}")
    if not given:
        return None
    name, value = given[0], options[given[0]]
    if name == "schema":
        return _of_schema(value)
    if name == "choices":
        return Wanted(name, "lark", _lark_of_choices(value))
    if name == "json":
        check_flag(name, value)
        return Wanted(name, "schema", '{"type":"object"}')
    source = check_text(name, value)
    return Wanted(name, "regex" if name == "regex" else _form_of_grammar(source), source)


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(those of ConstraintOptions, the others)."""
    own: dict[str, Any] = {name: value for name, value in options.items() if name in _NAMES}
    return own, {name: value for name, value in options.items() if name not in own}


def _form_of_grammar(source: str) -> Form:
    return "gbnf" if _GBNF_RULE.search(source) else "lark"


def _of_schema(value: object) -> Wanted:
    model = None
    if isinstance(value, type):
        if not (hasattr(value, "model_json_schema") and hasattr(value, "model_validate_json")):
            raise InvalidArgument(f"a class as schema must be a pydantic model: found {shown(value)}")
        model = value
        value = _closed(cast(Any, model).model_json_schema())
    if isinstance(value, str):
        try:
            value = json_module.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidConstraint(f"the schema is no JSON: {one_line(error)}") from None
    if isinstance(value, bool):
        value = {} if value else {"enum": []}
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"schema must be an object, JSON text or a pydantic model: found {shown(value)}")
    try:
        # x-guidance would change how llguidance reads it.
        own = {name: part for name, part in value.items() if name != "x-guidance"}
        source = json_module.dumps(own, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidConstraint(f"the schema cannot be written as JSON: {one_line(error)}") from None
    return Wanted("schema", "schema", source, model)


def _closed(schema: Any) -> Any:
    """The schema of a pydantic model without properties that the model would drop."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: part if name in _VALUES else _closed(part) for name, part in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed


def _lark_of_choices(value: object) -> str:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise InvalidArgument(f"choices must be several texts: found {shown(value)}")
    if not value or any(check_text("a choice", choice) == "" for choice in value):
        raise InvalidArgument("choices must be texts of at least one character each, and at least one: found none")
    quoted = [json_module.dumps(choice, ensure_ascii=False) for choice in value]
    return f"start: {' | '.join(quoted)}"
