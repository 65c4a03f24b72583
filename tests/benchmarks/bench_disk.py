"""How fast a disk gives slices of a file past the page cache, as an expert cache reads them.

    python tests/benchmarks/bench_disk.py FILE [--readers 1,2,4] [--slices 0.6,1.8,3.5] [--seconds 2] [--rounds 3]

FILE: any large file on the disk in question, a model for example. O_DIRECT reads of slices (MB) at random places,
multiples of 4096, by that many threads at once; rounds alternate. For each of them the median of MB/s, least and most,
and milliseconds until a slice is there, median and 95th of a hundred. One JSON line on stdout at the end.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine, read_ahead_kib

PAGE = 4096


def read_for(path: Path, slice_bytes: int, until: float, seed: int, times: list[float]) -> None:
    """Read slices until then; adds the seconds that each took."""
    rng = np.random.default_rng(seed)
    n_places = (path.stat().st_size - slice_bytes) // PAGE
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    with mmap.mmap(-1, slice_bytes) as buffer:
        buffer.write(bytes(slice_bytes))  # its pages are there before the first read
        while (started := time.perf_counter()) < until:
            if os.preadv(descriptor, [buffer], PAGE * int(rng.integers(n_places))) != slice_bytes:
                raise SystemExit(f"{path}: a read was short")
            times.append(time.perf_counter() - started)
    os.close(descriptor)


def measure(path: Path, n_readers: int, slice_bytes: int, seconds: float, seed: int) -> tuple[float, list[float]]:
    """MB/s of all readers together, and the seconds of each slice."""
    times: list[list[float]] = [[] for _ in range(n_readers)]
    started = time.perf_counter()
    threads = [
        threading.Thread(target=read_for, args=(path, slice_bytes, started + seconds, seed + i, times[i]))
        for i in range(n_readers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = [one for of_reader in times for one in of_reader]
    return len(took) * slice_bytes / 1e6 / (time.perf_counter() - started), took


def bench(path: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    cases = [(n, mb) for mb in arguments.slices for n in arguments.readers]
    rates: dict[tuple[int, float], list[float]] = {case: [] for case in cases}
    latencies: dict[tuple[int, float], list[float]] = {case: [] for case in cases}
    for turn in range(arguments.rounds):
        for i, (n, mb) in enumerate(cases):
            rate, took = measure(path, n, int(mb * 1e6) // PAGE * PAGE, arguments.seconds, 1000 * turn + 10 * i)
            rates[n, mb].append(rate)
            latencies[n, mb] += took
    return [
        {
            "slice_mb": mb,
            "readers": n,
            "mb_s": round(statistics.median(rates[n, mb])),
            "least": round(min(rates[n, mb])),
            "most": round(max(rates[n, mb])),
            "p50_ms": round(1e3 * float(np.percentile(latencies[n, mb], 50)), 2),
            "p95_ms": round(1e3 * float(np.percentile(latencies[n, mb], 95)), 2),
        }
        for n, mb in cases
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--readers", type=lambda s: [int(n) for n in s.split(",")], default=[1, 2, 4])
    parser.add_argument("--slices", type=lambda s: [float(n) for n in s.split(",")], default=[0.6, 1.8, 3.5])
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rows = bench(arguments.file, arguments)
    facts = {"file_mb": round(arguments.file.stat().st_size / 1e6), "read_ahead_kib": read_ahead_kib(arguments.file)}
    print(json.dumps({"benchmark": "disk", "machine": machine(), **facts, "rows": rows}))


if __name__ == "__main__":
    main()
