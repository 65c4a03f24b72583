"""One engine in a process of its own that passes a text, for bench_expert_cache.py; reads a Job as JSON from stdin.

Prints one JSON line: seconds of each pass, a hash of the logits of each, and what the system counted meanwhile.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

MARGIN = 48 << 20  # bytes of a limit that nobody planned: page tables, stacks, what Python takes later
Forward: TypeAlias = Callable[[np.ndarray], np.ndarray]  # (n,) tokens to the logits of the last


@dataclass(frozen=True)
class Job:
    """What is to be run."""

    variant: str  # a name of VARIANTS
    path: str
    n_ctx: int
    n_batch: int
    n_threads: int
    limit: int | None  # bytes of memory, None without one
    # warm_up, passes: token ids, each pass after those before it; chunks forget those before
    warm_up: Sequence[Sequence[int]]
    passes: Sequence[Sequence[int]]
    chunks: bool = False
    # least, seconds: of timed passes; more than `least` are made only while they took less than so many seconds
    # together
    least: int = 24
    seconds: float = 60.0
    slices: Sequence[Sequence[Any]] = ()  # of steering.py, library: of it
    library: str = ""


@dataclass(frozen=True)
class Opened:
    """An engine that is ready."""

    forward: Forward
    reset: Callable[[], object]  # forgets the text
    close: Callable[[], None]  # gives its memory back
    counts: Callable[[], dict[str, float]] = dict  # what the engine has counted so far
    facts: Mapping[str, Any] = field(default_factory=dict)  # of it


def open_llama(job: Job) -> Opened:
    from llama_nodes import Llama
    from steering import Slices, Steering

    steering = None
    if job.variant in ("steered", "predicted"):
        top_k = 8 if job.variant == "predicted" else 0
        steering = Steering(Path(job.library), top_k)
    callback = steering.callback if steering else None
    mapped = job.variant != "repacked"
    llama = Llama(Path(job.path), job.n_ctx, job.n_threads, callback, mapped, job.n_batch)
    if steering:
        steering.start([Slices(*values) for values in job.slices])
    return Opened(lambda tokens: llama.decode(tokens)[-1], lambda: llama.keep(0), llama.close)


def open_edgeinfer(job: Job) -> Opened:
    from expert_sessions import expert_sizes, open_model, plan_model

    from edgeinfer.offload.control import ExpertControl

    path, before = Path(job.path), status("RssAnon")
    sizes = job.n_ctx, job.n_batch, job.n_threads
    cache = None
    if job.limit is not None:
        least = expert_sizes(path).least
        cache = job.limit - MARGIN - before - (plan_model(path, *sizes, least).use.total - least)
    plan = plan_model(path, *sizes, cache)
    stack = ExitStack()
    model = stack.enter_context(open_model(path, *sizes, cache, PREFETCH[job.variant]))
    if PREFETCH[job.variant] is None and model.expert_cache is not None:
        control = ExpertControl(model.expert_cache, expert_sizes(path), job.n_threads)  # keeps nothing for the next run
        model.pass_hook = control.run
        control.begin()
    session = stack.enter_context(closing(model.session()))

    def forward(tokens: np.ndarray) -> np.ndarray:
        row: np.ndarray = session.forward(tokens, logits="last").logits[-1]
        session.commit(range(len(tokens)))
        return row

    def counts() -> dict[str, float]:
        stats = model.expert_stats()
        if stats is None:
            return {}
        names = "lookups", "hits", "bytes_read", "prefetches", "useful", "seconds_waited"
        totals = {name: sum(getattr(layer, name) for layer in stats.layers) for name in names}
        return {**totals, "busy_seconds": stats.busy_seconds}

    facts = {"planned": plan.use.total, "expert_cache": cache, "anonymous_before": before}
    return Opened(forward, lambda: session.truncate(0), stack.close, counts, facts)


VARIANTS: dict[str, Callable[[Job], Opened]] = {
    "mmap": open_llama,
    "steered": open_llama,
    "predicted": open_llama,
    "repacked": open_llama,
    "edgeinfer": open_edgeinfer,
    "edgeinfer-no-prefetch": open_edgeinfer,
    "edgeinfer-prefetch": open_edgeinfer,
}
# Of a token's experts, the share that is read ahead; None where that is decided as in the product.
PREFETCH = {"edgeinfer": None, "edgeinfer-no-prefetch": 0.0, "edgeinfer-prefetch": 5 / 8}


# ---- what the system counts ------------------------------------------------------------------------------------------


def status(name: str) -> int:
    """Bytes of /proc/self/status."""
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) << 10 if found else 0


def counters() -> dict[str, float]:
    """Bytes that this process has read from disk, mapped or not, its major faults, and seconds of CPU of all others."""
    read = re.search(r"read_bytes: (\d+)", Path("/proc/self/io").read_text())
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:8])
    others = user + nice + system + sum(interrupts) - int(fields[11]) - int(fields[12])
    return {
        "read_bytes": int(read[1]) if read else 0,
        "major_faults": int(fields[9]),
        "others_cpu_seconds": others / os.sysconf("SC_CLK_TCK"),
    }


def run(job: Job) -> dict[str, Any]:
    started = time.perf_counter()
    engine = VARIANTS[job.variant](job)
    loaded = time.perf_counter() - started
    digests, seconds, anonymous = [], [], 0

    def step(tokens: Sequence[int]) -> float:
        nonlocal anonymous
        if job.chunks:
            engine.reset()
        batch = np.array(tokens, np.int32)
        began = time.perf_counter()
        row = engine.forward(batch)
        took = time.perf_counter() - began
        digests.append(hashlib.sha256(np.ascontiguousarray(row)).hexdigest()[:12])
        anonymous = max(anonymous, status("RssAnon"))
        return took

    for tokens in job.warm_up:
        step(tokens)
    before = {**counters(), **engine.counts()}
    for tokens in job.passes:
        seconds.append(step(tokens))
        if len(seconds) >= job.least and sum(seconds) > job.seconds:
            break
    after = {**counters(), **engine.counts()}
    counted = {name: value - before[name] for name, value in after.items()}
    peak = {"anonymous": anonymous, "resident": status("VmHWM")}
    engine.close()
    return {"load_seconds": loaded, "seconds": seconds, "digests": digests, **counted, **peak, **engine.facts}


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(json.dumps(run(Job(**json.load(sys.stdin)))))
