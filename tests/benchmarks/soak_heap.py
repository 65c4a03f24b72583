"""What `edgeinfer serve` has in use of its heap over many short answers: whether what drafts learn is bounded.

    python tests/benchmarks/soak_heap.py [MODEL.gguf] [--requests 12000] [--drafter auto] [--trace]

Clients ask for short answers to prompts that differ, so that the tables of drafters fill. At every so many requests the
server, which is this file too, says what malloc has in use in all arenas (mallinfo2, so Linux), and /metrics what the
drafters hold. --trace: also what Python holds, and which of its lines hold more than at the middle of the run; slower.
One JSON line on stdout; exits with 1 if more is in use at the end than at half of the requests, by a twentieth.
"""

from __future__ import annotations

import ctypes
import gc
import http.client
import json
import random
import shlex
import signal
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import psutil
from bench_many import PROMPTS
from bench_server import free_port, model_of, running
from machine import machine
from soak_server import server_of

from edgeinfer.library.local import default_model

_GROWTH = 1.05
_WORDS = " ".join(PROMPTS).split()


class _MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def serve(to: Path, has_trace: bool, arguments: Sequence[str]) -> None:
    """Become `edgeinfer serve`; with each SIGUSR1 a line goes to the file."""
    from edgeinfer.cli import main

    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _MallInfo
    before: list[tracemalloc.Snapshot] = []

    def tell(number: int, frame: object) -> None:
        gc.collect()
        info = mallinfo()
        found: dict[str, Any] = {"in_use": info.uordblks + info.hblkhd, "free": info.fordblks}
        if has_trace:
            snapshot = tracemalloc.take_snapshot()
            found["python"] = tracemalloc.get_traced_memory()[0]
            if before:
                found["grown"] = [str(each) for each in snapshot.compare_to(before[-1], "lineno")[:12]]
            before[:] = [snapshot]
        with to.open("a") as file:
            file.write(json.dumps(found) + "\n")

    if has_trace:
        tracemalloc.start()
    signal.signal(signal.SIGUSR1, tell)
    sys.argv = ["edgeinfer", "serve", *arguments]
    main()


class Asking:
    """Clients that share a number of requests."""

    def __init__(self, port: int, tokens: int) -> None:
        self._port, self._tokens = port, tokens
        self._model = model_of(port)
        self._lock = threading.Lock()
        self._left = 0
        self.n_refused = 0

    def ask(self, n_requests: int, n_clients: int, seed: int) -> None:
        """So many requests, several at once."""
        self._left = n_requests
        threads = [threading.Thread(target=self._client, args=(f"{seed} {each}",)) for each in range(n_clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _client(self, seed: str) -> None:
        rng = random.Random(seed)
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        while self._take():
            words = " ".join(rng.choices(_WORDS, k=rng.randint(4, 30)))
            body = {
                "model": self._model,
                "messages": [{"role": "user", "content": words}],
                "max_tokens": rng.randint(1, self._tokens),
                "temperature": rng.choice([0.0, 0.8]),
                "seed": rng.randrange(1000),
            }
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
            reply = connection.getresponse()
            reply.read()
            self.n_refused += reply.status != 200
        connection.close()

    def _take(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left >= 0


def _held(port: int) -> dict[str, int]:
    """Bytes by purpose, as the server has them in /metrics."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    found = {}
    for line in lines:
        if line.startswith("edgeinfer_memory_taken_bytes{"):
            found[line.split('"')[3]] = int(float(line.split()[-1]))
    return found


def _told(to: Path, server: psutil.Process, n_before: int) -> dict[str, Any]:
    """What the server says of its heap."""
    server.send_signal(signal.SIGUSR1)
    for _ in range(600):
        lines = to.read_text().splitlines() if to.exists() else []
        if len(lines) > n_before:
            return dict(json.loads(lines[-1]))
        time.sleep(0.1)
    raise click.ClickException("the server did not tell of its heap")


@click.command()
@click.argument("path", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--requests", default=12_000, show_default=True)
@click.option("--every", default=500, show_default=True, help="Requests between two looks.")
@click.option("--clients", default=8, show_default=True)
@click.option("--parallel", default=4, show_default=True)
@click.option("--tokens", default=16, show_default=True, help="Most tokens of an answer.")
@click.option("--drafter", default="auto", show_default=True)
@click.option("--trace", is_flag=True, help="What Python holds, by line.")
def main(
    path: Path | None,
    requests: int,
    every: int,
    clients: int,
    parallel: int,
    tokens: int,
    drafter: str,
    trace: bool,
) -> None:
    """See the top of this file."""
    path, port = default_model() if path is None else path, free_port()
    looks: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder, "told")
        options = f"-q --port {port} -t 2 -c 4096 -np {parallel} --drafter {drafter} -m"
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", str(to), str(int(trace))]
        with running([*command, *shlex.split(options), str(path)], port):
            server, asking = server_of(port), Asking(port, tokens)
            for number in range(0, requests, every):
                asking.ask(every, clients, number)
                time.sleep(0.5)
                look = {"requests": number + every, **_told(to, server, len(looks)), "held": _held(port)}
                look["resident"] = server.memory_info().rss
                looks.append(look)
                print(json.dumps(look), file=sys.stderr, flush=True)
    half, last = (max(each["in_use"] for each in looks[:at] or looks[:1]) for at in (len(looks) // 2, len(looks)))
    report = {"model": path.name, "requests": requests, "clients": clients, "parallel": parallel, "tokens": tokens}
    report |= {"drafter": drafter, "refused": asking.n_refused, "looks": looks, "has_grown": last > _GROWTH * half}
    print(json.dumps({**report, "machine": machine()}))
    sys.exit(1 if report["has_grown"] or asking.n_refused else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]), sys.argv[3] == "1", sys.argv[4:])
    else:
        main()
