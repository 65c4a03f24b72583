"""Ollama's dialect."""

import json

import pytest

CHAT, GENERATE = "/api/chat", "/api/generate"
OPTIONS = {"num_predict": 8, "seed": 3}
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "options": OPTIONS}


def answer(engine, content="hello", system=None, **options):
    """The completion of the same chat without a server."""
    chat = engine.chat(system)
    chat.messages = [*chat.messages, {"role": "user", "content": content}]
    stream = chat.stream(**({"max_tokens": 8, "seed": 3} | options))
    for _ in stream:
        pass
    return stream.completion


def test_a_chat_is_streamed_in_lines_unless_it_says_otherwise(server, engine):
    reply = server.post(CHAT, HELLO | {"keep_alive": "5m"})
    assert reply.status == 200 and reply.headers["content-type"] == "application/x-ndjson"
    *pieces, last = reply.lines
    expected = answer(engine)
    assert "".join(piece["message"]["content"] for piece in pieces) == expected.text
    assert all(not piece["done"] and piece["message"]["role"] == "assistant" for piece in pieces)
    assert last["done"] is True and last["done_reason"] == "length" and last["message"]["content"] == ""
    assert last["eval_count"] == 8 and last["prompt_eval_count"] == expected.usage.prompt_tokens
    assert all(isinstance(last[f"{name}_duration"], int) for name in ("total", "load", "prompt_eval", "eval"))
    assert {line["model"] for line in reply.lines} == {"tiny:latest"}
    whole = server.ask(CHAT, **HELLO, stream=False)
    assert whole["message"]["content"] == expected.text and whole["done"] is True and whole["eval_count"] == 8


def test_a_prompt_is_a_chat_unless_it_is_raw(server, engine):
    said = server.ask(GENERATE, model="tiny", prompt="hello", system="be brief", options=OPTIONS, stream=False)
    assert said["response"] == answer(engine, system="be brief").text and "message" not in said
    raw = server.ask(GENERATE, model="tiny", prompt="hello", raw=True, options=OPTIONS, stream=False)
    assert raw["response"] == engine.generate("hello", max_tokens=8, seed=3).text
    lines = server.post(GENERATE, {"model": "tiny", "prompt": "hello", "raw": True, "options": OPTIONS}).lines
    assert "".join(line["response"] for line in lines) == raw["response"] and lines[-1]["done"]


def test_options_reach_the_engine_and_those_of_hardware_are_named(server, engine):
    options = OPTIONS | {"temperature": 1.5, "top_k": 3, "repeat_last_n": 8, "repeat_penalty": 1.3, "num_ctx": 8192}
    reply = server.post(CHAT, HELLO | {"options": options, "stream": False})
    given = {"temperature": 1.5, "top_k": 3, "penalty_last_n": 8, "repeat_penalty": 1.3}
    assert reply.json["message"]["content"] == answer(engine, **given).text
    assert reply.headers["x-edgeinfer-ignored"] == "num_ctx"
    stopped = answer(engine).text[2:4]
    said = server.ask(CHAT, **HELLO | {"options": OPTIONS | {"stop": [stopped]}}, stream=False)
    assert said["done_reason"] == "stop" and stopped not in said["message"]["content"]


@pytest.mark.parametrize(
    "change, status",
    [
        ({"model": ""}, 400),
        ({"model": "other"}, 404),
        ({"options": {"mirostat": 2}}, 400),
        ({"options": {"typical_p": 0.5}}, 400),
        ({"options": []}, 400),
        ({"format": 3}, 400),
        ({"keep_alive": "soon"}, 400),
        ({"unknown": 1}, 400),
        ({"think": True}, 400),
        ({"messages": [{"role": "user", "content": "a", "images": ["AAAA"]}]}, 400),
        ({"messages": [{"role": "nobody", "content": "a"}]}, 400),
        ({"messages": [{"role": "user", "content": "hello there " * 400}]}, 400),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_errors_have_the_form_of_ollama(server, change, status):
    reply = server.post(CHAT, HELLO | change)
    assert reply.status == status and isinstance(reply.json["error"], str) and len(reply.json) == 1


def test_a_request_of_nothing_loads(server):
    for path, name in ((CHAT, "message"), (GENERATE, "response")):
        said = server.ask(path, model="tiny", keep_alive=-1)
        assert said["done"] is True and said["done_reason"] == "load" and name in said
        assert server.ask(path, model="tiny", keep_alive=0)["done_reason"] == "unload"


def test_what_copilot_and_home_assistant_look_at(server, engine):
    assert [int(part) for part in server.get("/api/version").json["version"].split(".")] >= [0, 6, 4]
    (listed,) = server.get("/api/tags").json["models"]
    assert listed["name"] == listed["model"] == "tiny:latest" and len(listed["digest"]) == 64
    assert listed["size"] == engine.path.stat().st_size and listed["details"]["format"] == "gguf"
    shown = server.ask("/api/show", model=listed["name"])
    architecture = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{architecture}.context_length"] == engine.n_ctx
    assert shown["capabilities"] == ["completion", "tools"] and "im_start" in shown["template"]
    (loaded,) = server.get("/api/ps").json["models"]
    assert loaded["name"] == listed["name"] and loaded["expires_at"] > "20" and loaded["context_length"] == engine.n_ctx
    assert server.post("/api/pull", {"model": "x"}).status == 501
    assert server.request("DELETE", "/api/delete", {"model": "tiny"}).status == 501


def test_log_probabilities(server, engine):
    said = server.ask(CHAT, **HELLO, stream=False, logprobs=True, top_logprobs=2)["logprobs"]
    expected = answer(engine, logprobs=2).logprobs
    assert [each["logprob"] for each in said] == [each.logprob for each in expected]
    lines = server.post(CHAT, HELLO | {"logprobs": True, "top_logprobs": 2}).lines
    assert [each for line in lines for each in line.get("logprobs", ())] == said


def test_an_answer_keeps_to_a_schema(ending):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    said = ending.ask(CHAT, **HELLO | {"options": {"seed": 1}}, format=schema, stream=False)
    assert json.loads(said["message"]["content"])["a"] in (1, 2)
