"""The native engine against llama-cpp-python, in one process, round by round.

    python tests/benchmarks/bench_engine.py MODEL.gguf ... [--threads 1,2] [--rounds 9] [--no-peer]

For each model and number of threads: milliseconds to pass n = 1, 2, 4, 8, 16 tokens behind a context of 64, with the
logits of all of them, and to prefill 512 tokens with the logits of the last. Both engines are timed in every round, the
order swapped each time; the figures are medians. The process is pinned to as many cores as there are threads. One JSON
line on stdout at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from machine import machine

from edgeinfer.backends.native import MachineLimits, NativeBackend, best_isa
from edgeinfer.bench import work_of_a_token
from edgeinfer.gguf import ModelFile
from edgeinfer.models import read_spec
from edgeinfer.types import Device

CONTEXT = 64
SIZES = (1, 2, 4, 8, 16, 512)


class Contender(Protocol):
    """One engine with a context of 64 tokens behind it."""

    def seconds(self, n: int) -> float: ...


class Ours:
    def __init__(self, path: Path, n_threads: int, tokens: np.ndarray) -> None:
        self.file = ModelFile.open(path)
        spec = read_spec(self.file)
        backend = NativeBackend()
        plan = backend.plan(self.file, spec, 1024, 512, n_threads)
        self.session = backend.load(self.file, spec, plan, Device(n_threads))
        self.tokens = tokens
        self.session.forward(tokens[:CONTEXT])
        self.session.commit(range(CONTEXT))

    def seconds(self, n: int) -> float:
        batch = self.tokens[CONTEXT : CONTEXT + n]
        started = time.perf_counter()
        self.session.forward(batch, logits="all" if n <= 16 else "last")
        return time.perf_counter() - started


class LlamaCpp:
    def __init__(self, path: Path, n_threads: int, tokens: np.ndarray) -> None:
        import llama_cpp

        self.lib = llama_cpp
        self.model = llama_cpp.Llama(
            str(path), n_ctx=1024, n_batch=512, n_threads=n_threads, n_threads_batch=n_threads, verbose=False
        )
        self.tokens = tokens
        self.batch = llama_cpp.llama_batch_init(512, 0, 1)
        self._decode(0, CONTEXT, "last")

    def _decode(self, first: int, n: int, logits: str) -> float:
        batch = self.batch
        batch.n_tokens = n
        for i in range(n):
            batch.token[i] = int(self.tokens[first + i])
            batch.pos[i] = first + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = logits == "all" or i == n - 1
        context = self.model.ctx
        started = time.perf_counter()
        status = self.lib.llama_decode(context, batch)
        self.lib.llama_synchronize(context)
        elapsed = time.perf_counter() - started
        if status:
            raise RuntimeError(f"llama_decode gave {status}")
        return elapsed

    def seconds(self, n: int) -> float:
        elapsed = self._decode(CONTEXT, n, "all" if n <= 16 else "last")
        self.lib.llama_memory_seq_rm(self.lib.llama_get_memory(self.model.ctx), 0, CONTEXT, -1)
        return elapsed


def measure(contenders: dict[str, Contender], n: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of each, alternating."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for name in names:
        contenders[name].seconds(n)  # warm-up
    for _ in range(rounds):
        for name in names:
            time.sleep(0.02)  # OpenMP's threads spin for some milliseconds after llama.cpp's turn
            times[name].append(contenders[name].seconds(n))
        names.reverse()
    return {name: 1e3 * statistics.median(of) for name, of in times.items()}


def bench(path: Path, n_threads: int, rounds: int, peer: bool) -> dict[str, Any]:
    os.sched_setaffinity(0, set(sorted(ALL_CORES)[:n_threads]))
    makers: dict[str, Callable[..., Contender]] = {"edgeinfer": Ours}
    if peer:
        makers["llama.cpp"] = LlamaCpp
    tokens = np.random.default_rng(1).integers(0, 40000, CONTEXT + 512).astype(np.int32)
    contenders = {name: make(path, n_threads, tokens) for name, make in makers.items()}
    limits = MachineLimits.measure(best_isa(), n_threads)
    rows = []
    for n in SIZES:
        ms = measure(contenders, n, rounds if n <= 16 else max(3, rounds // 3))
        row: dict[str, Any] = {"n": n, "ms": {name: round(value, 3) for name, value in ms.items()}}
        row["tokens_per_second"] = {name: round(1e3 * n / value, 1) for name, value in ms.items()}
        if peer:
            row["speedup"] = round(ms["llama.cpp"] / ms["edgeinfer"], 3)
        rows.append(row)
    one = rows[0]["ms"]["edgeinfer"]
    for row in rows:
        row["cost"] = round(row["ms"]["edgeinfer"] / one, 3)
    with ModelFile.open(path) as file:
        weight_bytes, multiply_adds = work_of_a_token(file, read_spec(file))
    prefill = rows[-1]["ms"]["edgeinfer"]
    return {
        "model": path.name,
        "n_threads": n_threads,
        "rows": rows,
        "weights_gb_s": round(weight_bytes / 1e6 / one, 1),
        "bandwidth_gb_s": round(limits.read_bytes_per_second / 1e9, 1),
        "prefill_gmac_s": round(multiply_adds * SIZES[-1] / 1e6 / prefill),
        "int8_peak_gmac_s": round(limits.int8_multiply_adds_per_second / 1e9),
    }


def show(result: dict[str, Any]) -> None:
    print(
        f"\n{result['model']}, {result['n_threads']} thread(s): "
        f"{result['weights_gb_s']} of {result['bandwidth_gb_s']} GB/s at n = 1, "
        f"{result['prefill_gmac_s']} of {result['int8_peak_gmac_s']} GMAC/s in prefill",
        file=sys.stderr,
    )
    for row in result["rows"]:
        times = "  ".join(f"{name} {ms:9.2f} ms" for name, ms in row["ms"].items())
        print(f"  n = {row['n']:3}  c(n) {row['cost']:6.2f}  {times}  {row.get('speedup', '')}", file=sys.stderr)


ALL_CORES = os.sched_getaffinity(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, comma-separated")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-peer", action="store_true", help="without llama-cpp-python")
    arguments = parser.parse_args()
    results = []
    for path in arguments.models:
        for n_threads in map(int, arguments.threads.split(",")):
            results.append(bench(path, n_threads, arguments.rounds, not arguments.no_peer))
            show(results[-1])
    print(json.dumps({"benchmark": "engine", "machine": machine(), "results": results}))


if __name__ == "__main__":
    main()
