"""examples/plan_calls.py: plans of calls whose independent ones run at the same time."""

import importlib.util
import sys
import threading
from pathlib import Path

import pytest

import edgeinfer
from edgeinfer.tools.options import tool_of

PATH = Path(__file__).parents[3] / "examples" / "plan_calls.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("plan_calls", PATH)
    module = sys.modules["plan_calls"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["plan_calls"]


def test_results_stand_in_the_place_of_references(example):
    steps = example.read_plan(
        [
            {"tool": "add", "arguments": {"a": 1, "b": 2}},
            {"tool": "add", "arguments": {"a": "$1", "b": 10}},
            {"tool": "say", "arguments": {"texts": ["$1 and $2", {"x": "$2"}]}},
        ]
    )
    assert [sorted(step.needs) for step in steps] == [[], [1], [1, 2]]
    functions = {"add": lambda a, b: a + b, "say": lambda texts: texts}
    assert example.run_plan(steps, functions) == [3, 13, ["3 and 13", {"x": 13}]]


def test_independent_calls_run_at_the_same_time(example):
    both = threading.Barrier(2, timeout=100)
    steps = [example.Step("meet", {}), example.Step("meet", {}), example.Step("end", {"a": "$1", "b": "$2"})]
    assert len(example.run_plan(steps, {"meet": both.wait, "end": lambda a, b: a + b})) == 3


@pytest.mark.parametrize("reference", ["$2", "$3", "$0"])
def test_a_plan_that_needs_what_comes_later_is_refused(example, reference):
    calls = [{"tool": "f", "arguments": {}}, {"tool": "f", "arguments": {"a": reference}}]
    with pytest.raises(ValueError, match="call 2 needs results"):
        example.read_plan(calls)


def test_the_exception_of_a_call_is_raised(example):
    steps = [example.Step("fail", {}), example.Step("f", {"a": "$1"})]
    with pytest.raises(ZeroDivisionError):
        example.run_plan(steps, {"fail": lambda: 1 // 0, "f": lambda a: a})


@pytest.mark.usefixtures("grammar")
def test_a_model_plans_calls_that_there_are(example, default_model):
    tools = [tool_of(example.population), tool_of(example.difference)]
    with edgeinfer.load(default_model, n_ctx=2048) as engine:
        for seed in range(3):
            try:
                steps = example.plan(engine, "How many people live in Rome?", tools, seed=seed, max_tokens=250)
            except ValueError as error:
                assert "there is no plan" in str(error) or "needs results" in str(error)
                continue
            assert 1 <= len(steps) <= example.MOST_CALLS and {step.tool for step in steps} <= {
                "population",
                "difference",
            }
