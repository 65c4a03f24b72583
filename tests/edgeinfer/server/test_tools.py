"""Calls of tools and their results, in each dialect."""

import importlib.util
import json

import pytest
from http_server import running, server_is_there
from parts import missing
from tiny_models import write_tiny_model

import edgeinfer

TEMPLATE = """{%- for t in tools or [] -%}{{ 'TOOL ' + (t | tojson) + '\\n' }}{%- endfor -%}
{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] -%}
    {{ '<tool_call>' }}{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
    {{- '</tool_call>' + call.id }}
{%- endfor -%}
{%- if m.role == 'tool' -%}{{ '|' + (m.name or '') + '|' + m.tool_call_id }}{%- endif -%}
{{ '<|im_end|>\\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""
PARAMETERS = {
    "type": "object",
    "properties": {"at": {"enum": ["home", "sea"]}},
    "required": ["at"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": PARAMETERS}}
QUESTION = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory, native):
    server_is_there()
    if importlib.util.find_spec("llguidance") is None:
        missing("grammar", "llguidance is not installed")
    path = write_tiny_model(tmp_path_factory.mktemp("model") / "tools.gguf", template=TEMPLATE, n_ctx_train=1024)
    with edgeinfer.load(path, backend="native", draft="none") as engine, running(engine) as found:
        yield found


def rendered(server, monkeypatch):
    """Prompts of the requests from now on."""
    prompts, stream = [], server.engine.stream
    monkeypatch.setattr(
        server.engine, "stream", lambda prompt, **options: prompts.append(prompt) or stream(prompt, **options)
    )
    return prompts


def test_a_required_call_comes_whole_and_in_parts(server):
    asked = {
        "model": "tiny",
        "messages": QUESTION,
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "seed": 2,
    }
    (choice,) = server.ask("/v1/chat/completions", **asked)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert call["type"] == "function" and call["function"]["name"] == "look" and len(call["id"]) == 9
    assert json.loads(call["function"]["arguments"])["at"] in ("home", "sea")
    chunks = [
        event["choices"][0] for event in server.post("/v1/chat/completions", asked | {"stream": True}).events[:-1]
    ]
    parts = [part for chunk in chunks for part in chunk["delta"].get("tool_calls", ())]
    assert set(parts[0]) == {"index", "id", "type", "function"} and parts[0]["function"] == {
        "name": "look",
        "arguments": "",
    }
    assert all(set(part) == {"index", "function"} and part["index"] == 0 for part in parts[1:])
    assert "".join(part["function"]["arguments"] for part in parts) == call["function"]["arguments"]
    assert parts[0]["id"] == call["id"]
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["tool_calls"]
    assert chunks[-1]["delta"] == {}


def test_a_call_that_is_cut_is_no_call(server):
    asked = {
        "model": "tiny",
        "messages": QUESTION,
        "tools": [TOOL],
        "tool_choice": "required",
        "max_tokens": 5,
        "seed": 2,
    }
    (choice,) = server.ask("/v1/chat/completions", **asked)["choices"]
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]


def test_a_named_tool_is_the_one_that_is_called(server):
    other = {"type": "function", "function": {"name": "wait", "parameters": {"type": "object", "properties": {}}}}
    named = {"type": "function", "function": {"name": "look"}}
    for seed in range(4):
        asked = {"model": "tiny", "messages": QUESTION, "tools": [other, TOOL], "tool_choice": named, "seed": seed}
        (choice,) = server.ask("/v1/chat/completions", **asked)["choices"]
        assert {call["function"]["name"] for call in choice["message"]["tool_calls"]} == {"look"}


def test_ollama_has_the_arguments_as_an_object(server, monkeypatch):
    """It leaves the choice to the model, which here has none."""
    stream = edgeinfer.chat.Conversation.stream
    monkeypatch.setattr(
        edgeinfer.chat.Conversation, "stream", lambda chat, **given: stream(chat, **given | {"tool_choice": "required"})
    )
    asked = {"model": "tiny", "messages": QUESTION, "tools": [TOOL], "options": {"seed": 2}}
    whole = server.ask("/api/chat", **asked, stream=False)
    call = whole["message"]["tool_calls"][0]
    assert call["function"]["name"] == "look" and call["function"]["arguments"]["at"] in ("home", "sea")
    lines = server.post("/api/chat", asked).lines
    streamed = [call for line in lines for call in line["message"].get("tool_calls", ())]
    assert [each["function"]["arguments"] for each in streamed] == [
        each["function"]["arguments"] for each in whole["message"]["tool_calls"]
    ]


def test_anthropic_has_a_block_for_each_call(server):
    tool = {"name": "look", "description": "Look.", "input_schema": PARAMETERS}
    choice = {"type": "tool", "name": "look", "disable_parallel_tool_use": True}
    asked = {
        "model": "tiny",
        "max_tokens": 200,
        "messages": QUESTION,
        "tools": [tool],
        "tool_choice": choice,
        "seed": 2,
    }
    said = server.ask("/v1/messages", **asked)
    (block,) = said["content"]
    assert block["type"] == "tool_use" and block["name"] == "look" and block["input"]["at"] in ("home", "sea")
    assert said["stop_reason"] == "tool_use"
    body = server.post("/v1/messages", asked | {"stream": True}).body.decode()
    found = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: ")]
    start = next(each for each in found if each["type"] == "content_block_start")
    assert start["content_block"] == {
        "type": "tool_use",
        "id": block["id"],
        "name": "look",
        "input": {},
        "caller": {"type": "direct"},
    }
    deltas = [each["delta"] for each in found if each["type"] == "content_block_delta"]
    assert json.loads("".join(delta["partial_json"] for delta in deltas)) == block["input"]
    n = server.ask("/v1/messages/count_tokens", **asked)["input_tokens"]
    assert n == said["usage"]["input_tokens"]


def test_all_dialects_render_calls_and_results_alike(server, monkeypatch):
    prompts = rendered(server, monkeypatch)
    call = {"id": "abc", "type": "function", "function": {"name": "look", "arguments": '{"at": "sea"}'}}
    result = {"role": "tool", "tool_call_id": "abc", "content": "waves"}
    history = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    server.ask("/v1/chat/completions", model="tiny", messages=history, tools=[TOOL], max_tokens=1)
    theirs = {"id": "abc", "function": {"name": "look", "arguments": {"at": "sea"}}}
    history = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [theirs]}, result]
    server.ask("/api/chat", model="tiny", messages=history, tools=[TOOL], options={"num_predict": 1}, stream=False)
    history = [
        *QUESTION,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "abc", "name": "look", "input": {"at": "sea"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "abc", "content": "waves"}]},
    ]
    tool = {"name": "look", "description": "Look.", "input_schema": PARAMETERS}
    server.ask("/v1/messages", model="tiny", messages=history, tools=[tool], max_tokens=1)
    texts = {server.engine.detokenize(prompt) for prompt in prompts}
    assert len(prompts) == 3 and len(texts) == 1, texts
    (text,) = texts
    assert '"at": "sea"' in text and "waves|" in text and text.count("TOOL") == 1


def test_a_history_that_no_parser_takes_is_no_failure(server):
    call = {"id": "abc", "type": "function", "function": {"name": "look", "arguments": '{"at": '}}
    result = {"role": "tool", "tool_call_id": "abc", "content": "waves"}
    history = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    assert server.post("/v1/chat/completions", {"model": "tiny", "messages": history, "max_tokens": 1}).status == 200


@pytest.mark.parametrize(
    "change, status",
    [
        ({"tools": [TOOL] * 129}, 400),
        ({"tools": "look"}, 400),
        ({"tools": [{"type": "function"}]}, 400),
        ({"tools": [{**TOOL, "function": {**TOOL["function"], "description": "x" * (256 << 10)}}]}, 400),
        ({"tools": [TOOL], "tool_choice": "walk"}, 400),
        ({"tool_choice": "required"}, 400),
        ({"tools": [TOOL, {**TOOL, "function": {**TOOL["function"], "name": "see"}}] * 20}, 400),
        ({"tools": [{**TOOL, "function": {**TOOL["function"], "name": f"look{i}"}} for i in range(3)]}, 200),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_tools_have_limits(server, change, status):
    reply = server.post("/v1/chat/completions", {"model": "tiny", "messages": QUESTION, "max_tokens": 1} | change)
    assert reply.status == status, reply.body


def test_responses_have_an_item_for_each_call(server):
    tool = {"type": "function", "name": "look", "description": "Look.", "parameters": PARAMETERS}
    asked = {"model": "tiny", "input": "hello", "tools": [tool], "tool_choice": "required", "seed": 2}
    said = server.ask("/v1/responses", **asked, parallel_tool_calls=False)
    (item,) = said["output"]
    assert item["type"] == "function_call" and item["name"] == "look" and said["status"] == "completed"
    assert json.loads(item["arguments"])["at"] in ("home", "sea")
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "waves"}
    history = [{"role": "user", "content": "hello"}, item, result]
    assert server.ask("/v1/responses", model="tiny", input=history, tools=[tool], max_output_tokens=2)["output"]
