"""ToolRAG on BFCL's live_multiple: how often the right tool is among those chosen, and the tokens saved.

Each question is asked of a pool: its own tools, and others of the file up to --pool. Tools are ranked by BM25. Counted
are the questions all of whose right tools are among the first --most, and the tokens of these declarations beside those
of the whole pool.

Run: python tests/benchmarks/bench_tool_selection.py FOLDER [--pool 60] [--most 4,8,12] [--model default]
FOLDER is an unpacked wheel of bfcl-eval.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from bfcl import Question, questions, tool_of
from machine import machine

import edgeinfer
from edgeinfer.tools.selection import select_tools


def main() -> None:
    """Print a table, and a JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pool", type=int, default=60, help="tools of which are chosen")
    parser.add_argument("--most", default="4,8,12", help="how many are chosen, separated by commas")
    parser.add_argument("--model", help="a GGUF file that counts tokens; the default model")
    given = parser.parse_args()
    asked = questions(given.folder, "live_multiple")
    every: dict[str, dict[str, Any]] = {}
    for question in asked:
        for function in question.functions:
            every.setdefault(function["name"], function)
    sizes = [int(each) for each in given.most.split(",")]
    with edgeinfer.load(given.model, draft="none") as engine:
        n_tokens = {name: engine.count(json.dumps(tool_of(function))) for name, function in every.items()}
    record = {
        "questions": len(asked), "tools": len(every), "pool": given.pool,
        "chosen": measured(asked, every, given.pool, sizes, n_tokens), "machine": machine(),
    }  # fmt: skip
    for most, figures in record["chosen"].items():
        print(
            f"{most:>3} of {given.pool}: the right tools are among them in {figures['share']:.1%}, "
            f"{figures['tokens']:.0f} of {figures['tokens of all']:.0f} tokens, {figures['ms']:.1f} ms"
        )
    print(json.dumps(record))


def measured(
    asked: list[Question], every: dict[str, dict[str, Any]], n_pool: int, sizes: list[int], n_tokens: dict[str, int]
) -> dict[int, dict[str, float]]:
    """Figures by the number of tools chosen: means over the questions."""
    found: dict[int, dict[str, list[float]]] = {
        most: {"share": [], "tokens": [], "tokens of all": [], "ms": []} for most in sizes
    }
    for question in asked:
        names = pool_of(question, every, n_pool)
        tools = [tool_of(every[name]) for name in names]
        right = {name for call in question.truth for name in call}
        start = time.perf_counter()
        ranked = [names[index] for index, _ in select_tools(question.text, tools, len(tools))]
        seconds = time.perf_counter() - start
        for most, figures in found.items():
            figures["share"].append(float(right <= set(ranked[:most])))
            figures["tokens"].append(sum(n_tokens[name] for name in ranked[:most]))
            figures["tokens of all"].append(sum(n_tokens[name] for name in names))
            figures["ms"].append(seconds * 1e3)
    return {
        most: {name: statistics.mean(values) for name, values in figures.items()} for most, figures in found.items()
    }


def pool_of(question: Question, every: dict[str, dict[str, Any]], n_pool: int) -> list[str]:
    """Names of the tools of which are chosen: those of the question, and others, always the same ones."""
    own = [function["name"] for function in question.functions]
    others = [name for name in every if name not in own]
    rng = random.Random(question.id)
    names = own + rng.sample(others, max(0, min(n_pool - len(own), len(others))))
    rng.shuffle(names)
    return names


if __name__ == "__main__":
    main()
