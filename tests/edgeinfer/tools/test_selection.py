"""ToolRAG: which of many tools fit a message."""

import pytest
from call_models import TOOL_TEMPLATE
from scripted import Script
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.tools.selection import FEW, ToolSelection, select_tools, selection_of, words_of


def tool(name, description="", **parameters):
    properties = {key: {"type": "string", "description": value} for key, value in parameters.items()}
    return {"name": name, "description": description, "parameters": {"type": "object", "properties": properties}}


TOOLS = [
    tool("get_weather", "Current weather of a city.", city="name of the city"),
    tool("sendEmail", "Send an e-mail to somebody.", to="address", subject="what it is about"),
    tool("create_event", "Put an appointment into the calendar.", title="of the appointment", day="when it is"),
    tool("play", "Start music.", song="name of the song"),
    tool("convert_currency", "Convert an amount of money.", amount="how much", currency="such as EUR"),
]


@pytest.mark.parametrize(
    "message, name",
    [
        ("What's the weather like in Oslo?", "get_weather"),
        ("Email Ada that I am late", "sendEmail"),
        ("Make an appointment on Friday", "create_event"),
        ("Can you play some songs?", "play"),
        ("How many EUR are 5 dollars? Converting money is hard.", "convert_currency"),
    ],
)
def test_the_tool_that_fits_comes_first(message, name):
    (first, score), *_ = select_tools(message, TOOLS)
    assert TOOLS[first]["name"] == name and score > 0


def test_words_are_those_of_names_in_any_spelling():
    assert words_of("getWeatherForCities") == words_of("weather of cities") == ["weather", "cit"]
    assert words_of("HTTPServer2") == ["http", "server", "2"]
    assert words_of("wie heißt das Wetter 天気") == ["wie", "hei", "ß", "t", "das", "wetter", "天気"]


def test_values_and_nested_parameters_count():
    nested = {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "array", "items": {"properties": {"kind": {"enum": ["zebra", 5]}}}}},
        },
    }
    assert select_tools("a zebra", [TOOLS[0], nested])[0][0] == 1


def test_embeddings_rank_by_their_cosine():
    def embed(texts):
        return [[float("mail" in text.lower()) * 3, 1.0] for text in texts]

    ranked = select_tools("mail", TOOLS, 2, embed=embed)
    assert [index for index, _ in ranked] == [1, 0] and ranked[0][1] == pytest.approx(1.0)


@pytest.mark.parametrize("vectors", [[[1.0]], [1.0] * 6, [[1.0]] * 5 + [[float("nan")]], [[1.0]] * 5 + [["x"]], 5])
def test_vectors_that_do_not_fit_are_refused(vectors):
    with pytest.raises(InvalidArgument, match="embed must give"):
        select_tools("q", TOOLS, embed=lambda texts: vectors)


def test_choices_of_a_caller():
    assert selection_of(None) == selection_of(True) == ToolSelection(FEW) and selection_of(False) is None
    assert selection_of(3) == ToolSelection(3) and selection_of(len).embed is len
    for wrong in ("x", 0, 1.5, [1]):
        with pytest.raises(InvalidArgument):
            selection_of(wrong)


# ---- In a conversation -----------------------------------------------------------------------------------------------

MANY = [*TOOLS, *(tool(f"other_{n}", f"Something else, number {n}.") for n in range(20))]


@pytest.fixture(scope="module")
def engine(native, tmp_path_factory):
    path = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", template=TOOL_TEMPLATE, n_ctx_train=8192)
    with edgeinfer.load(path, draft="none") as engine:  # the reference takes a minute to read the long prompts
        yield engine


def given(engine, monkeypatch, message, **options):
    """Names of the tools that the prompt has."""
    script = Script(engine, monkeypatch)
    for _ in engine.chat().send(message, **options):
        pass
    prompt = engine.detokenize(script.prompts[-1])
    return [each["name"] for each in MANY if f'"name": "{each["name"]}"' in prompt]


@pytest.mark.usefixtures("grammar")
def test_of_many_tools_the_model_gets_those_that_fit(engine, monkeypatch):
    names = given(engine, monkeypatch, "the weather in Oslo", tools=MANY)
    assert len(names) == FEW and names[0] == "get_weather"
    assert given(engine, monkeypatch, "play a song", tools=MANY, tool_selection=2) == ["get_weather", "play"]
    assert len(given(engine, monkeypatch, "x", tools=MANY, tool_selection=False)) == len(MANY)
    assert len(given(engine, monkeypatch, "x", tools=MANY[:FEW])) == FEW
    chosen = given(engine, monkeypatch, "x", tools=MANY, tool_selection=lambda texts: [[1.0]] * len(texts))
    assert chosen == [each["name"] for each in MANY[:FEW]]


@pytest.mark.usefixtures("grammar")
def test_a_tool_that_is_asked_for_by_name_stays(engine, monkeypatch):
    script = Script(engine, monkeypatch)
    answer = engine.chat().send("play", tools=MANY, tool_choice="other_19", tool_selection=1)
    answer.close()
    names = [tool.name for tool in engine.chat()._selected([], _use("other_19"), 1).tools]
    assert names == ["other_19"] and script.prompts == []


def _use(choice):
    from edgeinfer.tools.options import tool_use_of

    return tool_use_of({"tools": MANY, "tool_choice": choice})
