"""From opening a model file to the first token, and the memory it takes, against llama-cpp-python.

    python tests/benchmarks/bench_load.py MODEL.gguf ... [--threads 2] [--rounds 5] [--no-peer]

Each in a process of its own, in turns, with the files in the page cache, behind one that fills 2 GiB of memory: where a
virtual machine gives free pages back to its host, who comes first would wait for new ones. They are: edgeinfer that
packs at load, edgeinfer that maps what `edgeinfer pack` wrote (beside a link, both removed again), llama.cpp with its
defaults; a context of 4096 and a prompt of 16 tokens. The vocabulary counts, importing does not. Medians of seconds
and of the largest resident set. One JSON line on stdout at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import machine

from edgeinfer.backends.native import NativeBackend
from edgeinfer.backends.native.packing.packed import packed_path
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile

MEASURED = r"""
import json, re, sys, time
path, n_threads, tokens = sys.argv[1], int(sys.argv[2]), list(range(100, 116))
{imports}
started = time.perf_counter()
{work}
seconds = time.perf_counter() - started
peak = re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())
print(json.dumps([seconds, int(peak[1]) / 1024]))
"""
FILLED = "import numpy; numpy.ones(2 << 30, numpy.uint8)"
OURS = MEASURED.format(
    imports="import edgeinfer.engine, edgeinfer.backends.native\n"
    "from edgeinfer.models.architectures import llama, qwen2",
    work="""engine = edgeinfer.load(path, n_ctx=4096, n_threads=n_threads, backend="native", draft="none")
engine.session.forward(tokens).logits.argmax()""",
)
PEER = MEASURED.format(
    imports="import llama_cpp\nllama_cpp.llama_backend_init()",
    work="""model = llama_cpp.Llama(path, n_ctx=4096, n_threads=n_threads, n_threads_batch=n_threads, verbose=False)
model.eval(tokens)
model.sample(temp=0)""",
)


def bench(path: Path, n_threads: int, rounds: int, peer: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        linked = {name: Path(folder) / name / path.name for name in ("plain", "packed")}
        for link in linked.values():
            link.parent.mkdir()
            link.hardlink_to(path)
        with ModelFile.open(linked["packed"]) as file:
            NativeBackend().pack(file, read_spec(file), packed_path(linked["packed"]))
        programs = {"edgeinfer": (OURS, linked["plain"]), "edgeinfer, packed": (OURS, linked["packed"])}
        if peer:
            programs["llama.cpp"] = (PEER, path)
        seconds: dict[str, list[float]] = {name: [] for name in programs}
        mebibytes: dict[str, list[float]] = {name: [] for name in programs}
        for turn in range(rounds + 1):
            for name, (program, place) in programs.items():
                command = [sys.executable, "-c", program, str(place), str(n_threads)]
                subprocess.run([sys.executable, "-c", FILLED], check=True)
                run = subprocess.run(command, check=True, capture_output=True, text=True)
                if turn:  # the first turn warms up
                    took, held = json.loads(run.stdout)
                    seconds[name].append(took)
                    mebibytes[name].append(held)
    return {
        "model": path.name,
        "n_threads": n_threads,
        "seconds": {name: round(statistics.median(values), 4) for name, values in seconds.items()},
        "peak_rss_mib": {name: round(statistics.median(values)) for name, values in mebibytes.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-peer", action="store_true", help="without llama-cpp-python")
    arguments = parser.parse_args()
    results = []
    for path in arguments.models:
        results.append(bench(path.resolve(), arguments.threads, arguments.rounds, not arguments.no_peer))
        for name, took in results[-1]["seconds"].items():
            held = results[-1]["peak_rss_mib"][name]
            print(f"{path.name}  {name:18}{took:9.4f} s{held:8} MiB", file=sys.stderr)
    print(json.dumps({"benchmark": "load", "machine": machine(), "results": results}))


if __name__ == "__main__":
    main()
