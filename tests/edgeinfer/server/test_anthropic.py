"""Anthropic's dialect."""

import json

import pytest

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO = {"model": "tiny", "max_tokens": 8, "seed": 3, "messages": [{"role": "user", "content": "hello"}]}


def answer(engine, **options):
    """The completion of the same chat without a server."""
    chat = engine.chat(options.pop("system", None))
    chat.messages = [*chat.messages, {"role": "user", "content": "hello"}]
    stream = chat.stream(**({"max_tokens": 8, "seed": 3} | options))
    for _ in stream:
        pass
    return stream.completion


def events(reply):
    """(name, data) of the events of a stream."""
    parts = [part.split("\n") for part in reply.body.decode().split("\n\n") if part]
    found = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in parts]
    assert all(name == data["type"] for name, data in found)
    return found


def test_a_message_is_answered(server, engine):
    expected = answer(engine, system="be brief")
    said = server.ask(MESSAGES, **HELLO, system=[{"type": "text", "text": "be brief", "cache_control": {"type": "x"}}])
    assert said["type"] == "message" and said["role"] == "assistant" and said["model"] == "tiny"
    assert said["content"] == [{"type": "text", "text": expected.text, "citations": None}]
    assert said["stop_reason"] == "max_tokens" and said["stop_sequence"] is None
    assert said["usage"]["input_tokens"] == expected.usage.prompt_tokens and said["usage"]["output_tokens"] == 8


def test_events_come_in_the_order_of_anthropic(server, engine):
    found = events(server.post(MESSAGES, HELLO | {"stream": True}))
    names = [name for name, _ in found]
    deltas = names.count("content_block_delta")
    assert names == [
        *("message_start", "content_block_start", *["content_block_delta"] * deltas),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    expected = answer(engine)
    assert "".join(data["delta"]["text"] for name, data in found if name == "content_block_delta") == expected.text
    start, end = found[0][1]["message"], found[-2][1]
    assert start["content"] == [] and start["usage"]["input_tokens"] == expected.usage.prompt_tokens
    assert (
        end["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None, "stop_details": None}
        and end["usage"]["output_tokens"] == 8
    )


def test_the_stop_sequence_that_was_met_is_named(server, engine):
    text = answer(engine, max_tokens=20).text
    stop = text[3:5]
    said = server.ask(MESSAGES, **HELLO | {"max_tokens": 20}, stop_sequences=["never here", stop])
    assert (said["stop_reason"], said["stop_sequence"]) == ("stop_sequence", stop)
    assert said["content"] == [{"type": "text", "text": text[: text.index(stop)], "citations": None}]


def test_tokens_are_counted_also_of_what_does_not_fit(server, engine):
    counted = {name: value for name, value in HELLO.items() if name != "max_tokens"}
    assert server.ask(COUNT, **counted)["input_tokens"] == answer(engine).usage.prompt_tokens
    long = [{"role": "user", "content": "hello there " * 400}]
    assert server.ask(COUNT, **counted | {"messages": long})["input_tokens"] > engine.n_ctx
    assert server.post(MESSAGES, HELLO | {"messages": long}).status == 400


@pytest.mark.parametrize(
    "change, status, kind",
    [
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"model": "other"}, 404, "not_found_error"),
        ({"messages": []}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "invalid_request_error"),
        ({"mcp_servers": []}, 400, "invalid_request_error"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error"),
        ({"thinking": {"type": "loud"}}, 400, "invalid_request_error"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "invalid_request_error"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_errors_have_the_form_of_anthropic(server, change, status, kind):
    reply = server.post(MESSAGES, HELLO | change)
    assert reply.status == status and reply.json["type"] == "error"
    assert reply.json["error"]["type"] == kind and reply.json["error"]["message"]
