"""OpenAI's /v1/responses, without anything that is stored."""

import json
from types import SimpleNamespace

import pytest

from edgeinfer.completion import Completion, Piece, Timings, Usage
from edgeinfer.models.reasoning import ToolCall
from edgeinfer.sampling import SamplingParams
from edgeinfer.server.asked import Asked
from edgeinfer.server.dialects.openai.responses import ResponseForm

PATH = "/v1/responses"
HELLO = {"model": "tiny", "input": "hello", "max_output_tokens": 8, "seed": 3}


def answer(engine, system=None):
    chat = engine.chat(system)
    chat.messages = [*chat.messages, {"role": "user", "content": "hello"}]
    stream = chat.stream(max_tokens=8, seed=3)
    for _ in stream:
        pass
    return stream.completion


def test_a_response_has_the_text_of_the_engine(server, engine):
    expected = answer(engine, "be brief")
    said = server.ask(PATH, **HELLO, instructions="be brief", store=True)
    (item,) = said["output"]
    assert said["object"] == "response" and item["type"] == "message" and item["status"] == "completed"
    assert item["content"][0]["text"] == expected.text and said["store"] is False
    assert said["status"] == "incomplete" and said["incomplete_details"] == {"reason": "max_output_tokens"}
    assert said["usage"]["input_tokens"] == expected.usage.prompt_tokens and said["usage"]["output_tokens"] == 8
    items = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
    parts = server.ask(PATH, **HELLO | {"input": items}, instructions="be brief")
    assert parts["output"][0]["content"] == item["content"]


def test_the_user_of_a_response_is_that_of_the_request_or_absent(server):
    assert "user" not in server.ask(PATH, **HELLO) and "user" not in server.ask(PATH, **HELLO, user=None)
    assert server.ask(PATH, **HELLO, user="ann")["user"] == "ann"


def test_events_are_numbered_and_in_order(server, engine):
    body = server.post(PATH, HELLO | {"stream": True}).body.decode()
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [event["type"].removeprefix("response.") for event in events]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert names == [
        *("created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * len(deltas)),
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    assert {event["output_index"] for event in events if "output_index" in event} == {0}
    first, last = events[0]["response"], events[-1]["response"]
    assert first["completed_at"] is None is first["usage"] and last["completed_at"] >= last["created_at"] > 0
    assert "".join(deltas) == answer(engine).text == events[-1]["response"]["output"][0]["content"][0]["text"]


@pytest.mark.parametrize(
    "change",
    [{"previous_response_id": "resp_1"}, {"input": []}, {"truncation": "auto"}, {"reasoning": {"effort": "low"}}]
    + [{"tools": [{"type": "web_search"}]}, {"input": [{"type": "item_reference", "id": "x"}]}, {"unknown": 1}],
    ids=str,
)
def test_what_is_not_there_is_refused(server, change):
    reply = server.post(PATH, HELLO | change)
    assert reply.status == 400 and reply.json["error"]["message"]


def test_reasoning_text_and_calls_are_items_one_after_another():
    call = ToolCall("<call>", "clock", {"zone": "UTC"}, "call_1")
    pieces = [
        Piece("", (1,), None, "h"),
        Piece("", (2,), None, "m"),
        Piece("hi", (3,)),
        Piece("", (4,), tool_calls=(call,)),
    ]
    form = ResponseForm(SimpleNamespace(id="tiny"), Asked(tools={"tools": [{}]}), {})
    data = [*form.begin([SimpleNamespace(params=SamplingParams())])]
    for piece in pieces:
        data += form.piece(0, piece)
    completion = Completion("hi", (1, 2, 3, 4), "stop", Usage(5, 0, 4), Timings(0.0, 0.0, 0.0, 0.0), SamplingParams())
    data += [*form.ended(0, completion), *form.end()]
    events = [json.loads(each.split(b"data: ")[1]) for each in data]
    of_items = [
        (event["type"].removeprefix("response."), event["output_index"]) for event in events if "output_index" in event
    ]
    text = ("output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done")
    reasoning = [each.format("reasoning_text") for each in text]
    calls = ("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done")
    assert of_items == [
        *((name, 0) for name in [*reasoning[:2], reasoning[2], *reasoning[2:]]),
        *((each.format("output_text"), 1) for each in text),
        *((each, 2) for each in calls),
    ]
    ended = events[-1]["response"]
    thought, said, called = ended["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}] and thought["summary"] == []
    assert said["content"][0]["text"] == "hi" and (called["name"], called["arguments"]) == ("clock", '{"zone": "UTC"}')
    assert ended["status"] == "completed" and {each["status"] for each in ended["output"]} == {"completed"}
    assert len({each["item_id"] for each in events if "item_id" in each}) == 3
