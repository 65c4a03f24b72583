"""The native engine against llama-cpp-python, in one process, round by round.

    python tests/benchmarks/bench_engine.py MODEL.gguf ... [--threads 1,2] [--rounds 9] [--no-peer]
        [--context 64] [--sizes 1,2,4,8,16,512] [--busy]

For each model and number of threads: milliseconds to pass n = 1, 2, 4, 8, 16 tokens after a context of 64, with the
logits of all of them, and to prefill 512 tokens with the logits of the last. Both engines pass all sizes in each round,
the order swapped each time, and what the machine can read and multiply just then is measured too; figures are medians.
Of up to 16 tokens, a figure is the mean of a tenth of a second of passes, after some that are not timed: engines and
machine take a while to come back from a pause. "limit" is the time in which the machine could read all weights, or do
all multiply-adds, whichever is longer; the share of it is the median of each round's, and so is the cost, the time over
that of the first size. The process is pinned to as many cores as there are threads. --busy measures everything again
beside a busy process on each of these cores, for half a second at a time: some passes wait for a core and some do not.
One JSON line on stdout at the end.
"""

from __future__ import annotations

import argparse
import ctypes
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
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile

N_BATCH = 512
FEW = 16  # tokens of a pass of which many are made
WARM_UP, STRETCH, BUSY_STRETCH = 0.05, 0.1, 0.5  # seconds of such passes


class Contender(Protocol):
    """One engine that has read a context. tokens: (n,) int32, the context and then what is passed."""

    def __init__(self, path: Path, n_threads: int, tokens: np.ndarray, n_context: int) -> None: ...

    def seconds(self, n: int) -> float: ...


class Ours:
    def __init__(self, path: Path, n_threads: int, tokens: np.ndarray, n_context: int) -> None:
        self.file = ModelFile.open(path)
        spec = read_spec(self.file)
        backend = NativeBackend()
        plan = backend.plan(self.file, spec, LoadSettings(len(tokens), n_batch=N_BATCH, n_threads=n_threads))
        self.session = backend.load(self.file, spec, plan, Device(n_threads)).session()
        self.after = tokens[n_context:]
        self.session.forward(tokens[:n_context], logits=[])
        self.session.commit(range(n_context))

    def seconds(self, n: int) -> float:
        batch = self.after[:n]
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
        self.state = self._saved_state()

    def _saved_state(self) -> Any:
        """What is restored after each pass of a model with recurrent layers, which give nothing back; else None."""
        lib, context, model = self.lib, self.model.ctx, self.model.model
        if not (lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model)):
            return None
        n_bytes = lib.llama_state_seq_get_size(context, 0)
        state = (ctypes.c_uint8 * n_bytes)()
        if lib.llama_state_seq_get_data(context, state, n_bytes, 0) != n_bytes:
            raise RuntimeError("llama.cpp did not give its state")
        return state

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
        memory = self.lib.llama_get_memory(self.model.ctx)
        if self.state is None:
            self.lib.llama_memory_seq_rm(memory, 0, self.n_context, -1)
        else:
            self.lib.llama_memory_clear(memory, True)
            self.lib.llama_state_seq_set_data(self.model.ctx, self.state, len(self.state), 0)
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
    """Of passes that take at least so many seconds together."""
    started = time.perf_counter()
    passes = [contender.seconds(n)]
    while time.perf_counter() - started < least:
        passes.append(contender.seconds(n))
    return sum(passes) / len(passes)


Times = dict[int, dict[str, list[float]]]


def measure(contenders: dict[str, Contender], sizes: Sequence[int], rounds: int, stretch: float = STRETCH) -> Times:
    """Milliseconds of each for each size in each round, alternating; of many tokens in at most max(3, rounds // 3)."""
    times: Times = {n: {name: [] for name in contenders} for n in sizes}
    names = list(contenders)
    for n in sizes:
        for name in names:
            contenders[name].seconds(n)  # warm-up
    for i in range(rounds):
        for n in sizes:
            if n > FEW and i >= max(3, rounds // 3):
                continue
            for name in names:
                time.sleep(0.02)  # OpenMP's threads spin for some milliseconds after llama.cpp's turn
                if n <= FEW:
                    mean_seconds(contenders[name], n, WARM_UP)
                times[n][name].append(1e3 * mean_seconds(contenders[name], n, stretch if n <= FEW else 0))
        names.reverse()
    return times


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
    rows = bench_sizes(contenders, arguments, BUSY_STRETCH if arguments.busy else STRETCH)
    result = {"model": path.name, "n_threads": n_threads, "n_context": arguments.context, "rows": rows}
    ours = contenders["edgeinfer"]
    if isinstance(ours, Ours) and ours.session.model.tuning is not None:
        result["tuning"] = ours.session.model.tuning.as_dict()
    if arguments.busy:
        with busy_cores(cores):
            result["busy_rows"] = bench_sizes(contenders, arguments, BUSY_STRETCH)
    with ModelFile.open(path) as file:
        weight_bytes, multiply_adds = work_of_a_token(file, read_spec(file))
    return result | {
        "weights_gb_s": round(weight_bytes / 1e6 / rows[0]["ms"]["edgeinfer"], 1),
        "prefill_gmac_s": round(multiply_adds * rows[-1]["n"] / 1e6 / rows[-1]["ms"]["edgeinfer"]),
    }


def bench_sizes(
    contenders: dict[str, Contender], arguments: argparse.Namespace, stretch: float
) -> list[dict[str, Any]]:
    times = measure(contenders, arguments.sizes, arguments.rounds, stretch)
    first = times[arguments.sizes[0]]["edgeinfer"]
    rows = []
    for n, of_n in times.items():
        ms = {name: statistics.median(of) for name, of in of_n.items()}
        row: dict[str, Any] = {"n": n, "ms": {name: round(value, 3) for name, value in ms.items()}}
        row["tokens_per_second"] = {name: round(1e3 * n / value, 1) for name, value in ms.items()}
        shares = (limit / ours for limit, ours in zip(of_n["limit"], of_n["edgeinfer"], strict=True))
        row["share_of_limit"] = round(statistics.median(shares), 3)
        row["cost"] = round(
            statistics.median(ours / one for ours, one in zip(of_n["edgeinfer"], first, strict=False)), 3
        )
        if "llama.cpp" in ms:
            row["speedup"] = round(ms["llama.cpp"] / ms["edgeinfer"], 3)
        rows.append(row)
    return rows


def show(result: dict[str, Any]) -> None:
    print(
        f"\n{result['model']}, {result['n_threads']} thread(s), context {result['n_context']}: "
        f"{result['weights_gb_s']} GB/s at n = {result['rows'][0]['n']}, "
        f"{result['prefill_gmac_s']} GMAC/s at n = {result['rows'][-1]['n']}",
        file=sys.stderr,
    )
    for when in ("rows", "busy_rows"):
        for row in result.get(when, ()):
            times = "  ".join(f"{name} {ms:9.2f} ms" for name, ms in row["ms"].items())
            share = f"{row['share_of_limit']:.0%} of the limit{', beside busy' if when == 'busy_rows' else ''}"
            print(
                f"  n = {row['n']:3}  c(n) {row['cost']:6.2f}  {times}  {row.get('speedup', '')}  {share}",
                file=sys.stderr,
            )


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
