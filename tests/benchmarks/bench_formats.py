"""Products with quantised matrices against ggml's of the same format, in one process, round by round.

    python tests/benchmarks/bench_formats.py [--formats Q2_K,Q3_K,Q4_K,Q6_K] [--threads 1,2] [--sizes 1,4,8]
        [--rounds 9] [--layers 4]

Matrices of the shapes of bench_ternary.py with random codes, several times what the caches hold. Of each format, number
of threads and number of columns: bytes read a second and weights a second, of ours as packed and of ggml as in the
file, medians of the rounds, in each of which the order is swapped. ggml's products are those on ordinary buffers:
llama.cpp repacks some types at load, on AVX2 of these Q4_K. ggml rounds the activations within that time, ours are
rounded before: some microseconds a matrix. One JSON line on stdout at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

import numpy as np
from bench_engine import numbers
from bench_ternary import ALL_CORES, SHAPES, Contender, Ggml, Kind, Library
from machine import machine

from edgeinfer.backends.native import _core, best_isa
from edgeinfer.models.gguf import GGMLType

# Bytes of a block at which it has float16 numbers.
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,)}
N_WEIGHTS = sum(n_out * n_in for n_out, n_in in SHAPES)  # of a layer


def random_blocks(kind: GGMLType, n_out: int, n_in: int, rng: np.random.Generator) -> np.ndarray:
    """Bytes of a matrix of random codes with small scales."""
    blocks = rng.integers(0, 256, (kind.n_bytes(n_out * n_in) // kind.block_bytes, kind.block_bytes), dtype=np.uint8)
    for at in HALVES[kind.name]:
        blocks[:, at : at + 2] = np.array([0.01], dtype="<f2").view(np.uint8)
    return blocks.reshape(-1)


class Ours:
    """Matrices of one format, packed."""

    def __init__(self, kind: GGMLType, n_layers: int, n_threads: int, rng: np.random.Generator) -> None:
        self.n_threads = n_threads
        shapes = SHAPES * n_layers
        self.matrices = [_core.PackedMatrix(int(kind), *shape, random_blocks(kind, *shape, rng)) for shape in shapes]
        self.n_bytes = sum(matrix.data.nbytes for matrix in self.matrices)

    def seconds(self, n: int, n_layers: int) -> float:
        """Of n_layers, with n columns."""
        return _core.time_products(self.matrices[: n_layers * len(SHAPES)], best_isa(), self.n_threads, n)


def bench(kind: GGMLType, n_threads: int, sizes: list[int], rounds: int, n_layers: int) -> dict[str, Any]:
    """What one format gives with so many threads."""
    os.sched_setaffinity(0, set(sorted(ALL_CORES)[:n_threads]))
    rng = np.random.default_rng(1)
    ours = Ours(kind, n_layers, n_threads, rng)
    theirs_kind = Kind(f"ggml {kind.name}", int(kind), lambda n_out, n_in, rng: random_blocks(kind, n_out, n_in, rng))
    theirs = Ggml(Library.of_llama_cpp(), theirs_kind, n_layers, n_threads, rng)
    contenders: dict[str, Contender] = {"edgeinfer": ours, "ggml": theirs}
    n_bytes = {"edgeinfer": ours.n_bytes, "ggml": kind.n_bytes(N_WEIGHTS * n_layers)}
    seconds: dict[int, dict[str, list[float]]] = {n: {name: [] for name in contenders} for n in sizes}
    for i in range(rounds + 1):
        for n in sizes:
            for name in list(contenders)[:: 1 if i % 2 else -1]:
                time.sleep(0.01)  # ggml's threads spin for some milliseconds after its turn
                found = contenders[name].seconds(n, n_layers)
                if i:  # the first round warms up
                    seconds[n][name].append(found)
    rows: dict[int, Any] = {}
    for n in sizes:
        median = {name: statistics.median(seconds[n][name]) for name in contenders}
        rows[n] = {
            name: {
                "gb_s": round(n_bytes[name] / median[name] / 1e9, 1),
                "gweights_s": round(N_WEIGHTS * n_layers / median[name] / 1e9, 1),
            }
            for name in contenders
        }
        rows[n]["speedup"] = round(median["ggml"] / median["edgeinfer"], 2)
    bits = round(8 * ours.n_bytes / N_WEIGHTS / n_layers, 3)
    result = {"format": kind.name, "n_threads": n_threads, "bits_a_weight": bits, "by_columns": rows}
    print(result, file=sys.stderr)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="Q2_K,Q3_K,Q4_K,Q6_K", help=f"comma-separated, of {', '.join(HALVES)}")
    parser.add_argument("--threads", type=numbers, default=[1, 2], help="numbers of threads, comma-separated")
    parser.add_argument("--sizes", type=numbers, default=[1, 4, 8], help="numbers of columns, comma-separated")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    results = [
        bench(GGMLType[name], n_threads, arguments.sizes, arguments.rounds, arguments.layers)
        for name in arguments.formats.split(",")
        for n_threads in arguments.threads
    ]
    print(json.dumps({"benchmark": "formats", "machine": machine(), "results": results}))


if __name__ == "__main__":
    main()
