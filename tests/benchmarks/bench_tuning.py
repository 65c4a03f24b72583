"""Whether prefetch tuning recovers from a bad start, as on an unknown CPU.

    python tests/benchmarks/bench_tuning.py MODEL.gguf ... [--threads 2] [--rounds 7] [--start NAME ...]

For each model: the known values for this CPU, and starts that are wrong on purpose. From each the search runs as at a
first load. Then passes of 1 to 8 tokens are timed with the known values, the bad start and the result, alternating, the
order swapped each round; figures are medians. "over_known" is the median of each round's ratio. One JSON line on stdout
at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine

from edgeinfer.backends.native import NativeBackend, NativeSession
from edgeinfer.backends.native.tuning import AROUND_L3, MOST_TOKENS, Prefetch, Search, Trials
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile

N_CONTEXT, N_BATCH = 64, 128
SIZES = range(1, MOST_TOKENS + 1)
Streams = Mapping[int, Prefetch]


def bad_starts(known: Streams) -> dict[str, Streams]:
    """What the values could be on a CPU that they were not measured on."""
    changes: dict[str, dict[str, Any]] = {
        "never ahead": {"ahead": 0, "easy": False, "eager": False},
        "too far ahead": {"ahead": 1 << 18},
        "one token left alone": {"easy": False, "eager": False},
        "around L3, tiny tasks": {"hint": AROUND_L3, "task": 4096, "tasks_each": 64},
        "several streams": {"at_once": 4},
    }
    return {name: {n: stream._replace(**change) for n, stream in known.items()} for name, change in changes.items()}


def use(session: NativeSession, streams: Streams) -> None:
    for n, stream in streams.items():
        session.model.decoder().set_prefetch(False, n, tuple(stream))


def milliseconds(session: NativeSession, tokens: list[int]) -> float:
    """The median of some passes with all logits."""
    times = []
    for _ in range(4):
        started = time.perf_counter()
        session.forward(tokens, logits="all")
        times.append(1e3 * (time.perf_counter() - started))
        session.commit([])
    return statistics.median(times[1:])


def compare(session: NativeSession, choices: Mapping[str, Streams], rounds: int) -> dict[str, Any]:
    """Medians of each choice for each size, and over those of the first."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 40000, N_CONTEXT + MOST_TOKENS).tolist()
    session.forward(tokens[:N_CONTEXT], logits=())
    session.commit(range(N_CONTEXT))
    times: dict[str, dict[int, list[float]]] = {name: {n: [] for n in SIZES} for name in choices}
    names = list(choices)
    for _ in range(rounds):
        for n in SIZES:
            for name in names:
                use(session, choices[name])
                times[name][n].append(milliseconds(session, tokens[N_CONTEXT : N_CONTEXT + n]))
        names.reverse()
    session.truncate(0)
    first = times[next(iter(choices))]
    return {
        name: {
            "ms": {n: round(statistics.median(of_n), 3) for n, of_n in of.items()},
            "over_known": {
                n: round(statistics.median(a / b for a, b in zip(of_n, first[n], strict=True)), 3)
                for n, of_n in of.items()
            },
        }
        for name, of in times.items()
    }


def bench(path: Path, n_threads: int, rounds: int, wanted: list[str] | None) -> dict[str, Any]:
    with ModelFile.open(path) as file:
        spec, backend = read_spec(file), NativeBackend(tuned=False)
        plan = backend.plan(file, spec, LoadSettings(2 * N_BATCH, n_batch=N_BATCH, n_threads=n_threads))
        session = backend.load(file, spec, plan, Device(n_threads)).session()
        decoder = session.model.tuned(N_BATCH)
        known = {n: Prefetch(*decoder.prefetch(False, n)) for n in SIZES}
        starts = {"known": known, **bad_starts(known)}
        starts = {name: start for name, start in starts.items() if not wanted or name in wanted}
        result: dict[str, Any] = {"model": path.name, "n_threads": n_threads, "starts": {}}
        for name, start in starts.items():
            use(session, start)
            trials = Trials(decoder, spec.n_layers, n_threads, False)
            search = Search(trials.seconds, decoder.streams_at_once, decoder.groups_at_once)
            started = time.perf_counter()
            found = search.run(start)
            seconds = time.perf_counter() - started
            choices = {"known": known, "start": start, "found": found}
            of_start = compare(session, choices, rounds)
            result["starts"][name] = {
                "seconds": round(seconds, 3),
                "disturbed": trials.were_disturbed,
                "found": {n: stream._asdict() for n, stream in found.items()},
                **of_start,
            }
            show(name, seconds, found[1], of_start)
        session.close()
    return result


def show(name: str, seconds: float, one: Prefetch, result: Mapping[str, Any]) -> None:
    print(f"\n{name}: {seconds:.2f} s; one token: {one}", file=sys.stderr)
    for choice, figures in result.items():
        cells = "".join(f"{figures['ms'][n]:8.2f} ({figures['over_known'][n]:.2f})" for n in SIZES)
        print(f"  {choice:>6} {cells}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--start", action="append", help="only this one, by its name in the report; may be repeated")
    arguments = parser.parse_args()
    results = [bench(path, arguments.threads, arguments.rounds, arguments.start) for path in arguments.models]
    print(json.dumps({"benchmark": "tuning", "machine": machine(), "results": results}))


if __name__ == "__main__":
    main()
