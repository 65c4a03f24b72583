"""Real servers on free ports of 127.0.0.1 for tests, and requests to them."""

from __future__ import annotations

import http.client
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from edgeinfer.engine import Engine
from edgeinfer.server.access import Access
from edgeinfer.server.limits import Limits
from edgeinfer.server.served import Models, Served
from edgeinfer.server.server import Server, Shown
from edgeinfer.server.serving import bind, serve

SECONDS = 60.0  # for a reply, and for what is waited for
ALL = Shown()
# Times that hardly any test is about: no machine is so slow that it is over before them.
_LIMITS = Limits(headers_seconds=120.0, body_seconds=120.0, idle_seconds=120, ping_seconds=600.0, drain_seconds=0.2)
# Of other programs that a test starts: below those that Linux gives to connections, above those of Ray's workers.
_FREE_PORTS = range(20_000, 32_000)


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

    def wait(self, is_so: Callable[[], object], seconds: float = SECONDS) -> float:
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
    limit = replace(_LIMITS, **limits)
    server = Server(models, limit, access or Access(), n_parallel or 4, log.append, shown)
    listening = bind("127.0.0.1", 0)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # of its connections: less than an answer
    ready, stops = threading.Event(), []

    def begun(stop: Callable[[], None]) -> None:
        stops.append(stop)
        ready.set()

    thread = threading.Thread(target=serve, args=(server, listening, begun), daemon=True)
    thread.start()
    assert ready.wait(SECONDS)
    try:
        yield Running(server, listening.getsockname()[1], engine, log, stops[0])
    finally:
        with_end = threading.Thread(target=stops[0])
        with_end.start()
        with_end.join(SECONDS)
        thread.join(SECONDS)
        listening.close()
        assert not thread.is_alive(), "the server did not end"


class Gate:
    """Lets passes of an engine through, as many as it was told.  holds: whether one waits before it."""

    def __init__(self, n: float) -> None:
        self._changed = threading.Condition()
        self._n_left = n
        self.holds = False

    def let(self, n: float = math.inf) -> None:
        """Let so many more through, by default all."""
        with self._changed:
            self._n_left += n
            self.holds = self.holds and not self._n_left
            self._changed.notify_all()

    def pass_through(self) -> None:
        """Wait until one more may."""
        with self._changed:
            self.holds = not self._n_left
            self._changed.wait_for(lambda: self._n_left > 0)
            self._n_left -= 1


@contextmanager
def held(engine: Engine, n_passes: int) -> Iterator[Gate]:
    """Within, an engine makes so many passes, and more only as its gate lets them: who is to catch it has the time."""
    scheduler, gate = engine.scheduler, Gate(n_passes)
    forward = scheduler._forward

    def when_let(*arguments: Any) -> Any:
        gate.pass_through()
        return forward(*arguments)

    scheduler._forward = when_let  # type: ignore[assignment, method-assign]
    try:
        yield gate
    finally:
        gate.let()
        scheduler._forward = forward  # type: ignore[method-assign]


def free_port() -> int:
    """A port that nobody listens on now, and that no connection is given; other processes of tests begin elsewhere."""
    begin = os.getpid() * 97 % len(_FREE_PORTS)
    for number in [*_FREE_PORTS[begin:], *_FREE_PORTS[:begin]]:
        with socket.socket() as listening, suppress(OSError):
            listening.bind(("127.0.0.1", number))
            return number
    raise AssertionError("all ports are taken")


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
