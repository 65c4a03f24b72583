"""Constraints for tests: schemas and grammars, and a check of answers that knows nothing of the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from parts import missing

from edgeinfer.common.errors import BackendUnavailable
from edgeinfer.constraints.compiling import WORKER
from edgeinfer.constraints.constraint import Constraints
from edgeinfer.constraints.library import open_library
from edgeinfer.constraints.options import wanted_of
from edgeinfer.models.tokenizer import Tokenizer

# Each ends within some dozen tokens, of whatever a model of bytes writes.
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["alpha", "beta", 3, None]},
        "on": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "age", "kind", "on"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"id": {"type": "string", "pattern": "^[a-c]{1,3}$"}, "next": {"$ref": "#/$defs/leaf"}},
            "required": ["id"],
            "additionalProperties": False,
        },
        "leaf": {"anyOf": [{"type": "null"}, {"type": "string", "format": "date"}]},
    },
    "type": "array",
    "items": {"$ref": "#/$defs/node"},
    "minItems": 1,
    "maxItems": 2,
}
SCHEMAS: dict[str, dict[str, Any]] = {"person": PERSON, "tree": TREE, "const": {"const": {"a": [1, "é漢"]}}}
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"schema": schema} for name, schema in SCHEMAS.items()},
    "regex": {"regex": r"\d{3}-[A-Z]{2,4}( (one|there|hello)){1,3}"},
    "lark": {"grammar": 'start: item{1,4} "."\nitem: WORD " "\nWORD: /[a-z]{1,4}/'},
    "gbnf": {"grammar": 'root ::= move ("," move)? "\\n"\nmove ::= [a-h] [1-8] "-" [a-h] [1-8]'},
    "choices": {"choices": ["hello", "hello there", "nothing", 'a "quoted" one\n']},
}


@pytest.fixture(scope="session")
def grammar() -> None:
    """For tests that need llguidance."""
    try:
        open_library()
    except BackendUnavailable as error:
        missing("grammar", str(error))


def check_masks(tokenizer: Tokenizer, options: Mapping[str, Any], answer: Sequence[int]) -> None:
    """Asserts that each token of an answer is in the mask of a matcher that has seen nothing but the ones before."""
    wanted = wanted_of(options)
    assert wanted is not None
    constraint = Constraints(tokenizer).read(wanted)
    for place, token in enumerate(answer):
        matcher = constraint.new_matcher()
        assert matcher.consume_tokens(list(answer[:place]))
        bits = matcher.compute_bitmask()
        assert bits[token >> 3] >> (token & 7) & 1, (place, tokenizer.name(token))


def check_answer(options: Mapping[str, Any], text: str) -> None:
    """Asserts that a whole answer is what was asked for, by other judges than llguidance."""
    import re

    import jsonschema

    if "schema" in options:
        jsonschema.validate(json.loads(text), options["schema"], format_checker=jsonschema.FormatChecker())
    elif "regex" in options:
        assert re.fullmatch(options["regex"], text)
    elif "choices" in options:
        assert text in options["choices"]


def grammar_text(form: Any, source: str) -> str:
    """What the worker makes of a source, in whatever time. Raises as it does."""
    import time

    WORKER.start()
    return WORKER.grammar(form, source, time.monotonic() + 200.0)
