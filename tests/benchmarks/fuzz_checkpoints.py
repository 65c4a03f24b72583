"""Damaged checkpoints: each is read soundly or refused with an EdgeInferError, in bounded time and memory, and nothing
outside of its folder is opened.

    python tests/benchmarks/fuzz_checkpoints.py [--cases 600] [--seed 0] [--only INDEX ...] [--out RECORD.json]

Exits with 1 if a case does anything else. One JSON line on stdout at the end; a case is its index and the seed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from checkpoint_trials import BYTES, SECONDS, outcomes  # noqa: E402


def main() -> int:
    from machine import machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = outcomes(options.cases, options.seed, options.only)
    wrong = [(index, outcome) for index, outcome in found if not outcome.is_sound]
    for index, outcome in wrong:
        print(index, asdict(outcome), outcome.crash, sep="\n", file=sys.stderr)
    families = {outcome.family: Counter[str]() for _, outcome in found}
    for _, outcome in found:
        families[outcome.family][outcome.error or "read"] += 1
    record = {
        "command": " ".join(["python", *sys.argv]),
        "cases": len(found),
        "wrong": len(wrong),
        "slowest_seconds": round(max(outcome.seconds for _, outcome in found), 2),
        "most_bytes": max(outcome.n_bytes for _, outcome in found),
        "limits": {"seconds": SECONDS, "bytes": BYTES},
        "families": families,
        "machine": machine(),
    }
    print(json.dumps(record))
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
