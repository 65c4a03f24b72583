"""Texts with a cache of experts while reads fail, end early or take long, and while processes are killed.

Each text has the logits of all experts in memory, or ends with an error that says where; nothing hangs, and no file
changes.

    python tests/benchmarks/check_faults.py [--runs 200] [--seed 0]

Exits with 1 if a run does anything else. One JSON line on stdout at the end; a run is named by its index and the seed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from fault_runs import FaultRun, FaultRuns  # noqa: E402


def kind_of(run: FaultRun) -> str:
    """What happens to a run."""
    return "kill" if run.killed_after is not None else run.reads.partition(":")[0]


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kinds: Counter[str] = Counter()
    n_right = n_errors = n_wrong = 0
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        runs = FaultRuns(Path(folder))
        for index in range(options.runs):
            run = runs.random_run(random.Random(f"{options.seed} {index}"))
            outcome = runs.outcome(run)
            kinds[kind_of(run)] += 1
            n_right += outcome.n_right
            n_errors += len(outcome.errors)
            if outcome.wrong:
                n_wrong += 1
                print(f"{index}: {outcome.wrong}: {run}", file=sys.stderr, flush=True)
    found = {
        "benchmark": "check_faults",
        "seed": options.seed,
        "runs": dict(sorted(kinds.items())),
        "right_texts": n_right,
        "texts_with_an_error": n_errors,
        "wrong_runs": n_wrong,
        "seconds": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(found))
    return 1 if n_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
