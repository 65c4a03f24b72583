"""Quantisers beside libgguf (`pip install libgguf==0.2.2`), which has llama.cpp's and takes a thread for each CPU.

    python tests/benchmarks/bench_quantise.py [--threads 2] [--rounds 5] [--no-peer]

A matrix of 2048 x 4096 gaussian weights, without and with importance, in turns. Medians in millions of weights a
second: "plain" is llama.cpp's search without importance, "default" what `formats.quantize` does without. Ours checks
the weights too. One JSON line on stdout at the end.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from machine import machine

from edgeinfer.models.formats import quantize, quantize_plain
from edgeinfer.models.gguf import GGMLType

FORMATS = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
SHAPE = (2048, 4096)


def contenders(name: str, weights: Any, columns: Any, n_threads: int, peer: bool) -> dict[str, Callable[[], object]]:
    """What is measured of a format, by name."""
    type = GGMLType[name]
    found: dict[str, Callable[[], object]] = {
        "plain": lambda: quantize_plain(type, weights, n_threads),
        "default": lambda: quantize(type, weights, None, n_threads),
        "importance": lambda: quantize(type, weights, columns, n_threads),
    }
    if peer:
        import libgguf  # type: ignore[import-not-found,import-untyped,unused-ignore]

        found["libgguf plain"] = lambda: libgguf.quantize_rows_raw(int(type), weights, *SHAPE, None)
        found["libgguf importance"] = lambda: libgguf.quantize_rows_raw(int(type), weights, *SHAPE, columns)
    return found


def rates(runs: dict[str, Callable[[], object]], n_rounds: int) -> dict[str, float]:
    """Median of millions of weights a second, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(n_rounds + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    n = SHAPE[0] * SHAPE[1] / 1e6
    return {name: round(n / statistics.median(taken[1:]), 1) for name, taken in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--no-peer", action="store_true")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(SHAPE, dtype=np.float32) * np.float32(0.02)
    columns = np.exp(rng.standard_normal(SHAPE[1])).astype(np.float32)
    found = {}
    for name in arguments.formats.split(","):
        runs = contenders(name, weights, columns, arguments.threads, not arguments.no_peer)
        found[name] = rates(runs, arguments.rounds)
        print(name, found[name], flush=True)
    result: dict[str, Any] = {"what": "millions of weights a second", "shape": SHAPE, "threads": arguments.threads}
    if not arguments.no_peer:
        result["peer"] = f"libgguf {importlib.metadata.version('libgguf')}"
    print(json.dumps(result | {"machine": machine(), "rates": found}))


if __name__ == "__main__":
    main()
