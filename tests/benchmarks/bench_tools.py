"""BFCL's questions with one tool, several, and parallel calls: are the calls valid, and are they right?

Valid: the answer ended by itself, and is calls that were read. Right: by the AST checker of bfcl-eval. In `parallel`
several calls may come in one answer, else one. With --drafts each answer is made a second time, with drafts. One that
differs is an error, and the exit code 1, as is one that ended and is not valid.

Run: python tests/benchmarks/bench_tools.py FOLDER --model MODEL [--most 50] [--categories simple_python,multiple]
[--choice required] [--drafts]
FOLDER is an unpacked wheel of bfcl-eval.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from bfcl import Question, judged, open_judge, questions
from machine import machine

import edgeinfer
from edgeinfer.completion import Completion

CATEGORIES = "simple_python,multiple,parallel,live_simple"


def main() -> None:
    """Print what was right in each category, and a JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", help="a GGUF file; the default model")
    parser.add_argument("--categories", default=CATEGORIES)
    parser.add_argument("--most", type=int, default=50, help="questions of each category")
    parser.add_argument("--choice", default="required", choices=("required", "auto"))
    parser.add_argument("--drafts", action="store_true", help="answer again with drafts, and compare")
    parser.add_argument("--show", action="store_true", help="print each answer that is wrong")
    given = parser.parse_args()
    open_judge(given.folder)
    warnings.simplefilter("ignore")  # of schemas with keywords that are not enforced
    record: dict[str, Any] = {"categories": {}, "machine": machine()}
    engines = [edgeinfer.load(given.model, draft="none", n_ctx=8192)]
    if given.drafts:
        engines.append(edgeinfer.load(given.model, n_ctx=8192))
    for category in given.categories.split(","):
        asked = questions(given.folder, category)[: given.most]
        record["categories"][category] = found = answered(engines, asked, category, given.choice, given.show)
        print(f"{category}: {json.dumps(found)}", flush=True)
    for engine in engines:
        engine.close()
    print(json.dumps(record))
    figures = record["categories"].values()
    sys.exit(any(each["invalid"] or each["differ with drafts"] for each in figures))


def answered(
    engines: list[edgeinfer.Engine], asked: list[Question], category: str, choice: str, is_shown: bool
) -> dict[str, Any]:
    """Counts of a category."""
    counts: Counter[str] = Counter()
    start = time.perf_counter()
    for question in asked:
        first, *others = [answer_of(engine, question, category, choice) for engine in engines]
        counts["differ with drafts"] += any(other.tokens != first.tokens for other in others)
        calls = [{"name": call.name, "arguments": call.arguments} for call in first.tool_calls]
        counts["cut"] += first.finish_reason == "length"
        is_valid = bool(calls) and first.call_error is None
        counts["valid"] += is_valid
        counts["no call"] += not calls and choice == "auto" and first.call_error is None
        counts["invalid"] += not is_valid and first.finish_reason == "stop" and (choice == "required" or bool(calls))
        problem = judged(question, calls, category) if calls else "no call"
        counts["right"] += not problem
        if problem and is_shown:
            print(f"  {question.id}: {problem}\n    {calls}\n    {question.truth}")
    names = ("valid", "invalid", "cut", "no call", "right", "differ with drafts")
    return {"questions": len(asked), **{name: counts[name] for name in names},
            "seconds": round(time.perf_counter() - start, 1)}  # fmt: skip


def answer_of(engine: edgeinfer.Engine, question: Question, category: str, choice: str) -> Completion:
    """The answer to a question."""
    chat = engine.chat()
    chat.messages = [{"role": each["role"], "content": each["content"]} for each in question.messages]
    stream = chat.stream(
        tools=question.tools, tool_choice=choice, parallel_tool_calls="parallel" in category, temperature=0,
        max_tokens=400,
    )  # fmt: skip
    for _ in stream:
        pass
    return stream.completion


if __name__ == "__main__":
    main()
