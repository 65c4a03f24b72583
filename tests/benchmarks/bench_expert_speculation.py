"""Speculation on models with experts: what n tokens cost, how large their unions are, and whether drafts pay.

    python tests/benchmarks/bench_expert_speculation.py MODEL.gguf ... [--caches 100%,50%] [--tokens 128] [--threads 2]

The models are those of split_ffn.py, which route real text. `cost`: milliseconds of passes of n tokens of a text over
those of one, all experts in memory, and the same with random ids; `union`: experts that they need, each once, in units
of one token's. `speed`: for each size of the expert cache tokens a second, by category of prompts, with the drafters
"suffix" and "recycling" and without drafts, in turns; the greedy texts must be equal. With them the costs that were
learnt, the share of experts that was missing, and how many of the experts predicted for tokens were right. One JSON
line on stdout at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from expert_sessions import open_model
from machine import machine
from text import LICENSE_TEXT, SAMPLE_TEXT

import edgeinfer
from edgeinfer.backends.base import run_sequence
from edgeinfer.backends.native import NativeSession
from edgeinfer.engine import Engine
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer
from edgeinfer.speculation.expert_cost import ExpertCostModel

SIZES = (1, 2, 3, 4, 6, 8, 16)
N_CONTEXT, STRETCHES = 64, 4
DRAFTS: dict[str, Any] = {"drafts": ["suffix", "recycling"], "none": "none"}
PROMPTS = {
    "code": (
        "Write a Python function that reads a CSV file and prints the mean of each column. Then write it again.",
        "Write a C program that sorts an array of integers, with a comment on each line.",
        "Write an HTML page with a table of five cities and their countries.",
    ),
    "edit": tuple(
        "Repeat this text word by word, and correct errors:\n" + LICENSE_TEXT[at : at + 600] for at in (0, 1500, 3000)
    ),
    "chat": (
        "What should I see on a first visit to Norway? Answer in some sentences.",
        "Why is the sky blue, and why is it red in the evening?",
        "Tell me a story about a fisherman and a storm.",
    ),
}


# ---- what passes cost ------------------------------------------------------------------------------------------------


def timed(session: NativeSession, stretches: Sequence[list[int]], rounds: int) -> dict[str, dict[int, float]]:
    """Median milliseconds by size, relative to one token, and the mean union; after a context."""
    times: dict[int, list[float]] = {n: [] for n in SIZES}
    unions: dict[int, list[float]] = {n: [] for n in SIZES}
    for _ in range(rounds):
        for stretch in stretches:
            for n in SIZES:
                began = time.perf_counter()
                session.forward(stretch[:n], logits="all")
                times[n].append(1e3 * (time.perf_counter() - began))
                unions[n].append(session.model.expert_union())
                session.commit(())
    one = statistics.median(times[1])
    return {
        "one_ms": {1: round(one, 3)},
        "cost": {n: round(statistics.median(of_n) / one, 3) for n, of_n in times.items()},
        "union": {n: round(statistics.fmean(of_n), 3) for n, of_n in unions.items()},
    }


def costs(path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    with ModelFile.open(path) as file:
        tokens = Tokenizer.from_file(file).encode(SAMPLE_TEXT[:2000] + LICENSE_TEXT[:2000], add_special=False)
    text = [tokens[first : first + max(SIZES)] for first in range(N_CONTEXT, len(tokens), len(tokens) // STRETCHES)]
    text = [stretch for stretch in text if len(stretch) == max(SIZES)]
    rng = np.random.default_rng(1)
    with open_model(path, 256, 64, arguments.threads) as model:
        random = [rng.integers(0, model.spec.n_vocab, max(SIZES)).tolist() for _ in text]
        session = model.session()
        run_sequence(session, tokens[:N_CONTEXT], logits="none")
        return {name: timed(session, of, arguments.rounds) for name, of in (("text", text), ("random", random))}


# ---- whether drafts pay ----------------------------------------------------------------------------------------------


def answer(engine: Engine, question: str, n: int) -> tuple[list[int], float]:
    """Tokens of a greedy answer, and seconds for each after the first."""
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    completion = engine.generate(prompt, max_tokens=n, temperature=0.0)
    return list(completion.tokens), 1.0 / completion.timings.decode_tokens_per_second


def speed(path: Path, cache: str, arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"cache": cache, "same_text": True}
    with ExitStack() as opened:
        load = partial(
            edgeinfer.load, path, n_ctx=1024, n_threads=arguments.threads, expert_cache=cache, backend="native"
        )
        engines = {name: opened.enter_context(load(draft=draft)) for name, draft in DRAFTS.items()}
        for engine in engines.values():
            engine.tokenizer.stop_ids = frozenset()
        for category, questions in PROMPTS.items():
            seconds: dict[str, list[float]] = {name: [] for name in engines}
            for turn, question in enumerate(questions[: arguments.questions]):
                texts = {}
                for name in sorted(engines, reverse=turn % 2 == 1):
                    texts[name], of_token = answer(engines[name], question, arguments.tokens)
                    seconds[name].append(of_token)
                found["same_text"] &= texts["drafts"] == texts["none"]
            means = {name: statistics.fmean(of) for name, of in seconds.items()}
            gain = means["none"] / means["drafts"]
            found[category] = {name: round(1 / of, 2) for name, of in means.items()} | {"gain": round(gain, 3)}
        found |= learnt(engines["drafts"])
    return found


def learnt(engine: Engine) -> dict[str, Any]:
    """What the speculation learnt of the experts."""
    assert engine.speculator is not None
    of, forecast = engine.speculator.costs, engine.speculator._forecast
    assert isinstance(of, ExpertCostModel)
    now = of.milliseconds(0)
    return {
        "cost": {n: round(now[n] / now[1], 3) for n in SIZES},
        "union": {n: round(of.union(n), 3) for n in SIZES},
        "missing_share": round(of.missing_share, 3),
        "precision": None if forecast is None else round(forecast.precision, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--caches", default="100%,50%", help="of the experts, comma-separated")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--questions", type=int, default=3, help="of each category, at most 3")
    parser.add_argument("--rounds", type=int, default=8, help="of the passes whose cost is measured")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # costs are measured anew
        for path in arguments.models:
            of_caches = [speed(path, cache, arguments) for cache in arguments.caches.split(",")]
            results.append({"model": path.name, **costs(path, arguments), "speed": of_caches})
    print(json.dumps({"benchmark": "speculation with experts", "machine": machine(), "results": results}))


if __name__ == "__main__":
    main()
