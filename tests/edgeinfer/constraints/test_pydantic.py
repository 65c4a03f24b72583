"""Models of pydantic as schemas."""

import datetime
import enum
import json
import typing
import uuid

import pytest
from drafting import PROMPT
from parts import is_there, missing

from edgeinfer.common.errors import InvalidConstraint
from edgeinfer.constraints.options import wanted_of

if not is_there("grammar"):
    missing("grammar", "llguidance, pydantic or jsonschema is not installed")

from pydantic import BaseModel, Field, field_validator  # noqa: E402

pytestmark = pytest.mark.usefixtures("grammar")

SHORT = 4


class Cat(BaseModel):
    kind: typing.Literal["cat"]
    lives: int = Field(ge=0, le=9)


class Dog(BaseModel):
    kind: typing.Literal["dog"]
    name: str = Field(max_length=SHORT)


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Pets(BaseModel):
    pet: Cat | Dog = Field(discriminator="kind")
    others: list[Cat | Dog] = Field(max_length=2)
    nothing: int | None = Field(ge=0, le=99)


class Facts(BaseModel):
    when: datetime.date
    id: uuid.UUID
    color: Color
    share: float = Field(ge=0, le=1)
    pair: tuple[bool, Color]


class Node(BaseModel):
    id: bool
    next: typing.Optional["Node"] = None


class Unique(BaseModel):
    numbers: set[int]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", [Pets, Facts, Node])
def test_an_answer_makes_the_object(engine, kind, seed):
    completion = engine.generate(PROMPT, schema=kind, seed=seed, temperature=1.2, max_tokens=460)
    if completion.finish_reason == "length":  # a number of endless digits
        assert completion.parsed is None and completion.parse_error
    else:
        assert isinstance(completion.parsed, kind) and completion.parse_error is None


def test_objects_within_are_closed_too_unless_the_model_is_open(engine):
    class Open(BaseModel):
        model_config = {"extra": "allow"}
        x: bool

    class Holder(BaseModel):
        inner: Cat
        open: Open

    source = wanted_of({"schema": Holder}).source
    assert source.count('"additionalProperties":false') == 2 and source.count('"additionalProperties":true') == 1


def test_what_a_schema_cannot_say_is_refused(engine):
    with pytest.raises(InvalidConstraint, match="uniqueItems.*#/properties/numbers/uniqueItems"):
        engine.generate(PROMPT, schema=Unique)


class Person(BaseModel):
    name: str = Field(max_length=5)
    age: int = Field(ge=0, le=9)

    @field_validator("age")
    @classmethod
    def is_even(cls, value):
        if value % 2:
            raise ValueError("an odd age")
        return value


def test_a_pydantic_model_gives_its_objects_or_says_what_it_refuses(engine):
    even, odd = (engine.generate(PROMPT, temperature=0, schema=Person, logit_bias={ord(digit): 30.0}) for digit in "45")
    value = json.loads(even.text)
    assert set(value) == {"name", "age"}  # properties that the model does not have are not written
    assert even.parsed == Person(**value) and value["age"] == 4
    assert json.loads(odd.text)["age"] == 5 and odd.parsed is None and "an odd age" in odd.parse_error
