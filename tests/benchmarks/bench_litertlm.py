"""A .litertlm file against its source: how far its logits are from those of exact arithmetic, and its speed and memory.

    python tests/benchmarks/bench_litertlm.py MODEL.gguf [--tokens 192] [--n-ctx 1280] [--rounds 3] [--threads 2]

With activations of 16 and of 8 bits: the mean Kullback-Leibler divergence (nats) of the next token from that of the
same weights in float32 (the reference backend), over the first tokens of sample.txt, and how often the best token is
the same; beside them the native engine. Then, in LiteRT-LM with packed weights on disk, milliseconds a token of a
prompt of 100 words and of 64 tokens behind it, and the most memory that it took. One JSON line on stdout at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine
from numpy.typing import NDArray

from edgeinfer.backends.native import NativeBackend
from edgeinfer.backends.reference import ReferenceBackend
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.exporters.checks.runtime import peak_bytes
from edgeinfer.exporters.litertlm import LitertlmTarget
from edgeinfer.exporters.litertlm.graph import build_model, cache_positions, prefill_lengths
from edgeinfer.exporters.litertlm.library import open_runtime, versions
from edgeinfer.exporters.request import Request
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer

Logits = NDArray[np.float32]
TEXT = Path(__file__).with_name("sample.txt")
PROMPT, N_DECODED = " ".join(["word"] * 100), 64


def engine_logits(file: ModelFile, tokens: list[int], backend: Any) -> Logits:
    spec = read_spec(file)
    model = backend.load(file, spec, backend.plan(file, spec, LoadSettings(len(tokens))), Device(2))
    try:
        return np.array(model.session().forward(np.array(tokens, np.int32), logits="all").logits)
    finally:
        model.close()


def file_logits(file: ModelFile, tokens: list[int], fine: bool, folder: Path) -> Logits:
    """Those of all tokens, one by one."""
    spec, n_ctx = read_spec(file), len(tokens)
    with (folder / "model.tflite").open("wb") as out:
        build_model(file, spec, n_ctx, fine).write(out)
    from ai_edge_litert.interpreter import Interpreter

    decode = Interpreter(str(folder / "model.tflite"), num_threads=2).get_signature_runner("decode")
    n_cache = cache_positions(n_ctx)
    caches: dict[str, Any] = {}
    for index, block in enumerate(layer.mixer for layer in spec.layers):
        caches[f"kv_cache_k_{index}"] = np.zeros((1, block.n_kv_heads, n_cache, block.head_dim), np.float32)
        caches[f"kv_cache_v_{index}"] = np.zeros((1, block.n_kv_heads, block.head_dim, n_cache), np.float32)
    rows = []
    for position, token in enumerate(tokens):
        mask = np.where(np.arange(n_cache) <= position, 0, -1e9).astype(np.float32)[None, None, None]
        ids, place = np.array([[token]], np.int32), np.array([position], np.int32)
        caches = decode(tokens=ids, input_pos=place, mask=mask, **caches)
        rows.append(caches.pop("logits")[0, 0])
    return np.stack(rows)


def distance(wanted: Logits, found: Logits) -> dict[str, float]:
    def log_softmax(logits: Logits) -> NDArray[np.float64]:
        shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
        return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))

    p, q = log_softmax(wanted), log_softmax(found)
    same = float(np.mean(wanted.argmax(axis=1) == found.argmax(axis=1)))
    return {"kl": round(float(np.mean(np.sum(np.exp(p) * (p - q), axis=1))), 6), "same_best": round(same, 4)}


def timed(path: Path, folder: Path, n_threads: int, rounds: int) -> dict[str, float]:
    """Of a file in LiteRT-LM, in a process of its own, which finds the packed weights of the first one."""
    for _ in range(2):
        command = [sys.executable, __file__, "--time", str(path), str(folder), str(n_threads), str(rounds)]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


def time_file(path: str, folder: str, n_threads: int, rounds: int) -> dict[str, Any]:
    runtime = open_runtime()
    started = time.perf_counter()
    engine = runtime.Engine(path, backend=runtime.Backend.CPU(thread_count=n_threads), cache_dir=folder)
    loaded = time.perf_counter() - started
    times = []
    for _ in range(rounds + 1):
        session = engine.create_session(
            apply_prompt_template=False, sampler_config=runtime.SamplerConfig(top_k=1), max_output_tokens=N_DECODED
        )
        times.append([time.perf_counter()])
        session.run_prefill([PROMPT])
        times[-1].append(time.perf_counter())
        text = session.run_decode().texts[0]
        times[-1].append(time.perf_counter())
        session.close()
    n_prompt, n_decoded = len(engine.tokenize(PROMPT)), max(1, len(engine.tokenize(text)))
    engine.close()
    prefill, decode = (statistics.median(b - a for a, b in (t[i : i + 2] for t in times[1:])) for i in (0, 1))
    return {
        "load_s": round(loaded, 2),
        "prompt_ms_a_token": round(1e3 * prefill / n_prompt, 2),
        "decode_ms_a_token": round(1e3 * decode / n_decoded, 2),
        "peak_mib": round((peak_bytes() or 0) / 2**20, 1),
    }


def main() -> None:
    if sys.argv[1:2] == ["--time"]:
        print(json.dumps(time_file(*sys.argv[2:4], *map(int, sys.argv[4:]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    for name, value in (("tokens", 192), ("n-ctx", 1280), ("rounds", 3), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    report: dict[str, Any] = {"model": args.model.name, "n_tokens": args.tokens, "n_ctx": args.n_ctx}
    report |= {"prefill_lengths": prefill_lengths(args.n_ctx), "threads": args.threads, "packages": versions()}
    with ModelFile.open(args.model) as file, tempfile.TemporaryDirectory() as scratch:
        tokens = Tokenizer.from_file(file).encode(TEXT.read_text())[: args.tokens]
        exact = engine_logits(file, tokens, ReferenceBackend())
        report["native"] = distance(exact, engine_logits(file, tokens, NativeBackend()))
        for bits in (16, 8):
            found: dict[str, Any] = distance(exact, file_logits(file, tokens, bits == 16, Path(scratch)))
            out, folder = Path(scratch) / f"a{bits}.litertlm", Path(scratch) / f"cache{bits}"
            folder.mkdir()
            request = Request(args.model, out, n_ctx=args.n_ctx, check=False, more={"activations": bits})
            result = LitertlmTarget().write(request, lambda share: None)
            found["file_mib"] = round(out.stat().st_size / 2**20, 1)
            found["estimated_peak_mib"] = round(result.facts["estimated_peak_bytes"] / 2**20, 1)
            report[f"activations_{bits}"] = found | timed(out, folder, args.threads, args.rounds)
            print(bits, found, file=sys.stderr)
    print(json.dumps(report | {"machine": machine()}))


if __name__ == "__main__":
    main()
