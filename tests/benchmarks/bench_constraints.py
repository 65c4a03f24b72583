"""JSON-Schema-Test-Suite through the masks: which schemas are refused, and which instances masks let through.

The suite is a folder such as json/tests/draft2020-12 of the jsonschema sdist (MIT). The masks are over a vocabulary of
bytes, so that every spelling of an instance is tried byte by byte; an object is tried in the order of the schema, too,
as properties come in that order. An instance that is invalid and let through is an error, and the exit code 1.

With --model, answers to the schemas are generated, of the suite or of the *.json files of --schemas: each that ends by
itself is judged by the jsonschema package, and compared with the one without drafts.

Run: python tests/benchmarks/bench_constraints.py FOLDER [--model MODEL [--schemas FOLDER] [--most 100] [--seeds 1]]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from machine import machine

import edgeinfer
from edgeinfer.common.errors import InvalidConstraint
from edgeinfer.constraints.library import grammar_of, open_library, open_matcher, problem_of
from edgeinfer.constraints.options import wanted_of

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from byte_masks import byte_vocabulary, lets_through  # noqa: E402


def main() -> None:
    """Print what was refused and what is wrong, and a JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite", type=Path)
    parser.add_argument("--model", help="a GGUF file, or `default`: generate answers, too")
    parser.add_argument("--schemas", type=Path, help="folder of schemas for these, one in a file")
    parser.add_argument("--most", type=int, default=100, help="schemas that are answered")
    parser.add_argument("--seeds", type=int, default=1, help="answers to each, at temperatures 0 and 0.8")
    given = parser.parse_args()
    groups = [group for path in sorted(given.suite.glob("*.json")) for group in json.loads(path.read_text())]
    if not groups:
        raise SystemExit(f"{given.suite} has no groups of tests: name a folder such as draft2020-12")
    found = judged(groups)
    print(f"{found['schemas']} schemas: {found['read']} read, {found['refused']} refused for")
    for reason, n in found["reasons"].items():
        print(f"  {n:4} {reason}")
    print("of the schemas that are read, instances:")
    for name in ("valid, let through", "invalid, refused", "valid, refused", "invalid, let through"):
        print(f"  {found['instances'][name]:4} {name}")
    for name in found["let through"]:
        print(f"  wrong: {name}")
    record = {"suite": found, "machine": machine(), "llguidance": str(open_library().__version__)}
    if given.model:
        schemas = [group["schema"] for group in groups]
        if given.schemas is not None:
            schemas = [json.loads(path.read_text()) for path in sorted(given.schemas.rglob("*.json"))]
        record["answers"] = answered(given.model, schemas, given.most, given.seeds)
        print(json.dumps(record["answers"], indent=1))
    print(json.dumps(record))
    answers = record.get("answers", {})
    sys.exit(bool(found["let through"] or answers.get("invalid") or answers.get("differ with drafts")))


# ---- The suite -------------------------------------------------------------------------------------------------------


def judged(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """What the masks of each schema say about its instances."""
    vocabulary = byte_vocabulary()
    reasons: Counter[str] = Counter()
    instances: Counter[str] = Counter()
    wrong, missed, n_read = [], [], 0
    for group in groups:
        try:
            wanted = wanted_of({"schema": group["schema"]})
            assert wanted is not None
            grammar = grammar_of(wanted.form, wanted.source)
            problem = problem_of(grammar)
        except InvalidConstraint as error:
            problem = str(error)
        matcher = None if problem else open_matcher(vocabulary, grammar)
        problem = problem or (matcher.get_error() if matcher.is_error() else "")
        if problem:
            reasons.update(reasons_of(problem))
            continue
        n_read += 1
        for test in group["tests"]:
            is_let = any(lets_through(matcher.deep_copy(), text) for text in texts_of(test["data"], group["schema"]))
            kind = f"{'valid' if test['valid'] else 'invalid'}, {'let through' if is_let else 'refused'}"
            instances[kind] += 1
            name = f"{group['description']}: {test['description']}"
            if is_let and not test["valid"]:
                wrong.append(name)
            elif test["valid"] and not is_let:
                missed.append(name)
    refused = len(groups) - n_read
    counts = {"schemas": len(groups), "read": n_read, "refused": refused, "reasons": dict(reasons.most_common())}
    return counts | {"instances": instances, "let through": wrong, "valid, refused": missed}


def reasons_of(problem: str) -> list[str]:
    """Short reasons why a schema is refused: a keyword each, or the message."""
    keys = re.search(r"Unimplemented keys: (\[.*?\])", problem)
    return json.loads(keys[1]) if keys else [re.sub(r"'[^']*'|\d+|: .*", "...", problem)[:70]]


def texts_of(value: Any, schema: Any) -> Iterator[str]:
    """An instance as JSON, as it is and with the properties in the order of the schema."""
    for each in (value, in_order(value, schema)):
        yield json.dumps(each, ensure_ascii=False, separators=(",", ":"))


def in_order(value: Any, schema: Any) -> Any:
    """The value with the properties of each object in the order in which a schema names them somewhere."""
    names: dict[str, int] = {}

    def collect(part: Any) -> None:
        if isinstance(part, dict):
            properties = part.get("properties")
            for name in [*(properties if isinstance(properties, dict) else ()), *_strings(part.get("required"))]:
                names.setdefault(name, len(names))
            for each in part.values():
                collect(each)
        elif isinstance(part, list):
            for each in part:
                collect(each)

    def ordered(part: Any) -> Any:
        if isinstance(part, list):
            return [ordered(each) for each in part]
        if not isinstance(part, dict):
            return part
        return {name: ordered(part[name]) for name in sorted(part, key=lambda name: names.get(name, len(names)))}

    collect(schema)
    return ordered(value)


def _strings(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


# ---- Answers ---------------------------------------------------------------------------------------------------------


def answered(model: str, schemas: list[Any], most: int, n_seeds: int) -> dict[str, Any]:
    """Answers of a model to the first schemas that are read, judged by jsonschema, with drafts and without."""
    counts: Counter[str] = Counter()
    invalid, differ = [], []
    path = None if model == "default" else model
    with edgeinfer.load(path, n_ctx=1024, draft="none") as plain, edgeinfer.load(path, n_ctx=1024) as drafting:
        for number, schema in enumerate(schemas):
            if counts["schemas"] == most:
                break
            try:
                requests = [{"temperature": 0.0}] + [{"temperature": 0.8, "seed": seed} for seed in range(n_seeds)]
                for request in requests:
                    texts = [answer_of(engine, schema, request) for engine in (plain, drafting)]
                    counts[texts[0].finish_reason] += 1
                    if texts[0].tokens != texts[1].tokens:
                        differ.append([number, request])
                    if texts[0].finish_reason == "stop" and (why := problem_in(texts[0].text, schema)):
                        invalid.append([number, request, why])
                counts["schemas"] += 1
                print(f"{counts['schemas']} schemas, {len(invalid)} wrong, {len(differ)} differ", file=sys.stderr)
            except InvalidConstraint:
                counts["refused"] += 1
    return {"counts": counts, "invalid": invalid, "differ with drafts": differ}


def answer_of(engine: edgeinfer.Engine, schema: Any, request: dict[str, Any]) -> edgeinfer.Completion:
    """The answer to a question that has the schema in it."""
    question = f"Write JSON that is valid by this schema: {json.dumps(schema)[:1500]}"
    answer = engine.chat().send(question, schema=schema, max_tokens=200, **request)
    for _ in answer:
        pass
    return answer.completion


def problem_in(text: str, schema: Any) -> str:
    """What is wrong with an answer, "" for nothing."""
    import jsonschema

    try:
        kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error)[:200]
    return ""


if __name__ == "__main__":
    main()
