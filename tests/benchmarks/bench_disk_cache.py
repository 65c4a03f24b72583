"""Seconds to the first token of a long prompt: read anew, and found on disk, each in a process of its own.

    python tests/benchmarks/bench_disk_cache.py [MODEL.gguf] [--tokens 4000] [--rounds 3] [-t 2] [--cache-type f16]

The limit is what the bytes take to copy from the system's cache of files, which is measured in the same run, and a pass
of one token. Both kinds of run take turns; figures are medians. The text of both must be the same. One JSON line on
stdout.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
from machine import machine

import edgeinfer
from edgeinfer.context_cache.cache import contexts_folder
from edgeinfer.library.local import default_model

DOCS = Path(__file__).parents[2] / "docs"
SOONER, MOST_SECONDS = 20.0, 0.150  # floors
ANSWER = 16  # tokens
ROOM = 96  # positions for the answer, and what the context is rounded up to


def measured(path: str, n_tokens: int, n_threads: int, cache_type: Any, cache_disk: str | None) -> dict[str, Any]:
    """One run: seconds to the first token after a warm-up, tokens found, and the answer."""
    n_ctx = -(-(n_tokens + ROOM) // 512) * 512
    text = "\n".join(page.read_text() for page in sorted(DOCS.glob("*.md")))
    options: dict[str, Any] = {"draft": "none", "cache_type": cache_type, "cache_disk": cache_disk}
    with edgeinfer.load(path, n_ctx=n_ctx, n_threads=n_threads, parallel=1, **options) as engine:
        prompt = engine.tokenize(text[: 8 * n_tokens])[:n_tokens]
        engine.generate("Once upon a time", max_tokens=4, temperature=0.0)
        started = time.perf_counter()
        stream = engine.stream(prompt, max_tokens=ANSWER, temperature=0.0)
        next(stream)
        seconds = time.perf_counter() - started
        for _ in stream:
            pass
        completion = stream.completion
        closing = time.perf_counter()
    return {
        "seconds": seconds,
        "n_prompt": len(prompt),
        "n_found": completion.usage.cached_tokens,
        "decode_tokens_per_second": completion.timings.decode_tokens_per_second,
        "close_seconds": time.perf_counter() - closing,
        "tokens": list(completion.tokens),
    }


def in_a_process(*arguments: object) -> dict[str, Any]:
    """What `measured` gives in a new process."""
    given = json.dumps(arguments)
    code = f"import json, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import bench_disk_cache as b; "
    code += "print(json.dumps(b.measured(*json.loads(sys.argv[1]))))"
    command = [sys.executable, "-c", code, given]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def copy_seconds() -> tuple[int, float]:
    """(bytes of all contexts, seconds to copy them from the system's cache of files into memory), the best of three."""
    folder = contexts_folder()
    assert folder is not None
    files = [each for each in folder.iterdir() if not each.name.startswith(".")]
    sizes = [each.stat().st_size for each in files]
    memory = bytearray(max(sizes))
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        for each in files:
            with each.open("rb", buffering=0) as file:
                file.readinto(memory)
        best = min(best, time.perf_counter() - started)
    return sum(sizes), best


@click.command()
@click.argument("model", required=False)
@click.option("--tokens", type=int, default=4000, show_default=True)
@click.option("--rounds", type=int, default=3, show_default=True)
@click.option("-t", "--threads", type=int, default=2, show_default=True)
@click.option("--cache-type", default="f16", show_default=True)
def main(model: str | None, tokens: int, rounds: int, threads: int, cache_type: str) -> None:
    """See the head of the file."""
    path = str(default_model() if model is None else model)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        common = (path, tokens, threads, cache_type)
        first = in_a_process(*common, "64GiB")
        assert first["n_found"] == 0
        anew, found = [], []
        for _ in range(rounds):
            anew.append(in_a_process(*common, None))
            found.append(in_a_process(*common, "64GiB"))
        n_bytes, seconds_of_copy = copy_seconds()
    assert all(each["tokens"] == first["tokens"] for each in anew + found), "the text must be the same"
    assert all(each["n_found"] == first["n_prompt"] - 1 for each in found)
    read, kept = (statistics.median(each["seconds"] for each in runs) for runs in (anew, found))
    click.echo(f"read anew {read:.3f} s, found on disk {1e3 * kept:.1f} ms: {read / kept:.1f} times sooner", err=True)
    click.echo(f"{n_bytes / 1e6:.0f} MB, a copy of which takes {1e3 * seconds_of_copy:.1f} ms", err=True)
    result = {
        "model": Path(path).name,
        "tokens": first["n_prompt"],
        "cache_type": cache_type,
        "threads": threads,
        "anew_seconds": [each["seconds"] for each in anew],
        "found_seconds": [each["seconds"] for each in found],
        "writing_seconds": first["seconds"],  # to the first token of a run that writes
        "writing_close_seconds": first["close_seconds"],
        "sooner": read / kept,
        "bytes": n_bytes,
        "copy_seconds": seconds_of_copy,
        "floor_sooner": read / kept >= SOONER,
        "floor_seconds": kept <= MOST_SECONDS,
        "machine": machine(),
        "version": edgeinfer.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
