"""A model with experts in less memory than it takes: edgeinfer's expert cache against llama.cpp's mapped file.

    python tests/benchmarks/bench_expert_cache.py MODEL.gguf [--shares 25,50,75] [--variants mmap,steered,edgeinfer]
        [--prefill] [--repeats 3] [--records FILE]

Each run is a process of its own in a memory cgroup, one variant after the other in each repeat. The limit is the same
for all: the model without its experts, that share of its experts, and --rest for all else (KV cache, activations,
Python). The model's files are dropped from the page cache before each run. All pass the same text token by token:
--warm-up tokens, then --least tokens and, while that takes less than --seconds, up to --tokens. With --prefill they
pass 512 tokens at once instead, --chunks times, different text each time.

mmap: llama.cpp as it is. steered: with MADV_RANDOM, and MADV_WILLNEED on what each layer chose, see steering.py.
predicted: and on what the next layer will probably choose. repacked: llama.cpp's default, where memory suffices.
edgeinfer: with the cache that the limit leaves; `edgeinfer pack` must have written its file. Share 100 is no limit.
edgeinfer-no-prefetch: never reading ahead but in prefill; edgeinfer-prefetch: always, 5 of 8 of a token's experts.

Medians and the 10th and 95th of a hundred of milliseconds a pass, over all repeats; bytes read and major faults for
each pass; cores that other processes kept busy (figures with more than 0.2 of them are noise); GB of the files in the
page cache before and after (what other processes have of them is no part of the limit: before there must be none, and
after no more than the limit, so nobody else may use these files); the most memory in the cgroup, and of the process
without mapped files; what the expert cache counted: waits are those of all threads that compute, disk_busy is the time
with at least one read under way. Hashes of logits must be the same in all runs of an engine. --records keeps each run:
the same command goes on where it was stopped. One JSON line on stdout at the end.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import numpy as np
from limited_run import VARIANTS, Job
from machine import machine, read_ahead_kib
from memory_group import MemoryGroup
from records import Records
from steering import compile_steering, expert_bytes, expert_slices
from text import LICENSE_TEXT, SAMPLE_TEXT

from edgeinfer.backends.native.packing.packed import packed_path
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer

N_PREFILL, N_DECODE_BATCH = 512, 64
CACHE_COUNTS = "lookups", "hits", "bytes_read", "seconds_waited", "busy_seconds", "prefetches", "useful"
PAGE, LEFT_BYTES = 4096, 32 << 20  # so much of a file may stay in the page cache: its header, which is read before


def drop(paths: Sequence[Path], patience: float = 60) -> float:
    """Take files out of the page cache; gives the GB of them that stay, which other processes have mapped."""
    until = time.monotonic() + patience
    while True:
        left = 0
        for path in paths:
            with path.open("rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                left += cached_bytes(file.fileno())
        if left < LEFT_BYTES or time.monotonic() > until:
            return left / 1e9
        time.sleep(2)


def cached_bytes(descriptor: int) -> int:
    """Of a file, in the page cache."""
    n_bytes = os.fstat(descriptor).st_size
    with mmap.mmap(descriptor, n_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as mapping:
        flags = (ctypes.c_ubyte * -(-n_bytes // PAGE))()
        start = ctypes.addressof(view := ctypes.c_char.from_buffer(mapping))
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(n_bytes), flags)
        del view
    if failed:
        raise SystemExit("mincore failed")
    return PAGE * int((np.frombuffer(flags, np.uint8) & 1).sum())


class Bench:
    """What all runs of a model share."""

    def __init__(self, path: Path, arguments: argparse.Namespace, library: Path) -> None:
        self.path, self.arguments, self.library = path.resolve(), arguments, library
        self.slices = expert_slices(path)
        self.expert_bytes = expert_bytes(self.slices)
        with ModelFile.open(path) as file:
            self.files = [part.resolve() for part in file.paths]
            tokens = Tokenizer.from_file(file).encode(SAMPLE_TEXT + LICENSE_TEXT)
        self.dense_bytes = sum(file.stat().st_size for file in self.files) - self.expert_bytes
        self.tokens = [int(token) for token in tokens]

    def limit(self, share: int) -> int | None:
        rest = self.arguments.rest << 20
        return None if share >= 100 else self.dense_bytes + self.expert_bytes * share // 100 + rest

    def job(self, variant: str, share: int) -> Job:
        arguments = self.arguments
        n_ctx = N_PREFILL if arguments.prefill else arguments.warm_up + arguments.tokens
        return Job(
            variant,
            str(self.path),
            n_ctx,
            n_batch=N_PREFILL if arguments.prefill else N_DECODE_BATCH,
            n_threads=arguments.threads,
            limit=self.limit(share),
            slices=[astuple(s) for s in self.slices],
            library=str(self.library),
            **(self._prefill() if arguments.prefill else self._decode()),
        )

    def _prefill(self) -> dict[str, Any]:
        starts = range(0, self.arguments.chunks * N_PREFILL, N_PREFILL)
        chunks = [self.tokens[i : i + N_PREFILL] for i in starts]
        return {"warm_up": [], "passes": chunks, "chunks": True, "least": len(chunks)}

    def _decode(self) -> dict[str, Any]:
        n, arguments = self.arguments.warm_up, self.arguments
        single = [[token] for token in self.tokens[: n + arguments.tokens]]
        return {
            "warm_up": single[:n],
            "passes": single[n:],
            "least": arguments.least,
            "seconds": arguments.seconds,
        }

    def cached(self) -> float:
        """GB of the model's files in the page cache."""
        n_bytes = 0
        for path in self.all_files():
            with path.open("rb") as file:
                n_bytes += cached_bytes(file.fileno())
        return n_bytes / 1e9

    def all_files(self) -> list[Path]:
        packed = packed_path(self.files[0])
        return [*self.files, *([packed] if packed.exists() else [])]

    def run(self, variant: str, share: int) -> dict[str, Any]:
        """What limited_run.py found, and the peak of the group."""
        job = self.job(variant, share)
        left = drop(self.all_files())
        group = MemoryGroup(job.limit) if job.limit is not None else None
        try:
            done = subprocess.run(
                [sys.executable, str(Path(__file__).with_name("limited_run.py"))],
                input=json.dumps(asdict(job)),
                capture_output=True,
                text=True,
                preexec_fn=group.enter if group else None,
            )
            if done.returncode:
                return {"failed": done.returncode, "error": done.stderr[-300:], "limit": job.limit}
            found = {**json.loads(done.stdout), "limit": job.limit, "cached_before": left}
            return found | {"group_peak": group.peak if group else None, "cached_after": self.cached()}
        finally:
            if group:
                group.remove()


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the repeats of a variant."""
    failed = [run for run in runs if "failed" in run]
    good = [run for run in runs if "failed" not in run]
    if not good:
        return {"failed": len(failed), "error": failed[-1]["error"] if failed else "not run"}
    ms = 1e3 * np.concatenate([run["seconds"] for run in good])
    n = len(ms)
    row = {
        "runs": len(good),
        "passes": n,
        **{f"p{at}_ms": round(float(np.percentile(ms, at)), 2) for at in (10, 50, 95)},
        "mean_ms": round(float(ms.mean()), 2),
        "first_ms": [round(1e3 * run["seconds"][0], 1) for run in good],
        "load_seconds": round(float(np.median([run["load_seconds"] for run in good])), 2),
        "read_mb_per_pass": round(sum(run["read_bytes"] for run in good) / n / 1e6, 1),
        "major_faults_per_pass": round(sum(run["major_faults"] for run in good) / n, 1),
        "others_cpu": round(float(sum(run["others_cpu_seconds"] for run in good) / (ms.sum() / 1e3)), 2),
        "cached_before_gb": round(max(run["cached_before"] for run in good), 2),
        "cached_after_gb": round(max(run["cached_after"] for run in good), 2),
        "anonymous_mb": round(max(run["anonymous"] for run in good) / 1e6),
        "group_peak_mb": round(max(run["group_peak"] or 0 for run in good) / 1e6),
        "limit_mb": round((good[0]["limit"] or 0) / 1e6),
    }
    if "lookups" in good[0]:
        row |= cache_summary(good)
    return row | ({"failed": len(failed)} if failed else {})


def cache_summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the expert cache counted in runs of edgeinfer. planned_mb: of the model, beside what Python had before."""
    n = sum(len(run["seconds"]) for run in runs)
    total = {name: sum(run[name] for run in runs) for name in CACHE_COUNTS}
    planned = [run["planned"] + run["anonymous_before"] for run in runs]
    return {
        "hit_rate": round(total["hits"] / total["lookups"], 3),
        "cache_read_mb_per_pass": round(total["bytes_read"] / n / 1e6, 1),
        "waited_ms_per_pass": round(1e3 * total["seconds_waited"] / n, 2),
        "disk_busy_ms_per_pass": round(1e3 * total["busy_seconds"] / n, 2),
        "disk_mb_s": round(total["bytes_read"] / 1e6 / max(total["busy_seconds"], 1e-9)),
        "prefetched": total["prefetches"],
        "useful": total["useful"],
        "cache_mb": round(runs[0]["expert_cache"] / 1e6),
        "planned_mb": round(planned[0] / 1e6),
        "anonymous_of_plan": round(max(run["anonymous"] / plan for run, plan in zip(runs, planned, strict=True)), 3),
    }


def same_logits(runs: Sequence[dict[str, Any]]) -> bool:
    """Whether all runs had the same logits as far as they went."""
    lists = [run["digests"] for run in runs if "failed" not in run]
    return all(a == b for one in lists for a, b in zip(one, lists[0], strict=False))


def engine_of(variant: str) -> str:
    """Variants of one engine have the same logits; repacked weights are multiplied by other functions."""
    return variant if variant == "repacked" else VARIANTS[variant].__name__


def wanted(arguments: argparse.Namespace) -> Iterator[tuple[int, int, str]]:
    """(repeat, share, variant) of all runs in their order."""
    for repeat in range(arguments.repeats):
        for share in arguments.shares:
            yield from ((repeat, share, variant) for variant in arguments.variants)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--shares", type=lambda s: [int(n) for n in s.split(",")], default=[25, 50, 75])
    parser.add_argument("--variants", type=lambda s: s.split(","), default=["mmap", "steered", "edgeinfer"])
    parser.add_argument("--rest", type=int, default=320, help="MiB of the limit beside the model")
    parser.add_argument("--warm-up", type=int, default=16, help="tokens before those that are timed")
    parser.add_argument("--tokens", type=int, default=96, help="most that are timed in a run")
    parser.add_argument("--least", type=int, default=24, help="fewest that are timed in a run")
    parser.add_argument("--seconds", type=float, default=20, help="of timed tokens in a run, unless these are too few")
    parser.add_argument("--prefill", action="store_true", help="512 tokens at once")
    parser.add_argument("--chunks", type=int, default=3, help="times that with --prefill")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--records", type=Path, help="keep runs here, and leave out those that it has")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    fixed = ("rest", "warm_up", "tokens", "least", "seconds", "prefill", "chunks", "threads")
    settings = {"model": arguments.model.name, **{name: getattr(arguments, name) for name in fixed}}
    records = Records(arguments.records, settings)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(arguments.model, arguments, compile_steering(Path(folder)))
        for repeat, share, variant in wanted(arguments):
            key = f"{share} {variant} {repeat}"
            if key not in records.rows:
                records.add(key, bench.run(variant, share))
                print(key, summary([records.rows[key]]), file=sys.stderr, flush=True)
    groups: dict[str, dict[str, list[dict[str, Any]]]] = {}
    engines: dict[str, list[dict[str, Any]]] = {}
    for key, run in records.rows.items():
        share_text, _, rest = key.partition(" ")
        variant = rest.rpartition(" ")[0]
        groups.setdefault(share_text, {}).setdefault(variant, []).append(run)
        engines.setdefault(engine_of(variant), []).append(run)
    rows = {share: {name: summary(runs) for name, runs in of.items()} for share, of in groups.items()}
    equal = {name: same_logits(runs) for name, runs in engines.items()}
    sizes = {"expert_bytes": bench.expert_bytes, "dense_bytes": bench.dense_bytes}
    found = {**settings, **sizes, "read_ahead_kib": read_ahead_kib(bench.path), "same_logits": equal, "shares": rows}
    print(json.dumps({"benchmark": "expert cache", "machine": machine(), **found}))


if __name__ == "__main__":
    main()
