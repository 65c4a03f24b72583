"""Calls of tools and their results as messages of a conversation."""

import json
import re

import pytest
from call_models import TOOL_TEMPLATE
from scripted import Script
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.common.errors import InvalidArgument

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'


def look(at: str) -> str:
    """Look at something."""
    return f"seen {at}"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", template=TOOL_TEMPLATE, n_ctx_train=2048)
    with edgeinfer.load(path, backend="reference") as engine:
        yield engine


@pytest.fixture
def script(engine, monkeypatch):
    return Script(engine, monkeypatch)


def prompt_of(script):
    return script.engine.detokenize(script.prompts[-1])


def asked(engine, script, **options):
    """A conversation whose last answer has called two tools."""
    chat = engine.chat()
    script.emit(f"{CALL}\n{CALL}")
    for _ in chat.send("q", **options):
        pass
    return chat


def test_the_template_gets_the_tools(engine, script):
    script.emit("")
    for _ in engine.chat().send("q", tools=[look]):
        pass
    assert 'TOOL {"type": "function", "function": {"name": "look", "description": "Look at something."' in prompt_of(
        script
    )
    asked(engine, script)
    assert "TOOL" not in prompt_of(script)


def test_calls_have_ids_which_the_same_answer_has_again(engine, script):
    chat, again = asked(engine, script), asked(engine, script)
    ids = [call["id"] for call in chat.messages[-1]["tool_calls"]]
    assert len(set(ids)) == 2 and all(re.fullmatch("[0-9A-Za-z]{9}", id) for id in ids)
    assert ids == [call["id"] for call in again.messages[-1]["tool_calls"]]
    for _ in chat.send_results(["a", "b"]):  # the script calls again
        pass
    assert not {call["id"] for call in chat.messages[-1]["tool_calls"]} & set(ids)


def test_a_piece_tells_when_a_call_has_ended(engine, script):
    script.emit(f"{CALL}\n{CALL}")
    answer = engine.chat().send("q")
    pieces = list(answer)
    ended = [call for piece in pieces for call in piece.tool_calls]
    assert len(ended) == 2 and tuple(ended) == answer.completion.tool_calls
    assert [call.id for call in ended] == [call.id for call in answer.completion.tool_calls]
    first = next(n for n, piece in enumerate(pieces) if piece.tool_calls)
    assert len(pieces) // 3 < first < len(pieces) * 2 // 3


@pytest.mark.parametrize(
    "order, kept", [("aa", "aa"), ("aaa", "aa"), ("aba", "ab"), ("abab", "ab"), ("abc", "abc"), ("aab", "aab")]
)
def test_calls_that_go_round_end_the_answer(engine, script, order, kept):
    calls = [CALL.replace('"é"', f'"{each}"') for each in order]
    script.emit("\n".join(calls))
    answer = engine.chat().send("q")
    pieces = list(answer)
    completion = answer.completion
    assert "".join(call.arguments["at"] for call in completion.tool_calls) == kept
    assert tuple(call for piece in pieces for call in piece.tool_calls) == completion.tool_calls
    assert completion.finish_reason == ("stop" if order == kept else "repetition") and completion.text == ""
    script.emit("\n".join(calls))
    free = engine.chat().send("q", loop_guard=0)
    for _ in free:
        pass
    assert len(free.completion.tool_calls) == len(order)


def test_results_go_to_the_model_with_the_ids_of_their_calls(engine, script):
    chat = asked(engine, script)
    first, second = [call["id"] for call in chat.messages[-1]["tool_calls"]]
    script.emit("Seen.")
    completion = None
    with chat.send_results(["one", {"n": 2}]) as answer:
        for _ in answer:
            pass
        completion = answer.completion
    assert completion.text == "Seen." and [m["role"] for m in chat.messages[-3:]] == ["tool", "tool", "assistant"]
    assert f"tool\none|look|{first}<|im_end|>" in prompt_of(script)
    assert f'tool\n{{"n": 2}}|look|{second}<|im_end|>' in prompt_of(script)


def test_results_may_be_given_by_id(engine, script):
    chat = asked(engine, script)
    ids = [call["id"] for call in chat.messages[-1]["tool_calls"]]
    chat.send_results({ids[1]: "two", ids[0]: "one"}).close()
    with chat.send_results({ids[1]: "two", ids[0]: "one"}) as answer:
        next(answer)
    assert f"one|look|{ids[0]}" in prompt_of(script) and f"two|look|{ids[1]}" in prompt_of(script)


@pytest.mark.parametrize("results", [["one"], ["a", "b", "c"], {}, {"other": "a"}, "one", 5])
def test_results_that_do_not_fit_the_calls_are_refused(engine, script, results):
    chat = asked(engine, script)
    with pytest.raises(InvalidArgument, match=r"results|one result"):
        chat.send_results(results)


def test_results_without_calls_are_refused(engine):
    with pytest.raises(InvalidArgument, match="no calls"):
        engine.chat().send_results(["a"])


def test_messages_that_were_not_made_here_are_answered(engine, script):
    chat = engine.chat()
    chat.messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "look", "arguments": {"at": "x"}, "id": "abc"}]},
        {"role": "tool", "content": "seen", "name": "look", "tool_call_id": "abc"},
    ]
    script.emit("Yes.")
    for _ in (stream := chat.stream(tools=[look])):
        pass
    assert stream.completion.text == "Yes."
    assert '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>abc' in prompt_of(script)
    assert "seen|look|abc" in prompt_of(script)


def test_a_conversation_with_calls_is_saved_and_loaded(engine, script, tmp_path):
    chat = asked(engine, script)
    script.emit("Seen.")
    for _ in chat.send_results(["one", "two"]):
        pass
    chat.messages.append({"role": "user", "content": "and?"})
    chat.messages.append({"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]})
    chat.save(tmp_path / "chat.jsonl")
    loaded = engine.chat()
    loaded.load(tmp_path / "chat.jsonl")
    assert loaded.messages == chat.messages


@pytest.mark.parametrize(
    "message, said",
    [
        ({"role": "user", "content": "", "name": "x"}, "only an answer may have name"),
        ({"role": "tool", "content": "", "tokens": [1]}, "only an answer may have tokens"),
        ({"role": "assistant", "content": "", "tool_call_id": "x"}, "only the result of a tool"),
        ({"role": "tool", "content": "", "name": 5}, "whose name is a text"),
        ({"role": "assistant", "content": "", "tool_calls": [{"name": None, "arguments": None}]}, "a list of calls"),
    ],
)
def test_wrong_messages_of_a_file_are_refused(engine, tmp_path, message, said):
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps(message) + "\n")
    with pytest.raises(InvalidArgument, match=said):
        engine.chat().load(path)


def test_another_answer_to_results_is_asked_for(engine, script):
    chat = asked(engine, script)
    before = list(chat.messages)
    script.emit("One.")
    for _ in chat.send_results(["a", "b"]):
        pass
    script.emit("Two.")
    for _ in chat.regenerate():
        pass
    assert chat.messages[:-1] == [*before, *chat.messages[2:4]] and chat.messages[-1]["content"] == "Two."
    assert chat.undo() == "q" and chat.messages == []
