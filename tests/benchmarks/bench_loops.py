"""How many answers end in a loop, by sampling parameters, and which of them the loop guard ends.

    python tests/benchmarks/bench_loops.py tests/benchmarks/everyday.txt [-m MODEL.gguf] [--limit 3000] [--threads 2]
        [--sets general,...] [--changes '{"penalty_last_n": 256}'] [--keep FILE]

Prompts: one per line, or JSON Lines with "turns", of which the first is asked. Each is asked once with each set of
parameters, with the number of the prompt as seed, in a conversation of its own with a context of 4096, without the
guard; then the guard reads the answer. An answer is a loop if it reached the limit, and of its last 256 runs of 8
tokens at least nine in ten occur three times or more, where all numbers count as one. --changes: also asks with the
model's own parameters changed. --keep: writes answers to this file as they are made; the same command continues a
stopped benchmark. One JSON line on stdout at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from records import Records

import edgeinfer
from edgeinfer.engine import Engine
from edgeinfer.repetition import LoopGuard
from edgeinfer.sampling import SamplingParams

SETS = {
    "general": "SamplingParams(): temperature 0.8, top_k 40, top_p 0.95, min_p 0.05",
    "general-0.2": "the same at temperature 0.2",
    "card": "the authors' advice for SmolLM2 alone: temperature 0.2, top_p 0.9",
    "default": "Engine.default_params",
}


def params_of(name: str, engine: Engine) -> SamplingParams:
    if name.startswith("{"):
        return replace(engine.default_params, **json.loads(name))
    return {
        "general": SamplingParams(),
        "general-0.2": SamplingParams(temperature=0.2),
        "card": SamplingParams(temperature=0.2, top_k=0, top_p=0.9, min_p=0.0),
        "default": engine.default_params,
    }[name]


def read_prompts(path: Path) -> list[str]:
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    return [json.loads(line)["turns"][0] for line in lines] if path.suffix == ".jsonl" else lines


def is_loop(engine: Engine, tokens: Sequence[int], limit: int) -> bool:
    """Whether an answer came to the limit in a loop; see above."""
    if len(tokens) < limit:
        return False
    texts = [engine.detokenize([token]).strip() for token in tokens]
    signs = ["0" if text.isdigit() else str(token) for text, token in zip(texts, tokens, strict=True)]
    alike = [sign for sign, before in zip(signs, ["", *signs], strict=False) if not sign == before == "0"]
    runs = [tuple(alike[i : i + 8]) for i in range(len(alike) - 7)]
    counts = Counter(runs)
    return sum(counts[run] >= 3 for run in runs[-256:]) >= 0.9 * 256


def guarded(engine: Engine, tokens: Sequence[int], n: int) -> int | None:
    """Tokens after which the guard ends an answer."""
    guard = LoopGuard(n, engine.tokenizer)
    return next((at for at, token in enumerate(tokens, start=1) if guard.push(token)), None)


def figures(engine: Engine, answers: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    ends = [guarded(engine, answer["tokens"], SamplingParams().loop_guard) for answer in answers]
    loops = [is_loop(engine, answer["tokens"], limit) for answer in answers]
    ended = [end for end in ends if end is not None]
    return {
        "answers": len(answers),
        "tokens": sum(len(answer["tokens"]) for answer in answers),
        "at_the_limit": sum(answer["finish_reason"] == "length" for answer in answers),
        "loops": sum(loops),
        "ended_by_guard": len(ended),
        "loops_that_the_guard_missed": [n for n, loop in enumerate(loops) if loop and ends[n] is None],
        "ended_but_no_loop": [n for n, loop in enumerate(loops) if not loop and ends[n] is not None],
        "ended_after_tokens": {
            "least": min(ended, default=None),
            "median": statistics.median(ended) if ended else None,
            "most": max(ended, default=None),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("-m", "--model", type=Path)
    parser.add_argument("--limit", type=int, default=3000)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--changes", action="append", default=[])
    parser.add_argument("--keep", type=Path)
    arguments = parser.parse_args()
    prompts = read_prompts(arguments.prompts)
    with edgeinfer.load(arguments.model, n_ctx=4096, n_threads=arguments.threads) as engine:
        settings = {"model": engine.name, "limit": arguments.limit, "prompts": prompts}
        records = Records(arguments.keep, settings)
        found = {}
        for name in [*filter(None, arguments.sets.split(",")), *arguments.changes]:
            for n, prompt in enumerate(prompts):
                key = f"{name} {n}"
                if key in records.rows:
                    continue
                answer = engine.chat().send(
                    prompt, max_tokens=arguments.limit, params=params_of(name, engine), seed=n, loop_guard=0
                )
                list(answer)
                completion = answer.completion
                records.add(key, {"tokens": completion.tokens, "finish_reason": completion.finish_reason})
                said = f"{key}: {len(completion.tokens)} tokens, {completion.finish_reason}"
                print(said, file=sys.stderr, flush=True)
            answers = [records.rows[f"{name} {n}"] for n in range(len(prompts))]
            params = params_of(name, engine).to_json()
            found[name] = {"about": SETS.get(name, "the default, changed"), "params": params} | figures(
                engine, answers, arguments.limit
            )
    result = {"model": settings["model"], "limit": arguments.limit, "prompts": arguments.prompts.name, "sets": found}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
