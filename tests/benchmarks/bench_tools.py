"""BFCL's questions with one tool, several, and parallel calls: are the calls valid, and are they right?

Valid: the answer ended by itself, and is calls that were read. Right: by the AST checker of bfcl-eval. In `parallel`
several calls may come in one answer, else one. With --drafts each answer is made a second time, with drafts. One that
differs is an error, and the exit code 1, as is one that ended and is not valid.

With --peer llama.cpp answers the same prompts with the same file, greedily, under its own grammar sampler: one call, or
several in `parallel`, of the schemas of the tools in the form that Qwen2.5 has been taught. What its converter of
schemas does not know counts as no call.

Run: python tests/benchmarks/bench_tools.py FOLDER --model MODEL [--most 50] [--categories simple_python,multiple]
[--seconds 600] [--choice required] [--drafts] [--peer] [--threads 2]
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
from llama_answers import Peer, grammar_of_schema
from machine import machine

import edgeinfer
from edgeinfer.completion import Completion

CATEGORIES = "simple_python,multiple,parallel,live_simple"
MAX_TOKENS = 400


def main() -> None:
    """Print what was right in each category, and a JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", help="a GGUF file; the default model")
    parser.add_argument("--categories", default=CATEGORIES)
    parser.add_argument("--most", type=int, default=50, help="questions of each category")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no question of a category is begun")
    parser.add_argument("--choice", default="required", choices=("required", "auto"))
    parser.add_argument("--drafts", action="store_true", help="answer again with drafts, and compare")
    parser.add_argument("--peer", action="store_true", help="llama.cpp, too")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--show", action="store_true", help="print each answer that is wrong")
    given = parser.parse_args()
    open_judge(given.folder)
    warnings.simplefilter("ignore")  # of schemas with keywords that are not enforced
    record: dict[str, Any] = {"categories": {}, "machine": machine()}
    engines = [edgeinfer.load(given.model, draft="none", n_ctx=8192, n_threads=given.threads)]
    if given.drafts:
        engines.append(edgeinfer.load(given.model, n_ctx=8192, n_threads=given.threads))
    peer = Peer(Path(given.model), 8192, given.threads) if given.peer else None
    for category in given.categories.split(","):
        asked = questions(given.folder, category)[: given.most]
        record["categories"][category] = found = answered(engines, peer, asked, category, given)
        print(f"{category}: {json.dumps(found)}", flush=True)
    for engine in engines:
        engine.close()
    print(json.dumps(record))
    figures = record["categories"].values()
    sys.exit(any(each["invalid"] or each["differ with drafts"] for each in figures))


def answered(
    engines: list[edgeinfer.Engine], peer: Peer | None, asked: list[Question], category: str, given: argparse.Namespace
) -> dict[str, Any]:
    """Counts of a category, those of llama.cpp under its name."""
    counts: Counter[str] = Counter()
    of_peer: Counter[str] = Counter()
    ended = time.perf_counter() + given.seconds
    for question in asked:
        count_ours(counts, engines, question, category, given)
        if peer is not None:
            count_peer(of_peer, peer, engines[0], question, category, given.show)
        if time.perf_counter() > ended:
            break
    names = ("questions", "valid", "invalid", "cut", "no call", "right", "differ with drafts")
    found: dict[str, Any] = {name: counts[name] for name in names}
    if peer is not None:
        found["llama.cpp"] = {name: of_peer[name] for name in ("valid", "invalid", "cut", "refused", "right")}
    return found


def count_ours(
    counts: Counter[str], engines: list[edgeinfer.Engine], question: Question, category: str, given: argparse.Namespace
) -> None:
    """Count our answer to a question, of all engines."""
    choice = given.choice
    first, *others = [answer_of(engine, question, category, choice) for engine in engines]
    counts["questions"] += 1
    counts["differ with drafts"] += any(other.tokens != first.tokens for other in others)
    calls = [{"name": call.name, "arguments": call.arguments} for call in first.tool_calls]
    counts["cut"] += first.finish_reason == "length"
    is_valid = bool(calls) and first.call_error is None
    counts["valid"] += is_valid
    counts["no call"] += not calls and choice == "auto" and first.call_error is None
    counts["invalid"] += not is_valid and first.finish_reason == "stop" and (choice == "required" or bool(calls))
    problem = judged(question, calls, category) if calls else "no call"
    counts["right"] += not problem
    if problem and given.show:
        print(f"  {question.id}: {problem}\n    {calls}\n    {question.truth}", flush=True)


def answer_of(engine: edgeinfer.Engine, question: Question, category: str, choice: str) -> Completion:
    """The answer to a question."""
    stream = chat_of(engine, question).stream(
        tools=question.tools, tool_choice=choice, parallel_tool_calls="parallel" in category, temperature=0,
        max_tokens=MAX_TOKENS,
    )  # fmt: skip
    for _ in stream:
        pass
    return stream.completion


def chat_of(engine: edgeinfer.Engine, question: Question) -> edgeinfer.Conversation:
    """A conversation in which a question is asked."""
    chat = engine.chat()
    chat.messages = [{"role": each["role"], "content": each["content"]} for each in question.messages]
    return chat


# ---- llama.cpp -------------------------------------------------------------------------------------------------------


def count_peer(
    counts: Counter[str], peer: Peer, engine: edgeinfer.Engine, question: Question, category: str, is_shown: bool
) -> None:
    """Count llama.cpp's answer to a question."""
    prompt = chat_of(engine, question).prompt(tools=question.tools, tool_choice="required")
    try:
        answer = peer.answer(prompt, MAX_TOKENS, call_grammar(question, "parallel" in category))
    except Exception as error:  # its converter raises Exception itself
        counts["refused"] += 1
        print(f"  {question.id}: {error}", file=sys.stderr)
        return
    calls = calls_in(engine.tokenizer.decode(answer.tokens))
    counts["cut"] += not answer.has_ended
    counts["valid"] += calls is not None and answer.has_ended
    counts["invalid"] += calls is None and answer.has_ended
    problem = judged(question, calls, category) if calls else "no call"
    counts["right"] += not problem
    if problem and is_shown:
        print(f"  llama.cpp, {question.id}: {problem}\n    {calls}\n    {question.truth}", flush=True)


def call_grammar(question: Question, is_parallel: bool) -> str:
    """GBNF of calls in the form of Qwen2.5, of the tools of a question."""
    calls = []
    for tool in question.tools:
        function = tool["function"]
        properties = {"name": {"const": function["name"]}, "arguments": _closed(function["parameters"])}
        calls.append({"type": "object", "properties": properties, "required": ["name", "arguments"]})
    rules = grammar_of_schema(json.dumps({"anyOf": [_closed(call) for call in calls]})).splitlines()
    call = "call ::= " + next(rule for rule in rules if rule.startswith("root ::=")).removeprefix("root ::=").strip()
    one = r'"<tool_call>\n" call "\n</tool_call>"'
    root = f"root ::= {one}" + (rf' ("\n" {one}){{0,31}}' if is_parallel else "")
    return "\n".join([root, call, *(rule for rule in rules if not rule.startswith("root ::="))])


def _closed(schema: Any) -> Any:
    """The schema without properties that it does not name, as tools have it here."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(part) for name, part in schema.items()}
    if isinstance(closed.get("properties"), dict) and closed.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed


def calls_in(text: str) -> list[dict[str, Any]] | None:
    """The calls that an answer consists of, None where it does not."""
    found = [part.partition("</tool_call>")[0] for part in text.split("<tool_call>")[1:]]
    try:
        calls = [json.loads(part) for part in found]
    except ValueError:
        return None
    return [{"name": call["name"], "arguments": call["arguments"]} for call in calls] or None


if __name__ == "__main__":
    main()
