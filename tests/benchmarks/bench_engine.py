"""The native engine against llama-cpp-python, in one process, round by round.

    python tests/benchmarks/bench_engine.py MODEL.gguf ... [--threads 1,2] [--rounds 9] [--no-peer]
        [--context 64] [--sizes 1,2,4,8,16,512] [--busy]

For each model and number of threads: milliseconds to pass n = 1, 2, 4, 8, 16 tokens behind a context of 64, with the
logits of all of them, and to prefill 512 tokens with the logits of the last. Both engines are timed in every round, the
order swapped each time, and so is what the machine can read and multiply just then; the figures are medians. "limit" is
the time in which it could read all weights, or do all multiply-adds, whichever is longer; the share of it is the median
of each round's. The process is pinned to as many cores as there are threads. --busy measures everything again beside a
busy process on each of these cores, and takes the mean of half a second of passes: some wait for a core and some do not.
One JSON line on stdout at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from machine import machine

from edgeinfer.backends.native import MachineLimits, NativeBackend, best_isa
from edgeinfer.bench import work_of_a_token
from edgeinfer.gguf import ModelFile
from edgeinfer.models import read_spec
from edgeinfer.types import Device

N_BATCH = 512
STRETCH = 0.5  # seconds
FEW = 16  # tokens of a pass that is made once before it is timed


class Contender(Protocol):
    """One engine with a context behind it. tokens: (n,) int32, the context and then what is passed."""

    def __init__(self, path: Path, n_threads: int, tokens: np.ndarray, n_context: int) -> None: ...

    def seconds(self, n: int) -> float: ...


class Ours:
    def __init__(self, path: Path, n_threads: int, tokens: np.ndarray, n_context: int) -> None:
        self.file = ModelFile.open(path)
        spec = read_spec(self.file)
        backend = NativeBackend()
        plan = backend.plan(self.file, spec, len(tokens), N_BATCH, n_threads)
        self.session = backend.load(self.file, spec, plan, Device(n_threads))
        self.behind = tokens[n_context:]
        self.session.forward(tokens[:n_context], logits=[])
        self.session.commit(range(n_context))

    def seconds(self, n: int) -> float:
        batch = self.behind[:n]
        started = time.perf_counter()
        self.session.forward(batch, logits="all" if n <= 16 else "last")
        return time.perf_counter() - started


class LlamaCpp:
    def __init__(self, path: Path, n_threads: int, tokens: np.ndarray, n_context: int) -> None:
        import llama_cpp

        self.lib = llama_cpp
        self.model = llama_cpp.Llama(
            str(path),
            n_ctx=len(tokens),
            n_batch=N_BATCH,
            n_threads=n_threads,
            n_threads_batch=n_threads,
            verbose=False,
        )
        self.tokens = tokens
        self.n_context = n_context
        self.batch = llama_cpp.llama_batch_init(N_BATCH, 0, 1)
        for first in range(0, n_context, N_BATCH):
            self._decode(first, min(N_BATCH, n_context - first), "last")

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
        elapsed = self._decode(self.n_context, n, "all" if n <= 16 else "last")
        self.lib.llama_memory_seq_rm(self.lib.llama_get_memory(self.model.ctx), 0, self.n_context, -1)
        return elapsed


class Limit:
    """What the machine could do at best: a lower bound for every engine that reads all weights for each pass."""

    def __init__(self, path: Path, n_threads: int, tokens: np.ndarray, n_context: int) -> None:
        self.n_threads = n_threads
        with ModelFile.open(path) as file:
            self.weight_bytes, self.multiply_adds = work_of_a_token(file, read_spec(file))

    def seconds(self, n: int) -> float:
        limits = MachineLimits.measure(best_isa(), self.n_threads, n_rounds=1)  # as each contender once
        reading = self.weight_bytes / limits.read_bytes_per_second
        return max(reading, n * self.multiply_adds / limits.int8_multiply_adds_per_second)


def mean_seconds(contender: Contender, n: int, least: float) -> float:
    """Of passes that take at least so many seconds together; with 0, of one."""
    started = time.perf_counter()
    passes = [contender.seconds(n)]
    while time.perf_counter() - started < least:
        passes.append(contender.seconds(n))
    return statistics.mean(passes)


def measure(contenders: dict[str, Contender], n: int, rounds: int, least: float = 0) -> dict[str, list[float]]:
    """Milliseconds of each in each round, alternating. least: seconds of passes of which the mean is taken."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for name in names:
        contenders[name].seconds(n)  # warm-up
    for _ in range(rounds):
        for name in names:
            time.sleep(0.02)  # OpenMP's threads spin for some milliseconds after llama.cpp's turn
            if n <= FEW:
                contenders[name].seconds(n)  # the pause is over for all threads
            times[name].append(mean_seconds(contenders[name], n, least))
        names.reverse()
    return {name: [1e3 * seconds for seconds in of] for name, of in times.items()}


@contextmanager
def busy_cores(cores: Sequence[int]) -> Iterator[None]:
    """A process that never waits on each of these cores."""
    spin = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
    with ExitStack() as running:
        for core in cores:
            process = running.enter_context(subprocess.Popen([sys.executable, "-c", spin, str(core)]))
            running.callback(process.kill)
        time.sleep(0.5)
        yield


def bench(path: Path, n_threads: int, arguments: argparse.Namespace) -> dict[str, Any]:
    cores = sorted(ALL_CORES)[:n_threads]
    os.sched_setaffinity(0, cores)
    makers: dict[str, type[Contender]] = {"edgeinfer": Ours, "limit": Limit}
    if not arguments.no_peer:
        makers["llama.cpp"] = LlamaCpp
    n_tokens = arguments.context + max(arguments.sizes)
    tokens = np.random.default_rng(1).integers(0, 40000, n_tokens).astype(np.int32)
    contenders = {name: make(path, n_threads, tokens, arguments.context) for name, make in makers.items()}
    least = STRETCH if arguments.busy else 0
    rows = [bench_size(contenders, n, arguments.rounds, least) for n in arguments.sizes]
    result = {"model": path.name, "n_threads": n_threads, "n_context": arguments.context, "rows": rows}
    if arguments.busy:
        with busy_cores(cores):
            result["busy_rows"] = [bench_size(contenders, n, arguments.rounds, least) for n in arguments.sizes]
    for row in rows:
        row["cost"] = round(row["ms"]["edgeinfer"] / rows[0]["ms"]["edgeinfer"] * rows[0]["n"], 3)
    with ModelFile.open(path) as file:
        weight_bytes, multiply_adds = work_of_a_token(file, read_spec(file))
    return result | {
        "weights_gb_s": round(weight_bytes / 1e6 / rows[0]["ms"]["edgeinfer"], 1),
        "prefill_gmac_s": round(multiply_adds * rows[-1]["n"] / 1e6 / rows[-1]["ms"]["edgeinfer"]),
    }


def bench_size(contenders: dict[str, Contender], n: int, rounds: int, least: float) -> dict[str, Any]:
    times = measure(contenders, n, rounds if n <= 16 else max(3, rounds // 3), least)
    ms = {name: statistics.median(of) for name, of in times.items()}
    row: dict[str, Any] = {"n": n, "ms": {name: round(value, 3) for name, value in ms.items()}}
    row["tokens_per_second"] = {name: round(1e3 * n / value, 1) for name, value in ms.items()}
    shares = (limit / ours for limit, ours in zip(times["limit"], times["edgeinfer"], strict=True))
    row["share_of_limit"] = round(statistics.median(shares), 3)
    if "llama.cpp" in ms:
        row["speedup"] = round(ms["llama.cpp"] / ms["edgeinfer"], 3)
    return row


def show(result: dict[str, Any]) -> None:
    print(
        f"\n{result['model']}, {result['n_threads']} thread(s), context {result['n_context']}: "
        f"{result['weights_gb_s']} GB/s at n = {result['rows'][0]['n']}, "
        f"{result['prefill_gmac_s']} GMAC/s at n = {result['rows'][-1]['n']}",
        file=sys.stderr,
    )
    for row in [*result["rows"], *result.get("busy_rows", ())]:
        times = "  ".join(f"{name} {ms:9.2f} ms" for name, ms in row["ms"].items())
        cost = f"c(n) {row['cost']:6.2f}" if "cost" in row else "beside busy"
        share = f"{row['share_of_limit']:.0%} of the limit"
        print(f"  n = {row['n']:3}  {cost}  {times}  {row.get('speedup', '')}  {share}", file=sys.stderr)


ALL_CORES = os.sched_getaffinity(0)


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--threads", type=numbers, default=[1, 2], help="numbers of threads, comma-separated")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--context", type=int, default=64, help="tokens before those that are timed")
    parser.add_argument("--sizes", type=numbers, default=[1, 2, 4, 8, 16, 512], help="n, comma-separated")
    parser.add_argument("--busy", action="store_true", help="again beside a busy process on each core")
    parser.add_argument("--no-peer", action="store_true", help="without llama-cpp-python")
    arguments = parser.parse_args()
    results = []
    for path in arguments.models:
        for n_threads in arguments.threads:
            results.append(bench(path, n_threads, arguments))
            show(results[-1])
    print(json.dumps({"benchmark": "engine", "machine": machine(), "results": results}))


if __name__ == "__main__":
    main()
