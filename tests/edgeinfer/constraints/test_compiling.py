"""Reading grammars: hostile ones are refused or read, within limits of time and memory, and end no process of ours."""

import json
import os
import random
import resource
import signal
import threading
import time
from contextlib import suppress

import psutil
import pytest
from constrained import PERSON, TREE, grammar_text
from parts import missing

from edgeinfer.common.errors import BackendUnavailable, ConstraintError, InvalidConstraint
from edgeinfer.constraints import compiling
from edgeinfer.constraints.compiling import MAX_SECONDS, WORKER, CompileWorker, in_time
from edgeinfer.constraints.constraint import Constraints
from edgeinfer.constraints.options import wanted_of
from edgeinfer.memory.process import resident_bytes

pytestmark = pytest.mark.usefixtures("grammar")


def nested(depth):
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


def unions(width, depth):
    if depth == 0:
        return {"type": "string"}
    return {"anyOf": [{"properties": {f"{depth}_{n}": unions(width, depth - 1)}} for n in range(width)]}


def all_of(n):
    return {"allOf": [{"anyOf": [{"properties": {f"{i}_{j}": {"const": j}}} for j in range(6)]} for i in range(n)]}


HOSTILE = {
    "deep schema": {"schema": nested(20_000)},
    "deep object": {"schema": {"a": json.loads(nested(300))}},
    "deep regex": {"regex": "(" * 100_000 + "a" + ")" * 100_000},
    "deep grammar": {"grammar": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000},
    "deep gbnf": {"grammar": "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000},
    "repeated repetition": {"regex": "((((a{0,1000}){0,1000}){0,1000}){0,1000})"},
    "counted automaton": {"regex": "(.*a.{30}|.*b.{30}|.*c.{30})x"},
    "exponential union": {"schema": unions(4, 6)},
    "exponential product": {"schema": all_of(14)},
    "huge enum": {"schema": {"enum": [f"value {n}" for n in range(60_000)]}},
    "many properties": {"schema": {"properties": {f"p{n}": {"type": "integer"} for n in range(20_000)}}},
    "enough properties": {"schema": {"properties": {f"p{n}": {"type": "integer"} for n in range(5_000)}}},
    "huge array": {"schema": {"type": "array", "minItems": 10**6, "maxItems": 10**9}},
    "huge string": {"schema": {"type": "string", "minLength": 10**7, "maxLength": 10**9}},
    "huge number": {"schema": {"type": "number", "minimum": 10**400}},
    "awkward number": {"schema": {"type": "integer", "multipleOf": 7919 * 104729}},
    "circle": {"schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
    "many patterns": {"schema": {"patternProperties": {f"^(a|b)*c{n}$": {} for n in range(400)}}},
    "backreference": {"regex": r"(a+)\1"},
    "invalid UTF-8": {"grammar": 'start: "\udcff\ud800"'},
    "null": {"regex": "a\0b"},
    "ambiguous grammar": {"grammar": 'start: s\ns: s s | s s s | "a" |'},
    "left recursion": {"grammar": 'root ::= root "a" | root root | "a"'},
    "too long": {"regex": "a" * (1 << 20) + "b"},
}


def spent_seconds():
    """Of processor time, by this process and those that read grammars; on a busy machine they wait for longer."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = time.process_time() + children.ru_utime + children.ru_stime
    if WORKER._process is not None:
        with suppress(psutil.NoSuchProcess):
            spent += sum(psutil.Process(WORKER._process.pid).cpu_times()[:2])
    return spent


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_or_read_within_its_limits(engine, name, monkeypatch):
    monkeypatch.setattr("edgeinfer.constraints.constraint.MAX_SECONDS", MAX_SECONDS)  # as it is outside of tests
    WORKER.start()  # which is no matter of the grammar
    started, before = spent_seconds(), resident_bytes()
    try:
        completion = engine.generate("x", max_tokens=4, seed=1, **HOSTILE[name])
        assert len(completion.tokens) <= 4
    except (InvalidConstraint, ConstraintError) as error:  # read in time, with masks too large
        assert len(str(error)) < 500
    assert spent_seconds() - started < 15  # mostly two
    assert resident_bytes() - before < 400 << 20


def test_what_takes_too_long_is_given_up():
    given_up = threading.Event()
    with pytest.raises(InvalidConstraint, match="takes more than 2 s"):
        in_time(time.monotonic() + 0.05, lambda: given_up.wait(200))
    given_up.set()


def test_an_error_and_a_panic_of_the_work_are_its_own():
    class Panic(BaseException):
        pass

    def work(error):
        raise error

    for error in (InvalidConstraint("wrong"), Panic("wrong")):
        with pytest.raises(InvalidConstraint, match="wrong"):
            in_time(time.monotonic() + 200, lambda error=error: work(error))
    assert in_time(time.monotonic() + 200, lambda: 5) == 5


def test_a_worker_that_hangs_or_crashes_is_replaced(monkeypatch):
    worker, ask = CompileWorker(), compiling._asked

    def asked_of_killed(process, *question):
        process.kill()  # after it was seen to run, else another one would be started
        return ask(process, *question)

    try:
        later = lambda: time.monotonic() + 200  # noqa: E731
        assert worker.grammar("regex", "a+", later())
        os.kill(worker._process.pid, signal.SIGSTOP)
        with pytest.raises(InvalidConstraint, match="takes more than"):
            worker.grammar("regex", "a+", time.monotonic() + 0.1)
        assert worker.grammar("regex", "a+", later())
        with monkeypatch.context() as patch:
            patch.setattr(compiling, "_asked", asked_of_killed)
            with pytest.raises(InvalidConstraint, match="crashes"):
                worker.grammar("regex", "b+", later())
        assert worker.grammar("regex", "b+", later())
        worker._process.stdin.close()  # as after a while without a question: it ends by itself
        worker._process.wait()
        assert worker.grammar("regex", "c+", later())
    finally:
        worker.close()


def test_a_stack_that_overflows_ends_the_worker_alone():
    """12,000 properties take more than the stack of the worker."""
    schema = json.dumps({"properties": {f"p{n}": {"type": "integer"} for n in range(16_000)}})
    with pytest.raises(InvalidConstraint, match="crashes"):
        grammar_text("schema", schema)
    assert grammar_text("schema", "{}")


def test_a_worker_that_does_not_start_is_an_error(monkeypatch):
    worker = CompileWorker()
    monkeypatch.setattr(compiling, "interpreter", lambda: "/bin/false")
    if not os.path.exists("/bin/false"):
        missing("compiler", "there is no /bin/false")
    with pytest.raises(BackendUnavailable, match="does not start"):
        worker.start()


def mutated(schema, rng):
    """The schema with one to four places changed: other values, keywords, or parts of itself."""
    schema = json.loads(json.dumps(schema))
    keywords = ["type", "items", "properties", "enum", "const", "pattern", "minLength", "maxItems", "anyOf", "allOf"]
    keywords += ["oneOf", "not", "$ref", "format", "multipleOf", "minimum", "exclusiveMaximum", "required"]
    keywords += ["additionalProperties", "prefixItems", "patternProperties", "uniqueItems", "if", "$defs", "x-guidance"]
    for _ in range(rng.randint(1, 4)):
        places = []

        def walk(part, places=places):
            if isinstance(part, dict | list):
                places.append(part)
                for each in part.values() if isinstance(part, dict) else part:
                    walk(each)

        walk(schema)
        place = rng.choice(places)
        values = [None, True, [], {}, -1, 0, 1e308, 10**30, "", "string", "object", "#", "#/$defs/node", "(", "a{9999}"]
        values += ["\0", "é漢", [{"type": "string"}], {"a": {}}, rng.choice(places), rng.choice(keywords)]
        value = json.loads(json.dumps(rng.choice(values)))
        if isinstance(place, dict):
            if place and rng.random() < 0.3:
                del place[rng.choice(list(place))]
            place[rng.choice(keywords)] = value
        elif place and rng.random() < 0.5:
            place[rng.randrange(len(place))] = value
        else:
            place.append(value)
    return schema


def test_mutated_schemas_are_read_or_refused(engine):
    """Whatever is read can be followed for some tokens."""
    rng, counts = random.Random(5), {"read": 0, "refused": 0}
    constraints = Constraints(engine.tokenizer)
    for n in range(500):
        schema = mutated((PERSON, TREE)[n % 2], rng)
        try:
            wanted = wanted_of({"schema": schema})
            state = constraints.read(wanted).state(wanted, 0)
        except InvalidConstraint:
            counts["refused"] += 1
            continue
        counts["read"] += 1
        text = []
        while len(text) < 12 and not state.is_complete(text):
            mask = state.mask_at(text)
            allowed = [id for id in range(mask.n_vocab) if mask.allows(id)]
            assert allowed, (schema, text)
            text.append(rng.choice(allowed))
            if text[-1] in engine.tokenizer.stop_ids:
                break
    assert min(counts.values()) > 50, counts
