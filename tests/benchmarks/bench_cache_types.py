"""What each type of KV cache costs: perplexity, recall over a long context, and the time of a token.

    python tests/benchmarks/bench_cache_types.py MODEL.gguf ... [--threads 2] [--windows 2] [--rounds 15]

Perplexity over windows of 2048 tokens of this project's documentation, from position 128 on, with the divergence
KL(f16 || type) of each row. Recall: 1960 tokens of documentation with 24 codes of three digits spread over it; how many
are, asked for one by one behind it, the most probable continuation. Time: one token behind 1960, types in turns,
medians.
One JSON line on stdout at the end; with --note it says what else ran on the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any, get_args

import numpy as np
from machine import machine
from numpy.typing import NDArray

from edgeinfer.backends.base import run_text
from edgeinfer.backends.native import NativeBackend, NativeSession
from edgeinfer.common.settings import CacheType, LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer

N_CTX, N_BATCH, N_UNSEEN, N_PAST, N_ASKED = 2048, 512, 128, 1960, 24
TYPES: tuple[CacheType, ...] = get_args(CacheType)
DOCS = Path(__file__).parents[2] / "docs"
FIRST = ("red", "blue", "green", "grey", "black", "white", "brown", "pink", "gold", "silver", "orange", "purple")
SECOND = ("horse", "river", "table", "window", "garden", "engine", "bridge", "letter", "mountain", "kitchen", "doctor")

Sessions = dict[CacheType, NativeSession]


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    shifted: NDArray[np.float32] = logits - logits.max(axis=-1, keepdims=True)
    logs: NDArray[np.float32] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return logs


def perplexity(sessions: Sessions, tokens: NDArray[np.int32]) -> dict[str, dict[str, float]]:
    """Of each type: sums of -log p of the tokens that follow, of divergences, and of equal most probable tokens."""
    sums = {kind: {"nll": 0.0, "divergence": 0.0, "agreement": 0.0, "rows": 0.0} for kind in sessions}
    for session in sessions.values():
        session.truncate(0)
    for first in range(0, len(tokens) - 1, N_BATCH):
        part = tokens[first : min(first + N_BATCH, len(tokens) - 1)]
        rows = np.arange(max(0, N_UNSEEN - first), len(part))
        expected: NDArray[np.float32] | None = None
        for kind, session in sessions.items():
            found = log_softmax(session.forward(part, logits=rows.tolist()).logits)
            session.commit(range(len(part)))
            expected = found if expected is None else expected
            of_kind = sums[kind]
            of_kind["nll"] -= float(found[np.arange(len(rows)), tokens[first + rows + 1]].sum())
            of_kind["divergence"] += float((np.exp(expected) * (expected - found)).sum())
            of_kind["agreement"] += float((expected.argmax(-1) == found.argmax(-1)).sum())
            of_kind["rows"] += len(rows)
    return {str(kind): of_kind for kind, of_kind in sums.items()}


def perplexities(sessions: Sessions, tokenizer: Tokenizer, n_windows: int) -> dict[str, dict[str, float]]:
    text = "".join(page.read_text() for page in sorted(DOCS.glob("*.md")))
    ids = np.array(tokenizer.encode(text), dtype=np.int32)
    windows = ids[: n_windows * N_CTX].reshape(-1, N_CTX)
    of_windows = [perplexity(sessions, window) for window in windows]
    results: dict[str, dict[str, float]] = {}
    for kind in TYPES:
        total = {name: sum(of[kind][name] for of in of_windows) for name in of_windows[0][kind]}
        results[kind] = {
            "perplexity": round(math.exp(total["nll"] / total["rows"]), 4),
            "kl_to_f16": round(total["divergence"] / total["rows"], 5),
            "same_first_token_as_f16": round(total["agreement"] / total["rows"], 4),
        }
    return results


def needles(rng: np.random.Generator) -> dict[str, str]:
    """Codes by names."""
    names = [f"{a} {b}" for a in FIRST for b in SECOND]
    return {name: str(rng.integers(100, 1000)) for name in rng.permutation(names)[:N_ASKED].tolist()}


def haystack(tokenizer: Tokenizer, codes: dict[str, str]) -> list[int]:
    """About N_PAST tokens of this project's documentation with the codes spread over it."""
    words = "".join(page.read_text() for page in sorted(DOCS.glob("*.md"))).split()
    n_tokens = len(tokenizer.encode(" ".join(words[:2000])))
    each = 2000 * (N_PAST - 20 * len(codes)) // n_tokens // len(codes)  # words before a code
    parts = [
        " ".join(words[i * each : (i + 1) * each]) + f"\nThe code of the {name} is {code}.\n"
        for i, (name, code) in enumerate(codes.items())
    ]
    ids: list[int] = tokenizer.encode("".join(parts))
    return ids[:N_PAST]


def recall(sessions: Sessions, tokenizer: Tokenizer) -> dict[str, dict[str, float]]:
    """Share of the codes that each type gives back, and the mean of -log p of a code. Asking commits nothing."""
    codes = needles(np.random.default_rng(3))
    ids, results = haystack(tokenizer, codes), {}
    for kind, session in sessions.items():
        session.truncate(0)
        run_text(session, ids, logits="none")
        n_right, nll = 0, 0.0
        for name, code in codes.items():
            question = tokenizer.encode(f"The code of the {name} is")
            answer = tokenizer.encode(f"The code of the {name} is {code}")[len(question) :]
            rows = range(len(question) - 1, len(question) + len(answer) - 1)
            logs = log_softmax(session.forward([*question, *answer], logits=rows).logits)
            n_right += logs.argmax(axis=-1).tolist() == answer
            nll -= float(logs[np.arange(len(answer)), answer].sum())
        results[str(kind)] = {"recalled": round(n_right / len(codes), 3), "nll": round(nll / len(codes), 4)}
    return results


def milliseconds(sessions: Sessions, rounds: int) -> dict[str, float]:
    """Median of a token behind N_PAST others, types in turns."""
    rng = np.random.default_rng(5)
    times: dict[CacheType, list[float]] = {kind: [] for kind in sessions}
    for session in sessions.values():
        session.truncate(0)
        run_text(session, rng.integers(0, 1000, N_PAST), logits="none")
    for turn in range(rounds + 1):
        for kind, session in sessions.items():
            started = time.perf_counter()
            session.forward([7])
            if turn:  # the first turn warms up
                times[kind].append(1e3 * (time.perf_counter() - started))
    return {str(kind): round(statistics.median(of), 3) for kind, of in times.items()}


def bench(path: Path, n_threads: int, n_windows: int, rounds: int) -> dict[str, Any]:
    with ModelFile.open(path) as file:
        spec, backend, tokenizer = read_spec(file), NativeBackend(), Tokenizer.from_file(file)
        plans = {
            kind: backend.plan(file, spec, LoadSettings(N_CTX, n_batch=N_BATCH, n_threads=n_threads, cache_type=kind))
            for kind in TYPES
        }
        model = backend.load(file, spec, plans["f16"], Device(n_threads))
        sessions = {kind: model.session(cache_type=kind) for kind in TYPES}
        results: dict[str, Any] = {
            "model": path.name,
            "kv_cache_mib": {kind: round(plan.use.kv_cache / 2**20, 2) for kind, plan in plans.items()},
            "milliseconds": milliseconds(sessions, rounds),
        }
        if n_windows:
            results["text"] = perplexities(sessions, tokenizer, n_windows)
            results["recall"] = recall(sessions, tokenizer)
        model.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--windows", type=int, default=2, help="of 2048 tokens; 0 for times only")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--note", default="")
    arguments = parser.parse_args()
    models = [bench(path, arguments.threads, arguments.windows, arguments.rounds) for path in arguments.models]
    print(json.dumps({"benchmark": "cache_types", "machine": machine(), "note": arguments.note, "models": models}))


if __name__ == "__main__":
    main()
