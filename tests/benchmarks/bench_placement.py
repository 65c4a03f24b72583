"""Experts on CPU and GPU by the rules of edgeinfer.experimental.placement, simulated on recorded routing.

No model runs. The times are given: of one expert on the CPU and on the GPU (of one row, and of each further one), of
moving one to the GPU, of reading one from disk. The defaults are of no machine in particular: 3 MB an expert over
20 GB/s of memory, 100 GB/s of a GPU's, 6 GB/s of PCIe, 1.2 GB/s of disk. Traces as for bench_hit_rates.py. Printed is
the mean time of the experts of one token: all on the CPU; with the experts that the GPU holds on the GPU, those that
the prompt used most; and as `assign` has it, with a cache by score.

Run: python tests/benchmarks/bench_placement.py TRACE.csv ... [--gpu 10,25,50] [--memory 50] [--cpu-ms .15,.02] ...
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from machine import machine

from edgeinfer.experimental.placement import ExpertTimes, interpolated

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from placement_simulation import simulate  # noqa: E402
from route_traces import read_trace  # noqa: E402


def main() -> None:
    """Print a table, and a JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--gpu", default="10,25,50", help="percent of all experts that the GPU holds")
    parser.add_argument("--memory", type=float, default=100.0, help="percent that memory holds")
    parser.add_argument("--cpu-ms", default=".15,.02", help="of one row, and of each further one")
    parser.add_argument("--gpu-ms", default=".03,.002")
    parser.add_argument("--transfer-ms", type=float, default=0.5)
    parser.add_argument("--read-ms", type=float, default=2.5)
    given = parser.parse_args()
    times = ExpertTimes(_line(given.cpu_ms), _line(given.gpu_ms), given.transfer_ms, given.read_ms)
    rows = [row for path in given.traces for row in _rows(path, times, given.gpu, given.memory)]
    print(f"{'trace':<24}{'on GPU':>8}{'CPU alone':>12}{'static':>10}{'ours':>10}{'moved a token':>15}")
    for row in rows:
        shown = "".join(f"{row['ms'][name]:>{width}.2f}" for name, width in (("cpu", 12), ("static", 10), ("ours", 10)))
        print(f"{row['trace']:<24}{row['gpu_percent']:>6g} %{shown}{row['moved']:>15.2f}")
    settings = {name: value for name, value in vars(given).items() if name != "traces"}
    print(json.dumps({"placement": rows, "settings": settings, "machine": machine()}))


def _line(text: str) -> Any:
    first, further = map(float, text.split(","))
    return interpolated({1: first, 2: first + further})


def _rows(path: Path, times: ExpertTimes, shares: str, memory: float) -> list[dict[str, Any]]:
    routing = read_trace(path)
    n_all, n_tokens = routing.n_layers * routing.n_experts, routing.n_tokens - routing.n_prompt
    in_memory = None if memory >= 100 else int(n_all * memory / 100)
    rows = []
    for share in map(float, shares.split(",")):
        found = simulate(routing, times, int(n_all * share / 100), in_memory)
        ms = {name: round(of.seconds / n_tokens, 3) for name, of in found.items()}  # the times are in ms
        rows.append(
            {
                "trace": path.name,
                "gpu_percent": share,
                "ms": ms,
                "moved": round((found["ours"].transfers + found["ours"].swaps) / n_tokens, 2),
            }
        )
    return rows


if __name__ == "__main__":
    main()
