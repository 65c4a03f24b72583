"""What a load balancer in front of `edgeinfer serve` costs: CPU time for a request, an event and a health check.

    python tests/benchmarks/bench_router.py HAPROXY [MODEL.gguf] [--streams 200] [--events 200] [--checked 200]

HAPROXY: its program; it runs with one thread and the recipe of docs/scaling.md. Behind it is a server of this process
that streams events as an answer has them; clients are of this process too. Counted are the CPU seconds of HAProxy's
process (user and system), so that other work on the machine changes little: caches make them rather too many. What a
health check takes of a replica is counted on a real server. Memory is HAProxy's resident memory for streams that are
open; the kernel's for their sockets is not in it. One JSON line on stdout, for simulate_fleet.py --router.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import click
import psutil
from bench_server import free_port, running
from machine import machine
from soak_server import server_of

from edgeinfer.library.local import default_model

_EVENT = json.dumps(
    {
        "id": f"chatcmpl-{'0' * 24}",
        "object": "chat.completion.chunk",
        "created": 1790000000,
        "model": "SmolLM2-135M-Instruct.Q4_1",
        "choices": [{"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None}],
    },
    separators=(",", ":"),
).encode()
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "word " * 100}], "stream": True}).encode()
_CONFIG = """
global
    nbthread 1
    maxconn 4000
defaults
    mode http
    option http-no-delay
    timeout connect 2s
    timeout client 3600s
    timeout server 3600s
frontend clients
    bind 127.0.0.1:{port}
    http-request set-header x-session-id %[src] unless {{ req.hdr(x-session-id) -m found }}
    default_backend replicas
backend replicas
    balance hdr(x-session-id)
    hash-type consistent
    option httpchk
    http-check send meth GET uri /health hdr Host localhost
{servers}
"""


def _seconds(process: psutil.Process) -> float:
    """CPU time of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


class _Replica:
    """Streams n_events to whoever asks, one each `gap` seconds; none where n_events is 0, until it is released."""

    def __init__(self) -> None:
        self.n_events, self.gap = 0, 0.02
        self.release = asyncio.Event()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Requests of a connection, one after another."""
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"GET"):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
                else:
                    await reader.readexactly(len(_BODY))
                    await self._stream(writer)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):  # the end of the measurement too
            pass
        finally:
            writer.close()

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(_HEAD)
        for _ in range(self.n_events):
            data = b"data: " + _EVENT + b"\n\n"
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            await asyncio.sleep(self.gap)
        if not self.n_events:
            writer.write(b"1\r\n\n\r\n")
            await self.release.wait()
        writer.write(b"0\r\n\r\n")


async def _ask(port: int, session: int, begun: asyncio.Semaphore | None = None) -> None:
    """A request on a connection of its own, read to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nx-session-id: {session}\r\ncontent-length: {len(_BODY)}"
    writer.write(head.encode() + b"\r\nconnection: close\r\n\r\n" + _BODY)
    if begun is not None and b" 200 " in await reader.readuntil(b"\r\n"):
        begun.release()
    while await reader.read(1 << 16):
        pass
    writer.close()


@contextmanager
def _haproxy(program: str, port: int, behind: int, n_servers: int, check: str) -> Iterator[psutil.Process]:
    """HAProxy in front of so many servers, which are all the same one.  check: as in a server's line."""
    servers = "\n".join(f"    server s{each} 127.0.0.1:{behind} {check}" for each in range(n_servers))
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "haproxy.cfg")
        config.write_text(_CONFIG.format(port=port, servers=servers))
        process = subprocess.Popen([program, "-db", "-f", str(config)], stderr=subprocess.DEVNULL)
        try:
            yield psutil.Process(process.pid)
        finally:
            process.kill()
            process.wait()


@asynccontextmanager
async def _routed(program: str, replica: _Replica, n_servers: int, check: str) -> AsyncIterator[Any]:
    """(port, HAProxy's process) once it answers."""
    server = await asyncio.start_server(replica.answer, "127.0.0.1", 0, backlog=1024)
    port, behind = free_port(), server.sockets[0].getsockname()[1]
    with _haproxy(program, port, behind, n_servers, check) as process:
        for _ in range(100):
            await asyncio.sleep(0.1)
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            except OSError:
                continue
        else:
            raise click.ClickException(f"{program} did not begin to listen on port {port}")
        yield port, process
    server.close()


async def _checks(program: str, n_servers: int, seconds: float = 10.0) -> float:
    """CPU seconds of a health check."""
    async with _routed(program, _Replica(), n_servers, "check inter 1s") as (_, process):
        await asyncio.sleep(2)
        before = _seconds(process)
        await asyncio.sleep(seconds)
        return (_seconds(process) - before) / (n_servers * seconds)


async def _streams(program: str, n_streams: int, n_events: int, n_short: int) -> dict[str, float]:
    """CPU seconds of a request and of an event, and bytes of memory of an open stream."""
    replica = _Replica()
    async with _routed(program, replica, 8, "") as (port, process):
        resident, begun = process.memory_info().rss, asyncio.Semaphore(0)  # first, as it keeps what it has once taken
        asked = [asyncio.create_task(_ask(port, each, begun)) for each in range(4 * n_streams)]
        for _ in asked:
            await begun.acquire()
        stream = (process.memory_info().rss - resident) / len(asked)
        replica.release.set()
        await asyncio.gather(*asked)
        replica.n_events, replica.gap = 1, 0.0
        before = _seconds(process)
        for first in range(0, n_short, 50):
            await asyncio.gather(*(_ask(port, first + each) for each in range(50)))
        request = (_seconds(process) - before) / n_short
        replica.n_events, replica.gap = n_events, 0.02
        before = _seconds(process)
        await asyncio.gather(*(_ask(port, each) for each in range(n_streams)))
        event = (_seconds(process) - before - n_streams * request) / (n_streams * (n_events - 1))
    return {"request": request, "event": event, "stream": stream}


def _replica_check(path: Path, n: int = 2000) -> float:
    """CPU seconds of a server for a health check on a connection of its own, beside what it takes at rest."""
    port = free_port()
    command = [sys.executable, *shlex.split(f"-m edgeinfer serve -q --port {port} -t 2 -m"), str(path)]
    with running(command, port):
        server = server_of(port)
        started, before = time.monotonic(), _seconds(server)
        for _ in range(n):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("GET", "/health", headers={"connection": "close"})
            connection.getresponse().read()
            connection.close()
        took, wall, at_rest = _seconds(server) - before, time.monotonic() - started, _seconds(server)
        time.sleep(wall)
        return (took - (_seconds(server) - at_rest)) / n


@click.command()
@click.argument("haproxy", type=click.Path(exists=True, dir_okay=False))
@click.argument("path", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--streams", default=200, show_default=True, help="At once.")
@click.option("--events", default=200, show_default=True, help="Of each.")
@click.option("--short", default=5000, show_default=True, help="Requests of one event.")
@click.option("--checked", default=200, show_default=True, help="Servers that are checked once a second.")
def main(haproxy: str, path: Path | None, streams: int, events: int, short: int, checked: int) -> None:
    """See the top of this file."""
    found = asyncio.run(_streams(haproxy, streams, events, short))
    check = asyncio.run(_checks(haproxy, checked))
    replica_check = _replica_check(default_model() if path is None else path)
    named = subprocess.run([haproxy, "-v"], capture_output=True, text=True, check=True).stdout.split()
    router = {
        "request_us": round(1e6 * found["request"], 1),
        "event_us": round(1e6 * found["event"], 2),
        "check_us": round(1e6 * check, 1),
        "replica_check_us": round(1e6 * replica_check, 1),
        "stream_kib": round(found["stream"] / 1024, 1),
    }
    options = {"streams": streams, "events": events, "short": short, "checked": checked, "event_bytes": len(_EVENT) + 8}
    print(json.dumps({"haproxy": named[2], "router": router, **options, "machine": machine()}))


if __name__ == "__main__":
    main()
