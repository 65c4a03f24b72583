"""`edgeinfer serve` at twice what it takes, for a while: its memory, its queue, and what clients get.

    python tests/benchmarks/soak_server.py [MODEL.gguf] [--minutes 20] [--clients 136] [--parallel 4]

Clients ask without a pause: streams and whole answers of random length, with and without a seed, schemas among them;
a quarter of them leave in the midst of their answer. Every half minute the resident memory of the server is read, and
at the end its threads and whether a place is still taken. One JSON line on stdout; exits with 1 if a reply was neither
200 nor 429, if a 429 had no Retry-After, if a place is still taken, or if memory grew by a tenth after the first third.
"""

from __future__ import annotations

import http.client
import json
import random
import shlex
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
import psutil
from bench_many import PROMPTS
from bench_server import free_port, model_of, running
from machine import machine

from edgeinfer.library.local import default_model

_EVERY = 30.0  # seconds
_GROWTH = 1.1


class Soak:
    """Clients of a server until a time."""

    def __init__(self, port: int, until: float) -> None:
        self.port, self.until = port, until
        self.model = model_of(port)
        self.replies: Counter[str] = Counter()
        self._lock = threading.Lock()

    def client(self, seed: int) -> None:
        """Ask until the time is over."""
        rng = random.Random(seed)
        while time.monotonic() < self.until:
            try:
                kind, pause = self._ask(rng)
            except (OSError, http.client.HTTPException) as error:
                kind, pause = type(error).__name__, 0.1
            with self._lock:
                self.replies[kind] += 1
            time.sleep(pause)

    def _ask(self, rng: random.Random) -> tuple[str, float]:
        """(what became of one request, seconds until the next one)."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": rng.choice(PROMPTS) * rng.randint(1, 3)}],
            "max_tokens": rng.randint(1, 60),
            "temperature": rng.choice([0.0, 0.8]),
            "stream": rng.random() < 0.7,
        }
        if rng.random() < 0.5:
            body["seed"] = rng.randrange(100)
        if rng.random() < 0.1:
            body["response_format"] = {"type": "json_object"}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
            if not body["stream"] and rng.random() < 0.25:
                time.sleep(rng.random())
                return "left", 0.0
            reply = connection.getresponse()
            if reply.status == 429:
                wait = reply.getheader("retry-after")
                return ("429", min(1.0, float(wait))) if wait else ("429 without Retry-After", 1.0)
            if body["stream"] and rng.random() < 0.25:
                reply.read(rng.randint(1, 400))
                return f"left {reply.status}", 0.0
            data = reply.read()
            is_whole = not body["stream"] or data.endswith(b"data: [DONE]\n\n")
            return (str(reply.status) if is_whole else "cut"), 0.0
        finally:
            connection.close()


def server_of(port: int) -> psutil.Process:
    """The process that listens on a port, a child of this one."""
    for process in psutil.Process().children(recursive=True):
        if any(each.laddr.port == port and each.status == "LISTEN" for each in process.net_connections("inet")):
            return process
    raise click.ClickException(f"no child of this process listens on {port}")


def _gauge(port: int, name: str) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


@click.command()
@click.argument("path", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--minutes", default=20.0, show_default=True)
@click.option("--clients", default=136, show_default=True)
@click.option("--parallel", default=4, show_default=True)
def main(path: Path | None, minutes: float, clients: int, parallel: int) -> None:
    """See the top of this file."""
    path, port = default_model() if path is None else path, free_port()
    command = [
        sys.executable,
        *shlex.split(f"-m edgeinfer serve -q --port {port} -t 2 -c 4096 -np {parallel} -m"),
        str(path),
    ]
    with running(command, port):
        server = server_of(port)
        soak = Soak(port, time.monotonic() + 60 * minutes)
        threads = [threading.Thread(target=soak.client, args=(seed,)) for seed in range(clients)]
        for thread in threads:
            thread.start()
        resident: list[float] = []
        while time.monotonic() < soak.until:
            time.sleep(min(_EVERY, max(0.0, soak.until - time.monotonic())))
            resident.append(round(server.memory_info().rss / (1 << 20), 1))
            print(f"{resident[-1]} MiB, {dict(soak.replies)}", file=sys.stderr, flush=True)
        for thread in threads:
            thread.join()
        time.sleep(2)
        n_running, n_waiting = (_gauge(port, f"edgeinfer_texts_{name}") for name in ("running", "waiting"))
        n_threads = server.num_threads()
    wrong = [kind for kind in soak.replies if kind not in ("200", "429", "left", "left 200")]
    has_grown = max(resident[len(resident) // 3 :]) > _GROWTH * resident[len(resident) // 3]
    report = {"model": path.name, "minutes": minutes, "clients": clients, "parallel": parallel}
    report |= {"replies": dict(soak.replies), "resident_mib": resident, "threads": n_threads, "wrong": wrong}
    report |= {"running": n_running, "waiting": n_waiting, "has_grown": has_grown, "machine": machine()}
    print(json.dumps(report))
    sys.exit(1 if wrong or n_running or n_waiting or has_grown else 0)


if __name__ == "__main__":
    main()
