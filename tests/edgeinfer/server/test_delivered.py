"""examples/ray/delivered.py: what a client has of a stream, and where a conversation belongs."""

import importlib.util
import json
from pathlib import Path

import pytest

PATH = Path(__file__).parents[3] / "examples" / "ray" / "delivered.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("delivered", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FIRST = b'data: {"id":"chatcmpl-a1","n":1}\n\n'
SECOND = b'data: {"id":"chatcmpl-a1","n":2}\n\n'
STREAM = FIRST + b": tokens 12,7\n\n" + SECOND + b": tokens 3\n\n" + b"data: [DONE]\n\n"


@pytest.mark.parametrize("n", [1, 2, 7, 40, 1000])
def test_all_is_handed_on_but_the_comments_however_it_is_cut(example, n):
    delivered = example.Delivered("5")
    found = b"".join(delivered.take(STREAM[at : at + n]) for at in range(0, len(STREAM), n)) + delivered.end()
    assert found == FIRST + SECOND + b"data: [DONE]\n\n"
    shown = example.Delivered("5", shows_tokens=True)
    assert shown.take(STREAM) + shown.end() == STREAM


@pytest.mark.parametrize("n", range(len(STREAM) + 1))
def test_wherever_it_breaks_the_tokens_are_those_of_what_was_handed_on(example, n):
    delivered = example.Delivered("5")
    found = delivered.take(STREAM[:n])
    tokens = {b"": "", FIRST: "12,7", FIRST + SECOND: "12,7,3"}[found]
    id = "; id=chatcmpl-a1" if tokens else ""
    assert delivered.going_on() == {"x-edgeinfer-continue": f"seed=5; tokens={tokens}{id}"}
    whole = {"": STREAM, "12,7": SECOND + b": tokens 3\n\ndata: [DONE]\n\n", "12,7,3": b"data: [DONE]\n\n"}[tokens]
    assert found + delivered.take(whole) + delivered.end() == FIRST + SECOND + b"data: [DONE]\n\n"


def test_a_sign_of_life_passes_what_is_kept_back(example):
    delivered = example.Delivered("5")
    assert delivered.take(FIRST + b": ping\n\n") == b": ping\n\n"


def test_what_cannot_go_on_is_handed_on_as_it_comes(example):
    delivered = example.Delivered(None)
    assert delivered.take(FIRST[:10]) == FIRST[:10] and delivered.end() == b"" and delivered.going_on() == {}


def key(example, body, **headers):
    return example.conversation_of(headers, json.dumps(body).encode())


def test_a_conversation_keeps_its_key_while_it_grows(example):
    begin = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    more = [*begin, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "and now?"}]
    assert key(example, {"messages": begin}) == key(example, {"messages": more, "stream": True})
    assert key(example, {"messages": begin}) != key(example, {"messages": begin[1:]})
    assert key(example, {"messages": begin[1:], "system": "a"}) != key(example, {"messages": begin[1:], "system": "b"})
    assert key(example, {"input": begin}) == key(example, {"input": more})


def test_a_prompt_has_the_key_of_its_beginning(example):
    assert key(example, {"prompt": "x" * 1000 + "a"}) == key(example, {"prompt": "x" * 1000 + "b"})
    assert key(example, {"prompt": "x" * 999 + "a"}) != key(example, {"prompt": "x" * 999 + "b"})


def test_a_session_of_the_client_is_the_key(example):
    assert example.conversation_of({"x-session-id": "me"}, b"{}") == "me"


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"[" * 100_000, b'{"messages": [1]}', b'{"prompt": 3}'])
def test_every_body_has_a_key(example, body):
    assert example.conversation_of({}, body)
