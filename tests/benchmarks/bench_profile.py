"""What `edgeinfer profile` expects of a model against what is measured, and how long the command takes.

    python tests/benchmarks/bench_profile.py MODEL.gguf [--ctx-size 512] [--rounds 3] [--draft none]

Each round begins without any kept measurement, as on a new machine. In it the command is timed twice (the first time
measures, the second finds it kept), and `--measure` loads the model in a process of its own. A round in which other
processes had the cores is left out. Medians of the other rounds; one JSON line on stdout at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from typing import Any

from machine import machine

PROFILE = (sys.executable, "-m", "edgeinfer", "profile")


def profile(folder: str, *arguments: str) -> tuple[float, dict[str, Any]]:
    """(seconds of the command, what it says) with measurements kept in that folder."""
    environment = os.environ | {"XDG_CACHE_HOME": folder}
    started = time.perf_counter()
    done = subprocess.run([*PROFILE, *arguments, "--json"], env=environment, stdout=subprocess.PIPE, check=True)
    return time.perf_counter() - started, json.loads(done.stdout)


def run(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """One round, None if it was disturbed."""
    chosen = ["--drafter", arguments.draft] if arguments.draft in ("none", "auto") else ["-md", arguments.draft]
    settings = [arguments.model, "-c", str(arguments.ctx_size), *chosen]
    with tempfile.TemporaryDirectory() as folder:
        first, found = profile(folder, *settings)
        kept, _ = profile(folder, *settings)
        _, checked = profile(folder, *settings, "--measure")
    check = checked["verification"]
    print(f"first {first:.2f} s, kept {kept:.2f} s, {check['speeds']}", file=sys.stderr)
    if found["expected"]["is_disturbed"] or check["was_disturbed"]:
        print("other processes had the cores: left out", file=sys.stderr)
        return None
    return {"first": first, "kept": kept, "speeds": check["speeds"], "ledger": check["ledger"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--ctx-size", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draft", default="none", help="none, auto, or a file")
    arguments = parser.parse_args()
    rounds = [found for _ in range(arguments.rounds) if (found := run(arguments)) is not None]
    if not rounds:
        raise SystemExit("every round was disturbed")
    speeds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for of in (of for found in rounds for of in found["speeds"]):
        for name in ("expected", "measured"):
            speeds[of["name"].partition(" (")[0]][name].append(of[name])
    table = {}
    for name, of in speeds.items():
        expected, measured = statistics.median(of["expected"]), statistics.median(of["measured"])
        table[name] = {"expected": expected, "measured": measured, "error": expected / measured - 1}
        print(f"{name:32} {expected:8.3g} {measured:8.3g} {100 * (expected / measured - 1):+6.1f} %")
    record = {
        "benchmark": "bench_profile",
        "model": os.path.basename(arguments.model),
        "n_ctx": arguments.ctx_size,
        "draft": arguments.draft,
        "rounds": len(rounds),
        "seconds_first": statistics.median(found["first"] for found in rounds),
        "seconds_kept": statistics.median(found["kept"] for found in rounds),
        "speeds": table,
        "ledger": rounds[-1]["ledger"],
        **machine(),
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
