"""Answers to schemas are the same with drafts, without, from a new matcher, and beside other texts.

Each schema is asked for with several seeds at temperatures 0 and 0.8; a seed has a question of its own, too. All runs:
- fresh: one text after the other, without drafts, and nothing that was learnt of a grammar is kept for the next answer;
- drafts: one after the other, with drafts, which are always made;
- joint: four at once, with drafts, and as many texts without a schema between them.
An answer that differs from the fresh one in a token is an error, as is one that ended and is not valid by the
jsonschema package; then the exit code is 1. One JSON line on stdout.

Run: python tests/benchmarks/check_constraints.py DATA [--model MODEL.gguf] [--most 200] [--skip 0] [--seeds 3]
[--tokens 24] [--characters 300] [--threads 2]
DATA is `data` of a clone of guidance-ai/jsonschemabench.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_constraints import problem_in
from machine import machine
from schemas import mixed_schemas, question_of

import edgeinfer
from edgeinfer.common.errors import InvalidConstraint
from edgeinfer.completion import Completion
from edgeinfer.constraints.library import open_library
from edgeinfer.engine import Engine
from edgeinfer.speculation.payoff import Payoff

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from drafting import FixedCosts  # noqa: E402

N_TEXTS = 4
FREE = "Tell me about this in your own words, without JSON."


@dataclass(frozen=True)
class Asked:
    """An answer that is asked for."""

    name: str
    prompt: list[int]
    options: dict[str, Any]

    @property
    def schema(self) -> Any:
        """None for a free text."""
        return self.options.get("schema")

    def answer(self, engine: Engine, n_tokens: int) -> Completion:
        return engine.generate(self.prompt, max_tokens=n_tokens, loop_guard=0, **self.options)


@dataclass
class Found:
    """What the answers were."""

    counts: Counter[str] = field(default_factory=Counter)
    differ: list[list[Any]] = field(default_factory=list)
    invalid: list[list[Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def compare(self, kind: str, asked: Asked, fresh: Completion, other: Completion) -> None:
        self.counts[f"{kind}, compared"] += 1
        same = (fresh.tokens, fresh.text, fresh.finish_reason, fresh.parsed, fresh.parse_error)
        if same != (other.tokens, other.text, other.finish_reason, other.parsed, other.parse_error):
            sampling = {name: value for name, value in asked.options.items() if name != "schema"}
            self.differ.append([kind, asked.name, sampling, fresh.text, other.text])
        statistics = other.timings.speculation
        for name, counts in {} if statistics is None else statistics.by_drafter.items():
            self.counts[f"{kind}, drafted by {name}"] += counts.drafted
            self.counts[f"{kind}, accepted of {name}"] += counts.accepted


def main() -> None:
    """Print what differs, and a JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", help="a GGUF file; the default model")
    parser.add_argument("--most", type=int, default=200, help="schemas")
    parser.add_argument("--skip", type=int, default=0, help="schemas that another run has answered")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24, help="most tokens of an answer")
    parser.add_argument("--characters", type=int, default=300, help="of each schema that the question has")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--order", type=int, default=1, help="seed of the order of the schemas")
    given = parser.parse_args()
    Payoff.needs_plain_step = property(lambda self: False)  # type: ignore[assignment,method-assign]
    found = Found()
    plain = edgeinfer.load(given.model, n_ctx=1024, draft="none", n_threads=given.threads)
    drafting, joint = (
        edgeinfer.load(given.model, n_ctx=1024, parallel=n, n_threads=given.threads) for n in (1, N_TEXTS)
    )
    with plain, drafting, joint:
        for engine in (drafting, joint):
            assert engine.speculator is not None
            engine.speculator.costs = FixedCosts()
        schemas = readable(plain, given.data, given.order, given.skip + given.most, found.counts)[given.skip :]
        named = enumerate(schemas, start=given.skip)
        asked = [each for number, schema in named for each in asked_of(plain, schema, number, given)]
        fresh = fresh_answers(plain, asked, given.tokens, found)
        compare(drafting, "drafts", asked, fresh, given.tokens, found)
        compare(joint, "joint", asked, fresh, given.tokens, found)
    record = {
        "model": Path(given.model).name if given.model else "default", "first": given.skip, "schemas": len(schemas),
        "seeds": given.seeds, "tokens": given.tokens, "counts": found.counts, "differ": len(found.differ),
        "invalid": len(found.invalid), "seconds": found.seconds, "llguidance": str(open_library().__version__),
        "machine": machine(),
    }  # fmt: skip
    for each in [*found.differ, *found.invalid][:20]:
        print(json.dumps(each))
    print(json.dumps(record))
    sys.exit(bool(found.differ or found.invalid))


def readable(engine: Engine, data: Path, order: int, most: int, counts: Counter[str]) -> list[tuple[str, Any]]:
    """The first schemas that are not refused."""
    schemas: list[tuple[str, Any]] = []
    for name, schema in mixed_schemas(data, order, 6000):
        if len(schemas) == most:
            break
        try:
            engine.generate("x", max_tokens=1, schema=schema)
            schemas.append((name, schema))
        except InvalidConstraint:
            counts["schemas refused"] += 1
    return schemas


def asked_of(engine: Engine, named: tuple[str, Any], number: int, given: argparse.Namespace) -> list[Asked]:
    """The answers to one schema, and free texts of the same question between them."""
    name, schema = named
    asked = []
    for seed in range(given.seeds):
        question = question_of(schema, given.characters) + (f" It is number {seed + 1}." if seed else "")
        for temperature in (0.0, 0.8):
            sampling = {"temperature": temperature, "seed": 1000 * number + seed}
            asked.append(Asked(name, prompt_of(engine, question), {**sampling, "schema": schema}))
            if temperature and seed == number % given.seeds:
                asked.append(Asked(f"{name}, free", prompt_of(engine, f"{question} {FREE}"), sampling))
    return asked


def prompt_of(engine: Engine, question: str) -> list[int]:
    """A question as a chat has it."""
    assert engine.template is not None
    messages: list[Any] = [{"role": "user", "content": question}]
    return engine.template.encode(engine.tokenizer, messages, add_generation_prompt=True)


def fresh_answers(plain: Engine, asked: list[Asked], n_tokens: int, found: Found) -> list[Completion]:
    """The answers of one text after the other, each with its grammar read anew."""
    started = time.perf_counter()
    fresh = []
    for number, each in enumerate(asked):
        plain._constraints._kept.clear()
        answer = each.answer(plain, n_tokens)
        fresh.append(answer)
        found.counts[f"{'free' if each.schema is None else 'schema'}: {answer.finish_reason}"] += 1
        found.counts["tokens"] += len(answer.tokens)
        if each.schema is not None and answer.finish_reason == "stop" and (why := problem_in(answer.text, each.schema)):
            found.invalid.append(["invalid", each.name, answer.text, why])
        tell("fresh", number, asked, found)
    found.seconds["fresh"] = round(time.perf_counter() - started, 1)
    return fresh


def compare(
    engine: Engine, kind: str, asked: list[Asked], fresh: list[Completion], n_tokens: int, found: Found
) -> None:
    """All answers again, as many at once as the engine runs."""
    started = time.perf_counter()
    n_threads = 1 if engine.scheduler.n_parallel == 1 else engine.scheduler.n_parallel + 2
    with ThreadPoolExecutor(n_threads) as threads:
        others = threads.map(lambda each: each.answer(engine, n_tokens), asked)
        for number, (each, answer, other) in enumerate(zip(asked, fresh, others, strict=True)):
            found.compare(kind, each, answer, other)
            tell(kind, number, asked, found)
    found.seconds[kind] = round(time.perf_counter() - started, 1)


def tell(kind: str, number: int, asked: list[Asked], found: Found) -> None:
    """How far it is, on stderr."""
    if (number + 1) % 100 == 0:
        print(f"{kind}: {number + 1} of {len(asked)}, {len(found.differ)} differ, {len(found.invalid)} invalid",
              file=sys.stderr)  # fmt: skip


if __name__ == "__main__":
    main()
