"""Who may ask, and how much a request may take."""

import concurrent.futures
import http.client
import json
import socket
from contextlib import suppress

import pytest
from http_server import SECONDS, held, running

from edgeinfer.common.errors import InvalidArgument
from edgeinfer.server.access import Access, read_keys
from edgeinfer.server.body import parse
from edgeinfer.server.limits import Limits
from edgeinfer.server.problem import Problem

CHAT = "/v1/chat/completions"
QUESTION = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
HELLO = QUESTION | {"max_tokens": 2}
LONG = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 400,
    "seed": 1,
    "loop_guard": 0,
}

# ---- Who may ask -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host, is_allowed",
    [
        *(("localhost", True), ("LOCALHOST:80", True), ("a.localhost:8080", True), ("127.0.0.1:1", True)),
        *(("127.8.9.1", True), ("[::1]:8080", True), ("evil.example", False), ("localhost.evil.example:8080", False)),
        *(("192.168.1.2", False), ("", False), ("127.0.0.1.evil.example", False), ("my.name", False)),
    ],
)
def test_a_local_server_answers_by_names_of_this_machine_alone(server, host, is_allowed):
    reply = server.request("GET", "/v1/models", headers={"Host": host})
    assert reply.status == (200 if is_allowed else 403), reply.body
    if not is_allowed:
        assert reply.json["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost:1", "https://127.0.0.1.evil.example"]
)
def test_pages_of_other_sites_may_not_ask(server, origin):
    reply = server.request("POST", CHAT, HELLO, {"Origin": origin})
    assert reply.status == 403 and not any(name.startswith("access-control") for name in reply.headers)
    assert server.request("OPTIONS", CHAT, headers={"Origin": origin}).status == 403


def test_its_own_page_and_named_origins_may_ask(engine):
    with running(engine, access=Access(origins={"http://a.example"})) as server:
        own = server.request("POST", CHAT, HELLO, {"Origin": f"http://127.0.0.1:{server.port}"})
        assert own.status == 200 and "access-control-allow-origin" not in own.headers
        named = server.request("POST", CHAT, HELLO, {"Origin": "http://a.example"})
        assert named.headers["access-control-allow-origin"] == "http://a.example"
        assert "access-control-allow-credentials" not in named.headers
        before = server.request("OPTIONS", CHAT, headers={"Origin": "http://a.example"})
        assert before.status == 204 and "POST" in before.headers["access-control-allow-methods"]
        assert server.request("GET", "/v1/models", headers={"Origin": "http://b.example"}).status == 403


def test_with_keys_one_of_them_is_needed(engine):
    with running(engine, access=Access(keys=("one-key", "two-key"))) as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "one-key"}, {"x-api-key": "ö"}):
            reply = server.request("POST", CHAT, HELLO, headers)
            assert reply.status == 401 and reply.json["error"]["type"] == "authentication_error"
            assert server.request("GET", "/metrics", headers=headers).status == 401
        for headers in (
            {"Authorization": "Bearer two-key"},
            {"authorization": "bearer one-key"},
            {"x-api-key": "one-key"},
        ):
            assert server.request("POST", CHAT, HELLO, headers).status == 200
        assert server.get("/health").status == 200
        server.wait(lambda: any("key 2" in line for line in server.log))
        assert "one-key" not in "".join(server.log)


@pytest.mark.parametrize(
    "access, host, is_allowed",
    [
        (Access(is_local=False), "10.0.0.7:8080", True),
        (Access(is_local=False), "evil.example", False),
        (Access(is_local=False, hosts={"my.lan"}), "MY.lan:80", True),
        (Access(is_local=False, keys=("k",)), "any.name", True),
        (Access(is_local=True, keys=("k",)), "any.name", False),
    ],
)
def test_a_name_leads_to_other_machines_only_with_a_key(access, host, is_allowed):
    headers = {"host": host, "x-api-key": "k"}
    if is_allowed:
        access.check("GET", "/v1/models", headers)
    else:
        with pytest.raises(Problem):
            access.check("GET", "/v1/models", headers)


def test_keys_are_read_one_a_line():
    assert read_keys(["# of the house", "", " a ", "b", "a"]) == ("a", "b")
    for lines in ([], ["# none"], ["two words"], ["ä"]):
        with pytest.raises(InvalidArgument):
            read_keys(lines)


# ---- Bodies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data, said",
    [
        (b"{", "JSON"),
        (b"[]", "object"),
        (b'{"a": NaN}', "JSON"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"a":' + b"[" * 70 + b"]" * 70 + b"}", "nested"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested"),
        (b'{"a":[' + b"[]," * 200_000 + b"[]]}", "lists"),
        (b'{"a": ' + b"1" * 5000 + b"}", "JSON"),
    ],
)
def test_a_body_that_is_none_is_refused(server, data, said):
    reply = server.post(CHAT, data)
    assert reply.status == 400 and said in reply.json["error"]["message"]


def test_depth_is_that_of_lists_and_objects():
    limits = Limits(depth=3)
    assert parse(b'{"a":[{"b":1}]}', limits) == {"a": [{"b": 1}]}
    with pytest.raises(Problem, match="nested"):
        parse(b'{"a":[{"b":[]}]}', limits)


def test_a_body_that_is_too_long_is_refused_whether_or_not_it_says_so(engine):
    with running(engine, body=1000) as server:
        assert server.post(CHAT, b" " * 1000).status == 400
        assert server.post(CHAT, b" " * 1001).status == 413
        with socket.create_connection(("127.0.0.1", server.port), SECONDS) as sent:  # it need not read what it refuses
            sent.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 40000000\r\n\r\n")
            assert b" 413 " in read_all(sent).split(b"\r\n")[0]
        with socket.create_connection(("127.0.0.1", server.port), SECONDS) as sent:
            sent.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
            sent.sendall(b"800\r\n" + b" " * 2048 + b"\r\n0\r\n\r\n")
            assert b" 413 " in sent.recv(4096).split(b"\r\n")[0]


def read_all(connection):
    """What comes until the connection is closed, in whatever way."""
    data = b""
    with suppress(ConnectionError):
        while part := connection.recv(4096):
            data += part
    return data


def test_a_slow_body_is_ended(engine):
    with running(engine, body_seconds=0.3) as server:
        with socket.create_connection(("127.0.0.1", server.port), SECONDS) as sent:
            sent.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
            assert b" 408 " in read_all(sent).split(b"\r\n")[0]


@pytest.mark.parametrize("start", [b"", b"GET /health HT"])
def test_slow_headers_are_ended(engine, start):
    with running(engine, headers_seconds=0.3) as server:
        with socket.create_connection(("127.0.0.1", server.port), SECONDS) as sent:
            sent.sendall(start)
            assert read_all(sent) == b""


def test_slow_headers_of_the_second_request_of_a_connection_are_ended(engine):
    with running(engine) as server, socket.create_connection(("127.0.0.1", server.port), SECONDS) as sent:
        sent.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        data = b""
        while b'{"status":"ok"}' not in data:
            part = sent.recv(4096)
            assert part, data
            data += part
        object.__setattr__(server.server.limits, "headers_seconds", 0.3)  # the first request had all the time it needs
        sent.sendall(b"GET /hea")
        assert read_all(sent) == b""


def test_what_is_no_http_is_refused(server):
    with socket.create_connection(("127.0.0.1", server.port), SECONDS) as sent:
        sent.sendall(b"\x00\x01\x02 nothing\r\n\r\n")
        assert b" 400 " in sent.recv(4096)
    with socket.create_connection(("127.0.0.1", server.port), SECONDS) as sent:
        with suppress(ConnectionError):  # the server need not read all before it closes the connection
            sent.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 400_000)  # and no end
        assert b" 400 " in sent.recv(4096)
    assert server.get("/health").status == 200


# ---- Places ----------------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_says_when_to_come_again(engine):
    with running(engine, queue=2, n_parallel=4) as server, concurrent.futures.ThreadPoolExecutor(12) as threads:
        with engine.scheduler.alone():  # so that none ends before all have asked
            asked = [threads.submit(server.post, CHAT, LONG) for _ in range(12)]
            server.wait(lambda: sum(each.done() for each in asked) == 6)
        replies = [each.result(SECONDS) for each in asked]
        refused = [reply for reply in replies if reply.status == 429]
        assert len(refused) == 6 and {reply.status for reply in replies} == {200, 429}
        for reply in refused:
            assert 1 <= int(reply.headers["retry-after"]) <= 60 and reply.json["error"]["code"] == "queue_full"
        assert len({reply.json["choices"][0]["message"]["content"] for reply in replies if reply.status == 200}) == 1
        server.wait(lambda: not server.server.n_texts)
        assert server.post(CHAT, HELLO | {"n": 7}).json["error"]["param"] == "n"


def test_a_key_among_several_has_so_many_requests_at_once(engine, monkeypatch):
    access = Access(keys=("a-key", "b-key"))
    with running(engine, access=access, of_key=1) as server, concurrent.futures.ThreadPoolExecutor(6) as threads:
        most = []
        submit = engine.scheduler.submit
        monkeypatch.setattr(engine.scheduler, "submit", lambda each: most.append(len(server.texts)) or submit(each))
        asked = [threads.submit(server.post, CHAT, HELLO, **{"x-api-key": "a-key"}) for _ in range(6)]
        assert {each.result(SECONDS).status for each in asked} == {200}
        assert len(most) == 6 and max(most) == 0


def test_a_text_ends_when_the_time_of_requests_is_over(slow):
    """A text of 400 tokens takes eight seconds at least here."""
    with running(slow, request_seconds=0.05) as server:
        said = server.ask(CHAT, **LONG)
        assert said["choices"][0]["finish_reason"] == "length" and said["usage"]["completion_tokens"] < 400
    with running(slow) as server:
        assert server.ask(CHAT, **LONG, timeout=0.05)["usage"]["completion_tokens"] < 400


def test_a_stream_without_text_is_kept_alive(engine):
    """The text does not come on while somebody else has the engine."""
    with running(engine, ping_seconds=0.05) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=SECONDS)
        with engine.scheduler.alone():
            connection.request("POST", CHAT, json.dumps(HELLO | {"stream": True}))
            reply, data = connection.getresponse(), b""
            while data.count(b": ping\n\n") < 3:
                part = reply.read1()
                assert part, data
                data += part
        assert (data + reply.read()).endswith(b"data: [DONE]\n\n")
        connection.close()


# ---- The end ---------------------------------------------------------------------------------------------------------


def test_answers_have_time_to_end_and_no_new_ones_begin(engine):
    with running(engine, drain_seconds=SECONDS) as server, concurrent.futures.ThreadPoolExecutor(1) as threads:
        with held(engine, 4) as gate:
            asked = threads.submit(server.post, CHAT, LONG | {"stream": True})
            server.wait(lambda: gate.holds)
            server.stop()
            server.wait(lambda: server.server.is_draining)
            gate.let()
            events = asked.result(SECONDS).events
        assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "length"

        def is_closed():  # uvicorn looks ten times a second whether it is to end, and a short answer is over before
            try:
                socket.create_connection(("127.0.0.1", server.port), SECONDS).close()
            except OSError:
                return True
            return False

        server.wait(is_closed)


def test_the_end_waits_for_nothing_where_nothing_runs(engine):
    with running(engine, drain_seconds=10 * SECONDS) as server:  # which looks whether it ends within SECONDS
        assert server.post(CHAT, HELLO).status == 200


def test_an_answer_that_does_not_end_in_time_ends_with_an_error(engine):
    with running(engine, drain_seconds=0.3) as server, concurrent.futures.ThreadPoolExecutor(1) as threads:
        with held(engine, 4) as gate:
            asked = threads.submit(server.post, CHAT, LONG | {"stream": True})
            server.wait(lambda: gate.holds)
            server.stop()
            reply = asked.result(SECONDS)
        last = json.loads(reply.body.decode().rstrip().rpartition("data: ")[2])
        assert last["error"]["code"] == "shutting_down"


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/completions", {"model": "tiny", "prompt": "hello", "max_tokens": 400, "seed": 1, "stream": True}),
        ("/v1/responses", {"model": "tiny", "input": "hello", "max_output_tokens": 400, "seed": 1, "stream": True}),
    ],
)
def test_the_error_at_the_end_of_a_stream_is_that_of_its_dialect(engine, path, body):
    with running(engine, drain_seconds=0.3) as server, concurrent.futures.ThreadPoolExecutor(1) as threads:
        with held(engine, 4):
            asked = threads.submit(server.post, path, body)
            server.wait(lambda: server.server.metrics.between_tokens.n == 3)  # the stream has four tokens
            server.stop()
            last = asked.result(SECONDS).events[-1]
    if path == "/v1/responses":  # its events have a type, which is not the kind of the error
        assert last.keys() == {"type", "sequence_number", "message", "param", "code"}
        assert last["type"] == "error" and last["sequence_number"] > 2
    else:
        assert last.keys() == {"error"} and last["error"]["type"] == "overloaded_error"
        last = last["error"]
    assert last["code"] == "shutting_down" and last["param"] is None and "shut down" in last["message"]
