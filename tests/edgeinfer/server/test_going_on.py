"""An answer that one server has begun is finished by another one, with the same bits."""

import importlib.util
import json

import pytest
from http_server import running
from parts import missing

import edgeinfer
from edgeinfer.common.errors import InvalidArgument

CHAT = "/v1/chat/completions"
HELLO = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 40,
    "temperature": 1.2,
    "repeat_penalty": 1.1,
    "stream": True,
}


def parts(reply):
    """(data, tokens of the comment after it) of the events of a stream."""
    found = []
    for part in reply.body.decode().split("\n\n"):
        if part.startswith("data: "):
            found.append((part.removeprefix("data: "), []))
        elif part.startswith(": tokens "):
            found[-1][1].extend(map(int, part.removeprefix(": tokens ").split(",")))
    return found


def text_of(found):
    choices = [json.loads(data)["choices"][0] for data, _ in found if data != "[DONE]"]
    return "".join(
        (choice["delta"].get("content") or "") if "delta" in choice else choice["text"] for choice in choices
    )


@pytest.mark.parametrize("n_begun", [1, 7, 39, 40])
def test_another_server_goes_on_with_the_same_bits(server, model, n_begun, monkeypatch):
    monkeypatch.setattr("edgeinfer.sampling.secrets.randbits", lambda n: n_begun)  # the seed that is drawn
    reply = server.post(CHAT, HELLO, **{"x-edgeinfer-tokens": "1"})
    whole = parts(reply)
    tokens = [id for _, ids in whole for id in ids]
    assert len(tokens) == 40
    n, before = 0, []
    for data, ids in whole:
        if n < n_begun:
            before.append((data, ids))
            n += len(ids)
    id = json.loads(whole[0][0])["id"]
    going_on = f"seed={reply.headers['x-edgeinfer-seed']}; tokens={','.join(map(str, tokens[:n]))}; id={id}"
    with edgeinfer.load(model, backend="native", parallel=2) as engine, running(engine) as other:
        engine.tokenizer.stop_ids = frozenset()
        rest = other.post(CHAT, HELLO | {"return_progress": True}, **{"x-edgeinfer-continue": going_on})
        assert rest.status == 200, rest.body
        after = parts(rest)
        assert not any("prompt_progress" in data for data, _ in after)  # the client has got further already
        assert text_of(before) + text_of(after) == text_of(whole)
        chunks = [json.loads(data) for data, _ in after[:-1]]
        assert {chunk["id"] for chunk in chunks} == {id}
        assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks)
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert after[-1][0] == "[DONE]"


def test_a_schema_holds_across_servers(ending, model):
    if importlib.util.find_spec("llguidance") is None:
        missing("grammar", "llguidance is not installed")
    asked = HELLO | {"regex": "[a-z]{20}", "seed": 5}
    reply = ending.post(CHAT, asked, **{"x-edgeinfer-tokens": "1"})
    whole = parts(reply)
    tokens = [id for _, ids in whole for id in ids]
    with edgeinfer.load(model, backend="native", draft="none") as engine, running(engine) as other:
        going_on = f"seed=5; tokens={','.join(map(str, tokens[:4]))}"
        rest = parts(other.post(CHAT, asked, **{"x-edgeinfer-continue": going_on}))
        begun = engine.detokenize(tokens[:4])
        assert begun + text_of(rest) == text_of(whole) and len(text_of(whole)) == 20


@pytest.mark.parametrize(
    "header, change",
    [
        ("seed=1", {}),
        ("tokens=1", {}),
        ("seed=x; tokens=1", {}),
        ("seed=1; tokens=a", {}),
        ("seed=1; tokens=1; more=2", {}),
        ("seed=1; tokens=999999", {}),
        ('seed=1; tokens=1; id="x"', {}),
        ("seed=1; tokens=1", {"n": 2}),
        ("seed=1; tokens=1", {"stream": False}),
        ("seed=1; tokens=1", {"logprobs": True}),
    ],
)
def test_what_cannot_go_on_is_refused(server, header, change):
    assert server.post(CHAT, HELLO | change, **{"x-edgeinfer-continue": header}).status == 400


def test_an_engine_goes_on(engine):
    whole = engine.generate("hello", max_tokens=30, seed=4, temperature=1.3, repeat_penalty=1.2)
    for n in (0, 1, 12, 30):
        options = {"max_tokens": 30, "seed": 4, "temperature": 1.3, "repeat_penalty": 1.2}
        found = engine.generate("hello", begun=whole.tokens[:n], **options)
        assert (found.text, found.tokens, found.finish_reason) == (whole.text, whole.tokens, whole.finish_reason)
        assert found.usage.completion_tokens == 30
    assert not engine.scheduler.texts
    with pytest.raises(InvalidArgument):
        engine.stream("hello", begun=[1], logprobs=1)
