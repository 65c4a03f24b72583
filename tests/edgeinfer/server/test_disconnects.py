"""A client that goes frees its place at once, wherever its request is; the others notice nothing."""

import concurrent.futures
import json
import random
import socket
import time

import pytest
from http_server import SECONDS, held, running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
QUESTION = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
LONG = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 450,
    "seed": 1,
    "loop_guard": 0,
}


def sent(server, path, body):
    """A connection on which a request was sent."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port), SECONDS)
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_during_its_answer(engine, stream):
    with running(engine) as server, held(engine, 4) as gate:
        connection = sent(server, CHAT, LONG | {"stream": stream})
        server.wait(lambda: gate.holds)
        (text,) = server.texts
        assert text.n_ready == 4
        connection.close()
        server.wait(lambda: text.is_cancelled)
        gate.let()
        server.wait(lambda: not server.texts and not server.server.n_texts)
        assert text.n_ready <= 5, "the pass that ran is the last one"
        server.wait(lambda: any(" gone " in line or " 200 " in line for line in server.log))
        assert not any("bug" in line for line in server.log)


def test_a_client_that_goes_during_its_prompt(engine, monkeypatch):
    monkeypatch.setattr(engine.scheduler.pace, "piece", lambda n, room: min(4, room))
    with running(engine) as server, held(engine, 3) as gate:
        connection = sent(server, TEXT, {"model": "tiny", "prompt": "hello there " * 60, "max_tokens": 50})
        server.wait(lambda: gate.holds)
        (text,) = server.texts
        connection.close()
        server.wait(lambda: text.is_cancelled)
        gate.let()
        server.wait(lambda: not server.texts)
        assert text.share_read < 0.5 and not text.n_ready


def test_clients_that_go_from_the_queue(engine):
    with running(engine) as server, held(engine, 0) as gate:
        others = [sent(server, CHAT, LONG | {"seed": seed}) for seed in range(4)]
        server.wait(lambda: len(server.texts) == 4)
        gate.let(8)
        server.wait(lambda: gate.holds)
        texts = server.texts
        assert all(text.n_ready > 1 for text in texts)
        waits = [sent(server, CHAT, LONG | {"stream": stream}) for stream in (True, False)]
        server.wait(lambda: len(server.texts) == 6)
        for connection in waits:
            connection.close()
        server.wait(lambda: sum(text.is_cancelled for text in server.texts) == 2)
        gate.let(1)
        server.wait(lambda: gate.holds)
        assert server.texts == texts
        assert not any(text.is_cancelled or text.has_ended for text in texts)
        for connection in others:
            connection.close()
        server.wait(lambda: all(text.is_cancelled for text in texts))
        gate.let()
        server.wait(lambda: not server.texts)
        assert max(text.n_ready for text in texts) <= 10


def stands_still(texts):
    """Whether texts come no further for some time."""
    before = [text.n_ready for text in texts]
    time.sleep(0.3)
    return before == [text.n_ready for text in texts]


def test_a_client_that_does_not_read_stops_its_text_alone(engine):
    with running(engine, unread=2) as server:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.port))
            data = json.dumps(LONG | {"stream": True, "n": 4, "logprobs": True, "top_logprobs": 20}).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
            connection.sendall(head.encode() + data)
            server.wait(lambda: any(text.n_ready for text in server.texts))
            server.wait(lambda: stands_still(server.texts))
            assert max(text.n_ready for text in server.texts) < 400
            assert server.ask(CHAT, **LONG | {"max_tokens": 5})["usage"]["completion_tokens"] == 5
        server.wait(lambda: not server.texts)


# ---- Load ------------------------------------------------------------------------------------------------------------


def mixed(seed):
    """A request of any kind."""
    draw = random.Random(seed)
    options = {
        "model": "tiny",
        "max_tokens": draw.randint(1, 24),
        "seed": seed,
        "temperature": draw.choice([0, 0.7, 1.5]),
    }
    options["stream"] = draw.random() < 0.5
    if draw.random() < 0.3:
        options["n"] = 2
    words = " ".join(draw.choices(["hello", "there", "is", "one", "more", "world"], k=draw.randint(1, 40)))
    if draw.random() < 0.5:
        return TEXT, options | {"prompt": words}
    if draw.random() < 0.3:
        options |= {"logprobs": True, "top_logprobs": 2}
    return CHAT, options | {"messages": [{"role": "user", "content": words}]}


def said(reply):
    """What a reply says, by choice: text, log probabilities, reason."""
    assert reply.status == 200, reply.body
    if reply.headers["content-type"].startswith("application/json"):
        return {
            each["index"]: (
                each["message"]["content"] if "message" in each else each["text"],
                json.dumps((each["logprobs"] or {}).get("content", [])),
                each["finish_reason"],
            )
            for each in reply.json["choices"]
        }
    found = {}
    for event in reply.events[:-1]:
        (each,) = event["choices"]
        text, logprobs, reason = found.get(each["index"], ("", [], None))
        text += each["delta"].get("content") or "" if "delta" in each else each["text"]
        logprobs = logprobs + (each["logprobs"] or {}).get("content", [])
        found[each["index"]] = text, logprobs, reason or each["finish_reason"]
    return {index: (text, json.dumps(logprobs), reason) for index, (text, logprobs, reason) in found.items()}


def test_eight_connections_get_the_bytes_of_one_with_clients_that_go_between(engine):
    with running(engine) as server:
        expected = {seed: said(server.post(*mixed(seed))) for seed in range(48)}

        def client(number):
            draw, replies = random.Random(number), {}
            for seed in random.Random(number).sample(range(48), 12):
                if draw.random() < 0.3:
                    connection = sent(server, *mixed(seed))
                    time.sleep(draw.random() * 0.02)
                    connection.close()
                replies[seed] = said(server.post(*mixed(seed)))
            return replies

        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            for replies in threads.map(client, range(8)):
                assert replies == {seed: expected[seed] for seed in replies}
        server.wait(lambda: not server.texts and not server.server.n_texts)
        assert not any("bug" in line for line in server.log)
