"""What a benchmark says of the machine it ran on, and the limits measured in the same run."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.backends.native import best_isa


def machine() -> dict[str, Any]:
    """CPU, cores, ISA path and versions."""
    versions = {}
    for package in ("edgeinfer", "llama-cpp-python", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "isa": best_isa(), "versions": versions}


def cpu_name() -> str:
    """The CPU's name for itself."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def read_bandwidth_gb_s(n_threads: int, n_bytes: int = 1 << 30) -> float:
    """Best of five reads of a buffer larger than the caches, each thread its share."""
    buffer = np.ones(n_bytes // 8, dtype=np.int64)
    shares = np.array_split(buffer, n_threads)
    best = 0.0
    with ThreadPoolExecutor(n_threads) as pool:
        for _ in range(5):
            started = time.perf_counter()
            list(pool.map(np.max, shares))
            best = max(best, n_bytes / (time.perf_counter() - started) / 1e9)
    return best
