"""What a pass of single tokens of several texts costs, over a pass of one: a server that decodes texts together.

    python tests/benchmarks/bench_joint_passes.py MODEL.gguf ... [--threads 2] [--rounds 30] [--context 256]

Each text has its own session with `context` committed tokens. In turns: one text; 2, 4 and 8 texts in one joint pass
(Model.forward); and as many tokens behind one text in one pass, which is the same work but for the attention. Medians
and minima of milliseconds, and their ratios to the pass of one text. One JSON line on stdout at the end; with --note it
says what else ran on the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine

from edgeinfer.backends.base import Rows, run_text
from edgeinfer.backends.native import NativeBackend, NativeSession
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile

SIZES = (1, 2, 4, 8)


def joint_pass(sessions: list[NativeSession], tokens: list[int]) -> None:
    """A token of each text; nothing is committed."""
    pairs = zip(sessions, tokens, strict=True)
    sessions[0].model.forward([Rows(session, [token]) for session, token in pairs])


def one_text(session: NativeSession, tokens: list[int]) -> None:
    """As many tokens of one text."""
    session.forward(tokens, logits="all")


def milliseconds(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - started)


def bench(path: Path, n_threads: int, rounds: int, n_context: int) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    with ModelFile.open(path) as file:
        spec, backend = read_spec(file), NativeBackend()
        plan = backend.plan(file, spec, LoadSettings(n_context + 16, n_batch=128, n_threads=n_threads))
        model = backend.load(file, spec, plan, Device(n_threads))
        sessions = [model.session() for _ in range(max(SIZES))]
        for session in sessions:
            run_text(session, rng.integers(0, spec.n_vocab, n_context).astype(np.int32), logits="none")
        tokens = rng.integers(0, spec.n_vocab, max(SIZES)).tolist()
        times: dict[str, dict[int, list[float]]] = {"texts": {n: [] for n in SIZES}, "one_text": {n: [] for n in SIZES}}
        for turn in range(rounds + 1):
            for n in SIZES:
                joint = milliseconds(lambda n=n: joint_pass(sessions[:n], tokens[:n]))  # type: ignore[misc]
                alone = milliseconds(lambda n=n: one_text(sessions[0], tokens[:n]))  # type: ignore[misc]
                if turn:  # the first turn warms up
                    times["texts"][n].append(joint)
                    times["one_text"][n].append(alone)
        model.close()
    result: dict[str, Any] = {"model": path.name, "n_threads": n_threads, "context": n_context}
    for name, of_times in (("median", statistics.median), ("fastest", min)):
        ms = {kind: {n: of_times(of_n) for n, of_n in of.items()} for kind, of in times.items()}
        one = ms["one_text"][1]
        result[f"{name}_ms"] = {kind: {n: round(one_ms, 3) for n, one_ms in of.items()} for kind, of in ms.items()}
        result[f"{name}_over_one"] = {
            kind: {n: round(one_ms / one, 3) for n, one_ms in of.items()} for kind, of in ms.items()
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--note", help="What else ran on the machine.")
    options = parser.parse_args()
    results = [bench(path, options.threads, options.rounds, options.context) for path in options.models]
    print(json.dumps({"machine": machine(), "rounds": options.rounds, "note": options.note, "models": results}))


if __name__ == "__main__":
    main()
