"""The share of recurrences in the passes of hybrids: what their layers take beside their products.

    python tests/benchmarks/bench_recurrence.py MODEL.gguf [--threads 2] [--rows 1,2,4,8,16,32] [--n-past 64]

Each number of rows is a chain after --n-past tokens, of which nothing is committed, so that each pass reads the same.
For each the median of --repeats passes. Convolutions, lengths of queries and keys, states, norm and gate of what
they give count as recurrence, with what the first thread waits for the others there. Random weights do, as
make_hybrids.py writes them. Other work on the machine makes both parts slower, not alike. One JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from machine import machine

from edgeinfer.backends.base import run_sequence
from edgeinfer.backends.native import NativeBackend, NativeModel
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile

N_TOKENS = 4096  # different ones that texts are made of


def load(path: Path, n_threads: int, n_ctx: int) -> NativeModel:
    """The model for one text."""
    backend = NativeBackend()
    with ModelFile.open(path) as file:
        spec = read_spec(file)
        plan = backend.plan(file, spec, LoadSettings(n_ctx, n_threads=n_threads))
        return backend.load(file, spec, plan, Device(n_threads))


def measure(model: NativeModel, n_past: int, n_rows: int, repeats: int) -> dict[str, float | int]:
    """Medians of passes of so many rows, in milliseconds, and the share of the recurrence."""
    n_tokens = min(N_TOKENS, model.spec.n_vocab)
    text = [7 * i % n_tokens for i in range(n_past + n_rows)]
    session = model.session()
    run_sequence(session, text[:n_past])
    whole, part = [], []
    for repeat in range(repeats + 1):
        began = time.perf_counter()
        session.forward(text[n_past:], logits="all")
        if repeat:  # the first also applies what is committed
            whole.append(time.perf_counter() - began)
            part.append(model.decoder().recurrence_seconds)
    session.close()
    pass_ms, recurrence_ms = (1e3 * statistics.median(each) for each in (whole, part))
    return {
        "rows": n_rows,
        "pass_ms": round(pass_ms, 3),
        "recurrence_ms": round(recurrence_ms, 3),
        "share": round(recurrence_ms / pass_ms, 4),
    }


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", default="1,2,4,8,16,32")
    parser.add_argument("--n-past", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=21)
    arguments = parser.parse_args()
    rows = [int(n) for n in arguments.rows.split(",")]
    model = load(arguments.model, arguments.threads, arguments.n_past + max(rows))
    spec = model.spec
    found: dict[str, Any] = {
        **machine(),
        "model": arguments.model.name,
        "threads": arguments.threads,
        "recurrent_layers": sum(layer.mixer.state_kind == "recurrent" for layer in spec.layers),
        "layers": spec.n_layers,
        "n_past": arguments.n_past,
        "passes": [measure(model, arguments.n_past, n, arguments.repeats) for n in rows],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
