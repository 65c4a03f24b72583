"""Real servers on free ports of 127.0.0.1 for tests, and requests to them."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from edgeinfer.engine import Engine
from edgeinfer.server.access import Access
from edgeinfer.server.limits import Limits
from edgeinfer.server.served import Models, Served
from edgeinfer.server.server import Server, Shown
from edgeinfer.server.serving import bind, serve

SECONDS = 60.0  # for a reply
ALL = Shown()


@dataclass
class Reply:
    """What a server sent."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of a stream of events, that of the last one as text."""
        parts = [part for part in self.body.decode().split("\n\n") if part and not part.startswith(":")]
        data = [next(line[6:] for line in part.split("\n") if line.startswith("data: ")) for part in parts]
        return [each if each == "[DONE]" else json.loads(each) for each in data]

    @property
    def lines(self) -> list[Any]:
        """The objects of a stream of lines."""
        return [json.loads(line) for line in self.body.decode().splitlines()]


@dataclass
class Running:
    """A server that runs.  log: its lines."""

    server: Server
    port: int
    engine: Any  # None of several models
    log: list[str]
    stop: Callable[[], None] = field(default=lambda: None)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] = {},
        seconds: float = SECONDS,
    ) -> Reply:
        """The reply to one request; body: bytes, or a JSON value."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, dict(headers))
            reply = connection.getresponse()
            return Reply(reply.status, {key.lower(): value for key, value in reply.getheaders()}, reply.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Reply:
        return self.request("GET", path, headers=headers)

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        return self.request("POST", path, body, headers)

    def ask(self, path: str, **body: Any) -> Any:
        """The JSON of a reply, which must be good."""
        reply = self.post(path, body)
        assert reply.status == 200, (reply.status, reply.body)
        return reply.json

    def wait(self, is_so: Callable[[], object], seconds: float = 10.0) -> float:
        """Wait until something is so; the seconds that it took."""
        start = time.monotonic()
        while not is_so():
            assert time.monotonic() - start < seconds, "it did not come to it"
            time.sleep(0.002)
        return time.monotonic() - start

    @property
    def texts(self) -> Sequence[Any]:
        """Texts that the engine has."""
        return self.engine.scheduler.texts


@contextmanager
def running(
    engine: Engine | None = None,
    *,
    models: Models | None = None,
    access: Access | None = None,
    n_parallel: int | None = None,
    any_name: bool = False,
    shown: Shown = ALL,
    **limits: Any,
) -> Iterator[Running]:
    """A server of an engine, or of models, until the end of the block."""
    log: list[str] = []
    if engine is not None:
        models = Models(Served(engine, "tiny", frozenset({"tiny.gguf", "Tiny Alias"})), any_name)
        n_parallel = n_parallel or engine.scheduler.n_parallel
    assert models is not None
    limit = replace(Limits(drain_seconds=0.2), **limits)
    server = Server(models, limit, access or Access(), n_parallel or 4, log.append, shown)
    listening = bind("127.0.0.1", 0)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # of its connections: less than an answer
    ready, stops = threading.Event(), []

    def begun(stop: Callable[[], None]) -> None:
        stops.append(stop)
        ready.set()

    thread = threading.Thread(target=serve, args=(server, listening, begun), daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield Running(server, listening.getsockname()[1], engine, log, stops[0])
    finally:
        with_end = threading.Thread(target=stops[0])
        with_end.start()
        with_end.join(10)
        thread.join(30)
        listening.close()
        assert not thread.is_alive(), "the server did not end"


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def server_is_there() -> None:
    """Skip where uvicorn is missing."""
    from parts import missing

    from edgeinfer.common.errors import BackendUnavailable
    from edgeinfer.server.library import open_routing, open_uvicorn

    try:
        open_uvicorn()
        open_routing()
    except BackendUnavailable as error:
        missing("server", str(error))
