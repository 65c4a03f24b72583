"""Calls in the format of each model: what the grammar allows is what the parser reads, with and without drafts."""

from typing import Literal

import pytest
from call_models import FORMATS, write_call_model

import edgeinfer
from edgeinfer.models.call_formats import GENERIC, call_format_of
from edgeinfer.models.provenance import plain
from edgeinfer.tools.options import tool_of
from edgeinfer.tools.reading import FormatReader, spelled

pytestmark = pytest.mark.usefixtures("grammar")


def turn(degrees: int, fast: bool = False, side: Literal["left", "right", "5"] = "left") -> str:
    """Turn."""
    return f"{degrees} {fast} {side}"


def stop() -> str:
    """Stop."""
    return ""


SAY = {
    "name": "say",
    "parameters": {
        "type": "object",
        "properties": {
            "text": {"type": "string", "maxLength": 6},
            "loud": {"type": ["boolean", "null"]},
            "to": {"type": "array", "items": {"enum": ["a", "b", 7, None]}, "maxItems": 2},
            "how": {
                "type": "object",
                "properties": {"speed": {"type": "number", "minimum": 0, "maximum": 9}, "tone": {"const": "soft"}},
                "required": ["tone"],
                "additionalProperties": False,
            },
        },
        "required": ["text", "to"],
        "additionalProperties": False,
    },
}
TOOLS = [turn, stop, SAY]
CASES = [(name, has_tokens) for name in (*FORMATS, "generic") for has_tokens in (True, False)]
CASES.remove(("generic", True))
REQUESTS = [
    {"temperature": 0.0},
    *({"temperature": 1.0, "top_k": 0, "seed": seed} for seed in (1, 2)),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}, {'tokens' if case[1] else 'text'}")
def engines(native, request, tmp_path_factory):
    """(name of the format, an engine without drafts, one with drafts)."""
    name, has_tokens = request.param
    path = write_call_model(tmp_path_factory.mktemp("model") / "tiny.gguf", name, has_tokens)
    with edgeinfer.load(path, draft="none") as engine, edgeinfer.load(path, draft="auto") as drafting:
        yield name, engine, drafting


def answered(engine, **options):
    """(the completion, the pieces)."""
    limit = 400 if options["tool_choice"] == "say" else 120
    answer = engine.chat().send("q", tools=TOOLS, max_tokens=limit, **options)
    pieces = list(answer)
    completion = answer.completion
    assert "".join(piece.text for piece in pieces) == completion.text
    assert tuple(call for piece in pieces for call in piece.tool_calls) == completion.tool_calls
    return completion


def check_calls(completion):
    import jsonschema

    schemas = {tool.name: tool.parameters for tool in map(tool_of, TOOLS)}
    for call in completion.tool_calls:
        jsonschema.validate(call.arguments, schemas[call.name])


@pytest.mark.parametrize("choice", ["required", "auto", "none", "say"])
def test_calls_are_valid_and_the_same_with_drafts(engines, choice):
    _, engine, drafting = engines
    finished = 0
    for request in REQUESTS:
        plain_one = answered(engine, tool_choice=choice, **request)
        drafted = answered(drafting, tool_choice=choice, **request)
        assert drafted.tokens == plain_one.tokens and drafted.text == plain_one.text
        assert [(c.name, c.arguments, c.id) for c in drafted.tool_calls] == [
            (c.name, c.arguments, c.id) for c in plain_one.tool_calls
        ]
        check_calls(plain_one)
        if plain_one.finish_reason == "stop":
            finished += 1
            assert plain_one.call_error is None
            if choice in ("required", "say"):
                assert plain_one.tool_calls and plain_one.text == ""
        if choice == "none":
            assert plain_one.tool_calls == ()
        if choice == "say":
            assert {call.name for call in plain_one.tool_calls} <= {"say"} and len(plain_one.tool_calls) <= 1
    assert finished or choice != "say"


def test_one_call_alone_where_no_more_may_come(engines):
    _, engine, _ = engines
    for seed in range(3):
        completion = answered(engine, tool_choice="required", parallel_tool_calls=False, seed=seed, temperature=1.0)
        assert len(completion.tool_calls) == 1 or completion.finish_reason == "length"


def test_a_call_that_is_cut_says_length_and_loses_no_text(engines):
    _, engine, _ = engines
    whole = answered(engine, tool_choice="say", temperature=0)
    n = len(whole.tokens)
    answer = engine.chat().send("q", tools=TOOLS, tool_choice="say", temperature=0, max_tokens=max(2, n // 2))
    pieces = list(answer)
    cut = answer.completion
    assert cut.finish_reason == "length" and cut.tool_calls == () and cut.call_error is not None
    assert "say" in cut.text and cut.text == "".join(piece.text for piece in pieces)


def test_the_format_is_found(engines):
    name, engine, _ = engines
    assert engine.chat()._tools.format.name == name


CALLS = [
    {"name": "turn", "arguments": {"degrees": -5, "fast": True, "side": "5"}},
    {"name": "stop", "arguments": {}},
    {"name": "say", "arguments": {"text": "é\n\"'x", "to": ["a", 7, None], "how": {"tone": "soft", "speed": 1.5}}},
]


@pytest.mark.parametrize("format", [*FORMATS.values(), GENERIC], ids=lambda format: format.name)
def test_what_is_spelled_is_read_again(format):
    """Each call as the description writes it, and all together where several may be."""
    reader = FormatReader(format, [tool_of(each) for each in TOOLS])
    if format.has_channels:
        pytest.skip("its parser is that of channels")
    for calls in (*([call] for call in CALLS), CALLS):
        if len(calls) > 1 and format.is_single:
            continue
        text = plain(spelled(format, calls))
        assert text.startswith(format.opening) and text.endswith(format.closing)
        found = []
        for part in text.split(format.opening)[1:] if format.opening else [text]:
            found += reader.read(part[: part.rindex(format.closing)] if format.closing else part)
        assert [{"name": call.name, "arguments": call.arguments} for call in found] == calls


NASTY = [
    "</tool_call>",
    "</parameter>\n",
    "</arg_value>",
    "}",
    "<tool_call>",
    '"}]',
    "[TOOL_CALLS]",
    "\n",
    ")",
    "5",
    "é",
]


def test_a_parser_reads_what_is_spelled_with_marks_in_texts(engines):
    """What ends a call may stand in a text of its arguments, in ordinary tokens."""
    name, engine, _ = engines
    format = engine.chat()._tools.format
    if format.has_channels:
        pytest.skip("calls of channels end with a token")
    tool = tool_of({"name": "put", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}})
    for nasty in NASTY:
        if format.arguments == "parameters" and format.parameter[2] in f"{nasty}y":
            continue  # it ends the text
        calls = [{"name": "put", "arguments": {"a": f"x{nasty}y"}}]
        parser = engine.output_format.parser("", FormatReader(format, [tool]))
        for token in tokens_of(engine, spelled(format, calls)):
            parser.push(token)
        parser.flush()
        assert [{"name": call.name, "arguments": call.arguments} for call in parser.tool_calls] == calls, nasty
        assert parser.answer == "" and parser.call_error is None


def tokens_of(engine, text):
    """Tokens of a text, in which trusted characters may be special tokens and others are not."""
    return engine.tokenizer.encode_rendered(text, engine.template.source)


@pytest.mark.parametrize(
    "text",
    ["", "x", "{", '{"name": 5}', "call:f{", "call:f{a:}", "call:f{a:1,a:2}", "f(", "[f(x)]", "<function=f>", "[]"]
    + ["call:f" + "{a:" * 200, "[" * 5000, "call:f{a:" + "9" * 5000 + "}", "call:f{a:1}x"],
)
@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda format: format.name)
def test_what_is_no_call_is_not_read(format, text):
    if text == "x" and format.name.startswith("glm"):
        pytest.skip("a call without arguments")
    assert FormatReader(format, [tool_of(turn)]).read(text) == []


def test_a_format_that_is_not_known_is_none():
    assert call_format_of("{{ messages }}", ()) is None
    assert call_format_of("{{ tools }}", ["<|tool_call_start|>"]) is FORMATS["lfm2"]
