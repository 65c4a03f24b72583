"""Hit rates of expert caches on recorded routing: LRU, this project's policy, and the best that any policy could have.

The routing is simulated, no model runs. Traces are those of BigMoeOnEdge (github.com/Helldez/BigMoeOnEdge, Apache-2.0),
docs/bench-data/2026-07-15-route-trace/*.route.csv, or of its --route-trace. The prompt fills the cache; the tokens
after it are counted. A budget is a share of all experts. --demand fails where a rate of ours is lower.

Run: python tests/benchmarks/bench_hit_rates.py TRACE.csv ... [--budgets 10,25,50] [--demand .53,.82,.96]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from machine import machine

from edgeinfer.offload.policies import hit_rates

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from route_traces import read_trace  # noqa: E402


def main() -> None:
    """Print a table, and a JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--budgets", default="10,25,50", help="percent of all experts")
    parser.add_argument("--demand", help="least hit rates of ours, one for each budget, in each trace")
    given = parser.parse_args()
    budgets = [float(share) for share in given.budgets.split(",")]
    demands = [float(rate) for rate in given.demand.split(",")] if given.demand else [0.0] * len(budgets)
    rows = [row for path in given.traces for row in _rates(path, budgets)]
    print(f"{'trace':<24}{'budget':>8}{'experts':>9}{'LRU':>8}{'ours':>8}{'Belady':>8}")
    for row in rows:
        print(
            f"{row['trace']:<24}{row['budget_percent']:>6g} %{row['capacity']:>9}{row['lru']:>8.3f}{row['ours']:>8.3f}"
            f"{row['belady']:>8.3f}"
        )
    print(json.dumps({"hit_rates": rows, "machine": machine()}))
    short = [row for row, least in zip(rows, demands * len(given.traces), strict=True) if row["ours"] < least]
    if short:
        raise SystemExit(f"below what is demanded: {short}")


def _rates(path: Path, budgets: list[float]) -> list[dict[str, Any]]:
    routing = read_trace(path)
    rows = []
    for budget in budgets:
        capacity = int(routing.n_layers * routing.n_experts * budget / 100)
        started = time.perf_counter()
        rates = hit_rates(routing, capacity)
        rows.append(
            {
                "trace": path.name,
                "n_layers": routing.n_layers,
                "n_experts": routing.n_experts,
                "n_used": routing.chosen.shape[2],
                "prompt_tokens": routing.n_prompt,
                "tokens": routing.n_tokens - routing.n_prompt,
                "budget_percent": budget,
                "capacity": capacity,
                **{name: round(rate, 4) for name, rate in rates.items()},
                "seconds": round(time.perf_counter() - started, 2),
            }
        )
    return rows


if __name__ == "__main__":
    main()
