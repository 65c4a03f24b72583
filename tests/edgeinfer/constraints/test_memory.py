"""What constraints take: planned with the first one, refused where a budget has no room, and no more than planned."""

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner
from constrained import PERSON, TREE

import edgeinfer
from edgeinfer.cli import main
from edgeinfer.common.errors import BudgetExceeded
from edgeinfer.constraints import constraint as constraints_module
from edgeinfer.constraints.constraint import Constraints
from edgeinfer.constraints.memory import Room, first_bytes, grammar_bytes, vocabulary_bytes
from edgeinfer.constraints.options import wanted_of
from edgeinfer.server.problem import problem_of

MIB = 1 << 20


def test_the_first_constraint_joins_the_ledger(model, native):
    with edgeinfer.load(model, draft="none", n_threads=1) as engine:
        before = engine.memory
        engine.generate("x", max_tokens=4, schema=PERSON, seed=1)
        after = engine.memory
        assert "constraints" not in [item.name for item in before.items]
        assert after.of("constraints") == first_bytes(engine.tokenizer.n_vocab) + 192 * len(
            wanted_of({"schema": PERSON}).source
        )
        assert after.planned == before.planned + after.of("constraints")
        assert after.as_json()["items"][-1]["purpose"] == "constraints"
        engine.generate("x", max_tokens=4, schema=TREE, seed=1)
        assert engine.memory.of("constraints") > after.of("constraints")


@pytest.mark.filterwarnings("ignore:not enough memory", "ignore:the budget is")
def test_a_budget_without_room_refuses_constraints_alone(model, native, monkeypatch):
    with edgeinfer.load(model, draft="none", n_threads=1) as engine:
        planned = engine.memory.planned
        expected = engine.generate("x", max_tokens=4, schema=PERSON, seed=1).tokens
    few, many = planned + 30 * MIB, planned + 90 * MIB
    with edgeinfer.load(model, draft="none", n_threads=1, budget=few) as engine:
        monkeypatch.setattr(constraints_module, "vocabulary_of", lambda _: pytest.fail("nothing is to be read"))
        for options in ({"schema": PERSON}, {"regex": "a+"}, {"json": True}):
            with pytest.raises(
                BudgetExceeded, match=r"within the budget: reading it takes .* MiB, and .* MiB are left"
            ):
                engine.generate("x", max_tokens=4, **options)
        assert engine.memory.of("constraints") == 0 and engine.generate("x", max_tokens=4).tokens
        monkeypatch.undo()
    with edgeinfer.load(model, draft="none", n_threads=1, budget=many) as engine:
        assert engine.generate("x", max_tokens=4, schema=PERSON, seed=1).tokens == expected
        assert engine.memory.planned <= many


def test_older_constraints_make_room(engine):
    room = first_bytes(engine.tokenizer.n_vocab) + 2 * grammar_bytes(0)
    constraints = Constraints(engine.tokenizer, room)
    first = constraints.read(wanted_of({"regex": "a+"}))
    for pattern in "bcd":
        constraints.read(wanted_of({"regex": f"{pattern}+"}))
        assert constraints.planned_bytes <= room
    assert constraints.read(wanted_of({"regex": "d+"})) is constraints.read(wanted_of({"regex": "d+"}))
    assert constraints.read(wanted_of({"regex": "a+"})) is not first
    with pytest.raises(BudgetExceeded):
        constraints.read(wanted_of({"choices": ["a" * 200_000]}))
    unlimited = Constraints(engine.tokenizer)
    kept = [unlimited.read(wanted_of({"regex": f"{n}a"})) for n in range(17)]
    assert unlimited.read(wanted_of({"regex": "1a"})) is kept[1]
    assert unlimited.read(wanted_of({"regex": "0a"})) is not kept[0], "the last 16 are kept"


def test_without_a_budget_there_is_room(engine):
    assert Room(None, 10).has_room([1 << 40]) and not Room(1, 10).has_room([1])
    assert Room(None, 10).planned([]) == 0 and Room(None, 10).planned([5, 6]) > vocabulary_bytes(10)


_TAKEN = """
import ctypes, pathlib, sys, edgeinfer
from edgeinfer.backends.native import _core
from edgeinfer.constraints import constraint
from edgeinfer.memory.process import peak_bytes, resident_bytes
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: what is touched counts, not what was rounded up to 2 MiB
constraint.MAX_SECONDS = 100  # whatever else the machine does
with edgeinfer.load(sys.argv[1], n_ctx=512, draft="none", n_threads=1) as engine:
    engine.generate("x", max_tokens=2)
    _core.give_back_freed()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
    before = resident_bytes()
    schema = {"properties": {f"p{n}": {"type": ["string", "integer"]} for n in range(int(sys.argv[2]))}}
    engine.generate("x", max_tokens=24, schema=schema, temperature=0.8, seed=1)
    print(max(peak_bytes(), resident_bytes()) - before, engine.memory.of("constraints"))
"""


@pytest.mark.parametrize("n_properties", [3, 1000])
def test_a_constraint_takes_no_more_than_planned(default_model, native, n_properties):
    """The reader is a process of its own, whose part of the plan this process does not take."""
    command = [sys.executable, "-c", _TAKEN, str(default_model), str(n_properties)]
    tuned = ("MALLOC_", "GLIBC_TUNABLES", "PYTHONMALLOC")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(tuned)}
    found = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True, env=plain).stdout
    taken, planned = map(int, found.split())
    assert 20 * MIB < taken < planned - 32 * MIB + 2 * MIB


def test_profile_and_server_tell(default_model, native):
    found = CliRunner().invoke(main, ["profile", str(default_model)], catch_exceptions=False)
    assert "The first schema, grammar or tool takes up to" in found.output
    assert problem_of(BudgetExceeded("too much")).status == 501
