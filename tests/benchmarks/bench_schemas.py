"""Speed of answers to schemas: with drafts, without, against free answers, and against llama.cpp's grammar sampler.

Each schema of JSONSchemaBench is asked for once in each way, in turns and greedily, so that no drafter has seen the
answer; only those that llama.cpp's converter reads, too. A speed is all tokens after the first ones of the answers over
their time. Masks: the time of a pass in which they are computed and applied. Large: the time to the first token with a
schema of 100 KB that is read already, and without, in turns. One JSON line on stdout.

Run: python tests/benchmarks/bench_schemas.py MODEL.gguf DATA [--schemas 12] [--tokens 96] [--order 2026] [--no-peer]
DATA is `data` of a clone of guidance-ai/jsonschemabench. Peer: llama-cpp-python.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench_constraints import problem_in
from llama_answers import Peer, grammar_of_schema
from machine import machine
from schemas import mixed_schemas, question_of

import edgeinfer
from edgeinfer.common.errors import InvalidConstraint
from edgeinfer.constraints.library import open_library
from edgeinfer.constraints.mask import Mask
from edgeinfer.constraints.matching import MatcherPath
from edgeinfer.engine import Engine
from edgeinfer.scheduling.scheduler import Scheduler

N_CTX = 1024
LARGE = 100_000  # bytes
_WARM_UP = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}


class MaskClock:
    """Seconds of masks in each pass of an engine."""

    def __init__(self) -> None:
        self.passes: list[tuple[float, float]] = []  # (of masks, of all)
        self._seconds, self._is_inside, self._is_on = 0.0, False, False

    def install(self) -> None:
        """Measure from now on, while `with clock` holds."""
        for owner, name in ((MatcherPath, "mask"), (MatcherPath, "copy"), (MatcherPath, "follows"), (Mask, "apply")):
            setattr(owner, name, self._timed(getattr(owner, name)))
        make_pass = Scheduler._make_pass

        def timed_pass(scheduler: Scheduler) -> bool:
            self._seconds, started = 0.0, time.perf_counter()
            could_run = make_pass(scheduler)
            if self._is_on:
                self.passes.append((self._seconds, time.perf_counter() - started))
            return could_run

        Scheduler._make_pass = timed_pass  # type: ignore[method-assign]

    def __enter__(self) -> None:
        self._is_on = True

    def __exit__(self, *_: object) -> None:
        self._is_on = False

    def figures(self) -> dict[str, float]:
        """Milliseconds of masks and of passes, and the share at the median."""
        masks, passes = ([1e3 * each[n] for each in self.passes] for n in (0, 1))
        shares = [mask / whole for mask, whole in zip(masks, passes, strict=True)]
        return {
            "passes": len(masks),
            "median_ms": statistics.median(masks),
            "p99_ms": sorted(masks)[int(0.99 * len(masks))],
            "pass_median_ms": statistics.median(passes),
            "median_share": statistics.median(shares),
        }

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            if self._is_inside:
                return function(*arguments)
            self._is_inside, started = True, time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self._is_inside = False
                self._seconds += time.perf_counter() - started

        return timed


class Speed:
    """Tokens after the first ones, and their seconds."""

    def __init__(self) -> None:
        self.tokens, self.seconds, self.first_seconds = 0, 0.0, list[float]()
        self.ended, self.wrong = 0, list[str]()

    def add(self, n_tokens: int, seconds: float, first_seconds: float) -> None:
        """Count an answer. seconds: after its first token."""
        self.first_seconds.append(first_seconds)
        if n_tokens > 1:
            self.tokens += n_tokens - 1
            self.seconds += seconds

    def figures(self) -> dict[str, Any]:
        """What was measured."""
        return {
            "tokens": self.tokens, "tokens_per_second": self.tokens / max(self.seconds, 1e-9), "ended": self.ended,
            "invalid": self.wrong, "first_token_ms": 1e3 * statistics.median(self.first_seconds),
        }  # fmt: skip


def main() -> None:
    """Measure, and print a JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--schemas", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of an answer")
    parser.add_argument("--order", type=int, default=2026, help="seed of the order of the schemas")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-peer", action="store_true")
    given = parser.parse_args()
    clock = MaskClock()
    clock.install()
    options: dict[str, Any] = {"n_ctx": N_CTX, "n_threads": given.threads}
    with ExitStack() as opened:
        plain = opened.enter_context(edgeinfer.load(given.model, draft="none", **options))
        drafting = opened.enter_context(edgeinfer.load(given.model, **options))
        peer = None if given.no_peer else Peer(given.model, N_CTX, given.threads)
        schemas = readable(plain, peer, given.data, given.order, given.schemas)
        speeds = measured(plain, drafting, peer, schemas, given.tokens, clock)
        large = large_schema_times(plain)
    figures = {name: speed.figures() for name, speed in speeds.items()}
    rates = {name: each["tokens_per_second"] for name, each in figures.items()}
    ratios = {
        f"drafts over {name}": rates["drafts"] / rate for name, rate in rates.items() if name != "drafts" and rate
    }
    record = {
        "model": given.model.name, "schemas": [name for name, _ in schemas], "most_tokens": given.tokens,
        "speeds": figures, "ratios": ratios, "masks": clock.figures(), "large": large, "threads": given.threads,
        "llguidance": str(open_library().__version__), "machine": machine(),
    }  # fmt: skip
    print(json.dumps(record))
    sys.exit(any(each["invalid"] for name, each in figures.items() if name != "llama.cpp"))


def readable(engine: Engine, peer: Peer | None, data: Path, order: int, n: int) -> list[tuple[str, Any]]:
    """The first n schemas that both sides read."""
    schemas: list[tuple[str, Any]] = []
    for name, schema in mixed_schemas(data, order, 6000):
        if len(schemas) == n:
            break
        try:
            grammar = grammar_of_schema(json.dumps(schema))
            if peer is not None:
                peer.check(grammar)
            engine.generate("x", max_tokens=1, schema=schema)
        except InvalidConstraint:
            continue
        except Exception:  # the converter of llama-cpp-python raises anything
            continue
        schemas.append((name, schema))
    return schemas


def measured(
    plain: Engine, drafting: Engine, peer: Peer | None, schemas: list[tuple[str, Any]], n_tokens: int, clock: MaskClock
) -> dict[str, Speed]:
    """The speeds of all ways."""
    speeds = {name: Speed() for name in ("drafts", "no drafts", "free, no drafts")}
    if peer is not None:
        speeds["llama.cpp"] = Speed()
    for engine in (plain, drafting):
        engine.generate("Hello", schema=_WARM_UP, max_tokens=8, temperature=0.0)
    for number, (name, schema) in enumerate(schemas):
        prompt = prompt_of(plain, schema)
        ways: list[Callable[[], None]] = [
            lambda: ours(speeds["no drafts"], plain, prompt, schema, n_tokens),  # noqa: B023
            lambda: ours(speeds["free, no drafts"], plain, prompt, None, n_tokens),  # noqa: B023
            lambda: with_masks(clock, speeds["drafts"], drafting, prompt, schema, n_tokens),  # noqa: B023
        ]
        if peer is not None:
            ways.append(lambda: theirs(speeds["llama.cpp"], peer, plain, prompt, schema, n_tokens))  # noqa: B023
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            way()
        told = ", ".join(f"{kind} {each.tokens / max(each.seconds, 1e-9):.1f}" for kind, each in speeds.items())
        print(f"{number + 1} {name}: tokens/s so far: {told}", file=sys.stderr)
    return speeds


def prompt_of(engine: Engine, schema: Any) -> list[int]:
    """A question as a chat has it."""
    assert engine.template is not None
    messages: list[Any] = [{"role": "user", "content": question_of(schema)}]
    return engine.template.encode(engine.tokenizer, messages, add_generation_prompt=True)


def with_masks(clock: MaskClock, speed: Speed, engine: Engine, prompt: list[int], schema: Any, n_tokens: int) -> None:
    """`ours`, with the time of its masks."""
    with clock:
        ours(speed, engine, prompt, schema, n_tokens)


def ours(speed: Speed, engine: Engine, prompt: list[int], schema: Any, n_tokens: int) -> None:
    """Answer a prompt that is not in the cache."""
    engine.forget()
    if schema is not None:  # the time to read it is no matter of the speed
        engine.generate([1], schema=schema, max_tokens=1)
        engine.forget()
    started = time.perf_counter()
    stream = engine.stream(prompt, schema=schema, max_tokens=n_tokens, temperature=0.0, loop_guard=0)
    first, n_first = 0.0, 0
    for piece in stream:
        if piece.tokens and not first:
            first, n_first = time.perf_counter(), len(piece.tokens)
    ended = time.perf_counter()
    completion = stream.completion
    if not first:
        return
    # A piece may hold several tokens; those of the first one are none that are counted.
    speed.add(len(completion.tokens) - n_first + 1, ended - first, first - started)
    if schema is not None and completion.finish_reason == "stop":
        speed.ended += 1
        if why := problem_in(completion.text, schema):
            speed.wrong.append(why)


def theirs(speed: Speed, peer: Peer, engine: Engine, prompt: list[int], schema: Any, n_tokens: int) -> None:
    """The answer of llama.cpp."""
    answer = peer.answer(prompt, n_tokens, grammar_of_schema(json.dumps(schema)))
    speed.add(len(answer.tokens), answer.seconds - answer.first_seconds, answer.first_seconds)
    if answer.has_ended:
        speed.ended += 1
        if why := problem_in(engine.tokenizer.decode(answer.tokens), schema):
            speed.wrong.append(why)


def large_schema_times(engine: Engine, n: int = 7) -> dict[str, float]:
    """Milliseconds to the first token with a large schema that is read already, and without, the prompt being read."""
    schema = large_schema()
    prompt = prompt_of(engine, {"type": "object"})
    started = time.perf_counter()
    engine.generate(prompt, schema=schema, max_tokens=1)
    compiled = time.perf_counter() - started
    engine.generate(prompt, max_tokens=1)
    times: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(n):
        for name, options in (("with", {"schema": schema}), ("without", {})):
            started = time.perf_counter()
            engine.generate(prompt, max_tokens=1, temperature=0.0, **options)
            times[name].append(1e3 * (time.perf_counter() - started))
    medians = {f"{name}_ms": statistics.median(each) for name, each in times.items()}
    return {"bytes": len(json.dumps(schema)), "first_time_ms": 1e3 * compiled, **medians,
            "more_ms": medians["with_ms"] - medians["without_ms"]}  # fmt: skip


def large_schema() -> dict[str, Any]:
    """A schema of LARGE bytes: an object with objects of properties of all types."""
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 80}, {"type": "integer", "minimum": 0}, {"type": "boolean"},
        {"enum": ["red", "green", "blue"]}, {"type": "array", "items": {"type": "number"}},
    ]  # fmt: skip
    properties: dict[str, Any] = {}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    while len(json.dumps(schema)) < LARGE:
        names = [f"field_{len(properties)}_{n}" for n in range(20)]
        parts = {name: kinds[n % len(kinds)] for n, name in enumerate(names)}
        group = {"type": "object", "properties": parts, "required": names[:5], "additionalProperties": False}
        properties[f"group_{len(properties)}"] = group
    return schema


if __name__ == "__main__":
    main()
