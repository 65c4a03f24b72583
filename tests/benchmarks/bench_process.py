"""The cost per token of running llama.cpp in a process of its own.

    python tests/benchmarks/bench_process.py MODEL.gguf ... [--threads 1] [--tokens 300] [--rounds 5]

Passes of one token behind a short text, alternating between a session and the same code called in this process. Medians
of milliseconds. One JSON line on stdout at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine

from edgeinfer.backends.llama_cpp import LlamaCppBackend
from edgeinfer.backends.llama_cpp.context import Context
from edgeinfer.backends.llama_cpp.library import open_library
from edgeinfer.backends.llama_cpp.model import Model
from edgeinfer.backends.llama_cpp.passes import Passes
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models.gguf import ModelFile

N_CTX = 512
ONE, CHAIN = np.zeros(1, dtype=np.int32), np.full(1, -1, dtype=np.int32)


def by_session(path: Path, n_threads: int) -> Callable[[int], None]:
    """Runs and commits the token at a position, in a process of its own."""
    backend = LlamaCppBackend()
    with ModelFile.open(path) as file:
        session = backend.load(
            file,
            None,
            backend.plan(file, None, LoadSettings(N_CTX, n_batch=N_CTX, n_threads=n_threads)),
            Device(n_threads),
        ).session()

    def step(n_past: int) -> None:
        if n_past == 0:
            session.reuse_prefix([])
        session.forward([100 + n_past])
        session.commit([0])

    return step


def by_call(path: Path, n_threads: int) -> Callable[[int], None]:
    """The same in this process."""
    model = Model(open_library(), path, path, True, lambda share, _: True)
    context = Context(model, N_CTX, N_CTX, n_threads, "f16", bytearray(2))
    passes = Passes(context)
    passes.warm_up()

    def step(n_past: int) -> None:
        passes.keep(ONE if n_past else ONE[:0], n_past)
        logits = np.empty((1, model.n_vocab), dtype=np.float32)
        passes.run(ONE + 100 + n_past, CHAIN, ONE, logits)

    return step


def bench(path: Path, n_threads: int, n_tokens: int, rounds: int) -> dict[str, Any]:
    """Median milliseconds of a token each way, and the median of what the process adds in a round."""
    ways = {"in a process of its own": by_session(path, n_threads), "in this process": by_call(path, n_threads)}
    medians: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, step in ways.items():
            seconds = []
            for n_past in range(n_tokens):
                start = time.perf_counter()
                step(n_past)
                seconds.append(time.perf_counter() - start)
            medians[name].append(1e3 * statistics.median(seconds))
    apart, here = medians.values()
    added = statistics.median(a - b for a, b in zip(apart, here, strict=True))
    ms = {name: round(statistics.median(of_way), 3) for name, of_way in medians.items()}
    return {"model": path.name, "threads": n_threads, "ms": ms, "added_ms": round(added, 3)}


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    found = [bench(path, arguments.threads, arguments.tokens, arguments.rounds) for path in arguments.models]
    print(json.dumps({**machine(), "tokens": arguments.tokens, "rounds": arguments.rounds, "models": found}))


if __name__ == "__main__":
    main()
