"""`edgeinfer serve` under several users, in turns with another server of OpenAI's dialect.

    python tests/benchmarks/bench_server.py [MODEL.gguf] [--users 1,2,4,8] [--rounds 3] [--tokens 128] [--gap 7600] \
        [--peer "llama-server -m {model} --port {port} -np 8 -c 65536"]

Each user sends one chat of its own, greedy, streamed, whose end is ignored. Tokens a second of all users together,
milliseconds to the first token and between two pieces (median and 95th percentile), each over all rounds; the first
round is a warm-up. Clients are threads of this process, on the same cores; a server that has nothing to do waits for
the other one. `start_s`: seconds until /health answers. --gap: then one answer runs while a prompt of about as many
tokens is read, and `reading` has the milliseconds between its pieces meanwhile. The engine alone, without HTTP, runs
after it (`engine`), so that the cost of HTTP is in the difference. One JSON line on stdout.
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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
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
            found[f"{name}_ms"] = round(statistics.median(values), 2)
            found[f"{name}_p95_ms"] = round(percentile_95(values), 2)
        return found


def percentile_95(values: Sequence[float]) -> float:
    """The least value that 95 % of them do not exceed."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


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


def pieces(port: int, model: str, prompt: str, n_tokens: int, counts: list[int]) -> Iterator[float]:
    """The time of each piece of one user's chat; the number of its tokens is added to counts at the end."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": n_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise click.ClickException(f"port {port} answered {reply.status}: {reply.read(300)!r}")
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                counts.append(event["usage"]["completion_tokens"])
            if event["choices"] and event["choices"][0]["delta"].get("content"):
                yield time.perf_counter()
    finally:
        connection.close()


def chat(port: int, model: str, prompt: str, n_tokens: int, measured: Measured, counts: list[int]) -> None:
    """One user's chat, measured."""
    last = time.perf_counter()
    for n, now in enumerate(pieces(port, model, prompt, n_tokens, counts)):
        (measured.gap_ms if n else measured.first_ms).append(1e3 * (now - last))
        last = now


def gaps_while_reading(port: int, model: str, n_prompt: int) -> dict[str, float]:
    """Milliseconds between the pieces of an answer that runs while another prompt is read, and of that reading."""
    times: list[float] = []
    runs, is_read = threading.Event(), threading.Event()

    def answer() -> None:
        for now in pieces(port, model, "Write all numbers from 1 to 1000, separated by commas.", 4000, []):
            times.append(now)
            if len(times) == 16:
                runs.set()
            if is_read.is_set():
                return
        times.append(math.inf)  # it ended by itself

    thread = threading.Thread(target=answer)
    thread.start()
    if not runs.wait(120):
        raise click.ClickException(f"the answer of port {port} ends before the prompt is read")
    asked = time.perf_counter()
    first = next(pieces(port, model, "Count these. " + " ".join(map(str, range(100, 100 + n_prompt // 4))), 4, []))
    is_read.set()
    thread.join()
    within = [1e3 * (b - a) for a, b in pairwise(times) if b > asked and a < first]
    if math.inf in times:
        raise click.ClickException(f"the answer of port {port} ended while the prompt was read")
    return {
        "read_s": round(first - asked, 2),
        "pieces": len(within),
        "gap_ms": round(statistics.median(within), 2),
        "gap_p95_ms": round(percentile_95(within), 2),
        "gap_most_ms": round(max(within), 2),
    }


def round_of(port: int, model: str, n_users: int, n_tokens: int, each: int, measured: Measured) -> None:
    """All users once, at the same time. Prompts differ between rounds, so that nothing of them is cached."""
    counts: list[int] = []
    users = [
        threading.Thread(
            target=chat,
            args=(port, model, f"({each}, {n_users}) {PROMPTS[user % len(PROMPTS)]}", n_tokens, measured, counts),
        )
        for user in range(n_users)
    ]
    started = time.perf_counter()
    for user in users:
        user.start()
    for user in users:
        user.join()
    measured.tokens_per_second.append(sum(counts) / (time.perf_counter() - started))


def in_turns(
    commands: dict[str, str], path: Path, numbers: Sequence[int], rounds: int, n_tokens: int, n_gap: int
) -> dict[str, dict[Any, Any]]:
    """The figures of each server by the number of users, with its start and, for n_gap tokens, `reading`."""
    found = {name: {n: Measured() for n in numbers} for name in commands}
    report: dict[str, dict[Any, Any]] = {name: {} for name in commands}
    with ExitStack() as servers:
        ports, models = {}, {}
        for name, command in commands.items():
            ports[name] = free_port()
            filled = shlex.split(command.format(model=path, port=ports[name]))
            report[name]["start_s"] = round(servers.enter_context(running(filled, ports[name])), 3)
            models[name] = model_of(ports[name])
        for each in range(rounds + 1):
            for n in numbers:
                for name, port in ports.items():
                    round_of(port, models[name], n, n_tokens, each, found[name][n] if each else Measured())
        for name, port in ports.items():
            report[name] |= {n: measured.figures() for n, measured in found[name].items()}
            if n_gap:
                report[name]["reading"] = gaps_while_reading(port, models[name], n_gap)
    return report


@click.command()
@click.argument("path", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--users", default="1,2,4,8", show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--tokens", default=128, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--n-ctx", default=4096, show_default=True)
@click.option("--drafter", default="auto", show_default=True)
@click.option("--gap", default=0, help="Tokens of a prompt that is read while an answer runs.")
@click.option("--peer", help="Command of another server, with {model} and {port}.")
def main(
    path: Path | None,
    users: str,
    rounds: int,
    tokens: int,
    threads: int,
    n_ctx: int,
    drafter: str,
    gap: int,
    peer: str | None,
) -> None:
    """See the top of this file."""
    path = default_model() if path is None else path
    numbers = [int(each) for each in users.split(",")]
    commands = {
        "edgeinfer": f"{sys.executable} -m edgeinfer serve -q -m {{model}} --port {{port}} -t {threads} -c {n_ctx} "
        f"-np {max(numbers)} --drafter {drafter}"
    }
    commands |= {} if peer is None else {"peer": peer}
    report: dict[str, Any] = in_turns(commands, path, numbers, rounds, tokens, gap)
    options: dict[str, Any] = {"n_threads": threads, "n_ctx": n_ctx, "parallel": max(numbers), "draft": drafter}
    with edgeinfer.load(path, **options) as engine:
        report["engine"] = {
            n: round(statistics.median([ours(engine, n, tokens) for _ in range(rounds + 1)][1:]), 2) for n in numbers
        }
    facts = {"model": path.name, "tokens": tokens, "rounds": rounds, "n_threads": threads, "drafter": drafter}
    print(json.dumps({**facts, **report, "peer_command": peer, "machine": machine()}))


if __name__ == "__main__":
    main()
