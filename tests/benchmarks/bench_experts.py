"""A model with experts in memory: the native engine against llama-cpp-python, in one process, in turns.

    python tests/benchmarks/bench_experts.py MODEL.gguf ... [--threads 2] [--rounds 7] [--sizes 1,2,4,8,512] [--no-peer]

Milliseconds to pass n tokens of real text after a context of 64, with the logits of all of them, and to prefill 512
with the logits of the last. Which experts a pass reads depends on the text: in each round both engines pass the same
--places stretches of it, other ones in each round, in an order that is swapped each time; of more than 16 tokens one.
Both have their own layout of the weights (llama.cpp repacks). The process is pinned to as many cores as threads.

speedup: the median over stretches of llama.cpp's time over edgeinfer's. c: the median over that of one token. union:
how many experts of a layer n tokens of this text need together, by llama.cpp's routing, the mean. load: the share of
the CPUs that other processes took meanwhile; figures with more than a few percent are noise. One JSON line on stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bench_engine import FEW, N_BATCH, LlamaCpp, Ours
from expert_unions import mean_union, numbers, routing
from limited_run import counters
from machine import machine
from text import LICENSE_TEXT, SAMPLE_TEXT

from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer

N_CONTEXT = 64
PAUSE = 0.02  # seconds: OpenMP's threads spin for some milliseconds after llama.cpp's turn


class Peer(LlamaCpp):
    """llama.cpp, with another stretch of text after the context each time."""

    def place(self, stretch: np.ndarray) -> None:
        self.tokens = np.concatenate([self.tokens[: self.n_context], stretch])


class Native(Ours):
    """The same of the native engine."""

    def place(self, stretch: np.ndarray) -> None:
        self.after = stretch


class Bench:
    """A model in both engines, and a text. times: milliseconds by size and engine, one for each stretch."""

    def __init__(self, path: Path, arguments: argparse.Namespace) -> None:
        self.path, self.arguments = path, arguments
        with ModelFile.open(path) as file:
            text = Tokenizer.from_file(file).encode(SAMPLE_TEXT + LICENSE_TEXT)
        self.text = np.array(text, dtype=np.int32)
        room = self.text[: N_CONTEXT + max(N_BATCH, *arguments.sizes)]
        kinds = {"edgeinfer": Native} | ({} if arguments.no_peer else {"llama.cpp": Peer})
        self.engines: dict[str, Any] = {
            name: kind(path, arguments.threads, room, N_CONTEXT) for name, kind in kinds.items()
        }
        self.times: dict[int, dict[str, list[float]]] = {
            n: {name: [] for name in self.engines} for n in arguments.sizes
        }

    def stretches(self, n: int, turn: int) -> list[np.ndarray]:
        """Of n tokens each, the first of which is to warm up."""
        rng = np.random.default_rng([n, turn])
        starts = rng.integers(N_CONTEXT, len(self.text) - n, 1 + (self.arguments.places if n <= FEW else 1))
        return [self.text[start : start + n] for start in starts]

    def turn(self, n: int, number: int) -> None:
        """Both engines, one after the other."""
        stretches = self.stretches(n, number)
        for name in sorted(self.engines, reverse=bool(number % 2)):
            engine = self.engines[name]
            time.sleep(PAUSE)
            for i, stretch in enumerate(stretches):
                engine.place(stretch)
                if n > FEW and not i:
                    continue  # warm after the sizes before
                took = engine.seconds(n)
                if i:
                    self.times[n][name].append(1e3 * took)

    def run(self) -> float:
        """All turns; gives the share of the CPUs that others took."""
        started, before = time.perf_counter(), counters()
        for n in self.arguments.sizes:
            for engine in self.engines.values():
                engine.place(self.text[N_CONTEXT : N_CONTEXT + n])
                engine.seconds(n)
        for number in range(self.arguments.rounds):
            for n in self.arguments.sizes:
                if n <= FEW or number < 3:
                    self.turn(n, number)
        others = counters()["others_cpu_seconds"] - before["others_cpu_seconds"]
        return others / (time.perf_counter() - started) / (os.cpu_count() or 1)


def rows_of(times: dict[int, dict[str, list[float]]], unions: dict[int, float]) -> list[dict[str, Any]]:
    """What is printed of each size."""
    first = next(iter(times.values()))
    rows = []
    for n, of_n in times.items():
        medians = {name: statistics.median(ms) for name, ms in of_n.items()}
        row: dict[str, Any] = {
            "n": n,
            "ms": {name: round(ms, 2) for name, ms in medians.items()},
            "least_ms": {name: round(min(ms), 2) for name, ms in of_n.items()},
            "tokens_per_second": {name: round(1e3 * n / ms, 1) for name, ms in medians.items()},
            "c": {name: round(ms / statistics.median(first[name]), 2) for name, ms in medians.items()},
            "stretches": len(of_n["edgeinfer"]),
            "union": round(unions[n], 1),
        }
        if "llama.cpp" in of_n:
            ratios = [peer / ours for peer, ours in zip(of_n["llama.cpp"], of_n["edgeinfer"], strict=True)]
            row["speedup"] = round(statistics.median(ratios), 3)
        rows.append(row)
    return rows


def bench(path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    chosen = routing(path, None, max(N_BATCH, *arguments.sizes), arguments.threads)
    unions = {n: mean_union(chosen, n) for n in arguments.sizes}
    running = Bench(path, arguments)
    load = running.run()
    rows = rows_of(running.times, unions)
    for row in rows:
        times = "  ".join(f"{name} {ms:9.2f} ms, c {row['c'][name]:5.2f}" for name, ms in row["ms"].items())
        print(
            f"{path.name}  n = {row['n']:3}  {times}  {row.get('speedup', '')}  union {row['union']}", file=sys.stderr
        )
    facts = {"experts": int(chosen.max()) + 1, "top_k": chosen.shape[2], "layers": chosen.shape[0]}
    return {"model": path.name, **facts, "load": round(load, 3), "rows": rows}


def pinned(n_threads: int) -> Sequence[int]:
    """The cores of this process from now on."""
    cores = sorted(os.sched_getaffinity(0))[:n_threads]
    os.sched_setaffinity(0, cores)
    return cores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--places", type=int, default=6, help="stretches of text in a round")
    parser.add_argument("--sizes", type=numbers, default=[1, 2, 4, 8, 512], help="n, comma-separated")
    parser.add_argument("--no-peer", action="store_true", help="without llama-cpp-python")
    arguments = parser.parse_args()
    pinned(arguments.threads)
    results = [bench(path, arguments) for path in arguments.models]
    print(json.dumps({"benchmark": "experts", "machine": machine(), "threads": arguments.threads, "results": results}))


if __name__ == "__main__":
    main()
