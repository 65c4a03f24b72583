"""Runs a server: its socket, timeouts of connections, signals, and an end that lets answers end."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from edgeinfer.common.errors import EdgeInferError
from edgeinfer.server.app import Application
from edgeinfer.server.library import open_protocol, open_uvicorn
from edgeinfer.server.limits import Limits
from edgeinfer.server.problem import Problem
from edgeinfer.server.server import Server

Ready: TypeAlias = Callable[[Callable[[], None]], None]

_AFTER_DRAIN = 5.0  # seconds for errors to reach their clients
_HEADERS = 256 << 10  # bytes of the headers of a request, one of which may be the tokens of an answer


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is a free one. Raises EdgeInferError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(128)
        except OSError:
            found.close()
            raise
    except OSError as error:
        raise EdgeInferError(f"cannot listen on {host}, port {port}: {error.strerror or error}") from error
    return found


def serve(server: Server, listening: socket.socket | Sequence[socket.socket], on_ready: Ready) -> None:
    """Serve on one or several sockets until SIGTERM or Ctrl-C.

    Answers that run then have some seconds to end; a second signal ends them.
    on_ready: called with a function that does what a signal does, from any thread.
    """
    sockets = [listening] if isinstance(listening, socket.socket) else list(listening)
    asyncio.run(_serve(server, sockets, on_ready))


async def _serve(server: Server, sockets: list[socket.socket], on_ready: Ready) -> None:
    runner, loop = _runner(server), asyncio.get_running_loop()

    def stop() -> None:
        loop.call_soon_threadsafe(_stop, server, runner)

    try:
        with _signals(lambda: _stop(server, runner)):
            on_ready(stop)
            await runner.serve(sockets=sockets)
    finally:
        server.fail_all(_shutting_down())
        await asyncio.to_thread(server.close)


def _stop(server: Server, runner: Any) -> None:
    """A signal came."""
    if runner.should_exit:
        server.fail_all(_shutting_down())
        runner.force_exit = True
    runner.should_exit = True


def _shutting_down() -> Problem:
    return Problem(503, "the server was shut down before this answer had ended", code="shutting_down")


@contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    """Within, signals that end a process call `stop`; outside of the main thread nothing does."""
    loop, added = asyncio.get_running_loop(), []
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        try:
            number = getattr(signal, name)
            if name == "SIGHUP" and signal.getsignal(number) == signal.SIG_IGN:  # under nohup
                continue
            loop.add_signal_handler(number, stop)
            added.append(number)
        except (AttributeError, NotImplementedError, ValueError, RuntimeError):
            pass
    try:
        yield
    finally:
        for number in added:
            loop.remove_signal_handler(number)


def _runner(server: Server) -> Any:
    """uvicorn's server with our end and our connections."""
    uvicorn = open_uvicorn()
    limits = server.limits

    class Runner(uvicorn.Server):  # type: ignore[name-defined,misc]
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # they are ours

        async def shutdown(self, sockets: Any = None) -> None:
            server.is_draining = True
            handle = asyncio.get_running_loop().call_later(
                limits.drain_seconds, lambda: server.fail_all(_shutting_down())
            )
            try:
                await super().shutdown(sockets)
            finally:
                handle.cancel()

    config = uvicorn.Config(
        Application(server),
        http=_connection(limits),
        loop="asyncio",
        ws="none",
        lifespan="off",
        interface="asgi3",
        access_log=False,
        log_config=None,
        log_level="error",
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=limits.idle_seconds,
        timeout_graceful_shutdown=int(limits.drain_seconds + _AFTER_DRAIN),
        limit_concurrency=limits.connections,
        h11_max_incomplete_event_size=_HEADERS,
    )
    return Runner(config)


def _connection(limits: Limits) -> Any:
    """uvicorn's connection, closed where the headers of a request do not come in time."""
    protocol, h11 = open_protocol(), open_protocol().h11

    class Connection(protocol.H11Protocol):  # type: ignore[name-defined,misc]
        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._arm()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._disarm()
            elif self.conn.trailing_data[0] and self._late is None:
                self._arm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def _arm(self) -> None:
            self._late = self.loop.call_later(limits.headers_seconds, self.transport.close)

        def _disarm(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return Connection
