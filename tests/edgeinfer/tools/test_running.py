"""Conversation.run: calls, results and so on until an answer, within a bound."""

import threading

import pytest
from call_models import TOOL_TEMPLATE
from scripted import Script
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.models.tool_calls import ToolCall
from edgeinfer.tools.options import tool_of
from edgeinfer.tools.running import run_calls

pytestmark = pytest.mark.usefixtures("grammar")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", template=TOOL_TEMPLATE, n_ctx_train=4096)
    with edgeinfer.load(path, backend="reference") as engine:
        yield engine


@pytest.fixture
def says(engine, monkeypatch):
    """A conversation, and what sets the answers that come one after the other."""
    script = Script(engine, monkeypatch)
    request, waiting = engine._request, []

    def requesting(prompt, *rest):
        script.tokens = waiting.pop(0)
        return request(prompt, *rest)

    monkeypatch.setattr(engine, "_request", requesting)

    def say(*texts):
        encode = engine.tokenizer.encode
        waiting.extend(encode(text, add_special=False, continues=True) for text in texts)
        return engine.chat()

    return say


def call_of(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def double(n: int) -> int:
    """Double a number."""
    if n > 99:
        raise ValueError("too large")
    return 2 * n


def results_of(chat):
    return [message["content"] for message in chat.messages if message["role"] == "tool"]


def test_calls_run_until_there_is_an_answer(says):
    chat = says(call_of("double", '{"n":4}'), call_of("double", '{"n":8}'), "It is 16.")
    rounds = []
    completion = chat.run("q", [double], on_round=rounds.append)
    assert completion.text == "It is 16." and results_of(chat) == ["8", "16"]
    assert [message["role"] for message in chat.messages] == ["user", *["assistant", "tool"] * 2, "assistant"]
    assert [each.results[0].value for each in rounds] == [8, 16]


def test_an_exception_of_a_tool_is_its_result(says):
    chat = says(call_of("double", '{"n":100}'), "No.")
    rounds = []
    assert chat.run("q", [double], on_round=rounds.append).text == "No."
    assert results_of(chat) == ["Error: ValueError: too large"]
    assert isinstance(rounds[0].results[0].error, ValueError)


def test_rounds_have_a_bound(says):
    chat = says(*[call_of("double", '{"n":1}')] * 2, "Enough.")
    completion = chat.run("q", [double], max_rounds=2)
    assert completion.text == "Enough." and completion.tool_calls == () and results_of(chat) == ["2", "2"]


def test_tools_that_cannot_run_are_refused(engine):
    with pytest.raises(InvalidArgument, match="no function that could run: f"):
        engine.chat().run("q", [{"name": "f"}])
    with pytest.raises(InvalidArgument, match="max_rounds"):
        engine.chat().run("q", [double], max_rounds=0)


@pytest.mark.parametrize(
    "call, said",
    [
        (ToolCall("", "other", {}), "there is no tool 'other'; there are double"),
        (ToolCall("", None, None), "there is no tool None"),
        (ToolCall("", "double", None), "must be a JSON object"),
        (ToolCall("", "double", {"m": 1}), "do not fit double"),
        (ToolCall("", "double", {}), "do not fit double"),
        (ToolCall("", "double", {"n": "x"}), "Error: TypeError"),
    ],
)
def test_calls_that_do_not_fit_have_a_result_that_says_so(call, said):
    (result,) = run_calls([call], [tool_of(double)])
    assert result.error is not None and said in str(result.result)


def test_calls_of_an_answer_run_side_by_side():
    both = threading.Barrier(2, timeout=100)

    def meet(name: str) -> str:
        both.wait()
        return name

    calls = [ToolCall("", "meet", {"name": name}) for name in ("a", "b")]
    assert [each.result for each in run_calls(calls, [tool_of(meet)])] == ["a", "b"]


def test_ctrl_c_in_a_tool_is_raised():
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_calls([ToolCall("", "stop", {})], [tool_of(stop)])
