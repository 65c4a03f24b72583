"""`edgeinfer serve` under several users, and after it another server of OpenAI's dialect.

    python tests/benchmarks/bench_server.py [MODEL.gguf] [--users 1,2,4,8] [--rounds 3] [--tokens 128] \
        [--peer "llama-server -m {model} --port {port} -np 8 -c 16384"]

Each user sends one chat of its own, greedy, streamed. Tokens a second of all users together, milliseconds to the first
token and between two pieces (median and 95th percentile), each over all rounds; the first round is a warm-up. Clients
are threads of this process, on the same cores. --start: seconds until /health answers. The engine alone, without HTTP,
runs beside it (`engine`), so that the cost of HTTP is in the difference. One JSON line on stdout.
"""

from __future__ import annotations

import http.client
import json
import math
import shlex
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from bench_many import PROMPTS, ours
from machine import machine

import edgeinfer
from edgeinfer.library.local import default_model

_STARTING_SECONDS = 120.0


@dataclass
class Measured:
    """Of the rounds of one server and one number of users."""

    tokens_per_second: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    gap_ms: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Medians, and the 95th percentiles of what one user waits for."""
        found = {"tokens_per_second": round(statistics.median(self.tokens_per_second), 2)}
        for name, values in (("first", self.first_ms), ("gap", self.gap_ms)):
            ordered = sorted(values)
            found[f"{name}_ms"] = round(statistics.median(ordered), 2)
            found[f"{name}_p95_ms"] = round(ordered[math.ceil(0.95 * len(ordered)) - 1], 2)
        return found


@contextmanager
def running(command: list[str], port: int) -> Iterator[float]:
    """A server, which is ended at the end; gives the seconds until /health answered."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not _is_healthy(port):
            if process.poll() is not None or time.perf_counter() - started > _STARTING_SECONDS:
                raise click.ClickException(f"{shlex.join(command)} does not answer on port {port}")
            time.sleep(0.02)
        yield time.perf_counter() - started
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def model_of(port: int, key: str = "") -> str:
    """The name by which the server has its model."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/v1/models", headers={"authorization": f"Bearer {key}"})
    found = str(json.loads(connection.getresponse().read())["data"][0]["id"])
    connection.close()
    return found


def chat(port: int, model: str, prompt: str, n_tokens: int, measured: Measured, counts: list[int]) -> None:
    """One user's chat."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": n_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    last = started = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    reply = connection.getresponse()
    if reply.status != 200:
        raise click.ClickException(f"port {port} answered {reply.status}: {reply.read(300)!r}")
    is_first = True
    for line in reply:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if event.get("usage"):
            counts.append(event["usage"]["completion_tokens"])
        if not event["choices"] or not event["choices"][0]["delta"].get("content"):
            continue
        now = time.perf_counter()
        (measured.first_ms if is_first else measured.gap_ms).append(1e3 * (now - (started if is_first else last)))
        is_first, last = False, now
    connection.close()


def round_of(port: int, model: str, n_users: int, n_tokens: int, measured: Measured) -> None:
    """All users once, at the same time. Prompts differ between rounds, so that nothing of them is cached."""
    n_before, counts = len(measured.tokens_per_second), []  # type: tuple[int, list[int]]
    users = [
        threading.Thread(
            target=chat,
            args=(port, model, f"({n_before}) {PROMPTS[user % len(PROMPTS)]}", n_tokens, measured, counts),
        )
        for user in range(n_users)
    ]
    started = time.perf_counter()
    for user in users:
        user.start()
    for user in users:
        user.join()
    measured.tokens_per_second.append(sum(counts) / (time.perf_counter() - started))


@click.command()
@click.argument("path", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--users", default="1,2,4,8", show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--tokens", default=128, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--n-ctx", default=4096, show_default=True)
@click.option("--drafter", default="auto", show_default=True)
@click.option("--peer", help="Command of another server, with {model} and {port}.")
def main(
    path: Path | None, users: str, rounds: int, tokens: int, threads: int, n_ctx: int, drafter: str, peer: str | None
) -> None:
    """See the top of this file."""
    path = default_model() if path is None else path
    numbers = [int(each) for each in users.split(",")]
    commands = {
        "edgeinfer": f"{sys.executable} -m edgeinfer serve -q -m {{model}} --port {{port}} -t {threads} -c {n_ctx} "
        f"-np {max(numbers)} --drafter {drafter}"
    }
    commands |= {} if peer is None else {"peer": peer}
    found: dict[str, dict[int, Measured]] = {name: {n: Measured() for n in numbers} for name in commands}
    starts: dict[str, float] = {}
    for name, command in commands.items():  # one server at a time: the other one would take its memory and its caches
        port = free_port()
        with running(shlex.split(command.format(model=path, port=port)), port) as starts[name]:
            model = model_of(port)
            for each in range(rounds + 1):
                for n in numbers:
                    round_of(port, model, n, tokens, found[name][n] if each else Measured())
    report: dict[str, Any] = {
        name: {n: measured.figures() for n, measured in by_users.items()} for name, by_users in found.items()
    }
    options: dict[str, Any] = {"n_threads": threads, "n_ctx": n_ctx, "parallel": max(numbers), "draft": drafter}
    with edgeinfer.load(path, **options) as engine:
        report["engine"] = {
            n: round(statistics.median([ours(engine, n, tokens) for _ in range(rounds + 1)][1:]), 2) for n in numbers
        }
    facts = {"model": path.name, "tokens": tokens, "rounds": rounds, "n_threads": threads, "drafter": drafter}
    print(json.dumps({**facts, **report, "start_s": starts, "peer_command": peer, "machine": machine()}))


if __name__ == "__main__":
    main()
