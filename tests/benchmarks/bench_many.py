"""Tokens a second of several texts at once, against one text, and against llama.cpp with as many sequences.

    python tests/benchmarks/bench_many.py [MODEL.gguf] [--texts 1,2,4,8] [--rounds 3] [--tokens 128] [--drafts] [--peer]

Real prompts of different length, greedy. The numbers of texts are run in turns; a figure is the median of the rounds.
In each round prompts have another number in front, so that no drafter has seen their answers.
--drafts: also with the model-free drafters. --peer: llama.cpp (llama-cpp-python) with as many sequences in a batch.
--gap: the longest time between two tokens of three texts, while a prompt of that many tokens is read. --samples N: the
time of N samples against that of as many joint passes. One JSON line on stdout.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from machine import machine

import edgeinfer
from edgeinfer.backends.base import Rows
from edgeinfer.engine import Engine
from edgeinfer.library.local import default_model

PROMPTS = [
    "Explain to a child why the sky is blue, and why it is red in the evening.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "What are the main differences between TCP and UDP? Give an example of where each is used.",
    "Give me a recipe for a vegetable soup for four people, with a list of what I need to buy.",
    "Summarise the causes of the First World War in five sentences.",
    "Write a Python function that finds the longest common prefix of a list of strings, and explain it step by step.",
    "My neighbour plays loud music at night. Help me write a friendly letter to him.",
    "Which is heavier, a kilogram of feathers or a kilogram of iron? Explain your answer.",
]
Run = Callable[[int], float]  # of the number of a round; gives tokens a second


def prompts_of(engine: Engine, n: int, round: int | None = None) -> list[list[int]]:
    """The first n prompts as a chat has them; round: with that number in front, so that they are asked there only."""
    mark = "" if round is None else f"({round}.{n}) "
    return [
        engine.template.encode(engine.tokenizer, [{"role": "user", "content": mark + text}], add_generation_prompt=True)
        for text in (PROMPTS[i % len(PROMPTS)] for i in range(n))
    ]


def ours(engine: Engine, n_texts: int, n_tokens: int, round: int | None = None) -> float:
    """Tokens a second of the texts together, from the first request to the last token."""
    engine.forget()
    prompts = prompts_of(engine, n_texts, round)
    started = time.perf_counter()
    found = list(engine.generate_many(prompts, max_tokens=n_tokens, temperature=0.0, loop_guard=0))
    seconds = time.perf_counter() - started
    return sum(len(each.tokens) for each in found) / seconds


def peer(path: Path, n_most: int, n_ctx: int, n_threads: int) -> Callable[[Sequence[Sequence[int]], int], float]:
    """llama.cpp with as many sequences in each batch; gives tokens a second."""
    import llama_cpp
    import numpy as np

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = n_ctx * n_most, 512, 512, n_most
    params.n_threads = params.n_threads_batch = n_threads
    context = llama_cpp.llama_init_from_model(model, params)
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(512, 0, 1)

    def decode(rows: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Run (token, position, sequence, wanted) rows; the greedy token after each that is wanted."""
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        if llama_cpp.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        found = []
        for i, row in enumerate(rows):
            if row[3]:
                logits = llama_cpp.llama_get_logits_ith(context, i)
                found.append(int(np.ctypeslib.as_array(logits, shape=(n_vocab,)).argmax()))
        return found

    def run(prompts: Sequence[Sequence[int]], n_tokens: int) -> float:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        started = time.perf_counter()
        last = []
        for sequence, prompt in enumerate(prompts):
            last += decode([(token, i, sequence, i + 1 == len(prompt)) for i, token in enumerate(prompt)])
        for step in range(n_tokens - 1):
            last = decode([(token, len(prompts[s]) + step, s, True) for s, token in enumerate(last)])
        return len(prompts) * n_tokens / (time.perf_counter() - started)

    return run


def longest_gap(engine: Engine, n_prompt: int) -> dict[str, float]:
    """Milliseconds between two tokens of three texts, while a long prompt is read, and before."""
    engine.forget()
    streams = [engine.stream(prompt, temperature=0.0, loop_guard=0) for prompt in prompts_of(engine, 3)]
    words = engine.tokenize(" ".join(PROMPTS), add_special=False)
    long = engine.stream((words * (1 + n_prompt // len(words)))[:n_prompt], max_tokens=1, temperature=0.0)
    gaps: list[float] = []
    before: list[float] = []
    for stream in streams:
        next(stream)
    last = time.perf_counter()
    for step in range(1 << 20):
        for stream in streams:
            next(stream)
        now = time.perf_counter()
        (gaps if step >= 32 else before).append(1e3 * (now - last))
        last = now
        if step == 31:
            long.start()
        if long.sequence is not None and long.sequence.has_ended:
            break
    for stream in streams:
        stream.close()
    return {
        "longest_gap_ms": max(gaps),
        "median_gap_ms": statistics.median(gaps),
        "before_ms": statistics.median(before),
    }


def samples(engine: Engine, n: int, n_tokens: int) -> dict[str, float]:
    """Seconds of n samples, and of as many joint passes of n rows."""
    (prompt,) = prompts_of(engine, 1)
    engine.forget()
    engine.generate(prompt, max_tokens=1)
    started = time.perf_counter()
    found = engine.generate(prompt, n=n, max_tokens=n_tokens, seed=1, loop_guard=0)
    seconds = time.perf_counter() - started
    n_passes = max(len(each.tokens) for each in found)
    engine.forget()
    model = engine.session.model
    sessions = [model.session() for _ in range(n)]
    for session in sessions:
        session.reuse_prefix(prompt)
        if session.n_past < len(prompt):
            session.forward(prompt[session.n_past :], logits=())
            session.commit(range(len(prompt) - session.n_past))
    started = time.perf_counter()
    for _ in range(n_passes):
        model.forward([Rows(session, [1]) for session in sessions])
        for session in sessions:
            session.commit([0])
    passes = time.perf_counter() - started
    for session in sessions:
        session.close()
    return {"samples_s": seconds, "joint_passes_s": passes, "ratio": seconds / passes}


@click.command()
@click.argument("path", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--texts", default="1,2,4,8", show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--tokens", default=128, show_default=True)
@click.option("--n-ctx", default=2048, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--drafts", is_flag=True)
@click.option("--peer", "with_peer", is_flag=True)
@click.option("--gap", type=int, help="Tokens of the long prompt.")
@click.option("--samples", "n_samples", type=int)
def main(
    path: Path | None,
    texts: str,
    rounds: int,
    tokens: int,
    n_ctx: int,
    threads: int,
    drafts: bool,
    with_peer: bool,
    gap: int | None,
    n_samples: int | None,
) -> None:
    """See the top of this file."""
    path = default_model() if path is None else path
    numbers = [int(each) for each in texts.split(",")]
    most = max(*numbers, 4 if gap else 1, n_samples or 1)
    n_ctx = max(n_ctx, (gap or 0) + 512)
    options: dict[str, Any] = {"n_threads": threads, "parallel": most, "n_ctx": n_ctx, "cache_ram": "1GiB"}
    found: dict[str, list[float]] = {}
    with edgeinfer.load(path, draft="auto", **options) as engine:
        drafting, engine.speculator = engine.speculator, None
        theirs = peer(path, most, n_ctx, threads) if with_peer else None
        runs: dict[str, Run] = {}
        for n in numbers:
            runs[f"{n}"] = lambda each, n=n: ours(engine, n, tokens, each)  # type: ignore[misc]
            if theirs is not None:
                runs[f"{n} llama.cpp"] = lambda each, n=n: theirs(prompts_of(engine, n, each), tokens)  # type: ignore[misc]
            if drafts:
                runs[f"{n} drafts"] = lambda each, n=n: ours(engine, n, tokens, each)  # type: ignore[misc]
        for each in range(rounds + 1):
            for name, run in runs.items():
                engine.speculator = drafting if name.endswith("drafts") else None
                speed = run(each)
                if each:  # the first round is a warm-up
                    found.setdefault(name, []).append(speed)
        engine.speculator = None
        more: dict[str, object] = {}
        if gap:
            more["gap"] = longest_gap(engine, gap)
        if n_samples:
            more["samples"] = samples(engine, n_samples, tokens)
    speeds = {name: round(statistics.median(each), 2) for name, each in found.items()}
    ratios = {name: round(speed / speeds[f"{numbers[0]}"], 3) for name, speed in speeds.items()}
    facts = {"model": path.name, "tokens": tokens, "rounds": rounds, "n_threads": threads}
    print(json.dumps({**facts, "tokens_per_second": speeds, "over_one_text": ratios, **more, "machine": machine()}))


if __name__ == "__main__":
    main()
