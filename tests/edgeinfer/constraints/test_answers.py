"""Answers under a constraint: they are what was asked for, and the same with every kind of draft."""

import json

import pytest
from constrained import OPTIONS, PERSON, check_answer, check_masks
from drafting import PROMPT, FixedCosts

from edgeinfer.common.errors import BackendUnavailable, InvalidArgument, InvalidConstraint
from edgeinfer.models.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("grammar")

SAMPLING = [
    {"temperature": 0.0},
    *({"temperature": 0.8, "seed": seed} for seed in (1, 2, 3)),
    {"temperature": 1.5, "seed": 4, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 0.7, "seed": 5, "repeat_penalty": 1.3, "dry_multiplier": 0.8, "logit_bias": {104: 3.0, 111: False}},
]


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_an_answer_is_what_was_asked_for(engine, name, sampling):
    options = OPTIONS[name]
    completion = engine.generate(PROMPT, max_tokens=200, **options, **sampling)
    assert completion.finish_reason == "stop" and completion.parse_error is None
    check_masks(engine.tokenizer, options, completion.tokens)
    check_answer(options, completion.text)
    expected = json.loads(completion.text) if "schema" in options else completion.text
    assert completion.parsed == expected


@pytest.mark.parametrize("sampling", [SAMPLING[0], SAMPLING[1]], ids=str)
def test_a_ban_gives_way_to_a_constraint_that_leaves_nothing_else(engine, sampling):
    ends = dict.fromkeys(engine.tokenizer.stop_ids, False)
    ended = engine.generate(PROMPT, max_tokens=40, choices=["alpha", "beta"], logit_bias=ends, **sampling)
    assert ended.finish_reason == "stop" and ended.text in ("alpha", "beta")
    a, b = (engine.tokenizer.encode(text)[-1] for text in "ab")
    left = engine.generate(PROMPT, max_tokens=40, choices=["a", "b"], logit_bias={a: False}, **sampling)
    assert left.text == "b"
    assert engine.generate(PROMPT, choices=["a", "b"], logit_bias={a: False, b: False}, **sampling).text in "ab"


@pytest.mark.parametrize("draft", ["suffix", "recycling", "answers", "auto"])
@pytest.mark.parametrize("name", OPTIONS)
def test_drafts_change_no_token(loaded, engine, model, name, draft):
    drafting = loaded(model, draft=draft)
    drafting.speculator.costs = FixedCosts()
    for sampling in SAMPLING:
        for prompt in (PROMPT, '[{"name": "hello", "age": 12, "kind": "alpha", "on": []}, '):
            plain = engine.generate(prompt, max_tokens=60, **OPTIONS[name], **sampling)
            drafted = drafting.generate(prompt, max_tokens=60, **OPTIONS[name], **sampling)
            assert drafted.tokens == plain.tokens and drafted.finish_reason == plain.finish_reason
            assert drafted.parsed == plain.parsed and drafted.parse_error == plain.parse_error
            assert drafted.timings.speculation is None or drafted.timings.speculation.dropped == {}


def test_requests_with_and_without_a_constraint_do_not_touch_each_other(engine):
    before = engine.generate(PROMPT, max_tokens=20, temperature=0).tokens
    engine.generate(PROMPT, max_tokens=20, temperature=0, schema=PERSON)
    after = engine.generate(PROMPT, max_tokens=20, temperature=0)
    assert after.tokens == before and after.parsed is None and after.parse_error is None


def test_an_answer_that_is_cut_has_no_value_and_says_why(engine):
    completion = engine.generate(PROMPT, max_tokens=9, temperature=0, schema=PERSON)
    assert completion.finish_reason == "length" and completion.parsed is None
    assert "max_tokens" in completion.parse_error and len(completion.tokens) == 9
    with engine.stream(PROMPT, temperature=0, schema=PERSON) as stream:
        next(stream)
    assert stream.completion.finish_reason == "interrupted" and "interrupted" in stream.completion.parse_error
    stopped = engine.generate(PROMPT, temperature=0, schema=PERSON, stop='"age"')
    assert stopped.finish_reason == "stop" and "stop string" in stopped.parse_error


def test_an_answer_that_ends_with_the_last_token_has_a_value(engine):
    whole = engine.generate(PROMPT, temperature=0, choices=["hello there"])
    cut = engine.generate(PROMPT, temperature=0, choices=["hello there"], max_tokens=len(whole.tokens))
    assert cut.tokens == whole.tokens and cut.finish_reason == "length"
    assert cut.parsed == whole.parsed == "hello there"


def test_a_number_that_may_go_on_has_no_value_where_it_is_cut(engine):
    cut = engine.generate(PROMPT, temperature=0, regex=r"\d{2,9}", max_tokens=2)
    assert cut.finish_reason == "length" and cut.parsed is None


def test_schema_may_be_json_text_and_json_is_any_object(engine):
    text = engine.generate(PROMPT, temperature=0, schema=json.dumps(PERSON))
    assert text.tokens == engine.generate(PROMPT, temperature=0, schema=PERSON).tokens
    anything = engine.generate(PROMPT, temperature=0, json=True, max_tokens=400)
    assert anything.text.startswith("{")
    assert engine.generate(PROMPT, temperature=0, json=False, max_tokens=9).parse_error is None


def test_a_conversation_takes_constraints(engine):
    chat = engine.chat()
    answer = chat.send("hello", schema=PERSON, temperature=0)
    for _ in answer:
        pass
    assert answer.parsed == json.loads(answer.completion.text)
    again = chat.regenerate(choices=["one", "two"], temperature=0)
    assert "".join(piece.text for piece in again) == again.parsed


@pytest.mark.parametrize(
    "options, told",
    [
        ({"schema": {}, "regex": "a"}, "only one"),
        ({"schema": 3}, "schema must be"),
        ({"schema": dict}, "pydantic"),
        ({"schema": "{"}, "no JSON"),
        ({"schema": {"a": ...}}, "cannot be written"),
        ({"schema": {"minimum": float("nan")}}, "cannot be written"),
        ({"schema": False}, "Unsatisfiable"),
        ({"regex": 5}, "regex must be"),
        ({"regex": "[a"}, "unclosed character class"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"grammar": "start: other"}, "other"),
        ({"grammar": "root ::= other"}, "other"),
        ({"grammar": 'root ::= ("a"'}, "Expected"),
        ({"choices": []}, "at least one"),
        ({"choices": "one"}, "several texts"),
        ({"choices": ["one", ""]}, "at least one"),
        ({"choices": [1]}, "choice must be"),
        ({"json": 1}, "json must be"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_refused_before_anything_is_generated(engine, options, told):
    with pytest.raises(InvalidArgument, match=told):
        engine.stream(PROMPT, **options)


@pytest.mark.parametrize(
    "schema, place",
    [
        ({"properties": {"a": {"not": {}}}}, "#/properties/a/not"),
        ({"items": {"propertyNames": {}}}, "#/items/propertyNames"),
        ({"items": [{"type": "strin"}]}, ""),
        ({"properties": {"x": {"type": "strin"}}}, "#/properties/x/type"),
        ({"properties": {"x~/": {"format": "nope", "type": "string"}}}, "#/properties/x~0~1/format"),
        ({"anyOf": [{"$ref": "#/nowhere"}]}, "#/anyOf/0/$ref"),
        ({"$ref": "http://localhost:1/x.json"}, "#/$ref"),
        ({"properties": {"x": {"pattern": "(?=a)", "type": "string"}}}, ""),
        ({"x-guidance": {"lenient": True}, "not": {}}, "#/not"),
    ],
    ids=str,
)
def test_the_part_of_a_schema_that_is_not_supported_is_named(engine, schema, place):
    with pytest.raises(InvalidConstraint) as caught:
        engine.stream(PROMPT, schema=schema)
    assert place in str(caught.value) and "\n" not in str(caught.value)


def test_a_model_without_an_end_is_refused(engine, monkeypatch):
    monkeypatch.setattr(engine.tokenizer, "stop_ids", frozenset())
    with pytest.raises(InvalidConstraint, match="no token that ends a text"):
        engine.generate(PROMPT, regex="never read before")


def test_white_space_between_the_tokens_of_json_has_a_bound(engine):
    spaces = {32: 50.0, 10: 50.0, 9: 50.0}
    completion = engine.generate(PROMPT, temperature=0, schema=PERSON, logit_bias=spaces)
    assert completion.finish_reason == "stop" and completion.parsed
    runs = completion.text.replace("\n", " ").replace("\t", " ")
    assert " " * 8 in runs and " " * 9 not in runs


def test_without_the_library_the_extra_is_named(engine, monkeypatch):
    def missing():
        raise BackendUnavailable("pip install 'edgeinfer[grammar]'")

    monkeypatch.setattr("edgeinfer.constraints.constraint.open_library", missing)
    with pytest.raises(BackendUnavailable, match=r"edgeinfer\[grammar\]"):
        engine.generate(PROMPT, regex="a")
    assert engine.generate(PROMPT, max_tokens=1).tokens


def test_a_grammar_is_read_once(engine, monkeypatch):
    engine.generate(PROMPT, max_tokens=1, regex="read once+")
    monkeypatch.setattr("edgeinfer.constraints.constraint.WORKER", None)
    engine.generate(PROMPT, max_tokens=1, regex="read once+")


def test_tokens_that_end_a_text_are_spelt_within_it(engine):
    """They are control tokens: the text has their characters."""
    name = engine.tokenizer.name(min(engine.tokenizer.stop_ids))
    assert isinstance(engine.tokenizer, Tokenizer) and name.startswith("<|")
    completion = engine.generate(PROMPT, choices=[name], temperature=0)
    assert completion.text == completion.parsed == name and len(completion.tokens) > 1


def test_the_default_model_writes_what_was_asked_for_with_drafts_and_without(loaded, default_model):
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0},
            "jobs": {"type": "array", "items": {"enum": ["cook", "painter", "driver"]}, "minItems": 2, "maxItems": 3},
        },
        "required": ["name", "age", "jobs"],
        "additionalProperties": False,
    }
    engine, drafting = (loaded(default_model, n_ctx=512, draft=draft) for draft in ("none", "auto"))
    drafting.speculator.costs = FixedCosts()
    question = "Invent a person: JSON with name, age and jobs."
    for sampling in SAMPLING[:4]:
        completions = []
        for each in (engine, drafting):
            answer = each.chat().send(question, max_tokens=150, schema=schema, **sampling)
            for _ in answer:
                pass
            completions.append(answer.completion)
        plain, drafted = completions
        assert drafted.tokens == plain.tokens and drafted.parsed == plain.parsed
        assert plain.finish_reason == "stop" and drafted.timings.tokens_per_step > 1.2
        check_answer({"schema": schema}, plain.text)
        check_masks(engine.tokenizer, {"schema": schema}, plain.tokens)
