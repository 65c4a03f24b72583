"""Every reply of `edgeinfer serve` in OpenAI's dialect, against OpenAI's own OpenAPI document.

    python tests/benchmarks/judge_openapi.py OPENAPI.json [MODEL.gguf] [--types] [--thoughts MODEL.gguf]

OPENAPI.json: of github.com/openai/openai-openapi. The requests are those of openapi_requests.py; each that is answered
must itself be valid, and each reply, each event of a stream and each refusal is read against the schema of its route.
Beside them: refusals of a full queue, and streams that end with an error because the server is shut down.
--types: also against the types of openai-python, read strictly; it must be importable. --thoughts: a model with a
template that opens <think>. What is known to be wrong in the document is in KNOWN, with the reason. One JSON line on
stdout; exits with 1 if something else was wrong.
"""

from __future__ import annotations

import http.client
import json
import os
import shlex
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from bench_server import free_port, model_of, running
from machine import machine
from openapi_requests import CHAT, RESPONSES, TEXT, Case, cases, thoughts
from openapi_schemas import Document, Types, Wrong
from soak_server import server_of

from edgeinfer.library.local import default_model

_KEY = "judged"
# Nulls that stay, by the route and the place: why.
_PARTS = "POST /completions, events"
_FIRST = (
    "of a prompt's first token, which has no log probability: other servers send null too, and lm-eval leaves it out"
)
KNOWN: dict[tuple[str, str], str] = {
    (_PARTS, "choices/*/finish_reason"): "until a text ends, as in the document's own example of a stream",
    (_PARTS, "usage"): "in all chunks but the last one, as the document says of stream_options",
    **{
        (route, f"choices/*/logprobs/{name}/*"): _FIRST
        for route in ("POST /completions", _PARTS)
        for name in ("token_logprobs", "top_logprobs")
    },
    (
        "POST /responses, events",
        "response/usage",
    ): "until a response ends, as in the document's own example of the event",
}


@dataclass
class Read:
    """A reply.  events: the data of a stream, None of a whole reply."""

    status: int
    headers: dict[str, str]
    text: str
    events: list[str] | None

    @property
    def values(self) -> list[str]:
        """Its JSON texts."""
        return [self.text] if self.events is None else [each for each in self.events if each != "[DONE]"]


@dataclass
class Verdicts:
    """Of one judge.  wrong: (route, place, what) with the names of requests; known: the same of those in KNOWN."""

    n: Counter[str] = field(default_factory=Counter)
    n_wrong: Counter[str] = field(default_factory=Counter)
    wrong: dict[tuple[str, str, str], list[str]] = field(default_factory=dict)
    known: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, case: Case, route: str, found: Iterable[Wrong]) -> None:
        """What a judge found of one value."""
        self.n[route] += 1
        first = {place: what for place, what in reversed(list(found))}  # a null is no text, and none of these texts
        for place, what in first.items():
            if what.startswith("None") and (route, place) in KNOWN:
                self.known[route, place] += 1
            else:
                self.wrong.setdefault((route, place, what), []).append(case.name)
        self.n_wrong[route] += bool(first)

    def report(self) -> dict[str, Any]:
        """For the JSON line."""
        wrong = [
            {"route": route, "place": place, "what": what, "requests": sorted(set(names))}
            for (route, place, what), names in self.wrong.items()
        ]
        known = [
            {"route": route, "place": place, "times": times, "why": KNOWN[route, place]}
            for (route, place), times in self.known.items()
        ]
        total = {"values": self.n.total(), "valid": self.n.total() - self.n_wrong.total()}
        return {**total, "by_route": dict(self.n), "wrong": wrong, "known": known}


class Judge:
    """Reads replies against the document and, where there are some, the types."""

    def __init__(self, document: Document, types: Types | None) -> None:
        self.document, self.types = document, types
        self.by_document, self.by_types = Verdicts(), Verdicts()
        self.other: list[str] = []  # that no schema says
        self.n_requests: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()  # of events, and reasons to end, so that it shows what was read
        self._lock = threading.Lock()

    def take(self, case: Case, read: Read, status: int | None = None) -> None:
        """A reply; status: that it must have, where it is not that of the request."""
        with self._lock:
            self.n_requests[f"{case.method} {case.path}"] += 1
            status = status or case.status
            if read.status != status:
                self.other.append(f"{case.name}: status {read.status} for {status}: {read.text[:200]}")
                return
            if status != 200:
                self._refusal(case, read)
                return
            if case.body is not None:
                schema = self.document.request(case.path)
                wrong = self.document.wrong(schema, case.body, is_request=True)
                self.other += [f"{case.name}: the request: {each}" for each in wrong]
            self._answer(case, read)

    def _answer(self, case: Case, read: Read) -> None:
        """A good reply, whole or a stream."""
        if case.is_stream is not (read.events is not None):
            self.other.append(f"{case.name}: content type {read.headers.get('content-type')}")
        elif read.events is not None and case.path != RESPONSES and not _has_end(read.events):
            self.other.append(f"{case.name}: the stream ends without [DONE]")
        schema = self.document.reply(case.path, case.method, case.is_stream)
        route = f"{case.method} {case.path}{', events' if case.is_stream else ''}"
        for text in read.values:
            value = json.loads(text)
            if "error" in value and case.path != RESPONSES:
                self.by_document.add(case, "refusals", self.document.wrong(self.document.error(), value))
                continue
            self.kinds.update(_kinds(value))
            of_event = self.document.event(schema, value) if case.is_stream else schema
            self.by_document.add(case, route, self.document.wrong(of_event, value))
            if self.types is not None:
                for each in value["data"] if case.path == "/models" else [value]:
                    found = self.types.wrong(case.path, case.is_stream, json.dumps(each))
                    self.by_types.add(case, route, found)

    def _refusal(self, case: Case, read: Read) -> None:
        if read.status == 429 and not read.headers.get("retry-after", "").isdigit():
            self.other.append(f"{case.name}: 429 without Retry-After")
        self.by_document.add(case, "refusals", self.document.wrong(self.document.error(), json.loads(read.text)))


def _kinds(value: Any) -> list[str]:
    """The type of an event, or why texts ended and whether they call tools or reason."""
    found = [str(value["type"])] if "type" in value else []
    for choice in value.get("choices", ()):
        said = choice.get("message") or choice.get("delta") or {}
        found += [name for name in ("tool_calls", "reasoning_content") if said.get(name)]
        found += [f"finish {choice['finish_reason']}"] if choice["finish_reason"] else []
    return found


def _has_end(events: Sequence[str]) -> bool:
    """Whether a stream has ended as it must: with [DONE], or with an error."""
    return bool(events) and (events[-1] == "[DONE]" or "error" in json.loads(events[-1]))


def send(port: int, case: Case) -> Read:
    """The reply to a request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    headers = {"content-type": "application/json", "authorization": f"Bearer {_KEY}", **case.headers}
    data = case.body if case.body is None or isinstance(case.body, bytes) else json.dumps(case.body)
    try:
        connection.request(case.method, f"/v1{case.url or case.path}", data, headers)
        reply = connection.getresponse()
        named = {name.lower(): value for name, value in reply.getheaders()}
        text = reply.read().decode()
        is_stream = named.get("content-type", "").startswith("text/event-stream")
        return Read(reply.status, named, text, _data_of(text) if is_stream else None)
    finally:
        connection.close()


def _data_of(text: str) -> list[str]:
    """The data of events. Those that have a name have it in their data too."""
    found = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "data" in lines:
            if "event" in lines and json.loads(lines["data"])["type"] != lines["event"]:
                raise click.ClickException(f"an event has two names: {block[:200]}")
            found.append(lines["data"])
    return found


def _fill_the_queue(port: int, model: str, judge: Judge) -> None:
    """More texts than may wait, so that some requests are refused."""

    def ask(path: str) -> None:
        body = {"messages": [{"role": "user", "content": "Hello"}]} if path == CHAT else {"prompt": "Hello"}
        case = Case("full queue", path, {"model": model, "max_tokens": 30, "n": 16, **body})
        read = send(port, case)
        judge.take(case, read, 429 if read.status == 429 else 200)
        n_refused[path] += read.status == 429

    n_refused: Counter[str] = Counter()
    threads = [threading.Thread(target=ask, args=(path,)) for path in (CHAT, TEXT) * 6]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    judge.other += [] if n_refused[CHAT] + n_refused[TEXT] else ["no request was refused for a full queue"]


def _shut_down(port: int, model: str, judge: Judge) -> None:
    """Two signals while streams run: each ends with an error."""
    common = {"model": model, "stream": True, "temperature": 1.0}
    long: dict[str, Any] = {"logit_bias": {"0": -100, "2": -100}, "max_tokens": 900}
    bodies: dict[str, Any] = {
        CHAT: {"messages": [{"role": "user", "content": "Tell a long story."}], **long},
        TEXT: {"prompt": "Once upon a time", **long},
        RESPONSES: {"input": "Tell a very long story of three brothers.", "max_output_tokens": 900},
    }

    def ask(case: Case) -> None:
        read = send(port, case)
        judge.take(case, read)
        judge.other += [] if '"shutting_down"' in read.text else [f"{case.name} of {case.path} had no error event"]

    threads = [
        threading.Thread(target=ask, args=(Case("shut down", path, {**common, **body}),))
        for path, body in bodies.items()
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    server = server_of(port)
    for _ in range(2):
        server.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    for thread in threads:
        thread.join()


def _judge(path: Path, judge: Judge, all_cases: bool) -> None:
    """All requests to a server of a model."""
    port = free_port()
    options = f"-m edgeinfer serve -q --port {port} -t 2 -c 4096 -np 4 -m"
    with running([sys.executable, *shlex.split(options), str(path)], port):
        model = model_of(port, _KEY)
        for case in cases(model) if all_cases else thoughts(model):
            judge.take(case, send(port, case))
        if all_cases:
            _fill_the_queue(port, model, judge)
            _shut_down(port, model, judge)


@click.command()
@click.argument("spec", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("path", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--types", is_flag=True, help="Read replies with openai-python's types too.")
@click.option("--thoughts", "reasoning", type=click.Path(exists=True, path_type=Path), help="A model that reasons.")
def main(spec: Path, path: Path | None, types: bool, reasoning: Path | None) -> None:
    """See the top of this file."""
    path = default_model() if path is None else path
    os.environ["EDGEINFER_API_KEY"] = _KEY
    judge = Judge(Document(spec), Types() if types else None)
    models: Sequence[tuple[Path, bool]] = [(path, True), *([] if reasoning is None else [(reasoning, False)])]
    for each, all_cases in models:
        _judge(each, judge, all_cases)
    report: dict[str, Any] = {"model": path.name, "requests": dict(judge.n_requests), "kinds": dict(judge.kinds)}
    report["document"] = {"version": judge.document.version, **judge.by_document.report()}
    if judge.types is not None:
        report["types"] = {"version": judge.types.version, **judge.by_types.report()}
    print(json.dumps({**report, "other": judge.other, "machine": machine()}))
    sys.exit(1 if judge.by_document.wrong or judge.by_types.wrong or judge.other else 0)


if __name__ == "__main__":
    main()
