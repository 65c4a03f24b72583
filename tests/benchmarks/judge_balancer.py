"""The HAProxy recipe of docs/scaling.md, as it stands there, in front of two servers.

    python tests/benchmarks/judge_balancer.py HAPROXY [MODEL.gguf]

HAPROXY: its program. Of the recipe only addresses and ports are changed. Looked at: whether a session stays with its
server, whether both have sessions, whether a stream comes as it is made and with the bytes of a server alone, and
whether sessions of a server that is gone are answered by the other one, and by theirs again once it is back. One JSON
line on stdout; exits with 1 if something is not so.
"""

from __future__ import annotations

import http.client
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
from bench_server import free_port, model_of, running
from machine import machine

from edgeinfer.library.local import default_model

_SCALING = Path(__file__).parents[2] / "docs" / "scaling.md"
_N_SESSIONS = 12
_SECONDS = 4.0  # in which HAProxy sees, by its checks, that a server has gone or come


def recipe(port: int, servers: tuple[int, int]) -> str:
    """The configuration of the documentation, with these ports."""
    text = _SCALING.read_text(encoding="utf-8").partition("## HAProxy")[2].partition("```")[2].partition("```")[0]
    text = text.replace("bind :80", f"bind 127.0.0.1:{port}")
    for address, behind in zip(("10.0.0.1:8080", "10.0.0.2:8080"), servers, strict=True):
        text, n = re.subn(re.escape(address), f"127.0.0.1:{behind}", text)
        if n != 1:
            raise click.ClickException(f"the recipe has {address} {n} times")
    return text


@contextmanager
def _balancer(program: str, port: int, servers: tuple[int, int]) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "haproxy.cfg")
        config.write_text(f"global\n    maxconn 1000\n{recipe(port, servers)}")
        process = subprocess.Popen([program, "-db", "-f", str(config)], stderr=subprocess.DEVNULL)
        try:
            time.sleep(_SECONDS)
            yield
        finally:
            process.kill()
            process.wait()


def _ask(port: int, model: str, session: int, n_tokens: int) -> tuple[int, bytes, int]:
    """(status, text of the stream without id and time, parts in which it came)."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"Tell a story of {session} cats."}],
        "max_tokens": n_tokens,
        "seed": session,
        "stream": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"x-session-id": f"s{session}"})
    reply = connection.getresponse()
    parts = []
    while part := reply.read1():
        parts.append(part)
    connection.close()
    return reply.status, re.sub(rb'"id":"[\w-]+"|"created":\d+', b"", b"".join(parts)), len(parts)


def _n_asked(port: int) -> int:
    """Chats that a server has answered."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics", headers={"host": "localhost"})
    text = connection.getresponse().read().decode()
    connection.close()
    found = re.findall(r'edgeinfer_requests_total\{path="/v1/chat/completions",status="200"\} (\d+)', text)
    return sum(map(int, found))


def _homes(port: int, model: str, servers: tuple[int, ...]) -> list[int]:
    """Which server answers each session, -1 where none does."""
    found = []
    for session in range(_N_SESSIONS):
        before = [_n_asked(server) for server in servers]
        status, _, _ = _ask(port, model, session, 2)
        grown: list[int] = []
        for _ in range(20):  # a server counts after the end of the stream
            after = [_n_asked(server) for server in servers]
            grown = [at for at, (a, b) in enumerate(zip(before, after, strict=True)) if b > a]
            if grown:
                break
            time.sleep(0.1)
        found.append(grown[0] if status == 200 and len(grown) == 1 else -1)
    return found


@click.command()
@click.argument("haproxy", type=click.Path(exists=True, dir_okay=False))
@click.argument("path", required=False, type=click.Path(exists=True, path_type=Path))
def main(haproxy: str, path: Path | None) -> None:
    """See the top of this file."""
    path, port, servers = default_model() if path is None else path, free_port(), (free_port(), free_port())
    commands = [
        [sys.executable, *shlex.split(f"-m edgeinfer serve -q --port {each} -t 1 -np 4 -c 2048 -m"), str(path)]
        for each in servers
    ]
    seen: dict[str, Any] = {}
    with ExitStack() as stack, ExitStack() as first:
        first.enter_context(running(commands[0], servers[0]))
        stack.enter_context(running(commands[1], servers[1]))
        stack.enter_context(_balancer(haproxy, port, servers))
        model = model_of(servers[0])
        homes = _homes(port, model, servers)
        seen["sessions of each server"] = [homes.count(0), homes.count(1)]
        seen["sessions stay"] = -1 not in homes and _homes(port, model, servers) == homes
        streams = [(_ask(port, model, each, 60), _ask(servers[0], model, each, 60)) for each in range(3)]
        seen["streams are those of a server alone"] = all(a[:2] == b[:2] for a, b in streams)
        seen["parts of a stream"] = [a[2] for a, _ in streams]
        first.close()
        gone = [_ask(port, model, each, 2)[0] for each in range(_N_SESSIONS)]  # before the next check too
        time.sleep(_SECONDS)
        seen["answered without the first server"] = gone.count(200)
        seen["others stay meanwhile"] = _homes(port, model, servers[1:]) == [0] * _N_SESSIONS
        stack.enter_context(running(commands[0], servers[0]))
        time.sleep(_SECONDS)
        seen["sessions return"] = _homes(port, model, servers) == homes
    is_fine = 0 not in seen["sessions of each server"] and all(value is not False for value in seen.values())
    is_fine = is_fine and min(seen["parts of a stream"]) > 20 and gone.count(200) == _N_SESSIONS
    named = subprocess.run([haproxy, "-v"], capture_output=True, text=True, check=True).stdout.split()
    print(json.dumps({"model": path.name, "haproxy": named[2], "is_fine": is_fine, **seen, "machine": machine()}))
    sys.exit(0 if is_fine else 1)


if __name__ == "__main__":
    main()
